"""Goldens: inputs and float32 PyTorch outputs that travel with a bundle.

Lengths are chosen where implementations break (1, 2, 3, around the window, odd, beyond the window, rows of different
lengths; where a pass is bounded, none beyond that, and the bound itself), positions where blocks and transforms meet, and
ids so that every row of the embedding is read.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from caracal_runtimes.errors import InputError
from caracal_runtimes.limits import check_forward
from caracal_runtimes.manifest import GoldenCase, GoldenGreedy, GoldenText, ModelSpec
from caracal_runtimes.parity import AT_ONCE, Progress
from caracal_runtimes.text import encode_text
from numpy.typing import NDArray

from caracal import CaracalConfig, CaracalModel
from caracal.model import gather_positions
from caracal_export.drafting import draft_greedy

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SEED = 20260502
_LOGIT_BYTES = 1 << 19  # logits recorded per row at most; fewer positions are kept for large vocabularies
_COLUMNS = 64  # vocabulary ids recorded per position where all positions are
_COVERAGE_LENGTH = 512
_MOST_LONGEST = 8192  # tokens up to which a pass as long as a bundle's bound is recorded
_COVERAGE_VOCABULARY = 16384  # up to here all ids are read even where a tied head shows every row anyway
GREEDY_TOKENS = 128
_HEAD_ROWS = 4096  # of the vocabulary that are in float64 at once
_PASSAGE = Path(__file__).with_name("passage.txt")  # the Book of Ruth, King James Version: public domain
_TEXT_TOKENS = 512


@dataclass
class Recorded:
    """Tensors for `golden.safetensors` and their description for the manifest."""

    tensors: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    cases: list[GoldenCase] = field(default_factory=list)
    greedy: list[GoldenGreedy] = field(default_factory=list)
    text: GoldenText | None = None
    rounding: float = 0.0


def record(
    model: CaracalModel,
    lags: int,
    progress: Progress | None = None,
    tokenizer: Tokenizer | None = None,
    longest: int | None = None,
) -> Recorded:
    """Runs the reference on every golden input.

    Args:
        model: float32, in eval mode.
        lags: M of the step graph; some row must be long enough for blocks of several sizes.
        tokenizer: of the checkpoint; with one, the likelihood of a passage is recorded too.
        progress: called with a name, done and total.
        longest: tokens that one pass of the bundle can read; any number when None. Continuations may be longer, since they are
            read and written in pieces.
    """
    plans, prompts = _planned(model.config, lags, longest)
    recorded = Recorded()
    total = len(plans) + len(prompts)
    read: _Plan | None = None
    hidden: list[torch.Tensor] = []
    for index, plan in enumerate(plans):
        if progress is not None:
            progress(plan.name, index, total)
        if read is None or plan.rows is not read.rows:
            read, hidden = plan, [_hidden_states(model, row) for row in plan.rows]
        _record_case(model, plan, hidden, recorded)
    if progress is not None:
        progress("continuations", len(plans), total)
    drafts = draft_greedy(model, [torch.from_numpy(prompt) for prompt in prompts.values()], GREEDY_TOKENS)
    for (name, prompt), drafted in zip(prompts.items(), drafts, strict=True):
        _record_greedy(model, name, prompt, drafted, recorded)
    if tokenizer is not None:
        _record_text(model, tokenizer, recorded, longest)
    row = max((plan.rows[0] for plan in plans if len(plan.rows) == 1), key=len)
    recorded.rounding = own_rounding(model, row, _positions(len(row), config=model.config))
    if progress is not None:
        progress("done", total, total)
    return recorded


@dataclass(frozen=True)
class Extent:
    """What the goldens of a configuration take: bytes of their file, and the largest pass of the reference."""

    bytes: int
    longest: int
    positions: int


def extent(config: CaracalConfig, lags: int, bound: int | None = None) -> Extent:
    """What `record` would write and compute, without a model; a passage's likelihood is not counted.

    Args:
        config: of the model.
        lags: as for `record`, and `bound` as its `longest`.
    """
    plans, prompts = _planned(config, lags, bound)
    numbers = longest = most = 0
    for plan in plans:
        length = max(map(len, plan.rows))
        positions = max(
            len(row) if plan.columns is not None else len(_positions(len(row), config)) for row in plan.rows
        )
        columns = config.vocab_size if plan.columns is None else len(plan.columns)
        numbers += len(plan.rows) * (2 * length + 2 + 2 * positions + positions * columns)
        longest, most = max(longest, length), max(most, positions)
    for prompt in prompts.values():
        numbers += 2 * len(prompt) + 3 * GREEDY_TOKENS
        longest, most = max(longest, len(prompt) + GREEDY_TOKENS), max(most, GREEDY_TOKENS)
    return Extent(4 * numbers, longest, most)


def _planned(config: CaracalConfig, lags: int, bound: int | None) -> tuple[list[_Plan], dict[str, NDArray[np.int64]]]:
    rng = np.random.default_rng(_SEED)
    plans = [*_length_plans(config, lags, rng, bound), *_coverage_plans(config, rng, bound)]
    return plans, _prompts(config, rng)


def spec_of(config: CaracalConfig) -> ModelSpec:
    """What the runtime knows of a model."""
    return ModelSpec(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ModelSpec)})


@dataclass(frozen=True)
class _Plan:
    name: str
    rows: list[NDArray[np.int64]]
    columns: NDArray[np.int64] | None = None


def _length_plans(config: CaracalConfig, lags: int, rng: np.random.Generator, bound: int | None = None) -> list[_Plan]:
    window = config.sliding_window
    beyond = max(3 * window, 6 * lags) + 5
    lengths: dict[str, Sequence[int]] = {
        "one": [1],
        "two": [2, 2],
        "three": [3, 3, 3],
        "window_minus_1": [max(1, window - 1)],
        "window": [window],
        "window_plus_1": [window + 1],
        "odd": [37, 37],
        "beyond_window": [beyond],
        "ragged": [1, window + 1, 2 * window + 3],
    }
    if bound is not None:
        ragged = [min(length, bound) for length in lengths.pop("ragged")]
        lengths = {name: rows for name, rows in lengths.items() if max(rows) <= bound}
        if bound <= beyond:  # what one pass reads ends here: at its last token, and just before
            lengths |= {"longest_minus_1": [bound - 1], "longest": [bound]}
        elif bound <= _MOST_LONGEST:
            lengths |= {f"longest{AT_ONCE}": [bound]}
        lengths |= {"ragged": ragged}
    columns = np.sort(rng.permutation(config.vocab_size)[:_COLUMNS])
    plans: list[_Plan] = []
    for name, row_lengths in lengths.items():
        rows = [rng.integers(0, config.vocab_size, n) for n in row_lengths]
        plans.append(_Plan(name, rows))
        if not name.endswith(AT_ONCE) and any(len(_positions(n, config)) < n for n in row_lengths):
            # Not every position fits with the whole vocabulary; on a few columns every one does.
            plans.append(_Plan(f"{name}_everywhere", rows, columns))
    return plans


def _coverage_plans(config: CaracalConfig, rng: np.random.Generator, bound: int | None = None) -> list[_Plan]:
    """Rows that hold every id once, all positions compared on a few columns of the vocabulary.

    With a tied head the other cases already show every row of the embedding as a column of logits; for large
    vocabularies that must do.
    """
    if config.tie_word_embeddings and config.vocab_size > _COVERAGE_VOCABULARY:
        return []
    ids = rng.permutation(config.vocab_size)
    length = min(_COVERAGE_LENGTH, config.vocab_size, bound or config.vocab_size)
    rows = -(-config.vocab_size // length)
    ids = np.concatenate((ids, ids[: rows * length - len(ids)])).reshape(rows, length)
    columns = np.sort(rng.permutation(config.vocab_size)[:_COLUMNS])
    if length in (_COVERAGE_LENGTH, config.vocab_size):
        return [_Plan(f"vocabulary_{index}", [row], columns) for index, row in enumerate(ids)]
    # Rows are short where the bound is: as many of them together as hold what one row does otherwise.
    count = _COVERAGE_LENGTH // length
    return [
        _Plan(f"vocabulary_{index}{AT_ONCE}", list(ids[start : start + count]), columns)
        for index, start in enumerate(range(0, rows, count))
    ]


def _positions(length: int, config: CaracalConfig) -> NDArray[np.int64]:
    """Positions to record: all if they fit, else the ends, block and power-of-two edges, and an even spread."""
    limit = max(4, _LOGIT_BYTES // (4 * config.vocab_size))
    if length <= limit:
        return np.arange(length)
    window = config.sliding_window
    edges = [0, length - 1, *(k * window + d for k in range(1, length // window + 1) for d in (-1, 0))]
    edges += [(1 << e) + d for e in range(1, length.bit_length()) for d in (-1, 0)]
    chosen = list(dict.fromkeys(p for p in edges if 0 <= p < length))[:limit]  # the first are the telling ones
    spread = np.linspace(0, length - 1, max(0, limit - len(chosen))).astype(int).tolist()
    return np.asarray(sorted({*chosen, *spread}), dtype=np.int64)


@torch.no_grad()
def _hidden_states(model: CaracalModel, row: NDArray[np.int64]) -> torch.Tensor:
    """What the head reads of a row alone, unpadded: a padded batch must give the same. [1, L, D]."""
    check_forward(spec_of(model.config), 1, len(row), 1)
    return model.hidden_states(torch.from_numpy(row)[None])


@torch.no_grad()
def _record_case(model: CaracalModel, plan: _Plan, hidden: Sequence[torch.Tensor], recorded: Recorded) -> None:
    """Records the logits of rows whose hidden states are known."""
    config = model.config
    length = max(map(len, plan.rows))
    kept = [np.arange(len(r)) if plan.columns is not None else _positions(len(r), config) for r in plan.rows]
    check_forward(spec_of(config), 1, length, max(map(len, kept)))
    ids = np.zeros((len(plan.rows), length), dtype=np.int64)
    positions = np.zeros((len(plan.rows), max(map(len, kept))), dtype=np.int64)
    logits = []
    for index, (row, keep) in enumerate(zip(plan.rows, kept, strict=True)):
        ids[index, : len(row)] = row
        # A short row repeats its last position; what stands in its padding is never read.
        positions[index] = np.pad(keep, (0, positions.shape[1] - len(keep)), mode="edge")
        x = model.norm(gather_positions(hidden[index], torch.from_numpy(positions[index : index + 1])))
        head = model.lm_head.weight
        if plan.columns is not None:
            head = head[torch.from_numpy(plan.columns)]
        logits.append(F.linear(x, head).numpy())
    if not all(np.isfinite(row).all() for row in logits):
        where = first_not_finite(model, torch.from_numpy(ids))
        raise InputError(
            f"export: the checkpoint itself computes NaN or infinite values, first seen in the output of {where} (golden "
            f"{plan.name}); there is nothing to be equal to, look at that layer's weights and those before it"
        )
    recorded.tensors[f"{plan.name}/input_ids"] = ids
    recorded.tensors[f"{plan.name}/lengths"] = np.asarray([len(r) for r in plan.rows], dtype=np.int64)
    recorded.tensors[f"{plan.name}/logit_positions"] = positions
    recorded.tensors[f"{plan.name}/logits"] = np.concatenate(logits)
    if plan.columns is not None:
        recorded.tensors[f"{plan.name}/columns"] = plan.columns
    recorded.cases.append(GoldenCase(plan.name, len(plan.rows), length, columns=plan.columns is not None))


@torch.no_grad()
def own_rounding(model: CaracalModel, row: NDArray[np.int64], positions: NDArray[np.int64]) -> float:
    """Relative L2 of the reference's float32 logits from float64, with one block at a time in float64.

    Args:
        model: float32.
        row: token ids, [L].
        positions: whose logits are compared, [P].
    """
    ids, at = torch.from_numpy(row)[None], torch.from_numpy(positions)[None]
    single = model(ids, at)[0]  # (P, V)
    x = F.embedding(ids, model.embed_tokens.weight).double()
    for block in model.blocks:
        x = copy.deepcopy(block).double()(x)
    x = copy.deepcopy(model.norm).double()(gather_positions(x, at))[0]
    difference = total = 0.0
    for start in range(0, single.shape[1], _HEAD_ROWS):
        exact = x @ model.lm_head.weight[start : start + _HEAD_ROWS].double().t()
        difference += float((single[:, start : start + _HEAD_ROWS] - exact).square().sum())
        total += float(exact.square().sum())
    return min(1.0, (difference / total) ** 0.5) if total else 0.0


@torch.no_grad()
def first_not_finite(model: CaracalModel, input_ids: torch.Tensor) -> str:
    """Name of the first module, in order of execution, whose output is not finite for these ids [B, L]."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> None:
            if not found and not torch.isfinite(output).all():
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name or "the model")) for name, module in model.named_modules()]
    try:
        model(input_ids)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "no module's output (the logits alone)"


