"""onnxruntime-genai with a random Llama, which its own builder turns into ONNX (from a Hugging Face folder, so it needs transformers)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as genai

from benchmarks.peers import llama_of_124m as llama

_PRECISIONS = {"float32": "fp32", "int4": "int4"}


def _write_checkpoint(folder: Path) -> None:
    """The model as transformers would have saved it, with a tokenizer of no use, which the builder wants to copy."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=llama.VOCABULARY,
        hidden_size=llama.WIDTH,
        intermediate_size=llama.INNER,
        num_hidden_layers=llama.LAYERS,
        num_attention_heads=llama.HEADS,
        num_key_value_heads=llama.HEADS,
        max_position_embeddings=llama.LONGEST,
        rms_norm_eps=llama.EPSILON,
        rope_theta=llama.ROPE_BASE,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = WordLevel({f"w{index}": index for index in range(llama.VOCABULARY)}, unk_token="w0")  # noqa: S106
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), bos_token="w0", eos_token="w1").save_pretrained(folder)  # noqa: S106


def build(folder: Path, precision: str) -> Path:
    """The model as the builder writes it, with logits of the last token only."""
    target = folder / f"genai-{precision}"
    if not (target / "genai_config.json").exists():
        checkpoint, partial = folder / "genai-checkpoint", folder / f"genai-{precision}.partial"
        if not (checkpoint / "config.json").exists():
            _write_checkpoint(checkpoint)
        shutil.rmtree(partial, ignore_errors=True)
        words = [
            "-i",
            checkpoint,
            "-o",
            partial,
            "-p",
            _PRECISIONS[precision],
            "-e",
            "cpu",
            "-c",
            folder / "genai-cache",
        ]
        done = subprocess.run(  # noqa: S603
            [
                sys.executable,
                "-m",
                "onnxruntime_genai.models.builder",
                *map(str, words),
                "--extra_options",
                "prune_lm_head=true",
            ],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"its builder failed: {done.stderr.strip()[-500:]}")
        partial.rename(target)
    return target


class Peer:
    """Generators by name. See `benchmarks.peers.worker`."""

    def __init__(self) -> None:
        self.version: str = genai.__version__
        self._models: dict[tuple[str, int], Any] = {}
        self._settings: dict[str, tuple[Any, int]] = {}
        self._generators: dict[str, Any] = {}
        self._known: dict[str, int] = {}

    def load(self, name: str, folder: str, precision: str, threads: int, context: int) -> None:
        """Loads a model for sequences of so many tokens at most."""
        key = (precision, threads)
        if key not in self._models:
            config = genai.Config(str(build(Path(folder), precision)))
            config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
            self._models[key] = genai.Model(config)
        self._settings[name] = (self._models[key], context)
        self._known[name] = 0

    def free(self, name: str) -> None:
        """Gives a generator's memory back."""
        self._generators.pop(name, None)
        del self._settings[name], self._known[name]

    def prefill(self, name: str, length: int) -> float:
        """Seconds for a prompt, logits of the last token."""
        self._generators.pop(name, None)
        self._known[name] = 0
        model, context = self._settings[name]
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=context)
        generator = genai.Generator(model, parameters)
        ids = np.random.default_rng(length).integers(2, llama.VOCABULARY, (1, length)).astype(np.int32)
        began = time.perf_counter()
        generator.append_tokens(ids)
        seconds = time.perf_counter() - began
        self._generators[name], self._known[name] = generator, length
        return seconds

    def decode(self, name: str, context: int, count: int) -> list[float]:
        """Seconds of each of some tokens after so many, which are read first if need be and forgotten again afterwards."""
        if self._known[name] != context:
            self.prefill(name, context)
        generator, seconds = self._generators[name], []
        for token in np.random.default_rng(count).integers(2, llama.VOCABULARY, count):
            began = time.perf_counter()
            generator.append_tokens(np.asarray([[token]], np.int32))
            seconds.append(time.perf_counter() - began)
        generator.rewind_to(context)
        return seconds
