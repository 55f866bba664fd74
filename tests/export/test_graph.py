"""The exported graphs themselves: symbolic axes, valid at every opset, no operator or node that need not be there."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import caracal_export
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from caracal_export.opsets import OPSETS, retarget
from caracal_export.tracing import GRAPHS, trace
from caracal_runtimes.errors import InputError
from caracal_runtimes.forward import ForwardPass
from caracal_runtimes.providers.ort import OrtSession

from caracal import CaracalConfig, CaracalModel

MIXINGS = ("matmul", "dft")
LAGS = 8  # of the bundles' step graph
LAYERS = ("mhf", "mhf", "swa")  # what the tiny model's blocks hold
READERS = ("forward", "extend")  # the graphs that read many tokens at once, with lengths to compute from
STEPS = ("step", "step_resident")
WEIGHTY = (*READERS, *STEPS)  # the graphs that have weights

# After a module, or after the operator where the model itself computes; the second use of an operator has a number.
_NAME = re.compile(
    r"(blocks\.\d+(\.(mhf|swa|ffn)(\.[a-z_]+)?)?|embed_tokens|norm|lm_head|lengths"
    r"|(valid_positions|gather_positions|tied_head|side_by_side|convolve_pairs)(_\d+)?)/[A-Z]\w*"
)
# What a provider does wrong, lacks, or runs on another device.
_UNWANTED = {
    *("Sin", "Cos", "If", "Loop", "Scan", "Identity", "Expand", "ScatterND", "NonZero"),
    *("And", "Or", "Xor", "Not", "Where", "Equal", "Greater", "GreaterOrEqual", "LessOrEqual"),
}


def _load(folder: Path, name: str) -> onnx.ModelProto:
    return onnx.load(folder / f"{name}.onnx", load_external_data=False)


@pytest.fixture(scope="session", params=MIXINGS)
def mixing(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def folder(bundle: Callable[[str], Path], mixing: str) -> Path:
    return bundle(mixing)


@pytest.fixture(scope="session", params=GRAPHS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def graph(folder: Path, name: str) -> onnx.GraphProto:
    return _load(folder, name).graph


@pytest.fixture(scope="session")
def retargeted(
    bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, int], Path]:
    """`retargeted(mixing, name, opset)`: a graph at that opset with the weights beside it, made once."""
    made: dict[tuple[str, str, int], Path] = {}

    def make(mixing: str, name: str, opset: int) -> Path:
        if (mixing, name, opset) not in made:
            target = tmp_path_factory.mktemp("opset")
            shutil.copyfile(bundle(mixing) / "weights.safetensors", target / "weights.safetensors")
            model = retarget(ir.load(bundle(mixing) / f"{name}.onnx"), opset)
            ir.save(model, target / f"{name}.onnx")
            made[mixing, name, opset] = target / f"{name}.onnx"
        return made[mixing, name, opset]

    return make


def _axes(value: onnx.ValueInfoProto) -> list[str | int]:
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _reference(model: CaracalModel, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(ids), torch.from_numpy(positions)).numpy()


def _sizes(shape: list[str | int], sizes: dict[str, int]) -> tuple[int, ...]:
    """A shape with numbers in place of its names, also in sums and products of them."""
    return tuple(int(eval(str(dim), {}, sizes)) for dim in shape)


def _feeds(graph: onnx.GraphProto, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Some valid inputs of these sizes."""
    feeds = {}
    for index, value in enumerate(graph.input):
        rng, shape = np.random.default_rng([index, *sizes.values()]), _sizes(_axes(value), sizes)
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            low, high = {
                "input_ids": (0, 97),
                "lengths": (1, sizes["length"] + 1),
                "logit_positions": (0, sizes["length"]),
                "starts": (1, 20),
            }[value.name]
            feeds[value.name] = rng.integers(low, high, shape)
    return feeds


