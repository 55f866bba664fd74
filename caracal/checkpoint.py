"""Checkpoints on disk: a Hugging-Face-style folder with `config.json`, `model.safetensors` and a tokenizer.

Loading is strict. Every parameter of the configured model must be in the file with its shape, and every tensor in the
file must be a parameter; whatever does not fit is listed, and nothing ever runs with leftover random weights.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from caracal._files import give_usual_mode
from caracal.config import CaracalConfig
from caracal.errors import CheckpointError, ConfigError
from caracal.model import CaracalModel

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILE = "tokenizer.json"

_WRAPPER = re.compile(r"^(?:module|_orig_mod|model|_fsdp_wrapped_module)\.")
# Inside an MHF block the paper's listing has its own names (left); ours are on the right.
_LISTING = {
    "W_V": "value_proj",
    "W_G1": "gate_proj",
    "W_G2": "gate_conv",
    "linear": "out_proj",
    "ln": "norm",
    "pre_conv": "pre_conv",
}
_LISTING_KEY = re.compile(r"^(blocks\.\d+\.mhf)\.(W_V|W_G1|W_G2|linear|ln|pre_conv)\.(weight|bias)$")
_MAX_LISTED = 8


def normalize_key(key: str) -> str:
    """The name a checkpoint's key has in `CaracalModel`: wrapper prefixes stripped, the paper's names translated."""
    while (match := _WRAPPER.match(key)) is not None:
        key = key[match.end() :]
    if (match := _LISTING_KEY.match(key)) is not None:
        key = f"{match[1]}.{_LISTING[match[2]]}.{match[3]}"
    return key


def load_checkpoint(path: str | Path) -> CaracalModel:
    """Reads a checkpoint folder into a float32 model in eval mode.

    Args:
        path: folder with `config.json` and `model.safetensors`.

    Returns:
        The model; weights stored in half precision are widened, which is exact.

    Raises:
        ConfigError: `config.json` is invalid.
        CheckpointError: a file is missing or damaged, or the weights are not finite or do not fit the configuration.
    """
    folder = checkpoint_folder(path)
    config = CaracalConfig.from_file(folder / CONFIG_FILE)
    state = read_weights(folder / WEIGHTS_FILE)
    with torch.device("meta"):
        model = CaracalModel(config)
    state = match_state(model, state, folder / WEIGHTS_FILE)
    model.load_state_dict(state, strict=True, assign=True)
    if config.tie_word_embeddings:  # `assign` replaces parameters one by one and so unties them
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval().requires_grad_(False)


def checkpoint_folder(path: str | Path) -> Path:
    """`path` if it looks like a checkpoint folder, otherwise CheckpointError."""
    folder = Path(path)
    expected = f"expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}"
    if not str(path).strip():
        raise CheckpointError(f"checkpoint: the path is empty; {expected}")
    try:
        exists = folder.exists()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint: {str(path)[:60]!r} is no path ({error}); {expected}") from None
    if not exists:
        raise CheckpointError(f"checkpoint: nothing at {folder}; {expected}")
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint: {folder} is a file; {expected}")
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (folder / name).is_file()]
    if missing:
        found = sorted(entry.name for entry in folder.iterdir())[:_MAX_LISTED]
        raise CheckpointError(
            f"checkpoint: {folder} has no {' and no '.join(missing)}; {expected}, found {', '.join(found) or 'nothing'}"
        )
    return folder


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file under their stored names and dtypes."""
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"checkpoint: {path} is not a whole safetensors file ({reason}); copy or save it again"
        ) from None


