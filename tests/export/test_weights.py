"""Weights in the bundle: in their place, in a layout that can be undone, and no change of one goes unnoticed."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import shutil
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors
import safetensors.numpy
import torch
from caracal_export import export_checkpoint, weight_files
from caracal_export.errors import VerificationError
from caracal_export.graph_files import refer_to_weights
from caracal_export.graph_model import ExtendGraph, ForwardGraph, StepGraph, graph_state, layout_of
from caracal_export.weight_files import WeightFile, float32, plan_files, write_files
from caracal_export.weights import compare_weights, graph_shapes, graph_weight
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cli import main
from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.parity import run_parity
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.safetensors_file import SafetensorsFile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from caracal import CaracalModel, load_checkpoint

WEIGHTS = "weights.safetensors"
GRAPHS = ("forward.onnx", "extend.onnx", "step.onnx", "step_resident.onnx")  # those that read it
# One parameter of each kind. Not among them: a bias of the keys, which moves all scores of a query alike, so that no
# output can show it; the comparison of weights must (see the test below).
KINDS = (
    "embed_tokens.weight",
    "norm.weight",
    "norm.bias",
    *(
        f"blocks.1.mhf.{name}.weight"
        for name in ("pre_conv", "norm", "value_proj", "gate_proj", "gate_conv", "out_proj")
    ),
    *(f"blocks.1.mhf.{name}.bias" for name in ("norm", "value_proj", "gate_proj", "gate_conv", "out_proj")),
    *(f"blocks.2.swa.{name}.weight" for name in ("norm", "q_proj", "k_proj", "v_proj", "out_proj")),
    *(f"blocks.2.swa.{name}.bias" for name in ("norm", "q_proj", "v_proj", "out_proj")),
    *(f"blocks.2.ffn.{name}.weight" for name in ("norm", "gate_proj", "up_proj", "down_proj")),
    *(f"blocks.2.ffn.{name}.bias" for name in ("norm", "gate_proj", "up_proj", "down_proj")),
)
KEY_BIAS = "blocks.2.swa.k_proj.bias"
# Two tensors of one shape each, so that names, shapes and sizes stay right when they change places.
SWAPS = (
    ("blocks.0.mhf.value_proj.weight", "blocks.0.mhf.gate_proj.weight"),
    ("blocks.0.mhf.out_proj.weight", "blocks.1.mhf.out_proj.weight"),
    ("blocks.0.mhf.pre_conv.weight", "blocks.1.mhf.pre_conv.weight"),
    ("blocks.0.mhf.gate_conv.weight", "blocks.1.mhf.gate_conv.weight"),
    ("blocks.0.mhf.norm.weight", "blocks.0.mhf.norm.bias"),
    ("blocks.2.swa.q_proj.weight", "blocks.2.swa.k_proj.weight"),
    ("blocks.2.ffn.gate_proj.weight", "blocks.2.ffn.up_proj.weight"),
    ("norm.weight", "norm.bias"),
)

Stored = Callable[[Path, str], NDArray[Any]]


@pytest.fixture
def altered(bundle: Callable[[str], Path], copy_bundle: Callable[[Path], Path]) -> Path:
    """A copy of the tied `matmul` bundle, to be altered."""
    return copy_bundle(bundle("matmul"))


def compared(model: CaracalModel, *graphs: Path) -> int:
    """`compare_weights` with the files that the bundle's manifest names."""
    parameters = dict(model.named_parameters())
    files = json.loads((graphs[0].parent / "manifest.json").read_text(encoding="utf-8"))["weights"]
    return compare_weights(graphs, files, parameters.keys(), parameters.__getitem__, model.config)


def _verdict(folder: Path) -> str:
    return run_parity(Bundle.open(folder), threads=1).verdict