def _prompts(config: CaracalConfig, rng: np.random.Generator) -> dict[str, NDArray[np.int64]]:
    first = config.bos_token_id if config.bos_token_id is not None else int(rng.integers(config.vocab_size))
    return {
        "greedy_from_start": np.asarray([first], dtype=np.int64),
        "greedy_beyond_window": np.asarray(
            [first, *rng.integers(0, config.vocab_size, config.sliding_window + 4)], dtype=np.int64
        ),
    }


@torch.no_grad()
def _record_greedy(
    model: CaracalModel, name: str, prompt: NDArray[np.int64], drafted: list[int], recorded: Recorded
) -> None:
    """The reference's greedy tokens: each is the best of its logits behind all tokens before it.

    The tokens are guessed first (`drafted`), and one pass of the reference over all of them says which are its own choice, because
    logits depend on nothing that follows. From the first that is not, the guess begins anew.
    """
    tokens: list[int] = []
    margins: list[float] = []
    while len(tokens) < GREEDY_TOKENS:
        known = torch.from_numpy(np.concatenate((prompt, np.asarray(tokens, dtype=np.int64))))
        if tokens:
            (drafted,) = draft_greedy(model, [known], GREEDY_TOKENS - len(tokens))
        ids = torch.cat((known, torch.tensor(drafted[:-1], dtype=torch.int64)))[None]
        # The positions behind which each drafted token stands.
        logits = model(ids, torch.arange(len(known) - 1, ids.shape[1])[None])[0]
        best = logits.topk(min(2, logits.shape[1])).values
        for row, guess in enumerate(drafted):
            tokens.append(int(logits[row].argmax()))
            margins.append(float(best[row, 0] - best[row, -1]) if best.shape[1] > 1 else float("inf"))
            if tokens[-1] != guess:
                break
    recorded.tensors[f"{name}/prompt"] = prompt
    recorded.tensors[f"{name}/continuation"] = np.asarray(tokens, dtype=np.int64)
    recorded.tensors[f"{name}/margins"] = np.asarray(margins, dtype=np.float32)
    recorded.greedy.append(GoldenGreedy(name, len(prompt), GREEDY_TOKENS))


@torch.no_grad()
def _record_text(model: CaracalModel, tokenizer: Tokenizer, recorded: Recorded, longest: int | None) -> None:
    """The likelihood of the passage's first tokens, from one forward pass over all of them."""
    text, bos = _PASSAGE.read_text(encoding="utf-8"), model.config.bos_token_id
    encoding = encode_text(tokenizer, text, special=False)
    most = _TEXT_TOKENS if longest is None else min(_TEXT_TOKENS, longest - (0 if bos is None else 1))
    ids = encoding.ids[:most]
    if len(ids) < 2:
        return
    row = torch.tensor([[*([] if bos is None else [bos]), *ids]])
    begins = 0 if bos is not None else encoding.offsets[0][1]  # without an opening token the first one is given
    logprobs = model(row)[0, :-1].double().log_softmax(-1).gather(-1, row[0, 1:, None])
    recorded.tensors["text/ids"] = row[0].numpy().copy()
    recorded.tensors["text/nats"] = np.asarray(-float(logprobs.sum()))
    scored = text[begins : encoding.offsets[len(ids) - 1][1]]
    recorded.text = GoldenText("text", row.shape[1], len(scored.encode()))