def _run(file: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = OrtSession.on_cpu(file, threads=1)
    names = [value.name for value in onnx.load(file, load_external_data=False).graph.output]
    return dict(zip(names, session.run(feeds, names), strict=True))


# Axes


Shapes = dict[str, list[str | int]]


def _documented(config: CaracalConfig) -> dict[str, Shapes]:
    """Inputs and outputs of each graph as `docs/bundle-format.md` has them, written out for layers MHF, MHF, SWA."""
    width, heads, window, vocabulary = (
        config.hidden_size,
        config.num_attention_heads,
        config.sliding_window,
        config.vocab_size,
    )
    reading: Shapes = {
        "input_ids": ["batch", "length"],
        "lengths": ["batch"],
        "logit_positions": ["batch", "positions"],
    }
    tail: Shapes = {"conv": ["batch", 2, width]}  # three taps
    rows: Shapes = {"keys": ["batch", window, width], "values": ["batch", window, width]}
    streams: Shapes = {name: ["batch", "length", width] for name in ("v", "g")}
    read = _state("present", {**streams, "mixed": ["batch", "2*length", width], **tail}, rows)
    logits: list[str | int] = ["batch", "positions", vocabulary]
    pending: Shapes = {n: ["batch", "length", width] for n in ("pending", "lag_v", "lag_g")}
    one: Shapes = {name: ["batch", width] for name in ("pending", "first_v", "first_g")}
    ring: Shapes = {n: [LAGS, "batch", width] for n in ("recent_v", "recent_g", "lag_v", "lag_g")}
    slots: Shapes = {
        "keys": ["batch", heads, width // heads, window],
        "values": ["batch", heads, window, width // heads],
    }
    recent: Shapes = {n: [LAGS - 1, "batch", width] for n in ("recent_v", "recent_g")}
    resident: Shapes = {**one, **recent, **{n: [LAGS - 1, "batch", width] for n in ("lag_v", "lag_g")}, **tail}
    new: Shapes = {name: ["batch", width] for name in ("v", "g")}
    product: Shapes = {
        "v_block": ["rows", "block", "channels"],
        "g_block": ["rows", "block", "channels"],
        "v_lags": ["rows", "lags", "channels"],
        "g_lags": ["rows", "lags", "channels"],
        "mixed": ["rows", "lags + block", "channels"],
    }
    return {
        "forward": {**reading, "logits": logits, **read},
        "extend": {
            **reading,
            "starts": ["batch"],
            **_state("past", {**pending, **tail}, rows),
            "logits": logits,
            **read,
        },
        "step": {
            "input_ids": ["batch"],
            "window_mask": ["batch", window],
            **_state("past", {**one, **ring, **tail}, slots),
            "logits": ["batch", vocabulary],
            **_state("present", {**new, **tail}, {"key": ["batch", width], "value": ["batch", width]}),
        },
        "step_resident": {
            "input_ids": ["batch"],
            "window_mask": ["batch", window],
            "keep_g": ["batch", 1],
            **_state("past", resident, slots),
            "logits": ["batch", vocabulary],
            "streams": ["batch", 4 * width],  # v and g of two layers
            **_state("present", {**recent, **tail}, slots),
        },
        **dict.fromkeys(("convolve", "convolve_long"), product),
    }


def _state(when: str, mhf: Shapes, swa: Shapes) -> Shapes:
    return {
        f"{when}.{layer}.{name}": shape
        for layer, kind in enumerate(LAYERS)
        for name, shape in (mhf if kind == "mhf" else swa).items()
    }


def test_inputs_and_outputs_have_their_symbolic_axes(graph: onnx.GraphProto, name: str, model: CaracalModel) -> None:
    values = [*graph.input, *graph.output]
    documented = _documented(model.config)[name]
    assert [(value.name, _axes(value)) for value in values] == list(documented.items())
    for value in values:
        whole = value.name in ("input_ids", "lengths", "logit_positions", "starts")
        wanted = onnx.TensorProto.INT64 if whole else onnx.TensorProto.FLOAT
        assert value.type.tensor_type.elem_type == wanted, value.name


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_no_axis_but_the_batch_to_read_at_run_time(folder: Path, name: str) -> None:
    graph = _load(folder, name).graph
    values = (*graph.input, *graph.output, *graph.value_info)
    assert {dim for value in values for dim in _axes(value) if isinstance(dim, str)} == {"batch"}
    assert "Shape" not in {node.op_type for node in graph.node}


# Besides the graph's own axes, what a row has before its tokens: K - 1 = 2 inputs of the convolution, W = 8 positions.
_READ = {("batch", dim) for dim in ("length", "positions", "length + 2", "length + 8", 2, 8)}
_ACTIVATIONS = {
    "forward": _READ,
    "extend": _READ,
    "step": {(LAGS, "batch"), *(("batch", size) for size in (32, 48, 3, 1))},
    "step_resident": {
        *((rows, "batch") for rows in (LAGS - 1, LAGS - 2, 1)),
        *(("batch", size) for size in (32, 48, 3, 1)),
    },
}


@pytest.mark.parametrize("name", WEIGHTY)
def test_no_recorded_shape_is_that_of_the_example(folder: Path, name: str) -> None:
    graph = _load(folder, name).graph
    weights = {tensor.name for tensor in graph.initializer}
    activations = [value for value in graph.value_info if value.name not in weights]
    assert len(activations) > 50
    for value in activations:
        assert tuple(_axes(value)[:2]) in _ACTIVATIONS[name], value.name


_AXES = ("batch", "length", "positions", "rows", "block", "lags", "channels")


# The second is that of the examples that were traced.
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1, 1, 1, 1, 1),
        (2, 5, 3, 2, 5, 7, 6),
        (3, 2, 5, 1, 3, 3, 9),
        (4, 9, 2, 5, 8, 16, 2),
        (1, 130, 9, 3, 64, 129, 4),
        (5, 300, 1, 1, 1, 300, 3),
    ],
    ids=str,
)
def test_outputs_have_the_declared_shapes_at_any_size(
    folder: Path, graph: onnx.GraphProto, name: str, shape: tuple[int, ...]
) -> None:
    sizes = dict(zip(_AXES, shape, strict=True))
    found = _run(folder / f"{name}.onnx", _feeds(graph, sizes))
    assert {key: value.shape for key, value in found.items()} == {
        value.name: _sizes(_axes(value), sizes) for value in graph.output
    }
    assert all(np.isfinite(value).all() for value in found.values())


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
    retargeted: Callable[[str, str, int], Path], graph: onnx.GraphProto, mixing: str, name: str, opset: int
) -> None:
    file = retargeted(mixing, name, opset)
    onnx.checker.check_model(str(file), full_check=True)
    inferred = onnx.shape_inference.infer_shapes(
        onnx.load(file, load_external_data=False), check_type=True, strict_mode=True, data_prop=True
    )
    assert [(entry.domain, entry.version) for entry in inferred.opset_import] == [("", opset)]
    for ends in ("input", "output"):
        values, wanted = getattr(inferred.graph, ends), getattr(graph, ends)
        assert [(v.name, _axes(v)) for v in values] == [(v.name, _axes(v)) for v in wanted]


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_computes_the_reference(
    retargeted: Callable[[str, str, int], Path],
    run_graph: Callable[[Path, CaracalConfig], ForwardPass],
    model: CaracalModel,
    relative_l2: Callable[..., float],
    mixing: str,
    opset: int,
) -> None:
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (3, 37))
    positions = np.tile(np.arange(37), (3, 1))
    got = run_graph(retargeted(mixing, "forward", opset), model.config).forward(ids)
    assert relative_l2(got, _reference(model, ids, positions)) <= 1e-5


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_computes_what_the_exported_graph_does(
    folder: Path,
    retargeted: Callable[[str, str, int], Path],
    relative_l2: Callable[..., float],
    graph: onnx.GraphProto,
    mixing: str,
    name: str,
    opset: int,
) -> None:
    """The state too, of all graphs: each output on its own, so that a large one cannot hide a small one."""
    feeds = _feeds(graph, dict(zip(_AXES, (3, 19, 4, 2, 12, 31, 5), strict=True)))
    got, want = _run(retargeted(mixing, name, opset), feeds), _run(folder / f"{name}.onnx", feeds)
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert relative_l2(got[key], value) <= 1e-6, key