# Layouts


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("mixing", ["matmul", "dft"])
def test_fresh_bundle_has_every_weight(
    bundle: Callable[[str], Path], model: CaracalModel, mixing: str, graph: str
) -> None:
    assert compared(model, bundle(mixing) / graph) == len(dict(model.named_parameters())) == 59


@pytest.mark.parametrize("graph", GRAPHS)
def test_fresh_untied_bundle_has_every_weight(untied_bundle: Path, untied_checkpoint: Path, graph: str) -> None:
    assert compared(load_checkpoint(untied_checkpoint), untied_bundle / graph) == 60


@pytest.mark.parametrize("kernel", [1, 3])
def test_every_layout_can_be_undone(random_model: Callable[..., CaracalModel], kernel: int) -> None:
    model = random_model(conv_kernel=kernel, tie_word_embeddings=False, norm_before_conv=True)
    for name, weight in model.named_parameters():
        layout = layout_of(name)
        assert torch.equal(layout.from_graph(layout.to_graph(weight, model.config), model.config), weight), name


def test_layouts_are_those_of_the_maths(random_model: Callable[..., CaracalModel]) -> None:
    """Each graph weight, used by the graph's plain product in numpy, does what PyTorch's module does."""
    model = random_model(tie_word_embeddings=False)
    mhf, config = model.blocks[0].mhf, model.config
    state = {name: weight.numpy() for name, weight in graph_state(model, config)}
    x = np.random.default_rng(0).standard_normal((2, 9, config.hidden_size)).astype(np.float32)
    t = torch.from_numpy(x)

    def close(got: NDArray[Any], want: torch.Tensor) -> None:
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-5, atol=1e-5)

    close(x @ state["blocks.0.mhf.value_proj.weight"] + state["blocks.0.mhf.value_proj.bias"], mhf.value_proj(t))
    close(x @ state["lm_head.weight"], model.lm_head(t))
    close(x @ state["blocks.0.ffn.up_proj.weight"] + state["blocks.0.ffn.up_proj.bias"], model.blocks[0].ffn.up_proj(t))

    taps = state["blocks.0.mhf.pre_conv.weight"]
    padded = np.concatenate((np.zeros_like(x[:, :2]), x), axis=1)
    want = mhf.pre_conv(torch.from_numpy(padded).transpose(1, 2)).transpose(1, 2)
    close(sum(padded[:, k : k + 9] * taps[k] for k in range(3)), want)

    heads = x.reshape(2, 9, config.num_attention_heads, config.head_dim)
    got = np.einsum("blhi,hio->blho", heads, state["blocks.0.mhf.gate_conv.weight"]).reshape(x.shape)
    close(got + state["blocks.0.mhf.gate_conv.bias"], mhf.gate_conv(t.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("graph", [ForwardGraph, ExtendGraph, StepGraph])
@pytest.mark.parametrize("missing", ["blocks.1.mhf.value_proj.bias", "norm.weight"])
def test_graph_module_refuses_a_model_that_lacks_a_weight(
    random_model: Callable[..., CaracalModel], missing: str, graph: Any
) -> None:
    model = random_model()
    owner, _, name = missing.rpartition(".")
    setattr(model.get_submodule(owner), name, None)
    with pytest.raises(RuntimeError, match=re.escape(missing)):
        graph.from_reference(model, model.config)


# Sabotage


def _flip_a_byte(file: Path, stored_tensor: Stored, name: str) -> None:
    tensor = stored_tensor(file, name)
    assert tensor.flat[7] != 0
    tensor.view(np.uint8).reshape(-1)[4 * 7] ^= 1  # the last bit of one value
    tensor.flush()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "file", [WEIGHTS, *GRAPHS, "convolve.onnx", "convolve_long.onnx", "golden.safetensors", "tokenizer.json"]
)
def test_a_changed_byte_names_the_file(altered: Path, file: str) -> None:
    data = bytearray((altered / file).read_bytes())
    data[len(data) // 2] ^= 1
    (altered / file).write_bytes(data)
    with pytest.raises(BundleError, match=f"{file} was altered"):
        Bundle.open(altered)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "blocks.1.mhf.gate_conv.weight", KEY_BIAS])
