"""The exported graph itself: symbolic axes, valid at every opset, no operator or node that need not be there."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import caracal_export
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from caracal_export.tracing import OPSETS, retarget, trace
from caracal_runtimes.errors import InputError
from caracal_runtimes.forward import ForwardPass

from caracal import CaracalConfig, CaracalModel

MIXINGS = ("matmul", "dft")
LAYERS = ("mhf", "mhf", "swa")  # what the tiny model's blocks hold

_NAME = re.compile(
    r"(blocks\.\d+(\.(mhf|swa|ffn)(\.[a-z_]+)?)?|embed_tokens|norm|lm_head|lengths"
    r"|valid_positions|gather_positions|tied_head)/[A-Z]\w*"
)
# What a provider does wrong, lacks, or runs on another device.
_UNWANTED = {
    *("Sin", "Cos", "If", "Loop", "Scan", "Identity", "Expand", "ScatterND", "NonZero"),
    *("And", "Or", "Xor", "Not", "Where", "Equal", "Greater", "GreaterOrEqual", "LessOrEqual"),
}


def _load(folder: Path) -> onnx.ModelProto:
    return onnx.load(folder / "forward.onnx", load_external_data=False)


@pytest.fixture(scope="session", params=MIXINGS)
def mixing(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def folder(bundle: Callable[[str], Path], mixing: str) -> Path:
    return bundle(mixing)


@pytest.fixture(scope="session")
def graph(folder: Path) -> onnx.GraphProto:
    return _load(folder).graph


@pytest.fixture(scope="session")
def retargeted(bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """`retargeted(mixing, opset)`: a folder with the graph at that opset and its weights, made once."""
    made: dict[tuple[str, int], Path] = {}

    def make(mixing: str, opset: int) -> Path:
        if (mixing, opset) not in made:
            target = tmp_path_factory.mktemp("opset")
            shutil.copyfile(bundle(mixing) / "weights.safetensors", target / "weights.safetensors")
            model = retarget(ir.load(bundle(mixing) / "forward.onnx"), opset)
            ir.save(model, target / "forward.onnx")
            made[mixing, opset] = target
        return made[mixing, opset]

    return make


def _axes(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _reference(model: CaracalModel, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids), torch.from_numpy(positions)).numpy()


# Axes


def test_batch_and_length_are_symbolic(graph: onnx.GraphProto, model: CaracalModel) -> None:
    found = {value.name: _axes(value) for value in (*graph.input, *graph.output)}
    assert found == {
        "input_ids": ["batch", "length"],
        "lengths": ["batch"],
        "logit_positions": ["batch", "positions"],
        "logits": ["batch", "positions", model.config.vocab_size],
    }
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert types == {
        "input_ids": onnx.TensorProto.INT64,
        "lengths": onnx.TensorProto.INT64,
        "logit_positions": onnx.TensorProto.INT64,
        "logits": onnx.TensorProto.FLOAT,
    }


def test_no_recorded_shape_is_that_of_the_example(graph: onnx.GraphProto) -> None:
    weights = {tensor.name for tensor in graph.initializer}
    activations = [value for value in graph.value_info if value.name not in weights]
    assert len(activations) > 50
    for value in activations:
        assert _axes(value)[:2] in (["batch", "length"], ["batch", "positions"]), value.name


@pytest.fixture(scope="session")
def forward(folder: Path, run_graph: Callable[[Path, CaracalConfig], ForwardPass], model: CaracalModel) -> ForwardPass:
    return run_graph(folder / "forward.onnx", model.config)


@pytest.mark.parametrize(
    ("batch", "length", "positions"), [(1, 1, 1), (2, 5, 3), (3, 5, 5), (7, 300, 4), (1, 2, 9), (4, 1, 2), (5, 2, 1)]
)
def test_one_graph_runs_any_shape(
    forward: ForwardPass,
    model: CaracalModel,
    relative_l2: Callable[..., float],
    batch: int,
    length: int,
    positions: int,
) -> None:
    """It was traced at batch 2, length 5 and 3 positions."""
    rng = np.random.default_rng([batch, length])
    ids = rng.integers(0, model.config.vocab_size, (batch, length))
    wanted = rng.integers(0, length, (batch, positions))
    assert relative_l2(forward.forward(ids, wanted), _reference(model, ids, wanted)) <= 1e-5


# Opsets


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_passes_onnx_own_checks(
    retargeted: Callable[[str, int], Path], mixing: str, opset: int, model: CaracalModel
) -> None:
    file = retargeted(mixing, opset) / "forward.onnx"
    onnx.checker.check_model(str(file), full_check=True)
    inferred = onnx.shape_inference.infer_shapes(
        onnx.load(file, load_external_data=False), check_type=True, strict_mode=True, data_prop=True
    )
    assert [(entry.domain, entry.version) for entry in inferred.opset_import] == [("", opset)]
    assert _axes(inferred.graph.output[0])[2] == model.config.vocab_size


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_computes_the_reference(
    retargeted: Callable[[str, int], Path],
    run_graph: Callable[[Path, CaracalConfig], ForwardPass],
    model: CaracalModel,
    relative_l2: Callable[..., float],
    mixing: str,
    opset: int,
) -> None:
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (3, 37))
    positions = np.tile(np.arange(37), (3, 1))
    got = run_graph(retargeted(mixing, opset) / "forward.onnx", model.config).forward(ids)
    assert relative_l2(got, _reference(model, ids, positions)) <= 1e-5


@pytest.mark.parametrize("opset", OPSETS)
def test_every_node_has_a_readable_name_of_its_own(
    retargeted: Callable[[str, int], Path], mixing: str, opset: int
) -> None:
    nodes = _load(retargeted(mixing, opset)).graph.node
    unreadable = [f"{node.op_type} {node.name!r}" for node in nodes if not _NAME.fullmatch(node.name)]
    assert not unreadable
    assert not [name for name, count in Counter(node.name for node in nodes).items() if count > 1]


@pytest.mark.parametrize("opset", OPSETS)
def test_every_value_is_named_after_its_node(retargeted: Callable[[str, int], Path], mixing: str, opset: int) -> None:
    for node in _load(retargeted(mixing, opset)).graph.node:
        for value in node.output:
            assert value == "logits" or value.partition(":")[0] == node.name, f"{node.op_type} {node.name!r}"


def test_retarget_refuses_an_opset_it_was_not_made_for(bundle: Callable[[str], Path]) -> None:
    model = ir.load(bundle("matmul") / "forward.onnx")
    for opset in (OPSETS.start - 1, OPSETS.stop):
        with pytest.raises(InputError, match=f"17 to 23, found {opset}"):
            retarget(model, opset)


# Operators


def test_each_mixing_computes_its_transform_its_own_way(graph: onnx.GraphProto, mixing: str) -> None:
    transforms = Counter(node.op_type for node in graph.node)["DFT"]
    assert transforms == (0 if mixing == "matmul" else 3 * LAYERS.count("mhf"))
    for layer, kind in enumerate(LAYERS):
        products = [n for n in graph.node if n.op_type == "MatMul" and n.name.startswith(f"blocks.{layer}.mhf/")]
        assert len(products) == (6 if mixing == "matmul" and kind == "mhf" else 0)  # rows and columns, of v, g and y


def test_no_unwanted_operator(graph: onnx.GraphProto) -> None:
    assert {node.op_type for node in graph.node} & _UNWANTED == set()
    assert {node.domain for node in graph.node} == {""}


def test_comparisons_only_choose_the_length_of_the_transform(graph: onnx.GraphProto, mixing: str) -> None:
    found = [node.name for node in graph.node if node.op_type == "Less"]
    assert found == ([] if mixing == "matmul" else ["lengths/Less"])


def test_nothing_is_sliced_with_a_step(graph: onnx.GraphProto) -> None:
    slices = [node for node in graph.node if node.op_type == "Slice"]
    assert slices
    assert all(len(node.input) <= 4 for node in slices)


def test_transposes_are_those_of_the_heads_alone(graph: onnx.GraphProto) -> None:
    found = Counter(node.name.partition("/")[0] for node in graph.node if node.op_type == "Transpose")
    assert found == {"blocks.0.mhf.gate_conv": 2, "blocks.1.mhf.gate_conv": 2, "blocks.2.swa": 4}


def test_weights_are_read_as_they_lie(graph: onnx.GraphProto) -> None:
    weights = {tensor.name for tensor in graph.initializer}
    readers = Counter(node.op_type for node in graph.node for name in node.input if name in weights)
    assert set(readers) == {"Gather", "Gemm", "MatMul", "Add", "LayerNormalization", "Split"}


def test_no_constant_is_a_baked_in_table(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        for attribute in node.attribute if node.op_type == "Constant" else ():
            value = onnx.helper.get_attribute_value(attribute)
            elements = int(np.prod(value.dims)) if attribute.name == "value" else np.size(value)
            assert elements <= 31, node.name


# Nodes


def test_every_node_leads_to_the_output(graph: onnx.GraphProto) -> None:
    needed = {value.name for value in graph.output}
    for node in reversed(graph.node):
        assert needed & set(node.output), node.name
        needed.update(node.input)
    assert {value.name for value in graph.input} <= needed


def test_no_node_is_computed_twice_from_lengths(graph: onnx.GraphProto) -> None:
    def key(node: onnx.NodeProto) -> tuple[object, ...]:
        return (node.op_type, *node.input, *(attribute.SerializeToString() for attribute in node.attribute))

    counts = Counter(key(node) for node in graph.node if node.name.startswith("lengths/"))
    assert [key for key, count in counts.items() if count > 1] == []


@pytest.mark.slow
def test_all_layers_share_the_tables(
    graph: onnx.GraphProto, mixing: str, random_model: Callable[..., CaracalModel]
) -> None:
    """Six layers read the same tables as three: the transform's matrices and the mask depend on lengths alone."""
    six = trace(random_model(num_hidden_layers=6), "forward", mixing, 18).graph
    shared = sum(node.name.startswith("lengths/") for node in graph.node)
    assert shared > 50
    assert sum((node.name or "").startswith("lengths/") for node in six) == shared