@pytest.mark.parametrize("opset", OPSETS)
def test_every_node_has_a_readable_name_of_its_own(
    retargeted: Callable[[str, str, int], Path], mixing: str, name: str, opset: int
) -> None:
    nodes = onnx.load(retargeted(mixing, name, opset), load_external_data=False).graph.node
    assert not [name for name, count in Counter(node.name for node in nodes).items() if count > 1]
    unreadable = [f"{node.op_type} {node.name!r}" for node in nodes if not _NAME.fullmatch(node.name)]
    assert not unreadable


@pytest.mark.parametrize("opset", OPSETS)
def test_every_value_is_named_after_its_node(
    retargeted: Callable[[str, str, int], Path], mixing: str, name: str, opset: int
) -> None:
    graph = onnx.load(retargeted(mixing, name, opset), load_external_data=False).graph
    outputs = {value.name for value in graph.output}
    for node in graph.node:
        for value in node.output:
            assert value in outputs or value.partition(":")[0] == node.name, f"{node.op_type} {node.name!r}"


def test_retarget_refuses_an_opset_it_was_not_made_for(bundle: Callable[[str], Path], name: str) -> None:
    model = ir.load(bundle("matmul") / f"{name}.onnx")
    for opset in (OPSETS.start - 1, OPSETS.stop):
        with pytest.raises(InputError, match=f"17 to 23, found {opset}"):
            retarget(model, opset)


# Operators


def test_each_mixing_computes_its_transform_its_own_way(graph: onnx.GraphProto, name: str, mixing: str) -> None:
    """A step has no transform; what extends a sequence transforms the streams of the lags as well."""
    streams = {"forward": 2, "extend": 4, "step": 0, "step_resident": 0, "convolve": 4, "convolve_long": 4}[name]
    transforms = LAYERS.count("mhf") if name in READERS else int(name.startswith("convolve"))
    inverse = int(streams > 0)
    found = Counter(node.op_type for node in graph.node)["DFT"]
    assert found == (0 if mixing == "matmul" else (streams + inverse) * transforms)
    products = 3 * (streams + inverse) if mixing == "matmul" else 0
    places = {f"blocks.{layer}.mhf/" if name in READERS else "convolve_pairs/" for layer in (0, 1)}
    for place in places:
        assert sum(n.op_type == "MatMul" and n.name.startswith(place) for n in graph.node) == products


