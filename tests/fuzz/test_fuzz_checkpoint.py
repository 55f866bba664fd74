"""What reads checkpoints: key maps, indexes, headers, PyTorch files, the pickled index of distributed ones, names and shapes."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, attempt, damaged, encoded, mutants

from caracal import CaracalConfig, CaracalError, CaracalModel, CheckpointError, ReadOptions, open_checkpoint
from caracal.checkpoint.fitting import fit, name_tensors
from caracal.checkpoint.inference import infer_config
from caracal.checkpoint.key_map import KeyMap
from caracal.checkpoint.key_map_draft import draft_key_map
from caracal.checkpoint.names import normalize_key
from caracal.checkpoint.parameters import parameter_shapes
from caracal.checkpoint.stores import Stored
from caracal.checkpoint.unpickling import load_distributed_metadata

CONFIG = CaracalConfig(
    vocab_size=7, hidden_size=4, num_hidden_layers=2, num_attention_heads=2, intermediate_size=6,
    layer_types=("mhf", "sliding_attention"), tie_word_embeddings=False,
)  # fmt: skip
torch.manual_seed(0)
STATE = {name: torch.randn(shape) for name, shape in parameter_shapes(CONFIG).items()}
NAMES = list(STATE)


def folder_with(folder: Path, **files: bytes) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()), encoding="utf-8")
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def load(path: Path) -> CaracalModel:
    """Everything that loading does; what is accepted must be a whole model of finite numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about what it reads
        model = open_checkpoint(path).model()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert [tuple(p.shape) for p in model.parameters()] == list(parameter_shapes(model.config).values())
    return model


# ---------------------------------------------------------------------------------------------------------------
# Key maps

MAP = """\
[[rule]]
match = 'layers\\.(\\d+)\\.attn\\.query\\.(weight|bias)'
name = 'blocks.\\1.swa.q_proj.\\2'

[[rule]]
match = '.*\\.inv_freq'
drop = true

[[rule]]
match = '(?P<stem>head)\\.weight'
name = 'lm_\\g<stem>.weight'
transpose = true
"""
KEYS = ["layers.0.attn.query.weight", "a.inv_freq", "head.weight"]


def key_map(path: Path) -> None:
    rules = KeyMap.from_file(path)
    assert rules.rules
    for renamed in rules.rename(KEYS).values():
        assert renamed.name is None or isinstance(renamed.name, str)


@FUZZ
@given(content=damaged(MAP.encode()) | st.binary(max_size=40))
def test_damaged_key_maps(content: bytes, folder: Path) -> None:
    (folder / "map.toml").write_bytes(content)
    attempt(CheckpointError, key_map, folder / "map.toml")


# No nested repeats: a pattern that backtracks without an end is the user's own, as docs/security.md says.
_PATTERNS = st.text(st.sampled_from("ab.()[]|?^$\\d{}1,<>P='#é\n"), max_size=12)


@FUZZ
@given(
    match=_PATTERNS, name=_PATTERNS | st.just(None), drop=st.booleans() | st.none(), transpose=st.booleans() | st.none()
)
def test_rules_of_any_text(
    match: str, name: str | None, drop: bool | None, transpose: bool | None, folder: Path
) -> None:
    lines = [f"match = {json.dumps(match)}"]
    lines += [] if name is None else [f"name = {json.dumps(name)}"]
    lines += [
        f"{key} = {str(value).lower()}"
        for key, value in (("drop", drop), ("transpose", transpose))
        if value is not None
    ]
    (folder / "map.toml").write_text("[[rule]]\n" + "\n".join(lines), encoding="utf-8")
    attempt(CheckpointError, key_map, folder / "map.toml")


# ---------------------------------------------------------------------------------------------------------------
# Files


def safetensors_bytes() -> bytes:
    return safetensors.torch.save(STATE, metadata={"format": "pt"})


def torch_bytes(**options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(
        {"epoch": 1, "model": STATE, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}, buffer, **options
    )
    return buffer.getvalue()


SAFETENSORS = safetensors_bytes()
HEADER_SIZE = int.from_bytes(SAFETENSORS[:8], "little")
HEADER = json.loads(SAFETENSORS[8 : 8 + HEADER_SIZE])
TORCH, LEGACY = torch_bytes(), torch_bytes(_use_new_zipfile_serialization=False)


@FUZZ
@given(content=damaged(SAFETENSORS, first=8 + HEADER_SIZE))
def test_damaged_safetensors(content: bytes, folder: Path) -> None:
    attempt(CaracalError, load, folder_with(folder, model__safetensors=content))


@FUZZ
@given(text=mutants(HEADER))
def test_safetensors_with_another_header(text: str, folder: Path) -> None:
    header = encoded(text)
    content = len(header).to_bytes(8, "little") + header + SAFETENSORS[8 + HEADER_SIZE :]
    attempt(CaracalError, load, folder_with(folder, model__safetensors=content))


INDEX = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(NAMES, "part.safetensors")}


@FUZZ
@given(text=mutants(INDEX))
def test_indexes(text: str, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> None:
    inner = folder / "index"
    inner.mkdir(exist_ok=True)
    folder_with(inner, part__safetensors=SAFETENSORS)
    (inner / "model.safetensors.index.json").write_bytes(encoded(text))
    attempt(CaracalError, load, inner)


@FUZZ
@given(content=damaged(TORCH))
def test_damaged_pytorch_files(content: bytes, folder: Path) -> None:
    folder_with(folder, run__pt=content)
    attempt(CaracalError, load, folder / "run.pt")


@FUZZ
@given(content=damaged(LEGACY, first=3000))
def test_damaged_pytorch_files_of_the_old_format(content: bytes, folder: Path) -> None:
    folder_with(folder, run__pt=content)
    attempt(CaracalError, load, folder / "run.pt")


_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(list(STATE.values()))
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*NAMES, "model", "ema", "optimizer", 3]), inner, max_size=4)
    ),
    max_leaves=8,
)


