"""Stored names and the names of `CaracalModel`: wrapper prefixes, the paper's names, fused matrices."""

from __future__ import annotations

import re

# Modules that wrap others add a component: DataParallel and DDP, torch.compile, a head around the model, FSDP, activation
# checkpointing. They nest in any order and may wrap single blocks; no module of the model has one of these names.
_WRAPPERS = frozenset({"module", "_orig_mod", "model", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_BLOCK = re.compile(r"blocks\.(?:0|[1-9][0-9]{0,5})\.(mhf|swa|ffn)\.")
# Names of the paper's listing (mhf) and others in use -> ours. "parts" names what a fused matrix is made of.
_ALIASES = {
    "mhf": {
        "W_V": "value_proj",
        "W_G1": "gate_proj",
        "W_G2": "gate_conv",
        "linear": "out_proj",
        "ln": "norm",
    },
    "swa": {
        "W_Q": "q_proj",
        "W_K": "k_proj",
        "W_V": "v_proj",
        "W_O": "out_proj",
        "o_proj": "out_proj",
        "ln": "norm",
        "qkv": "qkv_proj",
        "Wqkv": "qkv_proj",
        "W_qkv": "qkv_proj",
        "in_proj": "qkv_proj",
        "c_attn": "qkv_proj",
    },
    "ffn": {"ln": "norm"},
}
#: Fused matrices (left) and the parameters whose rows they hold, in this order.
FUSED = {
    "swa.qkv_proj": ("swa.q_proj", "swa.k_proj", "swa.v_proj"),
    "ffn.gate_up_proj": ("ffn.gate_proj", "ffn.up_proj"),
}
#: What is stored beside 8-bit floats: the factor that a weight is to be multiplied with, under either name.
SCALES = ("_scale", "_scale_inv")


def normalize_key(key: str) -> str:
    """The name a checkpoint's key has in `CaracalModel`: wrappers stripped, other names translated."""
    key = ".".join(part for part in key.split(".") if part not in _WRAPPERS)
    match = _BLOCK.match(key)
    if match is None:
        return key
    aliases = _ALIASES[match[1]]
    head, rest = key[: match.end()], key[match.end() :]
    module, dot, tail = rest.partition(".")
    if not dot and module in ("in_proj_weight", "in_proj_bias"):  # torch.nn.MultiheadAttention
        module, tail = module.rsplit("_", 1)
        dot = "."
    return f"{head}{aliases.get(module, module)}{dot}{tail}"


def parts_of(name: str) -> tuple[str, ...] | None:
    """The parameters that a fused one holds (`blocks.2.swa.qkv_proj.weight`), or None for any other name."""
    match = _BLOCK.match(name)
    if match is None:
        return None
    stem = name[: match.start(1)]
    module, _, tail = name[match.start(1) :].rpartition(".")
    if module not in FUSED or tail not in ("weight", "bias"):
        return None
    return tuple(f"{stem}{part}.{tail}" for part in FUSED[module])