def test_no_unwanted_operator(graph: onnx.GraphProto) -> None:
    assert {node.op_type for node in graph.node} & _UNWANTED == set()
    assert {node.domain for node in graph.node} == {""}


def test_comparisons_only_choose_the_length_of_the_transform(graph: onnx.GraphProto, name: str, mixing: str) -> None:
    found = [node.name for node in graph.node if node.op_type == "Less"]
    assert found == ([] if mixing == "matmul" or name in STEPS else ["lengths/Less"])


def test_nothing_is_sliced_with_a_step(graph: onnx.GraphProto) -> None:
    """A step of one, which the tracer writes out, is none."""
    constants = {
        node.output[0]: onnx.helper.get_attribute_value(node.attribute[0])
        for node in graph.node
        if node.op_type == "Constant"
    }
    slices = [node for node in graph.node if node.op_type == "Slice"]
    assert slices
    for node in slices:
        assert all(np.array_equal(_numbers(constants[step]), [1]) for step in node.input[4:]), node.name


def _numbers(value: Any) -> np.ndarray:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def test_transposes_are_those_of_the_heads_alone(graph: onnx.GraphProto, name: str) -> None:
    """One position is one row already, so that a step moves nothing. (The transform's tables are not data.)"""
    found = Counter(node.name.partition("/")[0] for node in graph.node if node.op_type == "Transpose")
    del found["lengths"]
    heads = {"blocks.0.mhf.gate_conv": 2, "blocks.1.mhf.gate_conv": 2, "blocks.2.swa": 5}
    assert found == (heads if name in READERS else {})


def test_weights_are_read_as_they_lie(graph: onnx.GraphProto, name: str) -> None:
    weights = {tensor.name for tensor in graph.initializer}
    readers = Counter(node.op_type for node in graph.node for name in node.input if name in weights)
    taps = "Mul" if name in STEPS else "Split"  # a step multiplies all taps at once
    wanted = {"Gather", "Gemm", "MatMul", "Add", "LayerNormalization", taps}
    assert set(readers) == (wanted if name in WEIGHTY else set())


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
@pytest.mark.parametrize("name", WEIGHTY)
def test_all_layers_share_the_tables(
    folder: Path, mixing: str, name: str, random_model: Callable[..., CaracalModel]
) -> None:
    """Six layers read the same tables as three: the transform's matrices and the mask depend on lengths alone."""
    six = trace(random_model(num_hidden_layers=6), name, mixing, 18, lags=LAGS).graph
    shared = sum(node.name.startswith("lengths/") for node in _load(folder, name).graph.node)
    assert shared > (50 if name in READERS else 10)  # a step has constants only
    # Three more layers take the tail of one array per MHF layer and of two per attention layer. Such an array is longer
    # than the input by what stands before it: three nodes find its rows, and read no table.
    tails = 2 * 1 + 1 * 2 if name in READERS else 0
    assert sum((node.name or "").startswith("lengths/") for node in six) == shared + 3 * tails


# Weights and traces of the machine


def test_every_weight_is_external_and_used(
    graph: onnx.GraphProto, name: str, folder: Path, model: CaracalModel
) -> None:
    from safetensors import safe_open

    with safe_open(folder / "weights.safetensors", framework="np") as stored:
        names = set(stored.keys())
    assert names == {parameter for parameter, _ in model.named_parameters()}
    if name not in WEIGHTY:
        assert len(graph.initializer) == 0
        return
    assert {tensor.name for tensor in graph.initializer} == names
    assert names <= {name for node in graph.node for name in node.input}
    for tensor in graph.initializer:
        assert tensor.data_location == onnx.TensorProto.EXTERNAL
        assert not tensor.raw_data
        assert not tensor.float_data
        external = {entry.key: entry.value for entry in tensor.external_data}
        assert external["location"] == "weights.safetensors"
        assert int(external["length"]) == 4 * int(np.prod(tensor.dims))


def test_the_graph_file_is_small(folder: Path, name: str) -> None:
    assert (folder / f"{name}.onnx").stat().st_size < 80_000


def test_the_graph_names_no_path_of_this_machine(folder: Path, name: str, checkpoint: Path) -> None:
    data = (folder / f"{name}.onnx").read_bytes()
    places = (
        Path.cwd(),
        Path(caracal_export.__file__).parent,
        Path(sys.prefix),
        Path(tempfile.gettempdir()),
        checkpoint,
    )
    for remnant in (b"site-packages", b".py", b"torch", *(str(place).encode() for place in places)):
        assert remnant not in data, remnant
