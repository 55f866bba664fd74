"""Every form in which a checkpoint may arrive, and what must happen: one list for the tests and for docs/checkpoints.md.

Each form is written here without the package's own writers. `make(folder, model)` writes it and returns a `Case`; a form
with `refused` must be refused with a message that holds all those pieces, any other must load to exactly `Case.state`.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from caracal.model import CaracalModel

State = dict[str, Tensor]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
WINDOW = {"sliding_window": 4}
NO_CONFIG = {**WINDOW, "tie_word_embeddings": True}


@dataclass
class Case:
    """What was written: where, what the user says besides, and the weights that must come back (None: the model's)."""

    path: Path
    options: dict[str, Any] = field(default_factory=dict)
    state: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Form:
    """One row of the table."""

    id: str
    group: str
    what: str
    then: str
    make: Callable[[Path, CaracalModel], Case]
    refused: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=dict)  # of the tiny model's configuration


FORMS: list[Form] = []


def form(
    group: str, what: str, then: str = "loads", *, refused: tuple[str, ...] = (), **model: Any
) -> Callable[[Callable[[Path, CaracalModel], Case]], Callable[[Path, CaracalModel], Case]]:
    """Adds a form to the list."""

    def add(make: Callable[[Path, CaracalModel], Case]) -> Callable[[Path, CaracalModel], Case]:
        FORMS.append(Form(make.__name__.strip("_"), group, what, then, make, refused, model))
        return make

    return add


# ---------------------------------------------------------------------------------------------------------------
# Writing by hand


def state_of(model: CaracalModel, *, tied_once: bool = True) -> State:
    """The model's tensors in memory of their own."""
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if tied_once and model.config.tie_word_embeddings:
        del state[HEAD]
    return state


def config_into(folder: Path, model: CaracalModel, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), **changes}), encoding="utf-8")


def hugging_face(folder: Path, model: CaracalModel, state: State | None = None, **changes: Any) -> Path:
    config_into(folder, model, **changes)
    safetensors.torch.save_file(state_of(model) if state is None else state, folder / "model.safetensors")
    return folder


def torch_file(path: Path, content: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path, **options)
    return path


def sharded(folder: Path, model: CaracalModel, kind: str, *, shards: int = 3) -> dict[str, str]:
    """Writes shards and returns the weight map, which is not written yet."""
    config_into(folder, model)
    state, weight_map = state_of(model), {}
    stem, suffix = ("model", "safetensors") if kind == "safetensors" else ("pytorch_model", "bin")
    for index in range(shards):
        file = f"{stem}-{index + 1:05}-of-{shards:05}.{suffix}"
        part = {name: state[name] for name in sorted(state)[index::shards]}
        weight_map |= dict.fromkeys(part, file)
        if kind == "safetensors":
            safetensors.torch.save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
    return weight_map


def index_into(folder: Path, weight_map: Mapping[str, str], kind: str = "safetensors") -> Path:
    name = "model.safetensors.index.json" if kind == "safetensors" else "pytorch_model.bin.index.json"
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return folder


def renamed(state: State, rename: Callable[[str], str]) -> State:
    return {rename(name): tensor for name, tensor in state.items()}


def distributed(folder: Path, content: Mapping[str, Any]) -> Path:
    import torch.distributed.checkpoint as dcp

    folder.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(content), checkpoint_id=str(folder), no_dist=True)
    return folder


def optimizer_of(model: CaracalModel) -> dict[str, Any]:
    """The state of an optimizer that has made a step: as many tensors as the model, none of them weights."""
    parameters = [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer.state_dict()


def linear(name: str) -> bool:
    return name.endswith("_proj.weight") or name == HEAD


class Evil:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (self.command,))


# ---------------------------------------------------------------------------------------------------------------
FOLDERS = "Folders in Hugging Face's style"


@form(FOLDERS, "`config.json` and `model.safetensors`")
def single_safetensors(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model))


@form(FOLDERS, "shards with `model.safetensors.index.json`")
def sharded_safetensors(folder: Path, model: CaracalModel) -> Case:
    return Case(index_into(folder, sharded(folder, model, "safetensors")))


@form(FOLDERS, "the index file itself")
def named_index(folder: Path, model: CaracalModel) -> Case:
    index_into(folder, sharded(folder, model, "safetensors"))
    return Case(folder / "model.safetensors.index.json")