def test_a_flipped_bit_behind_right_hashes_is_found(
    altered: Path, model: CaracalModel, stored_tensor: Stored, rehash: Callable[[Path], None], name: str
) -> None:
    """The smallest change there is, far below what any output could show."""
    _flip_a_byte(altered / WEIGHTS, stored_tensor, name)
    rehash(altered)
    Bundle.open(altered)
    with pytest.raises(VerificationError, match=f"{re.escape(name)} differs"):
        compared(model, altered / "forward.onnx")


@pytest.mark.parametrize("name", KINDS)
def test_one_zeroed_element_fails_parity(
    altered: Path, stored_tensor: Stored, rehash: Callable[[Path], None], name: str
) -> None:
    tensor = stored_tensor(altered / WEIGHTS, name)
    index = np.unravel_index(np.abs(tensor - np.median(tensor)).argmax(), tensor.shape)
    assert tensor[index] != 0
    tensor[index] = 0
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "FAILED"


def test_a_key_bias_shows_in_no_output_but_in_the_comparison_of_weights(
    altered: Path, model: CaracalModel, stored_tensor: Stored, rehash: Callable[[Path], None]
) -> None:
    tensor = stored_tensor(altered / WEIGHTS, KEY_BIAS)
    tensor[:] = 0
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "PASSED"
    with pytest.raises(VerificationError, match=re.escape(KEY_BIAS)):
        compared(model, altered / "forward.onnx")


@pytest.mark.parametrize(("first", "second"), SWAPS)
def test_two_weights_in_each_others_place_are_found(
    altered: Path,
    model: CaracalModel,
    stored_tensor: Stored,
    rehash: Callable[[Path], None],
    first: str,
    second: str,
) -> None:
    a, b = stored_tensor(altered / WEIGHTS, first), stored_tensor(altered / WEIGHTS, second)
    kept = np.array(a)
    a[:], b[:] = b, kept
    a.flush()  # type: ignore[attr-defined]
    b.flush()  # type: ignore[attr-defined]
    rehash(altered)
    with pytest.raises(VerificationError, match=re.escape(first) + "|" + re.escape(second)):
        compared(model, altered / "forward.onnx")
    assert _verdict(altered) == "FAILED"


@pytest.mark.parametrize("row", [0, 1, 50, 96])
def test_one_changed_embedding_row_of_an_untied_model_fails_parity(
    untied_bundle: Path,
    copy_bundle: Callable[[Path], Path],
    stored_tensor: Stored,
    rehash: Callable[[Path], None],
    row: int,
) -> None:
    """No column of the logits shows it: some golden must read that very row."""
    altered = copy_bundle(untied_bundle)
    tensor = stored_tensor(altered / WEIGHTS, "embed_tokens.weight")
    tensor[row, 3] += 0.01
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "FAILED"


def test_one_changed_column_of_an_untied_head_fails_parity(
    untied_bundle: Path, copy_bundle: Callable[[Path], Path], stored_tensor: Stored, rehash: Callable[[Path], None]
) -> None:
    altered = copy_bundle(untied_bundle)
    tensor = stored_tensor(altered / WEIGHTS, "lm_head.weight")
    tensor[:, 41] *= 1.01
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "FAILED"


# Graphs that read another place than they should


