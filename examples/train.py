"""Trains a Caracal model on plain text: one file, one plain loop, resumable.

    python examples/train.py --train data/kjv/train.txt --heldout data/kjv/heldout.txt -o runs/kjv

Every `--save-every` steps the run folder gets a checkpoint to resume from (same command again) and `model/`, a
Hugging-Face-style folder that `caracal export` reads. Texts may hold several documents separated by form feeds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from caracal import CaracalConfig, CaracalModel, save_checkpoint
from caracal.model import init_weights

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Byte-level BPE that can encode any text and puts the end-of-text token (id 0) in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\f"), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """All documents in one stream, each opened by the end-of-text token."""
    return np.concatenate([np.asarray(tokenizer.encode(document).ids) for document in text.split("\f")])


def add_residual_dropout(model: CaracalModel, p: float) -> None:
    """Drops elements of every residual branch while training; the saved model knows nothing of it."""
    for block in model.blocks:
        for branch in (block.mhf, block.swa, block.ffn):
            if branch is not None and p > 0:
                branch.register_forward_hook(lambda module, _, out: F.dropout(out, p, module.training))


@torch.no_grad()
def bits_per_byte(
    model: CaracalModel, ids: np.ndarray, text_bytes: int, context: int, limit: int | None = None
) -> float:
    """Mean code length of a text cut into windows of `context` tokens, each opened by the end-of-text token."""
    model.eval()
    total, scored = 0.0, 0
    windows = range(0, len(ids), context - 1)
    for start in windows if limit is None else list(windows)[:limit]:
        targets = torch.from_numpy(ids[start : start + context - 1].copy())[None]
        inputs = torch.cat((torch.zeros(1, 1, dtype=torch.long), targets[:, :-1]), dim=1)
        total += F.cross_entropy(model(inputs)[0], targets[0], reduction="sum").item()
        scored += targets.numel()
    model.train()
    return total / math.log(2) / (text_bytes * scored / len(ids))


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train", type=Path, required=True, help="training text")
    add("--heldout", type=Path, required=True, help="held-out text")
    add("-o", "--output", type=Path, required=True, help="run folder")
    add("--vocab-size", type=int, default=2048)
    add("--hidden-size", type=int, default=256)
    add("--layers", type=int, default=6)
    add("--heads", type=int, default=8)
    add("--intermediate-size", type=int, default=0, help="0: the published rule")
    add("--window", type=int, default=256)
    add("--context", type=int, default=1024, help="tokens a training row holds")
    add("--batch", type=int, default=6, help="rows per step")
    add("--steps", type=int, default=2000)
    add("--lr", type=float, default=2e-3)
    add("--warmup", type=int, default=100)
    add("--weight-decay", type=float, default=0.1)
    add("--dropout", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--eval-every", type=int, default=100)
    add("--save-every", type=int, default=100)
    add("--dtype", choices=("float32", "float16", "bfloat16"), default="float16", help="dtype of the saved weights")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    train_text, heldout_text = (path.read_text(encoding="utf-8") for path in (args.train, args.heldout))
    tokenizer_file = args.output / "tokenizer.json"
    if tokenizer_file.exists():
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    else:
        tokenizer = train_tokenizer(train_text, args.vocab_size)
        tokenizer.save(str(tokenizer_file))
    train_ids, heldout_ids = encode(tokenizer, train_text), encode(tokenizer, heldout_text)
    heldout_bytes = len(heldout_text.encode())

    config = CaracalConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=args.hidden_size, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, intermediate_size=args.intermediate_size, sliding_window=args.window,
        torch_dtype=args.dtype, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = CaracalModel(config)
    init_weights(model)
    add_residual_dropout(model, args.dropout)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    print(f"{model.num_parameters():,} parameters, {len(train_ids):,} training tokens, {len(heldout_ids):,} held out")

    resume_file, log_file = args.output / "resume.pt", args.output / "log.jsonl"
    step = 0
    rng = np.random.default_rng(args.seed)
    if resume_file.exists():
        state = torch.load(resume_file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        rng.bit_generator.state = json.loads(state["numpy_rng"])
        step = state["step"]
        print(f"resumed at step {step}")

    def save() -> None:
        state = {
            "model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step,
            "torch_rng": torch.get_rng_state(), "numpy_rng": json.dumps(rng.bit_generator.state),
        }  # fmt: skip
        temporary = resume_file.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(resume_file)
        save_checkpoint(model, args.output / "model", tokenizer_file=tokenizer_file)

    model.train()
    began, began_step, running = time.perf_counter(), step, 0.0
    while step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        starts = rng.integers(0, len(train_ids) - args.context, args.batch)
        rows = torch.from_numpy(np.stack([train_ids[s : s + args.context] for s in starts]))
        inputs = torch.cat((torch.zeros(args.batch, 1, dtype=torch.long), rows[:, :-1]), dim=1)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), rows.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        running = loss.item() if running == 0.0 else 0.95 * running + 0.05 * loss.item()
        speed = (time.perf_counter() - began) / (step - began_step)
        print(f"\rstep {step}/{args.steps}  loss {running:.3f}  {speed:.2f} s/step  "
              f"{speed * (args.steps - step) / 60:.1f} min left  ", end="", flush=True)  # fmt: skip
        if step % args.eval_every == 0 or step == args.steps:
            limit = None if step == args.steps else 12
            scores = {
                c: bits_per_byte(model, heldout_ids, heldout_bytes, c, limit and limit * 1024 // c) for c in (64, 1024)
            }
            print(
                f"\nheld-out bits per byte: {scores[64]:.4f} (context 64), {scores[1024]:.4f} (context 1024)",
                flush=True,
            )
            with log_file.open("a") as log:
                log.write(json.dumps({"step": step, "train_loss": running, "bits_per_byte": scores}) + "\n")
        if step % args.save_every == 0 or step == args.steps:
            save()


if __name__ == "__main__":
    main()