@form(FOLDERS, "`config.json` and `pytorch_model.bin`")
def single_bin(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    torch_file(folder / "pytorch_model.bin", state_of(model))
    return Case(folder)


@form(FOLDERS, "shards with `pytorch_model.bin.index.json`")
def sharded_bin(folder: Path, model: CaracalModel) -> Case:
    return Case(index_into(folder, sharded(folder, model, "bin"), "bin"))


@form(FOLDERS, "both `model.safetensors` and `pytorch_model.bin`", "loads the safetensors")
def safetensors_before_bin(folder: Path, model: CaracalModel) -> Case:
    hugging_face(folder, model)
    torch_file(folder / "pytorch_model.bin", {name: torch.zeros_like(t) for name, t in state_of(model).items()})
    return Case(folder)


@form(FOLDERS, "a snapshot of the hub's cache, whose files are links to blobs")
def hub_snapshot(folder: Path, model: CaracalModel) -> Case:
    plain = hugging_face(folder / "plain", model)
    return Case(into_cache(folder / "hub", plain, "team/model"))


def into_cache(cache: Path, plain: Path, repository: str, commit: str = "a" * 40) -> Path:
    """Lays a folder out as the hub's cache does: blobs named by sha256, links in a snapshot, a ref to its commit."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for made in (root / "blobs", root / "refs", snapshot):
        made.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(commit, encoding="utf-8")
    for file in sorted(plain.iterdir()):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, root / "blobs" / digest)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", digest))
    return snapshot


@form(
    FOLDERS,
    "nothing that holds weights",
    "refused with what was found",
    refused=("has no model.safetensors", "found config.json"),
)
def no_weights(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(folder)


@form(
    FOLDERS,
    "weights under another file name",
    "refused with the file to name",
    refused=("name what holds the weights", "step_100.pt"),
)
def weights_of_another_name(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    torch_file(folder / "step_100.pt", state_of(model))
    return Case(folder)


@form(
    FOLDERS, "a single file and an index side by side", "refused: which is meant?", refused=("which of them is meant",)
)
def single_and_index(folder: Path, model: CaracalModel) -> Case:
    hugging_face(folder, model)
    return Case(index_into(folder, sharded(folder, model, "safetensors")))


@form(
    FOLDERS,
    "an index that refers to a missing shard",
    "refused with its name",
    refused=("2 are not in", "model-00002-of-00003"),
)
def missing_shard(folder: Path, model: CaracalModel) -> Case:
    index_into(folder, sharded(folder, model, "safetensors"))
    for number in (2, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
    return Case(folder)


@form(FOLDERS, "an index that leads out of the folder", "refused", refused=("is not a plain file name", "../other"))
def index_out_of_the_folder(folder: Path, model: CaracalModel) -> Case:
    weight_map = sharded(folder / "inner", model, "safetensors")
    hugging_face(folder / "other", model)
    return Case(index_into(folder / "inner", {**weight_map, "norm.weight": "../other/model.safetensors"}))


@form(FOLDERS, "an index with an absolute path", "refused", refused=("is not a plain file name", "/model.safetensors"))
def index_with_an_absolute_path(folder: Path, model: CaracalModel) -> Case:
    weight_map = sharded(folder, model, "safetensors")
    return Case(index_into(folder, {**weight_map, "norm.weight": str(folder / "model.safetensors")}))


@form(
    FOLDERS,
    "an index of another run",
    "refused with the first tensor that is not there",
    refused=("says that 'norm.extra'", "it is not there"),
)
def index_of_another_run(folder: Path, model: CaracalModel) -> Case:
    weight_map = sharded(folder, model, "safetensors")
    return Case(index_into(folder, {**weight_map, "norm.extra": "model-00001-of-00003.safetensors"}))


@form(
    FOLDERS, "a shard with a tensor that the index does not list", "refused", refused=("does not list", "norm.weight")
)
def shard_with_more(folder: Path, model: CaracalModel) -> Case:
    weight_map = sharded(folder, model, "safetensors")
    del weight_map["norm.weight"]
    return Case(index_into(folder, weight_map))


@form(FOLDERS, "one tensor in two shards", "refused", refused=("is in two shards",))
def tensor_in_two_shards(folder: Path, model: CaracalModel) -> Case:
    weight_map = sharded(folder, model, "safetensors")
    first, second = (folder / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    both = {**safetensors.torch.load_file(first), **safetensors.torch.load_file(second)}
    safetensors.torch.save_file(both, second)
    return Case(index_into(folder, weight_map))


@form(
    FOLDERS,
    "a Git LFS pointer in place of the weights",
    "refused: run `git lfs pull`",
    refused=("Git LFS pointer", "git lfs pull"),
)
def lfs_pointer(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12\n", encoding="utf-8"
    )
    return Case(folder)


@form(FOLDERS, "a bundle", "refused: `caracal convert` reads it", refused=("is a bundle", "caracal convert"))
def bundle_as_checkpoint(folder: Path, model: CaracalModel) -> Case:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text("{}", encoding="utf-8")
    return Case(folder)


@form(FOLDERS, "a DeepSpeed checkpoint", "refused: run its zero_to_fp32.py", refused=("DeepSpeed", "zero_to_fp32.py"))
def deepspeed(folder: Path, model: CaracalModel) -> Case:
    torch_file(folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"x": 1})
    return Case(folder)


@form(
    FOLDERS,
    "a `config.json` that is a link to nothing (a broken cache)",
    "refused with its path",
    refused=("config.json is a link to nothing",),
)
def dangling_config(folder: Path, model: CaracalModel) -> Case:
    hugging_face(folder, model)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "blobs" / "gone")
    return Case(folder)


@form(
    FOLDERS,
    "PyTorch shards with weights of different entries",
    "refused",
    refused=("under 'ema'", "of different sets of weights"),
)
def shards_of_different_entries(folder: Path, model: CaracalModel) -> Case:
    index_into(folder, sharded(folder, model, "bin", shards=2), "bin")
    for number, entry in ((1, "model"), (2, "ema")):
        file = folder / f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({entry: torch.load(file)}, file)
    return Case(folder)


@form(
    FOLDERS,
    "one shard of several, named by itself",
    "refused: name the folder or the index",
    refused=("is one of 3 shards",),
)
def one_shard(folder: Path, model: CaracalModel) -> Case:
    index_into(folder, sharded(folder, model, "safetensors"))
    return Case(folder / "model-00001-of-00003.safetensors")


# ---------------------------------------------------------------------------------------------------------------
FILES = "Single files"


@form(FILES, "`.safetensors` with `--config`")
def file_with_config(folder: Path, model: CaracalModel) -> Case:
    config_into(folder / "elsewhere", model)
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(state_of(model), folder / "weights.safetensors")
    return Case(folder / "weights.safetensors", {"config": folder / "elsewhere" / "config.json"})


@form(FILES, "`.safetensors` with `config.json` beside it")
def file_with_config_beside(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    safetensors.torch.save_file(state_of(model), folder / "step_9.safetensors")
    return Case(folder / "step_9.safetensors")


@form(FILES, "`.safetensors` with the configuration in its metadata (JSON under `config`)")
def config_in_metadata(folder: Path, model: CaracalModel) -> Case:
    folder.mkdir(exist_ok=True)
    metadata = {"config": json.dumps(model.config.to_dict())}
    safetensors.torch.save_file(state_of(model), folder / "w.safetensors", metadata=metadata)
    return Case(folder / "w.safetensors")


@form(FILES, "a blob of a cache, without an ending", "loads")
def file_without_ending(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    safetensors.torch.save_file(state_of(model), folder / ("0" * 64))
    return Case(folder / ("0" * 64))


@form(
    FILES, "a truncated `.safetensors`", "refused", refused=("is not a whole safetensors file", "copy or save it again")
)
def truncated(folder: Path, model: CaracalModel) -> Case:
    file = hugging_face(folder, model) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return Case(folder)


@form(
    FILES,
    "a PyTorch file that is called `.safetensors`",
    "refused: rename it",
    refused=("is not a whole safetensors file", "give it the ending .pt"),
)
def torch_called_safetensors(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    torch_file(folder / "model.safetensors", state_of(model))
    return Case(folder)


@form(
    FILES,
    "a safetensors file that is called `.pt`",
    "refused: rename it",
    refused=("is a safetensors file", "give it the ending .safetensors"),
)
def safetensors_called_torch(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    safetensors.torch.save_file(state_of(model), folder / "w.pt")
    return Case(folder / "w.pt")


@form(
    FILES,
    "GGUF, ONNX, NumPy, Flax and other formats",
    "refused with the accepted forms",
    refused=("is a GGUF file", "expected a folder"),
)
def gguf(folder: Path, model: CaracalModel) -> Case:
    folder.mkdir(exist_ok=True)
    (folder / "model.gguf").write_bytes(b"GGUF")
    return Case(folder / "model.gguf")


@form(
    FILES,
    "a configuration inside the file that contradicts `config.json`",
    "refused: say which with `--config`",
    refused=("contradict each other", "--config FILE"),
)
def two_configurations(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model, sliding_window=5)
    metadata = {"config": json.dumps(model.config.to_dict())}
    safetensors.torch.save_file(state_of(model), folder / "w.safetensors", metadata=metadata)
    return Case(folder / "w.safetensors")


@form(FILES, "the same with `--config`")
def two_configurations_decided(folder: Path, model: CaracalModel) -> Case:
    two_configurations(folder, model)
    config_into(folder / "right", model)
    return Case(folder / "w.safetensors", {"config": folder / "right" / "config.json"})


# ---------------------------------------------------------------------------------------------------------------
TRAINING = "Training checkpoints (`.pt`, `.pth`, `.ckpt`), loaded with `weights_only=True` alone"


def _bare(suffix: str) -> Callable[[Path, CaracalModel], Case]:
    def make(folder: Path, model: CaracalModel) -> Case:
        config_into(folder, model)
        return Case(torch_file(folder / f"run{suffix}", state_of(model)))

    make.__name__ = f"bare_{suffix[1:]}"
    return make


for _suffix in (".pt", ".pth", ".ckpt"):
    form(TRAINING, f"a bare state dict, `{_suffix}`")(_bare(_suffix))


def _inside(entry: str) -> Callable[[Path, CaracalModel], Case]:
    def make(folder: Path, model: CaracalModel) -> Case:
        config_into(folder, model)
        content = {"epoch": 3, entry: state_of(model), "optimizer": optimizer_of(model), "step": torch.tensor(7)}
        return Case(torch_file(folder / "run.pt", content))

    make.__name__ = f"inside_{entry}"
    return make


for _entry in ("model", "state_dict", "model_state_dict", "module", "ema", "ema_state_dict", "model_ema"):
    form(TRAINING, f"a state dict inside `{_entry}`, beside an optimizer's state")(_inside(_entry))


@form(TRAINING, "PyTorch Lightning: `state_dict` with the prefix `model.`, hyperparameters, loops")
def lightning(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    content = {
        "epoch": 1,
        "global_step": 500,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": renamed(state_of(model), "model.".__add__),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {},
        "optimizer_states": [optimizer_of(model)],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 1e-3},
    }
    return Case(torch_file(folder / "epoch=1.ckpt", content))


@form(TRAINING, "FSDP, full state dict: names with `_fsdp_wrapped_module.` inside")
def fsdp_full(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)

    def rename(name: str) -> str:
        return name.replace(".mhf.", "._fsdp_wrapped_module.mhf.").replace(".swa.", "._fsdp_wrapped_module.swa.")

    return Case(torch_file(folder / "run.pt", {"model": renamed(state_of(model), rename)}))


@form(TRAINING, "`torch.optim.swa_utils.AveragedModel`: the prefix `module.` and a counter")
def averaged(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    state = {**renamed(state_of(model), "module.".__add__), "n_averaged": torch.tensor(12)}
    return Case(torch_file(folder / "swa.pt", state))


@form(TRAINING, "a nested entry, with `--entry ema.state_dict`")
def nested_entry(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    content = {
        "model": {k: torch.zeros_like(v) for k, v in state_of(model).items()},
        "ema": {"decay": 0.99, "state_dict": state_of(model)},
    }
    return Case(torch_file(folder / "run.pt", content), {"entry": "ema.state_dict"})


@form(TRAINING, "the configuration beside the weights in the same file (`config` with `model_type`)")
def config_in_the_file(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", {"model": state_of(model), "config": model.config.to_dict()}))


@form(TRAINING, "the format before PyTorch 1.6")
def legacy_format(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "old.pt", state_of(model), _use_new_zipfile_serialization=False))


@form(TRAINING, "an `OrderedDict` of `Parameter`s")
def ordered_parameters(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    content = collections.OrderedDict((k, nn.Parameter(v)) for k, v in state_of(model).items())
    return Case(torch_file(folder / "run.pt", content))


@form(
    TRAINING,
    "the model and its average (EMA) in one file",
    "refused: say which with `--entry`",
    refused=("2 sets of weights", "'model', 'ema'", "--entry"),
)
def model_and_ema(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {"model": state_of(model), "ema": state_of(model)}))


@form(
    TRAINING,
    "two models, one of them called `optimal_model`",
    "refused: say which with `--entry`",
    refused=("2 sets of weights", "'optimal_model'"),
)
def last_and_optimal(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {"last": state_of(model), "optimal_model": state_of(model)}))


@form(
    TRAINING, "an `--entry` that two sets of weights answer to", "refused", refused=("2 sets of weights under 'a.b'",)
)
def ambiguous_entry(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {"a.b": state_of(model), "a": {"b": state_of(model)}}), {"entry": "a.b"})


@form(
    TRAINING,
    "an `--entry` that is not there",
    "refused with those that are",
    refused=("no weights under 'emma'", "'model'"),
)
def wrong_entry(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {"model": state_of(model)}), {"entry": "emma"})


@form(
    TRAINING,
    "no names at all (a list of tensors)",
    "refused",
    refused=("holds no state dict", "save model.state_dict()"),
)
def list_of_tensors(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {"shadow_params": list(state_of(model).values())}))


@form(TRAINING, "an optimizer's state alone", "refused", refused=("holds no state dict",))
def optimizer_alone(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "optimizer.pt", {"optimizer": optimizer_of(model)}))


@form(
    TRAINING,
    "an `argparse.Namespace` beside the weights",
    "refused with a command that keeps the weights alone",
    refused=("argparse.Namespace", "add_safe_globals([argparse.Namespace])"),
)
def namespace(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {"model": state_of(model), "args": argparse.Namespace(lr=0.1)}))


@form(
    TRAINING,
    "numbers and random states of NumPy beside the weights",
    "refused with a command that keeps the weights alone",
    refused=("scalar", "add_safe_globals(["),
)
def numpy_numbers(folder: Path, model: CaracalModel) -> Case:
    import numpy as np

    config_into(folder, model)
    return Case(
        torch_file(folder / "run.pt", {"model": state_of(model), "best": np.float64(0.5), "seen": np.arange(3)})
    )


@form(
    TRAINING,
    "a pickle that runs code",
    "refused, naming the function; nothing is run",
    refused=("system", "could run code, and nothing of it was run"),
)
def evil(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {"model": state_of(model), "x": Evil(f"touch {folder / 'ran'}")}))


@form(
    TRAINING,
    "the same in the old format",
    "refused, naming the function; nothing is run",
    refused=("system", "could run code, and nothing of it was run"),
)
def evil_legacy(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    content = {"model": state_of(model), "x": Evil(f"touch {folder / 'ran'}")}
    return Case(torch_file(folder / "run.pt", content, _use_new_zipfile_serialization=False))


@form(
    TRAINING,
    "the same in `pytorch_model.bin` and in a shard",
    "refused, naming the function; nothing is run",
    refused=("system", "could run code, and nothing of it was run"),
)
def evil_shard(folder: Path, model: CaracalModel) -> Case:
    index_into(folder, sharded(folder, model, "bin"), "bin")
    torch.save({"norm.weight": Evil(f"touch {folder / 'ran'}")}, folder / "pytorch_model-00003-of-00003.bin")
    return Case(folder)


@form(
    TRAINING,
    "a whole pickled module",
    "refused: save its state dict",
    refused=("torch.nn.modules.linear.Linear", "torch.save(model.state_dict(), 'weights.pt')"),
)
def pickled_module(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", nn.Linear(3, 3)))


@form(TRAINING, "a TorchScript program", "refused: save its state dict", refused=("TorchScript", "torch.jit.load"))
def torchscript(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Linear(3, 3)).save(str(folder / "run.pt"))
    return Case(folder / "run.pt")


@form(TRAINING, "a truncated file", "refused", refused=("is not a whole file of torch.save",))
def truncated_torch(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    file = torch_file(folder / "run.pt", state_of(model))
    file.write_bytes(file.read_bytes()[:2000])
    return Case(file)


@form(
    TRAINING,
    "a sharded FSDP dump (flat parameters)",
    "refused: save a full state dict",
    refused=("flat parameter of FSDP", "FULL_STATE_DICT"),
)
def fsdp_flat(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    state = {"_fsdp_wrapped_module._flat_param": torch.ones(100), "embed_tokens.weight": torch.ones(19, 12)}
    return Case(torch_file(folder / "run.pt", {"model": state}))


# ---------------------------------------------------------------------------------------------------------------
DCP = "`torch.distributed.checkpoint` folders"


@form(DCP, "`{'model': ..., 'optim': ...}`, as training loops write it")
def dcp_training(folder: Path, model: CaracalModel) -> Case:
    distributed(folder / "dcp", {"model": state_of(model), "optim": optimizer_of(model), "step": 5})
    config_into(folder / "dcp", model)
    return Case(folder / "dcp")


@form(DCP, "a bare state dict, with `--config`")
def dcp_bare(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(distributed(folder / "dcp", state_of(model)), {"config": folder / "config.json"})


@form(DCP, "a file of the folder is missing", "refused with its name", refused=("lacks 1 of 1 files", "__0_0.distcp"))
def dcp_missing_file(folder: Path, model: CaracalModel) -> Case:
    distributed(folder / "dcp", {"model": state_of(model)})
    config_into(folder / "dcp", model)
    (folder / "dcp" / "__0_0.distcp").unlink()
    return Case(folder / "dcp")


def two_ranks(folder: Path, model: CaracalModel, *, lose: str = "") -> Path:
    """A folder as two ranks write it, each half of the rows of every tensor; `lose` is left out of the index."""
    import pickle

    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir(parents=True, exist_ok=True)
    tensors, places, paths = {}, {}, {}
    for rank in (0, 1):
        with (folder / f"__{rank}_0.distcp").open("wb") as file:
            for name, tensor in state_of(model).items():
                half = -(-len(tensor) // 2)
                piece = (tensor[:half] if rank == 0 else tensor[half:]).clone()
                full, start = f"model.{name}", file.tell()
                torch.save(piece, file)
                offsets = torch.Size([rank * half, *[0] * (tensor.dim() - 1)])
                entry = tensors.setdefault(
                    full, TensorStorageMetadata(TensorProperties.create_from_tensor(tensor), tensor.size(), [])
                )
                paths[full] = ("model", name)
                if rank == 1 and name == lose:
                    continue
                entry.chunks.append(ChunkStorageMetadata(offsets, piece.size()))
                length = file.tell() - start
                places[MetadataIndex(full, offsets)] = _StorageInfo(f"__{rank}_0.distcp", start, length)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, paths, places)))
    return folder


@form(DCP, "pieces of every tensor in the files of two ranks")
def dcp_two_ranks(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(two_ranks(folder, model))


@form(
    DCP,
    "pieces that leave a hole in a tensor",
    "refused with its name",
    refused=("do not make a whole tensor", "norm.weight"),
)
def dcp_hole(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(two_ranks(folder, model, lose="norm.weight"))


@form(DCP, "a truncated file", "refused", refused=("cannot be read", "copy or save it again"))
def dcp_truncated(folder: Path, model: CaracalModel) -> Case:
    distributed(folder / "dcp", {"model": state_of(model)})
    config_into(folder / "dcp", model)
    file = folder / "dcp" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return Case(folder / "dcp")


@form(DCP, "a file that runs code", "refused; nothing is run", refused=("cannot be read",))
def dcp_evil_file(folder: Path, model: CaracalModel) -> Case:
    distributed(folder / "dcp", {"model": state_of(model)})
    config_into(folder / "dcp", model)
    torch.save(Evil(f"touch {folder / 'ran'}"), folder / "dcp" / "__0_0.distcp")
    return Case(folder / "dcp")


@form(DCP, "`.metadata` beside a `model.safetensors`", "refused: which is meant?", refused=("which of them is meant",))
def dcp_and_safetensors(folder: Path, model: CaracalModel) -> Case:
    distributed(folder, {"model": state_of(model)})
    return Case(hugging_face(folder, model))


@form(DCP, "the `.metadata` file itself")
def dcp_named(folder: Path, model: CaracalModel) -> Case:
    distributed(folder, {"model": state_of(model)})
    hugging_face(folder, model)
    return Case(folder / ".metadata")


@form(
    DCP,
    "metadata that runs code",
    "refused, naming the function; nothing is run",
    refused=("system", "nothing of it was run"),
)
def dcp_evil(folder: Path, model: CaracalModel) -> Case:
    import pickle

    config_into(folder, model)
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(f"touch {folder / 'ran'}")))
    return Case(folder)


@form(DCP, "metadata that leads out of the folder", "refused", refused=("is not a plain file name", "../elsewhere"))
def dcp_out_of_the_folder(folder: Path, model: CaracalModel) -> Case:
    import pickle

    distributed(folder / "dcp", {"model": state_of(model)})
    config_into(folder / "dcp", model)
    metadata = pickle.loads((folder / "dcp" / ".metadata").read_bytes())
    for piece in metadata.storage_data.values():
        piece.relative_path = "../elsewhere"
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(metadata))
    return Case(folder / "dcp")


# ---------------------------------------------------------------------------------------------------------------
NAMES = "Names"

PAPER = {"norm": "ln", "value_proj": "W_V", "gate_proj": "W_G1", "gate_conv": "W_G2", "out_proj": "linear"}


def paper_name(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 5 and parts[2] == "mhf":
        parts[3] = PAPER.get(parts[3], parts[3])
    return ".".join(parts)


@form(NAMES, "the names of the paper's listing (`W_V`, `W_G1`, `W_G2`, `linear`, `ln`, `pre_conv`)")
def paper_names(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, renamed(state_of(model), paper_name)))


PREFIXES = (
    "module.",
    "model.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "module._orig_mod.",
    "_orig_mod.module.",
    "model._fsdp_wrapped_module._orig_mod.module.",
)


def _prefixed(prefix: str) -> Callable[[Path, CaracalModel], Case]:
    def make(folder: Path, model: CaracalModel) -> Case:
        return Case(hugging_face(folder, model, renamed(state_of(model), prefix.__add__)))

    make.__name__ = "prefix_" + prefix.replace(".", "_")
    return make


for _prefix in PREFIXES:
    form(NAMES, f"the prefix `{_prefix}`")(_prefixed(_prefix))


@form(NAMES, "wrappers around single blocks (`blocks.0._orig_mod.mhf...`)")
def wrapped_blocks(folder: Path, model: CaracalModel) -> Case:
    def rename(name: str) -> str:
        return name.replace(".mhf.", "._orig_mod.mhf.").replace(".ffn.", "._checkpoint_wrapped_module.ffn.")

    return Case(hugging_face(folder, model, renamed(state_of(model), rename)))


@form(
    NAMES,
    "one name twice, with and without a prefix",
    "refused",
    refused=("has norm.weight twice", "module.norm.weight"),
)
def doubled_name(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    return Case(hugging_face(folder, model, {**state, "module.norm.weight": state["norm.weight"].clone()}))


@form(
    NAMES, "a tensor too many", "refused with the list", refused=("1 unknown (blocks.0.mhf.extra.weight)", "--key-map")
)
def unknown_tensor(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, {**state_of(model), "blocks.0.mhf.extra.weight": torch.ones(2)}))


@form(
    NAMES,
    "a tensor too few",
    "refused with the list; nothing is filled in",
    refused=("1 missing (blocks.1.mhf.norm.bias)", "not whole"),
)
def missing_tensor(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    del state["blocks.1.mhf.norm.bias"]
    return Case(hugging_face(folder, model, state))


@form(NAMES, "a whole layer too few", "refused with the list", refused=("18 missing", "blocks.2.ffn.down_proj.bias"))
def missing_layer(folder: Path, model: CaracalModel) -> Case:
    return Case(
        hugging_face(folder, model, {k: v for k, v in state_of(model).items() if not k.startswith("blocks.2.")})
    )


@form(
    NAMES,
    "a tensor of another width",
    "refused with both shapes",
    refused=("norm.weight has [13], the config wants [12]",),
)
def wrong_width(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, {**state_of(model), "norm.weight": torch.ones(13)}))


@form(NAMES, "q, k and v in one matrix (`qkv_proj`, `Wqkv`, `in_proj`, `c_attn`)")
def fused_qkv(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, fuse_qkv(state_of(model), "qkv_proj.{}")))


@form(NAMES, "q, k and v as `torch.nn.MultiheadAttention` stores them (`in_proj_weight`)")
def fused_multihead(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, fuse_qkv(state_of(model), "in_proj_{}")))


@form(NAMES, "q, k and v in one matrix that is stored [in, out]")
def fused_qkv_transposed(folder: Path, model: CaracalModel) -> Case:
    state = fuse_qkv(state_of(model), "c_attn.{}")
    return Case(
        hugging_face(folder, model, {k: v.t().contiguous() if "c_attn.weight" in k else v for k, v in state.items()})
    )


@form(NAMES, "gate and up in one matrix (`gate_up_proj`)")
def fused_gate_up(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    for block in range(3):
        for tail in ("weight", "bias"):
            parts = [state.pop(f"blocks.{block}.ffn.{name}_proj.{tail}") for name in ("gate", "up")]
            state[f"blocks.{block}.ffn.gate_up_proj.{tail}"] = torch.cat(parts)
    return Case(hugging_face(folder, model, state))


def fuse_qkv(state: State, name: str) -> State:
    for block in {key.split(".")[1] for key in state if ".swa." in key}:
        for tail in ("weight", "bias"):
            parts = [state.pop(f"blocks.{block}.swa.{letter}_proj.{tail}") for letter in "qkv"]
            state[f"blocks.{block}.swa.{name.format(tail)}"] = torch.cat(parts)
    return state


@form(NAMES, "q, k and v in one matrix and k by itself too", "refused", refused=("twice, by itself and inside",))
def fused_and_separate(folder: Path, model: CaracalModel) -> Case:
    state = fuse_qkv(state_of(model), "qkv_proj.{}")
    return Case(hugging_face(folder, model, {**state, "blocks.2.swa.k_proj.weight": torch.ones(12, 12)}))


def foreign_name(name: str) -> str:
    """Another project's names for everything."""
    for ours, theirs in (
        ("embed_tokens", "transformer.wte"), ("lm_head", "transformer.head"), ("blocks.", "transformer.h."),
        (".mhf.pre_conv", ".mixer.dwconv"), (".mhf.norm", ".mixer.ln_1"), (".mhf.value_proj", ".mixer.to_v"),
        (".mhf.gate_proj", ".mixer.to_g1"), (".mhf.gate_conv", ".mixer.to_g2"), (".mhf.out_proj", ".mixer.proj"),
        (".swa.norm", ".attn.ln_1"), (".swa.q_proj", ".attn.query"), (".swa.k_proj", ".attn.key"),
        (".swa.v_proj", ".attn.value"), (".swa.out_proj", ".attn.proj"), (".ffn.norm", ".ln_2"),
        (".ffn.gate_proj", ".mlp.w1"), (".ffn.up_proj", ".mlp.w3"), (".ffn.down_proj", ".mlp.w2"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name.replace("norm.", "transformer.ln_f.") if name.startswith("norm.") else name


@form(
    NAMES,
    "a layout of another project, without a key map",
    "refused; `caracal info` prints a draft of one",
    refused=("unknown", "`caracal info` prints a draft", "--key-map"),
)
def foreign_layout(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, renamed(state_of(model), foreign_name)))


@form(NAMES, "the same with the key map that `caracal info` drafted")
def foreign_layout_with_draft(folder: Path, model: CaracalModel) -> Case:
    from caracal.checkpoint.key_map_draft import draft_key_map
    from caracal.checkpoint.stores import Stored

    state = renamed(state_of(model), foreign_name)
    hugging_face(folder, model, state)
    draft = draft_key_map({k: Stored("float32", tuple(v.shape)) for k, v in state.items()})
    (folder / "map.toml").write_text(draft, encoding="utf-8")
    return Case(folder, {"key_map": folder / "map.toml"})


@form(NAMES, "a key map that drops a buffer and turns a matrix")
def key_map_drop_and_transpose(folder: Path, model: CaracalModel) -> Case:
    state = {**state_of(model), "blocks.2.swa.mask": torch.ones(4, 4, dtype=torch.bool)}
    state["blocks.2.swa.q_proj.weight"] = state["blocks.2.swa.q_proj.weight"].t().contiguous()
    hugging_face(folder, model, state)
    (folder / "map.toml").write_text(
        "[[rule]]\nmatch = '.*\\.mask'\ndrop = true\n"
        "[[rule]]\nmatch = '(blocks\\.\\d+\\.swa\\.q_proj\\.weight)'\nname = '\\1'\ntranspose = true\n",
        encoding="utf-8",
    )
    return Case(folder, {"key_map": folder / "map.toml"})


def _bad_map(text: str, name: str) -> Callable[[Path, CaracalModel], Case]:
    def make(folder: Path, model: CaracalModel) -> Case:
        hugging_face(folder, model)
        (folder / "map.toml").write_text(text, encoding="utf-8")
        return Case(folder, {"key_map": folder / "map.toml"})

    make.__name__ = name
    return make


for _what, _text, _pieces, _name in (
    ("that is not TOML", "{", ("is not TOML",), "key_map_not_toml"),
    ("without rules", "", ("must hold [[rule]] tables", "no rules"), "key_map_empty"),
    ("with a misspelt key", "[[rule]]\nmach = 'a'\n", ("rule 1 has the key 'mach'",), "key_map_misspelt"),
    (
        "with a broken expression",
        "[[rule]]\nmatch = '('\nname = 'a'\n",
        ("rule 1 is no regular expression",),
        "key_map_broken",
    ),
    (
        "with a group that is not there",
        "[[rule]]\nmatch = 'a'\nname = '\\1'\n",
        ("rule 1 is no regular expression",),
        "key_map_no_group",
    ),
    (
        "with a rule that matches nothing",
        "[[rule]]\nmatch = 'nrom'\nname = 'norm'\n",
        ("rule 1 ('nrom') matches no name",),
        "key_map_unused",
    ),
):
    form(NAMES, f"a key map {_what}", "refused, naming the rule", refused=_pieces)(_bad_map(_text, _name))


# ---------------------------------------------------------------------------------------------------------------
VALUES = "Shapes, dtypes and storages"


@form(
    VALUES,
    "matrices stored [in, out] where the shape tells, square ones as PyTorch stores them, with `--linear-layout out-in`",
)
def transposed_where_told(folder: Path, model: CaracalModel) -> Case:
    state = {k: v.t().contiguous() if linear(k) and v.shape[0] != v.shape[1] else v for k, v in state_of(model).items()}
    return Case(hugging_face(folder, model, state), {"linear_layout": "out-in"})


@form(VALUES, "all matrices stored [in, out], with `--linear-layout in-out`")
def transposed_everywhere(folder: Path, model: CaracalModel) -> Case:
    state = {k: v.t().contiguous() if linear(k) else v for k, v in state_of(model).items()}
    return Case(hugging_face(folder, model, state), {"linear_layout": "in-out"})


@form(VALUES, "one matrix stored [in, out], the others not")
def one_transposed(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    state["blocks.0.ffn.up_proj.weight"] = state["blocks.0.ffn.up_proj.weight"].t().contiguous()
    return Case(hugging_face(folder, model, state))


@form(
    VALUES,
    "every matrix whose shape tells is [in, out], and square ones do not tell",
    "refused: say `--linear-layout`",
    refused=("is stored [in, out]", "--linear-layout in-out"),
)
def transposed_undecided(folder: Path, model: CaracalModel) -> Case:
    return Case(transposed_everywhere(folder, model).path)


@form(
    VALUES,
    "the layers [in, out], the head as PyTorch stores it (GPT-2's way)",
    "refused: say `--linear-layout`",
    refused=("is stored [in, out]", "--linear-layout in-out"),
    tie_word_embeddings=False,
)
def transposed_but_the_head(folder: Path, model: CaracalModel) -> Case:
    state = {k: v.t().contiguous() if linear(k) and k != HEAD else v for k, v in state_of(model).items()}
    return Case(hugging_face(folder, model, state))


@form(VALUES, "the same with `--linear-layout in-out`", tie_word_embeddings=False)
def transposed_but_the_head_decided(folder: Path, model: CaracalModel) -> Case:
    return Case(transposed_but_the_head(folder, model).path, {"linear_layout": "in-out"})


@form(
    VALUES,
    "a fused matrix that is square, in a checkpoint of [in, out] matrices",
    "refused: say `--linear-layout`",
    refused=("--linear-layout in-out",),
    intermediate_size=6,
)
def fused_square(folder: Path, model: CaracalModel) -> Case:
    state = {k: v.t().contiguous() if linear(k) else v for k, v in state_of(model).items()}
    for block in range(3):
        for tail in ("weight", "bias"):
            parts = [state.pop(f"blocks.{block}.ffn.{name}_proj.{tail}") for name in ("gate", "up")]
            state[f"blocks.{block}.ffn.gate_up_proj.{tail}"] = torch.cat(parts, dim=-1)
    return Case(hugging_face(folder, model, state))


@form(VALUES, "the same with `--linear-layout in-out`", intermediate_size=6)
def fused_square_decided(folder: Path, model: CaracalModel) -> Case:
    return Case(fused_square(folder, model).path, {"linear_layout": "in-out"})


@form(
    VALUES,
    "a `--linear-layout` that contradicts the shapes",
    "refused",
    refused=("--linear-layout in-out contradicts",),
)
def contradicting_layout(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model), {"linear_layout": "in-out"})


@form(VALUES, "convolutions without their axis of size 1")
def squeezed_convolutions(folder: Path, model: CaracalModel) -> Case:
    state = {k: v.squeeze().clone() if "_conv.weight" in k else v for k, v in state_of(model).items()}
    return Case(hugging_face(folder, model, state))


@form(VALUES, "a tied head stored twice", tie_word_embeddings=True)
def head_twice(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, state_of(model, tied_once=False)))


@form(VALUES, "a tied head stored under the head's name alone", tie_word_embeddings=True)
def head_alone(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    state[HEAD] = state.pop(EMBEDDING)
    return Case(hugging_face(folder, model, state))


@form(
    VALUES,
    "a tied head stored twice with other values",
    "refused",
    refused=("embed_tokens.weight and lm_head.weight differ",),
    tie_word_embeddings=True,
)
def head_differs(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model, tied_once=False)
    state[HEAD] = state[HEAD] + 1
    return Case(hugging_face(folder, model, state))


@form(
    VALUES,
    "an untied head that is not there",
    "refused: is it tied?",
    refused=("1 missing (lm_head.weight)", "is it tied"),
    tie_word_embeddings=False,
)
def head_missing(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    del state[HEAD]
    return Case(hugging_face(folder, model, state))


@form(VALUES, "an untied head", tie_word_embeddings=False)
def head_untied(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model))


def _stored_as(dtype: torch.dtype) -> Callable[[Path, CaracalModel], Case]:
    def make(folder: Path, model: CaracalModel) -> Case:
        state = {k: v.to(dtype) for k, v in state_of(model).items()}
        return Case(hugging_face(folder, model, state), state={k: v.float() for k, v in state.items()})

    make.__name__ = f"stored_{str(dtype).removeprefix('torch.')}"
    return make


for _dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2):
    form(VALUES, f"weights in {str(_dtype).removeprefix('torch.')}", "loads; computed in float32")(_stored_as(_dtype))


@form(
    VALUES,
    "8-bit floats with factors per tensor, per row and per block of 128 (`weight_scale`, `weight_scale_inv`)",
    "loads the products",
    hidden_size=132,
    num_attention_heads=3,
    intermediate_size=200,
)
def scaled_float8(folder: Path, model: CaracalModel) -> Case:
    state, expected = state_of(model), {}
    kinds = ("tensor", "row", "block")
    for index, name in enumerate(sorted(k for k in state if linear(k) and k != HEAD)):
        weight, kind = state[name], kinds[index % 3]
        rows, columns = weight.shape
        counts = {"tensor": (1, 1), "row": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}[kind]
        scale = 0.5 + torch.rand(counts, generator=torch.Generator().manual_seed(index))
        spread = torch.empty(rows, columns)
        for r in range(rows):  # the slow way, so that it is another one
            for block in range(counts[1]):
                row = {"tensor": 0, "row": r, "block": r // 128}[kind]
                spread[r, block * 128 : (block + 1) * 128 if counts[1] > 1 else columns] = scale[row, block]
        state[name] = (weight / spread).to(torch.float8_e4m3fn)
        expected[name] = state[name].float() * spread
        state[f"{name}_scale" + ("_inv" if kind == "block" else "")] = scale.reshape(()) if kind == "tensor" else scale
    return Case(hugging_face(folder, model, state), state={**state_of(model), **expected})


@form(VALUES, "a tied head in 8-bit floats with its factor, stored under the head's name", "loads the product")
def scaled_head(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    weight = (state.pop(EMBEDDING) * 4).to(torch.float8_e4m3fn)
    expected = {**state, EMBEDDING: weight.float() * 0.25}
    return Case(
        hugging_face(folder, model, {**state, HEAD: weight, f"{HEAD}_scale": torch.tensor(0.25)}), state=expected
    )


@form(
    VALUES,
    "factors per row of a matrix that is stored [in, out]",
    "refused: which way do they lie?",
    refused=("is no factor for",),
)
def scaled_transposed(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    name = "blocks.0.ffn.up_proj.weight"
    state |= {name: state[name].t().contiguous().to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(20)}
    return Case(hugging_face(folder, model, state))


@form(
    VALUES,
    "dtypes whose values mean nothing alone (`float8_e8m0fnu`)",
    "refused with the tensor's name",
    refused=("norm.weight", "must be floating point, found float8_e8m0fnu"),
)
def exponents(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    state = state_of(model)
    return Case(torch_file(folder / "run.pt", {**state, "norm.weight": state["norm.weight"].to(torch.float8_e8m0fnu)}))


@form(VALUES, "a factor of no shape that fits", "refused", refused=("is no factor for", "one per block of 128 x 128"))
def bad_scale(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    name = "blocks.0.ffn.up_proj.weight"
    state |= {name: state[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(7)}
    return Case(hugging_face(folder, model, state))


@form(VALUES, "several dtypes in one checkpoint")
def mixed_dtypes(folder: Path, model: CaracalModel) -> Case:
    state = {k: v.to(torch.bfloat16) if v.dim() > 1 else v for k, v in state_of(model).items()}
    return Case(hugging_face(folder, model, state), state={k: v.float() for k, v in state.items()})


@form(VALUES, "tensors that are not contiguous")
def not_contiguous(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    state = {k: v.t().contiguous().t() if v.dim() == 2 else v for k, v in state_of(model).items()}
    return Case(torch_file(folder / "run.pt", state))


@form(VALUES, "tensors that share one storage")
def shared_storage(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    state = state_of(model)
    flat = torch.cat([v.reshape(-1) for v in state.values()])
    views, start = {}, 0
    for key, value in state.items():
        views[key] = flat[start : start + value.numel()].view(value.shape)
        start += value.numel()
    return Case(torch_file(folder / "run.pt", views))


@form(
    VALUES,
    "a weight that is NaN or infinite",
    "refused with the tensor's name",
    refused=("blocks.1.mhf.gate_proj.weight", "1 of 144 values that are NaN or infinite"),
)
def not_a_number(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    state["blocks.1.mhf.gate_proj.weight"][3, 4] = float("nan")
    return Case(hugging_face(folder, model, state))


@form(
    VALUES,
    "a float64 weight beyond float32",
    "refused with the tensor's name",
    refused=("norm.weight", "beyond the range of float32"),
)
def beyond_float32(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    state["norm.weight"] = state["norm.weight"].double() * 1e300
    return Case(hugging_face(folder, model, state))


@form(
    VALUES,
    "integers in place of weights (a quantized checkpoint)",
    "refused with the tensor's name",
    refused=("blocks.0.ffn.up_proj.weight", "must be floating point, found int8"),
)
def integers(folder: Path, model: CaracalModel) -> Case:
    state = state_of(model)
    state["blocks.0.ffn.up_proj.weight"] = state["blocks.0.ffn.up_proj.weight"].to(torch.int8)
    return Case(hugging_face(folder, model, state))


@form(VALUES, "sparse tensors", "refused", refused=("norm.extra", "expected a dense tensor"))
def sparse(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    return Case(torch_file(folder / "run.pt", {**state_of(model), "norm.extra": torch.eye(3).to_sparse()}))


@form(
    VALUES,
    "more than 2^31 elements in one tensor",
    "refused beforehand, with the numbers",
    refused=("16,777,216 x 4,096 = 68,719,476,736 elements", "at most 2,147,483,647"),
)
def too_many_elements(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model, vocab_size=1 << 24, hidden_size=4096, num_attention_heads=4))


@form(
    VALUES,
    "a stored tensor of more than 2^31 elements",
    "refused beforehand, with the numbers",
    refused=("2,147,549,184 elements, at most 2,147,483,647",),
)
def too_many_stored_elements(folder: Path, model: CaracalModel) -> Case:
    config_into(folder, model)
    header = json.dumps(
        {"norm.weight": {"dtype": "F8_E4M3", "shape": [65536, 32769], "data_offsets": [0, 65536 * 32769]}}
    )
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + 65536 * 32769)  # a hole: nothing is written
    return Case(folder)


# ---------------------------------------------------------------------------------------------------------------
INFERRED = "Without a configuration"


@form(
    INFERRED,
    "Fourier and attention layers, with `--sliding-window` and `--tie-word-embeddings`",
    "loads; sizes, heads, kernel, activation and biases come from names and shapes, `layer_norm_eps` is assumed and said",
)
def no_config(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", state_of(model)), NO_CONFIG)


@form(
    INFERRED,
    "other choices of the architecture",
    "loads",
    use_bias=False,
    norm_before_conv=True,
    hidden_act="gelu",
    conv_kernel=5,
    tie_word_embeddings=False,
)
def no_config_other_choices(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", state_of(model)), WINDOW)


@form(INFERRED, "attention layers alone, with `--num-attention-heads`", "loads", layer_types=("sliding_attention",) * 3)
def no_config_attention(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", state_of(model)), {**NO_CONFIG, "num_attention_heads": 3})


@form(INFERRED, "Fourier layers alone", "loads", layer_types=("mhf",) * 3, tie_word_embeddings=False)
def no_config_fourier(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", state_of(model)))


@form(
    INFERRED,
    "the window is not said",
    "refused: `--sliding-window`",
    refused=("--sliding-window W", "or put the run's config.json"),
    tie_word_embeddings=False,
)
def no_config_no_window(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", state_of(model)))


@form(
    INFERRED,
    "heads, window and head are all unknown",
    "refused with all three flags at once",
    refused=("--num-attention-heads H and --sliding-window W and --tie-word-embeddings",),
    layer_types=("sliding_attention",) * 3,
)
def no_config_nothing_said(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", state_of(model)))


@form(
    INFERRED,
    "a flag that contradicts the shapes",
    "refused",
    refused=("--num-attention-heads 4 contradicts the shapes",),
)
def no_config_contradiction(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", state_of(model)), {**NO_CONFIG, "num_attention_heads": 4})


@form(
    INFERRED,
    "a flag that contradicts a configuration",
    "refused",
    refused=("--sliding-window 5 contradicts the configuration",),
)
def flag_against_config(folder: Path, model: CaracalModel) -> Case:
    return Case(hugging_face(folder, model), {"sliding_window": 5})


@form(INFERRED, "a block is missing in between", "refused", refused=("blocks up to 2 but none with number 1",))
def no_config_gap(folder: Path, model: CaracalModel) -> Case:
    state = {k: v for k, v in state_of(model).items() if not k.startswith("blocks.1.")}
    return Case(torch_file(folder / "run.pt", state), NO_CONFIG)


@form(INFERRED, "the weights of another kind of model", "refused", refused=("norm.weight", "--key-map"))
def no_config_other_model(folder: Path, model: CaracalModel) -> Case:
    return Case(torch_file(folder / "run.pt", {"encoder.layer.0.attention.query.weight": torch.ones(4, 4)}))