def _edit_graph(file: Path, edit: Callable[[dict[str, onnx.TensorProto]], None]) -> None:
    graph = onnx.load(file, load_external_data=False)
    edit({tensor.name: tensor for tensor in graph.graph.initializer})
    file.write_bytes(graph.SerializeToString())


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_that_reads_two_weights_crosswise_is_found(altered: Path, model: CaracalModel, graph: str) -> None:
    def swap(tensors: dict[str, onnx.TensorProto]) -> None:
        first, second = (tensors[name].external_data for name in SWAPS[0])
        kept = [entry.value for entry in first]
        for entry, other in zip(first, second, strict=True):
            entry.value = other.value
        for entry, value in zip(second, kept, strict=True):
            entry.value = value

    _edit_graph(altered / graph, swap)
    with pytest.raises(VerificationError, match="from another place"):
        compared(model, altered / graph)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_weight_inside_the_graph_is_found(altered: Path, model: CaracalModel, graph: str) -> None:
    def embed(tensors: dict[str, onnx.TensorProto]) -> None:
        tensor = tensors["norm.weight"]
        tensor.CopyFrom(onnx.numpy_helper.from_array(model.norm.weight.numpy(), "norm.weight"))

    _edit_graph(altered / graph, embed)
    with pytest.raises(VerificationError, match=r"norm\.weight lies inside the graph"):
        compared(model, altered / graph)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_weight_the_graph_lacks_is_named(altered: Path, model: CaracalModel, graph: str) -> None:
    def rename(tensors: dict[str, onnx.TensorProto]) -> None:
        tensors["norm.bias"].name = "norm.biased"

    _edit_graph(altered / graph, rename)
    with pytest.raises(VerificationError, match=r"norm\.bias .*2 such"):
        compared(model, altered / graph)


def test_weights_of_another_checkpoint_are_found(
    bundle: Callable[[str], Path], random_model: Callable[..., CaracalModel]
) -> None:
    with pytest.raises(VerificationError, match="differs from the checkpoint"):
        compared(random_model(seed=5), bundle("matmul") / "forward.onnx")


# Files


SHAPES = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.lists(st.integers(1, 40), max_size=3).map(tuple),
    min_size=1,
    max_size=12,
)


def no_progress(done: int, total: int) -> None:
    """For writers that nobody watches."""


def arrays_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, arrays: dict[str, NDArray[np.float32]], limit: int | None = None) -> list[WeightFile]:
    files = plan_files(float32({name: array.shape for name, array in arrays.items()}), limit)
    write_files(files, arrays.__getitem__, folder, no_progress)
    return files


@given(SHAPES, st.one_of(st.none(), st.integers(1000, 30_000)))
def test_a_plan_has_every_tensor_once_and_no_file_that_could_be_spared(
    shapes: dict[str, tuple[int, ...]], limit: int | None
) -> None:
    files = plan_files(float32(shapes), limit)
    placed = [name for file in files for name in file.tensors]
    assert placed == sorted(shapes)
    for file in files:
        end = file.bytes - sum(4 * math.prod(shapes[name]) for name in file.tensors)  # of the header
        for name, entry in file.tensors.items():
            assert (entry.dtype, entry.shape, entry.offset) == ("F32", shapes[name], end)
            end += entry.bytes
        assert end == file.bytes
        assert limit is None or file.bytes <= limit or len(file.tensors) == 1
    for file, following in itertools.pairwise(files):
        assert limit is not None
        name = next(iter(following.tensors))
        (together,) = plan_files(
            float32({**{other: shapes[other] for other in file.tensors}, name: shapes[name]}), None
        )
        assert together.bytes > limit
    shuffled = list(shapes.items())
    random.Random(1).shuffle(shuffled)
    assert plan_files(float32(dict(shuffled)), limit) == files


def test_the_names_of_files() -> None:
    shapes = dict.fromkeys("abcde", (100,))
    (file,) = plan_files(float32(shapes), None)
    assert file.name == "weights.safetensors"
    assert [file.name for file in plan_files(float32(shapes), file.bytes)] == ["weights.safetensors"]
    assert len(plan_files(float32(shapes), file.bytes - 1)) == 2
    assert [(file.name, list(file.tensors)) for file in plan_files(float32(shapes), 1100)] == [
        ("weights-00001-of-00003.safetensors", ["a", "b"]),
        ("weights-00002-of-00003.safetensors", ["c", "d"]),
        ("weights-00003-of-00003.safetensors", ["e"]),
    ]


