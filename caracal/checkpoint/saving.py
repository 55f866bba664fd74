"""Clean checkpoint folders: `config.json`, `model.safetensors` (or shards with an index), `tokenizer.json`."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from caracal._files import give_usual_mode
from caracal.checkpoint.files import CONFIG_FILE, INDEX, SAFETENSORS_FILE, TOKENIZER_FILE
from caracal.checkpoint.parameters import HEAD
from caracal.checkpoint.safetensors_writer import BytesProgress, plan_shards, size_of, write_shards
from caracal.checkpoint.stores import Stored, main_dtype
from caracal.config import CaracalConfig
from caracal.errors import CheckpointError
from caracal.model import CaracalModel

_METADATA = {"format": "pt"}


def write_folder(
    folder: Path,
    config: CaracalConfig,
    entries: Mapping[str, Stored],
    read: Callable[[str], Tensor],
    *,
    tokenizer: Path | None = None,
    max_shard_size: int | None = None,
    progress: BytesProgress | None = None,
) -> list[str]:
    """Writes the files of a checkpoint into an existing folder, one tensor in memory at a time.

    Args:
        folder: exists; whoever calls makes it appear whole.
        config: its `torch_dtype` is replaced by the dtype that most numbers have.
        entries: the parameters under the model's names, a tied head left out.
        read: gives one of them as its entry says.
        tokenizer: a `tokenizer.json` to copy.
        max_shard_size: bytes of tensors in one file; None for one file.
        progress: told the bytes written.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: a tensor is not what its entry says.
        OSError: a file cannot be written.
    """
    shards = plan_shards(entries, SAFETENSORS_FILE.removesuffix(".safetensors"), max_shard_size)
    write_shards(shards, read, folder, _METADATA, progress)
    names = [shard.file for shard in shards]
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(map(size_of, entries.values()))},
            "weight_map": {name: shard.file for shard in shards for name in shard.entries},
        }
        _write_json(folder / (SAFETENSORS_FILE + INDEX), index)
        names.append(SAFETENSORS_FILE + INDEX)
    _write_json(folder / CONFIG_FILE, dataclasses.replace(config, torch_dtype=main_dtype(entries.values())).to_dict())
    names.append(CONFIG_FILE)
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / TOKENIZER_FILE)
        names.append(TOKENIZER_FILE)
    return names


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def save_checkpoint(model: CaracalModel, path: str | Path, tokenizer_file: str | Path | None = None) -> None:
    """Writes a model as a checkpoint folder in the dtype its configuration names, each file replaced atomically.

    Args:
        model: its `config.torch_dtype` decides the stored dtype; a tied head is stored once.
        path: folder, made if missing.
        tokenizer_file: a `tokenizer.json` to copy beside the weights.

    Raises:
        CheckpointError: a weight does not survive the stored dtype (overflow to infinity), the head of a tied model is
            not the embedding, `path` is no folder, or there is no such tokenizer.
        OSError: a file cannot be written.
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
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state[HEAD]
    entries = {name: Stored(model.config.torch_dtype, tuple(tensor.shape)) for name, tensor in state.items()}

    def read(name: str) -> Tensor:
        tensor: Tensor = state[name].detach().to(dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"checkpoint: {name} is not finite as {model.config.torch_dtype}; store it wider")
        return tensor

    stage = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        names = write_folder(
            stage, model.config, entries, read, tokenizer=None if tokenizer_file is None else Path(tokenizer_file)
        )
        for name in names:
            give_usual_mode(stage / name)
            (stage / name).replace(folder / name)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    for stale in [*folder.glob("model-*-of-*.safetensors"), folder / (SAFETENSORS_FILE + INDEX)]:
        stale.unlink(missing_ok=True)  # shards of a checkpoint that was here before