@FUZZ
@given(tree=_TREES, whole=st.sampled_from(["", "model", "a.b"]))
def test_pytorch_files_of_any_structure(tree: Any, whole: str, folder: Path) -> None:
    content: Any = {"other": tree}
    if whole:
        place = content
        for step in whole.split(".")[:-1]:
            place = place.setdefault(step, {})
        place[whole.split(".")[-1]] = STATE
    folder_with(folder)
    torch.save(content, folder / "run.pt")
    attempt(CaracalError, load, folder / "run.pt")


def distributed_metadata() -> bytes:
    import tempfile

    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {name: STATE[name] for name in NAMES[:3]}, "step": 1}, checkpoint_id=place, no_dist=True)
        return (Path(place) / ".metadata").read_bytes()


METADATA = distributed_metadata()


@FUZZ
@given(content=damaged(METADATA))
def test_damaged_metadata_of_distributed_checkpoints(content: bytes, folder: Path) -> None:
    inner = folder / "dcp"
    inner.mkdir(exist_ok=True)
    (inner / "__0_0.distcp").write_bytes(b"")
    (inner / ".metadata").write_bytes(content)
    attempt(CaracalError, load, inner)


_CALLS = [("os", "system"), ("builtins", "eval"), ("builtins", "getattr"), ("subprocess", "Popen"), ("torch", "load"), ("torch.hub", "load"),
          ("torch", "float32.__reduce__"), ("torch.distributed.checkpoint.metadata", "Metadata.__init__")]  # fmt: skip


class _Call:
    def __init__(self, module: str, name: str) -> None:
        self.opcodes = f"c{module}\n{name}\n(S'touch ran'\ntR.".encode()


@FUZZ
@given(call=st.sampled_from(_CALLS), before=st.binary(max_size=3), module=st.text("abc._", max_size=6))
def test_no_name_but_the_formats_own_is_resolved(call: tuple[str, str], before: bytes, module: str) -> None:
    for owner, name in (call, (module, call[1])):
        with pytest.raises(CheckpointError, match=r"refused|is not the metadata"):
            load_distributed_metadata(io.BytesIO(_Call(owner, name).opcodes), Path("x"))
    # Whatever is put before it: what is run is decided name by name.
    attempt(
        CheckpointError, load_distributed_metadata, io.BytesIO(before + _Call(*call).opcodes), Path("some/.metadata")
    )


def test_the_calls_above_would_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    made: list[str] = []
    monkeypatch.setattr(os, "system", made.append)
    pickle.loads(_Call("os", "system").opcodes)
    assert made == ["touch ran"]


# ---------------------------------------------------------------------------------------------------------------
# Names and shapes

_ENTRIES = {name: Stored("float32", shape) for name, shape in parameter_shapes(CONFIG).items()}
_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 1 << 40]), max_size=4).map(tuple)
_KEYS = (
    st.sampled_from(NAMES)
    | st.text(st.sampled_from("abkqv.0129_\n\x1b{}\\'\"é"), max_size=20)
    | st.sampled_from(
        [
            "blocks.1.swa.qkv_proj.weight",
            "blocks.99999999999.mhf.norm.weight",
            "blocks.-1.swa.norm.bias",
            "norm.weight_scale",
            "model." * 300,
        ]
    )
)
_CHANGES = st.dictionaries(
    _KEYS, st.builds(Stored, st.sampled_from(["float32", "float8_e4m3fn", "int64", "C64", "?"]), _SHAPES), max_size=4
)


def judged(changes: dict[str, Stored], dropped: list[str], config: CaracalConfig | None) -> None:
    entries = {name: entry for name, entry in {**_ENTRIES, **changes}.items() if name not in dropped}
    named = name_tensors(entries, {}, "here")
    if config is None:
        config = infer_config(named, ReadOptions(sliding_window=4, tie_word_embeddings=True), "here").config
    recipes, _ = fit(config, named, "here")
    assert {name: recipe.shape for name, recipe in recipes.items()} == parameter_shapes(config)
    assert all(recipe.key in entries for recipe in recipes.values())


@FUZZ
@given(changes=_CHANGES, dropped=st.lists(st.sampled_from(NAMES), max_size=3), known=st.booleans())
def test_names_and_shapes(changes: dict[str, Stored], dropped: list[str], known: bool) -> None:
    attempt(CaracalError, judged, changes, dropped, CONFIG if known else None)


@FUZZ
@given(
    entries=st.dictionaries(
        _KEYS | st.text(max_size=30), st.builds(Stored, st.sampled_from(["float32", "bool"]), _SHAPES), max_size=12
    )
)
def test_drafts_are_key_maps(entries: dict[str, Stored]) -> None:
    draft = draft_key_map(entries)
    decided = [
        "drop = true" if line.startswith(("name = ", "#? name")) else line.removeprefix("#? ")
        for line in draft.splitlines()
    ]
    unknown = {
        key
        for key, entry in entries.items()
        if not entry.floating or normalize_key(key) not in parameter_shapes(CONFIG)
    }
    if "[[rule]]" not in draft:
        return
    renamed = KeyMap.parse("\n".join(decided)).rename(entries)
    # No name of the model's is taken by a rule that is meant for another.
    assert all(value.name is None for value in renamed.values())
    assert set(renamed) >= {key for key in unknown if not entries[key].floating}


@FUZZ
@given(key=_KEYS | st.text(max_size=60))
def test_normalizing_a_name_twice_changes_nothing_more(key: str) -> None:
    once: Callable[[str], str] = normalize_key
    assert once(once(key)) == once(key)