# Weights and traces of the machine


def test_every_weight_is_external_and_used(graph: onnx.GraphProto, folder: Path, model: CaracalModel) -> None:
    from safetensors import safe_open

    with safe_open(folder / "weights.safetensors", framework="np") as stored:
        names = set(stored.keys())
    assert {tensor.name for tensor in graph.initializer} == names == {name for name, _ in model.named_parameters()}
    assert names <= {name for node in graph.node for name in node.input}
    for tensor in graph.initializer:
        assert tensor.data_location == onnx.TensorProto.EXTERNAL
        assert not tensor.raw_data
        assert not tensor.float_data
        external = {entry.key: entry.value for entry in tensor.external_data}
        assert external["location"] == "weights.safetensors"
        assert int(external["length"]) == 4 * int(np.prod(tensor.dims))


def test_the_graph_file_is_small(folder: Path) -> None:
    assert (folder / "forward.onnx").stat().st_size < 80_000


def test_the_graph_names_no_path_of_this_machine(folder: Path, checkpoint: Path) -> None:
    data = (folder / "forward.onnx").read_bytes()
    places = (
        Path.cwd(),
        Path(caracal_export.__file__).parent,
        Path(sys.prefix),
        Path(tempfile.gettempdir()),
        checkpoint,
    )
    for remnant in (b"site-packages", b".py", b"torch", *(str(place).encode() for place in places)):
        assert remnant not in data, remnant