def match_state(model: CaracalModel, stored: Mapping[str, Tensor], source: Path) -> dict[str, Tensor]:
    """Fits stored tensors to a model's parameters by name and shape, as contiguous float32.

    Raises:
        CheckpointError: listing each missing, unknown, doubled, misshapen or non-finite tensor.
    """
    tied = model.config.tie_word_embeddings
    wanted = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    names: dict[str, str] = {}
    for key in stored:
        name = normalize_key(key)
        if name in names:
            raise CheckpointError(f"checkpoint: {source} has {name} twice, as {names[name]!r} and {key!r}")
        names[name] = key
    for key, tensor in stored.items():
        _require_finite(key, tensor, source)
    if tied:
        # The shared matrix may be stored under either name or under both; two different ones contradict the config.
        twins = ("embed_tokens.weight", "lm_head.weight")
        present = [twin for twin in twins if twin in names]
        if len(present) == 2 and not torch.equal(*(stored[names[twin]] for twin in twins)):
            raise CheckpointError(
                f"checkpoint: the config says tie_word_embeddings = true, but embed_tokens.weight and lm_head.weight "
                f"differ in {source}; set it to false or remove one"
            )
        for twin in twins:
            if present:
                names.setdefault(twin, names[present[0]])
    problems = [
        *_listed("missing", sorted(wanted.keys() - names.keys())),
        *_listed("unknown", sorted(names.keys() - wanted.keys())),
    ]
    wrong = [
        f"{name} has {list(stored[names[name]].shape)}, the config wants {list(shape)}"
        for name, shape in wanted.items()
        if name in names and tuple(stored[names[name]].shape) != shape
    ]
    problems += _listed("of another shape", wrong)
    if problems:
        raise CheckpointError(f"checkpoint: {source} does not fit its {CONFIG_FILE}: {'; '.join(problems)}")
    state: dict[str, Tensor] = {}
    for name in wanted:
        tensor = stored[names[name]]
        state[name] = tensor.to(torch.float32).contiguous()
        if not torch.isfinite(state[name]).all():
            raise CheckpointError(f"checkpoint: {names[name]} in {source} has values beyond the range of float32")
    return state


def _require_finite(key: str, tensor: Tensor, source: Path) -> None:
    if not tensor.is_floating_point():
        raise CheckpointError(f"checkpoint: {key} in {source} must be floating point, found {tensor.dtype}")
    # float32 holds every value of the narrower types; some of them have no isfinite of their own.
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    if not torch.isfinite(wide).all():
        bad = int((~torch.isfinite(wide)).sum())
        raise CheckpointError(
            f"checkpoint: {key} in {source} has {bad} of {tensor.numel()} values that are NaN or infinite; "
            f"the training run went wrong there, take an earlier checkpoint"
        )


def save_checkpoint(model: CaracalModel, path: str | Path, tokenizer_file: str | Path | None = None) -> None:
    """Writes a model as a checkpoint folder in the dtype its configuration names, each file replaced atomically.

    Args:
        model: its `config.torch_dtype` decides the stored dtype; a tied head is stored once.
        path: folder, made if missing.
        tokenizer_file: a `tokenizer.json` to copy beside the weights.

    Raises:
        CheckpointError: a weight does not survive the stored dtype (overflow to infinity), the head of a tied model is
            not the embedding, `path` is no folder, or there is no such tokenizer.
    """
    folder = Path(path)
    if tokenizer_file is not None and not Path(tokenizer_file).is_file():
        raise CheckpointError(f"checkpoint: no tokenizer at {tokenizer_file}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint: cannot make the folder {folder} ({error.strerror})") from None
    if model.config.tie_word_embeddings and not torch.equal(model.lm_head.weight, model.embed_tokens.weight):
        raise CheckpointError(
            "checkpoint: the config says tie_word_embeddings = true, but lm_head.weight is not embed_tokens.weight; "
            "set it to false to store both"
        )
    dtype = getattr(torch, model.config.torch_dtype)
    # Copied, because an untied head may still share its storage with the embedding, which safetensors refuses.
    state = {name: tensor.detach().to(dtype, copy=True).contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"checkpoint: {name} is not finite as {model.config.torch_dtype}; store it wider")

    def write(name: str, writer: Callable[[Path], object]) -> None:
        temporary = folder / f".{name}.{os.getpid()}.tmp"
        try:
            writer(temporary)
            give_usual_mode(temporary)
            temporary.replace(folder / name)
        finally:
            temporary.unlink(missing_ok=True)

    config_text = json.dumps(model.config.to_dict(), indent=2) + "\n"
    write(WEIGHTS_FILE, lambda file: safetensors.torch.save_file(state, file, metadata={"format": "pt"}))
    write(CONFIG_FILE, lambda file: file.write_text(config_text, encoding="utf-8"))
    if tokenizer_file is not None:
        source = Path(tokenizer_file)
        write(TOKENIZER_FILE, lambda file: shutil.copyfile(source, file))


def _listed(what: str, items: Iterable[str]) -> list[str]:
    items = list(items)
    if not items:
        return []
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return [f"{len(items)} {what} ({', '.join(items[:_MAX_LISTED])}{more})"]


__all__ = ["CheckpointError", "ConfigError", "load_checkpoint", "save_checkpoint"]