def test_a_tensor_beyond_the_limit_stands_alone() -> None:
    files = plan_files(float32({"a": (5,), "b": (10_000,), "c": (5,), "d": (5,)}), 1000)
    assert [list(file.tensors) for file in files] == [["a"], ["b"], ["c", "d"]]


def test_places_behind_2_gib_are_counted_in_whole_numbers() -> None:
    (file,) = plan_files(float32({"embed": (400_000, 1536), "head": (400_000, 1536), "norm": (1536,)}), None)
    start = file.tensors["embed"].offset
    assert start % 8 == 0
    assert 0 < start < 1000
    assert [entry.offset - start for entry in file.tensors.values()] == [0, 2_457_600_000, 4_915_200_000]
    assert file.bytes == start + 4_915_206_144


@pytest.mark.parametrize("limit", [0, -1, 999, True, 2.5e9, "2GB"])
def test_a_limit_that_makes_no_sense(limit: Any) -> None:
    with pytest.raises(InputError, match=r"--max-shard-size: expected at least 1\.0 kB, found"):
        plan_files(float32({"a": (1,)}), limit)


def test_one_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    arrays = arrays_of({"b": (3, 5), "a.weight": (7,), "c": (), "d": (2, 0)})
    write(tmp_path, arrays)
    expected = safetensors.numpy.save(arrays, metadata={"format": "caracal-bundle"})
    assert (tmp_path / "weights.safetensors").read_bytes() == expected


def test_shards_as_the_library_reads_them(tmp_path: Path) -> None:
    arrays = arrays_of({f"layer.{index}": (index + 1, 30) for index in range(12)})
    files = write(tmp_path, arrays, 3000)
    assert len(files) > 3
    found: dict[str, NDArray[Any]] = {}
    for file in files:
        with safetensors.safe_open(tmp_path / file.name, framework="np") as opened:
            assert opened.metadata() == {"format": "caracal-bundle"}
            assert sorted(opened.keys()) == sorted(file.tensors)
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        assert (tmp_path / file.name).stat().st_size == file.bytes
        assert SafetensorsFile.open(tmp_path / file.name).entries == file.tensors
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_a_tensor_that_lies_in_another_order_in_memory(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4).T
    write(tmp_path, {"a": array})
    found = safetensors.numpy.load_file(tmp_path / "weights.safetensors")["a"]
    np.testing.assert_array_equal(found, array, strict=True)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    shapes = dict.fromkeys("abcde", (40, 50))
    asked: list[str] = []
    alive: list[weakref.ref[Any]] = []

    def read(name: str) -> NDArray[np.float32]:
        assert all(ref() is None for ref in alive), f"{asked[-1]} is kept while {name} is read"
        array = np.full(shapes[name], ord(name), np.float32)
        asked.append(name)
        alive.append(weakref.ref(array))
        return array

    write_files(plan_files(float32(shapes), 20_000), read, tmp_path, no_progress)
    assert asked == list("abcde"), "each once, in order"


