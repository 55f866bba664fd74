"""llama.cpp through llama-cpp-python's low-level functions, with a random Llama that `gguf` writes.

Quantised files have every matrix in the one type, the head too.
"""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers import llama_of_124m as llama

_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "int8": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "int4": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_BATCH = 2048  # tokens that one call takes; llama.cpp cuts them by itself (`n_ubatch`, its default)


def write(file: Path, precision: str) -> None:
    """The model as a GGUF file."""
    kind, file_type = _TYPES[precision]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(llama.VOCABULARY)
    writer.add_context_length(llama.LONGEST)
    writer.add_embedding_length(llama.WIDTH)
    writer.add_block_count(llama.LAYERS)
    writer.add_feed_forward_length(llama.INNER)
    writer.add_head_count(llama.HEADS)
    writer.add_head_count_kv(llama.HEADS)
    writer.add_rope_dimension_count(llama.WIDTH // llama.HEADS)
    writer.add_rope_freq_base(llama.ROPE_BASE)
    writer.add_layer_norm_rms_eps(llama.EPSILON)
    writer.add_file_type(file_type)
    writer.add_tokenizer_model("no_vocab")
    for seed, (name, shape) in enumerate(llama.matrices()):
        data = gguf.quants.quantize(llama.random_matrix(shape, seed), kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    ones = np.ones(llama.WIDTH, np.float32)
    for name in ("output_norm", *(f"blk.{i}.{part}_norm" for i in range(llama.LAYERS) for part in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must live as long as the library


class Peer:
    """Contexts by name, each with a cache of its own. See `benchmarks.peers.worker`."""

    def __init__(self) -> None:
        self.version: str = llama_cpp.__version__
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._models: dict[str, Any] = {}
        self._contexts: dict[str, Any] = {}
        self._known: dict[str, int] = {}

    def load(
        self, name: str, folder: str, precision: str, threads: int, context: int, flash_attention: bool = False
    ) -> None:
        """Makes a context of so many tokens."""
        if precision not in self._models:
            file = Path(folder) / f"llama-{precision}.gguf"
            if not file.exists():
                partial = file.with_suffix(".partial")
                write(partial, precision)
                partial.rename(file)
            model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
            if not model:
                raise RuntimeError(f"{file} could not be loaded")
            self._models[precision] = model
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch = context, min(_BATCH, context)
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = int(flash_attention)
        made = llama_cpp.llama_init_from_model(self._models[precision], options)
        if not made:
            raise RuntimeError(f"no context of {context} tokens could be made")
        self._contexts[name], self._known[name] = made, 0

    def free(self, name: str) -> None:
        """Gives a context's memory back."""
        llama_cpp.llama_free(self._contexts.pop(name))
        del self._known[name]

    def prefill(self, name: str, length: int) -> float:
        """Seconds for a prompt, logits of the last token."""
        memory = llama_cpp.llama_get_memory(self._contexts[name])
        llama_cpp.llama_memory_clear(memory, False)
        ids = np.random.default_rng(length).integers(0, llama.VOCABULARY, length).tolist()
        began = time.perf_counter()
        for start in range(0, length, _BATCH):
            self._take(name, ids[start : start + _BATCH])
        seconds = time.perf_counter() - began
        self._known[name] = length
        return seconds

    def decode(self, name: str, context: int, count: int) -> list[float]:
        """Seconds of each of some tokens after so many, which are read first if need be and forgotten again afterwards."""
        if self._known[name] != context:
            self.prefill(name, context)
        seconds = []
        for token in np.random.default_rng(count).integers(0, llama.VOCABULARY, count).tolist():
            began = time.perf_counter()
            self._take(name, [token])
            seconds.append(time.perf_counter() - began)
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self._contexts[name]), 0, context, -1)
        return seconds

    def _take(self, name: str, ids: list[int]) -> None:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if code := llama_cpp.llama_decode(self._contexts[name], llama_cpp.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_get_logits_ith(self._contexts[name], -1)  # waits for the result