@pytest.mark.parametrize("chunk", [1 << 26, 100])
def test_progress_is_told_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(weight_files, "_CHUNK", chunk)
    arrays = arrays_of({"a": (7, 9), "b": (), "c": (50,)})
    told: list[tuple[int, int]] = []
    files = plan_files(float32({name: array.shape for name, array in arrays.items()}), None)
    write_files(files, arrays.__getitem__, tmp_path, lambda done, total: told.append((done, total)))
    assert {total for _, total in told} == {4 * (63 + 1 + 50)}
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert (told[0][0], told[-1][0]) == (0, 456)
    assert len(told) == (4 if chunk > 1000 else 1 + 3 + 1 + 2)
    assert safetensors.numpy.load_file(tmp_path / "weights.safetensors")["a"].tobytes() == arrays["a"].tobytes()


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((2, 3)), r"float64 \[2, 3\]"),
        (np.zeros((2, 3), np.float16), r"float16 \[2, 3\]"),
        (np.zeros((2, 3), ">f4"), r">f4 \[2, 3\]"),
        (np.zeros((3, 2), np.float32), r"float32 \[3, 2\]"),
        (np.zeros(6, np.float32), r"float32 \[6\]"),
    ],
)
def test_a_tensor_that_is_not_what_was_planned(tmp_path: Path, array: NDArray[Any], found: str) -> None:
    with pytest.raises(InputError, match=rf"expected norm as float32 \[2, 3\], found {found}"):
        write_files(plan_files(float32({"norm": (2, 3)}), None), lambda name: array, tmp_path, no_progress)


def test_shapes_are_those_of_the_written_layout(random_model: Callable[..., CaracalModel]) -> None:
    model = random_model(tie_word_embeddings=False, norm_before_conv=True)
    parameters = dict(model.named_parameters())
    shapes = graph_shapes({name: tuple(weight.shape) for name, weight in parameters.items()}, model.config)
    written = {name: graph_weight(name, weight, model.config) for name, weight in parameters.items()}
    assert shapes == {name: tuple(weight.shape) for name, weight in graph_state(model, model.config)}
    assert shapes == {name: weight.shape for name, weight in written.items()}
    for name, weight in graph_state(model, model.config):
        np.testing.assert_array_equal(written[name], weight.numpy(), strict=True)


def scale(weight: str, count: int) -> ir.Model:
    """x * weight, as a graph."""
    value = ir.Value(name=weight, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([count]))
    value.const_value = ir.tensor(np.zeros(count, np.float32), name=weight)
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([count]))
    node = ir.node("Mul", [x, value])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "y", x.type, x.shape
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[value], opset_imports={"": 18}, name="scale")
    return ir.Model(graph, ir_version=8)


def test_a_graph_refers_to_planned_files_only(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="the graph has and the checkpoint has not: other"):
        refer_to_weights(scale("other", 3), plan_files(float32({"norm": (3,)}), None), tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole in it takes its whole size there")
def test_a_graph_reads_a_weight_behind_2_gib(tmp_path: Path) -> None:
    """Of 2.1 GB only the ends are written: the rest of the file is a hole."""
    (file,) = plan_files(float32({"embed": (2**29 + 7,), "norm": (5,)}), None)
    weight = np.float32([1, -2, 3, -4, 5])
    (tmp_path / "tail").mkdir()
    (short,) = write(tmp_path / "tail", {"norm": weight})
    with (tmp_path / file.name).open("wb") as out:
        out.seek(file.tensors["norm"].offset)
        out.write((tmp_path / "tail" / short.name).read_bytes()[short.tensors["norm"].offset :])
    graph = scale("norm", 5)
    refer_to_weights(graph, [file], tmp_path)
    ir.save(graph, tmp_path / "scale.onnx")
    (told,) = onnx.load(tmp_path / "scale.onnx", load_external_data=False).graph.initializer
    assert int({entry.key: entry.value for entry in told.external_data}["offset"]) > 2**31
    (y,) = OrtSession.on_cpu(tmp_path / "scale.onnx", threads=1).run({"x": np.full(5, 2, np.float32)})
    np.testing.assert_array_equal(y, 2 * weight, strict=True)


# Shards


SHARD = 10_000  # bytes; the embedding is larger


@pytest.fixture(scope="module")
def sharded(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `checkpoint` in shards, verified. Read only."""
    target = tmp_path_factory.mktemp("sharded") / "bundle"
    return export_checkpoint(checkpoint, target, threads=1, lags=8, max_shard_size=SHARD).path


@pytest.fixture
def altered_shards(sharded: Path, tmp_path: Path) -> Path:
    """A copy of `sharded`, to be altered."""
    return Path(shutil.copytree(sharded, tmp_path / "altered"))


def files_of(folder: Path) -> list[str]:
    names: list[str] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["weights"]
    return names


def holder(folder: Path, tensor: str) -> Path:
    """The shard that has a tensor, by the library's own reader."""
    (file,) = (name for name in files_of(folder) if tensor in safetensors.numpy.load_file(folder / name))
    return folder / file


def test_a_sharded_bundle_has_the_same_weights(sharded: Path, bundle: Callable[[str], Path]) -> None:
    names = files_of(sharded)
    assert len(names) > 5
    assert names == [f"weights-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
    assert sorted(path.name for path in sharded.glob("*weights*")) == names
    expected, found = safetensors.numpy.load_file(bundle("matmul") / WEIGHTS), {}
    for name in names:
        tensors = safetensors.numpy.load_file(sharded / name)
        assert (sharded / name).stat().st_size <= SHARD or len(tensors) == 1
        assert found.keys().isdisjoint(tensors)
        found |= tensors
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


def test_a_sharded_bundle_is_the_same_model(sharded: Path, bundle: Callable[[str], Path]) -> None:
    one, several = (Bundle.open(folder).model(threads=1) for folder in (bundle("matmul"), sharded))
    ids = [[0, 5, 9, 60, 96, 7, 7, 31, 12, 11], [3, 7]]
    np.testing.assert_array_equal(several.forward(ids), one.forward(ids), strict=True)
    (expected,), (found,) = (model.generate([ids[0]], max_new_tokens=24, stop_ids=()) for model in (one, several))
    assert found.ids == expected.ids
    assert _verdict(sharded) == "PASSED"


def test_a_fresh_sharded_bundle_has_every_weight(sharded: Path, model: CaracalModel) -> None:
    assert compared(model, *(sharded / graph for graph in GRAPHS)) == 59


def test_every_parameter_is_asked_for_once(sharded: Path, model: CaracalModel) -> None:
    """It may come from a disk."""
    parameters, asked = dict(model.named_parameters()), []

    def parameter(name: str) -> torch.Tensor:
        asked.append(name)
        return parameters[name]

    graphs = [sharded / graph for graph in GRAPHS]
    compare_weights(graphs, files_of(sharded), set(parameters), parameter, model.config)
    assert sorted(asked) == sorted(parameters)


@pytest.mark.parametrize(("first", "second"), SWAPS)
def test_two_weights_of_shards_in_each_others_place_are_found(
    altered_shards: Path,
    model: CaracalModel,
    stored_tensor: Stored,
    rehash: Callable[[Path], None],
    first: str,
    second: str,
) -> None:
    a, b = (stored_tensor(holder(altered_shards, name), name) for name in (first, second))
    kept = np.array(a)
    a[:], b[:] = b, kept
    a.flush()  # type: ignore[attr-defined]
    b.flush()  # type: ignore[attr-defined]
    rehash(altered_shards)
    with pytest.raises(
        VerificationError, match=f"({re.escape(first)}|{re.escape(second)}) differs from the checkpoint"
    ):
        compared(model, *(altered_shards / graph for graph in GRAPHS))


def test_the_swaps_above_reach_across_shards(sharded: Path) -> None:
    assert sum(holder(sharded, first) != holder(sharded, second) for first, second in SWAPS) >= 3


def test_two_shards_in_each_others_place_are_found(
    altered_shards: Path, model: CaracalModel, rehash: Callable[[Path], None]
) -> None:
    first, second = (altered_shards / name for name in files_of(altered_shards)[:2])
    first.rename(altered_shards / "kept")
    second.rename(first)
    (altered_shards / "kept").rename(second)
    rehash(altered_shards)
    with pytest.raises(VerificationError, match="from another place"):
        compared(model, altered_shards / "forward.onnx")


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("keys", [("location",), ("offset",), ("location", "offset")], ids="-".join)
def test_any_graph_that_reads_shards_crosswise_is_found(
    altered_shards: Path, model: CaracalModel, graph: str, keys: tuple[str, ...]
) -> None:
    """Two norms of one shape, in different shards."""
    names = ("blocks.0.mhf.norm.bias", "norm.bias")
    assert holder(altered_shards, names[0]) != holder(altered_shards, names[1])

    def swap(tensors: dict[str, onnx.TensorProto]) -> None:
        first, second = ({entry.key: entry for entry in tensors[name].external_data} for name in names)
        for key in keys:
            first[key].value, second[key].value = second[key].value, first[key].value

    _edit_graph(altered_shards / graph, swap)
    with pytest.raises(VerificationError, match=rf"{re.escape(graph)} reads .*norm\.bias from another place"):
        compared(model, *(altered_shards / other for other in GRAPHS))


@pytest.mark.parametrize("key", ["length", "dtype", "shape"])
def test_a_graph_that_reads_a_weight_as_something_else_is_found(
    altered_shards: Path, model: CaracalModel, key: str
) -> None:
    def change(tensors: dict[str, onnx.TensorProto]) -> None:
        tensor = tensors["blocks.0.mhf.norm.bias"]
        if key == "length":
            (entry,) = (entry for entry in tensor.external_data if entry.key == "length")
            entry.value = "64"
        elif key == "dtype":
            tensor.data_type = onnx.TensorProto.INT32
        else:
            tensor.dims[:] = [4, 8]

    _edit_graph(altered_shards / "step.onnx", change)
    with pytest.raises(VerificationError, match=r"step\.onnx reads blocks\.0\.mhf\.norm\.bias (from|as)"):
        compared(model, *(altered_shards / graph for graph in GRAPHS))


def test_a_missing_shard_is_named(altered_shards: Path, model: CaracalModel) -> None:
    name = files_of(altered_shards)[2]
    (altered_shards / name).unlink()
    with pytest.raises(BundleError, match=f"{name} cannot be read"):
        compared(model, altered_shards / "forward.onnx")
    with pytest.raises(BundleError, match=f"{name} is missing"):
        Bundle.open(altered_shards)


def test_a_shard_that_is_not_listed_is_missed(altered_shards: Path, model: CaracalModel) -> None:
    manifest = json.loads((altered_shards / "manifest.json").read_text(encoding="utf-8"))
    del manifest["weights"][0]
    (altered_shards / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(VerificationError, match="no weight file has it"):
        compared(model, altered_shards / "forward.onnx")


@pytest.mark.parametrize(
    ("name", "match"), [("norm.bias", "'norm.bias' is in"), ("norm.biased", "has norm.biased, the")]
)
def test_a_tensor_too_many_is_found(altered_shards: Path, model: CaracalModel, name: str, match: str) -> None:
    file = altered_shards / files_of(altered_shards)[0]
    tensors = safetensors.numpy.load_file(file)
    tensors[name] = np.zeros(32, np.float32)
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises((BundleError, VerificationError), match=match):
        compared(model, altered_shards / "forward.onnx")


# The command


@pytest.mark.slow
def test_the_command_splits(
    checkpoint: Path, tmp_path: Path, sharded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(folder: str, size: str) -> int:
        return main(["export", str(checkpoint), "-o", str(tmp_path / folder), "--no-verify", "--max-shard-size", size])

    assert export("out", "10 kB") == 0
    assert files_of(tmp_path / "out") == files_of(sharded)
    assert (tmp_path / "out" / files_of(sharded)[0]).read_bytes() == (sharded / files_of(sharded)[0]).read_bytes()
    for wrong, said in (("2XB", "expected a size such as 500MB"), ("10", "expected at least 1.0 kB, found 10")):
        capsys.readouterr()
        assert export("other", wrong) == 2
        assert f"--max-shard-size: {said}" in capsys.readouterr().err
