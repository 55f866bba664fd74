"""Each onnxscript lowering alone, in ONNX Runtime and in ONNX's own reference evaluator, against float64 in numpy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from caracal_export import lowerings, operators
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnxscript.onnx_opset import opset18 as op
from torch import Tensor, nn

BATCH, WIDTH = 2, 3
LENGTHS = (1, 2, 3, 5, 7, 8, 17, 31, 64, 127, 128, 129, 251, 256, 257, 500, 1000, 1023, 2048)
EVALUATORS = ("onnxruntime", "reference")
MIXINGS = ("matmul", "dft")
WINDOWS = (1, 4, 16)
HEADS = 2
TAPS = (1, 2, 3, 5)
GROUPS = (1, 2, 6)

Run = Callable[..., list[NDArray[Any]]]


@torch.library.custom_op("caracal_test::roots_of_unity", mutates_args=())
def _roots_of_unity(x: Tensor) -> Tensor:
    raise NotImplementedError("traced only")


@_roots_of_unity.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2, 2 * x.shape[0])


def _lower_roots_of_unity(x: Any) -> Any:
    cos, sin = lowerings.roots_of_unity(op.Shape(x, start=0, end=1))
    first = op.Constant(value_ints=[0])
    return op.Concat(op.Unsqueeze(cos, first), op.Unsqueeze(sin, first), axis=0)


class _Calls(nn.Module):
    """A module around one function, for the tracer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


def _trace(
    function: Callable[..., Any], shapes: Sequence[tuple[int | str, ...]], mixing: str = "matmul"
) -> onnx.ModelProto:
    """The graph of a function; named axes are symbolic. Inputs are called x0, x1, ...."""
    sizes = {"batch": 2, "length": 5, "positions": 3, "size": 7}
    examples, dynamic = [], []
    for shape in shapes:
        dtype = torch.int64 if "positions" in shape else torch.float32
        examples.append(torch.zeros([sizes.get(dim, dim) for dim in shape], dtype=dtype))  # type: ignore[arg-type]
        dynamic.append({axis: dim for axis, dim in enumerate(shape) if isinstance(dim, str)})
    table = {
        **lowerings.translation_table(mixing),
        torch.ops.caracal_test.roots_of_unity.default: _lower_roots_of_unity,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _Calls(function),
            tuple(examples),
            input_names=[f"x{index}" for index in range(len(shapes))],
            dynamic_shapes=(tuple(dynamic),),
            custom_translation_table=table,
            opset_version=18,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def _runner(graph: onnx.ModelProto, evaluator: str) -> Run:
    """One session for every shape."""
    if evaluator == "reference":
        reference = ReferenceEvaluator(graph)
        return lambda *inputs: reference.run(None, {f"x{index}": value for index, value in enumerate(inputs)})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return lambda *inputs: session.run(None, {f"x{index}": value for index, value in enumerate(inputs)})


def _runners(graph: onnx.ModelProto) -> dict[str, Run]:
    return {evaluator: _runner(graph, evaluator) for evaluator in EVALUATORS}


def _normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


# The causal convolution


@pytest.fixture(scope="module")
def conv_graphs() -> dict[str, onnx.ModelProto]:
    shape = ("batch", "length", WIDTH)
    return {mixing: _trace(operators.causal_conv, [shape, shape], mixing) for mixing in MIXINGS}


@pytest.fixture(scope="module")
def conv(conv_graphs: dict[str, onnx.ModelProto]) -> dict[str, dict[str, Run]]:
    return {mixing: _runners(graph) for mixing, graph in conv_graphs.items()}


def _direct_sum(v: NDArray[Any], g: NDArray[Any]) -> NDArray[np.float64]:
    """`y[t] = sum_{j<=t} v[j] g[t-j]`, in float64, without a transform."""
    v, g = v.astype(np.float64), g.astype(np.float64)
    y = np.empty_like(v)
    for row in range(v.shape[0]):
        for channel in range(v.shape[2]):
            y[row, :, channel] = np.convolve(v[row, :, channel], g[row, :, channel])[: v.shape[1]]
    return y


def _conv_error(run: Run, length: int, relative_l2: Callable[..., float]) -> float:
    v, g = _normal(BATCH, length, WIDTH, seed=1), _normal(BATCH, length, WIDTH, seed=2)
    (y,) = run(v, g)
    return relative_l2(y, _direct_sum(v, g))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("mixing", MIXINGS)
def test_causal_conv_is_the_direct_sum(
    conv: dict[str, dict[str, Run]], relative_l2: Callable[..., float], mixing: str, evaluator: str, length: int
) -> None:
    assert _conv_error(conv[mixing][evaluator], length, relative_l2) <= 1e-6


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_causal_conv_takes_any_batch(
    conv: dict[str, dict[str, Run]], relative_l2: Callable[..., float], mixing: str, batch: int
) -> None:
    v, g = _normal(batch, 9, WIDTH, seed=1), _normal(batch, 9, WIDTH, seed=2)
    for run in conv[mixing].values():
        assert relative_l2(run(v, g)[0], _direct_sum(v, g)) <= 1e-6


@pytest.mark.parametrize("mixing", MIXINGS)
def test_causal_conv_looks_at_no_later_input(conv: dict[str, dict[str, Run]], mixing: str) -> None:
    """Wrapped-around terms of a transform that is too short would show here at full size."""
    v, g = _normal(BATCH, 40, WIDTH, seed=1), _normal(BATCH, 40, WIDTH, seed=2)
    later_v, later_g = v.copy(), g.copy()
    later_v[:, 25:] += 1
    later_g[:, 25:] -= 1
    for run in conv[mixing].values():
        before, after = run(v, g)[0], run(later_v, later_g)[0]
        np.testing.assert_allclose(after[:, :25], before[:, :25], atol=2e-5)
        assert np.abs(after[:, 25:] - before[:, 25:]).max() > 0.1


def _changed(graph: onnx.ModelProto, index: int, op_type: str) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(graph)
    changed.graph.node[index].op_type = op_type
    return changed


def _signs(graph: onnx.ModelProto) -> list[tuple[int, str]]:
    """Nodes that decide a sign of the transform, each with the operator that gets it wrong."""
    producer = {name: node for node in graph.graph.node for name in node.output}
    found = []
    for index, node in enumerate(graph.graph.node):
        if node.op_type == "Neg":
            found.append((index, "Identity"))
        elif node.op_type == "Sub" and all(producer[name].op_type == "Mul" for name in node.input):
            found.append((index, "Add"))  # of two products: a complex one, or an angle reduced to its quarter
    return found


@pytest.mark.parametrize(("mixing", "signs"), [("matmul", 7), ("dft", 1)])
def test_one_wrong_sign_fails_the_comparison(
    conv_graphs: dict[str, onnx.ModelProto], relative_l2: Callable[..., float], mixing: str, signs: int
) -> None:
    found = _signs(conv_graphs[mixing])
    assert len(found) == signs
    for index, wrong in found:
        run = _runner(_changed(conv_graphs[mixing], index, wrong), "onnxruntime")
        assert max(_conv_error(run, length, relative_l2) for length in LENGTHS[:9]) > 1e-2, index


# The tables of the transform


@pytest.fixture(scope="module")
def roots() -> dict[str, Run]:
    return _runners(_trace(_roots_of_unity, [("size",)]))


def _root_sizes() -> list[int]:
    some = np.random.default_rng(0).integers(130, 5000, 60).tolist()
    return sorted({*range(2, 130), *some, 251, 256, 257, 1021, 1023, 1024, 1025, 4093, 4096, 4999, 5000})


def _roots_error(run: Run, size: int) -> float:
    (found,) = run(np.zeros(size, np.float32))
    angle = 2 * np.pi * (np.arange(2 * size) % size) / size
    assert found.shape == (2, 2 * size)
    assert found.dtype == np.float32
    return float(np.abs(found.astype(np.float64) - np.stack((np.cos(angle), np.sin(angle)))).max())


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_roots_of_unity_are_exact_to_float32(roots: dict[str, Run], evaluator: str) -> None:
    errors = {size: _roots_error(roots[evaluator], size) for size in _root_sizes()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= 1.3e-7, worst


@pytest.mark.parametrize("size", [65536, 65537, 131071 * 2])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_roots_of_unity_of_long_transforms(roots: dict[str, Run], evaluator: str, size: int) -> None:
    assert _roots_error(roots[evaluator], size) <= 1.3e-7


# Sliding-window attention


@pytest.fixture(scope="module")
def attention_graph() -> onnx.ModelProto:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return tuple(operators.sliding_window_attention(q, k, v, HEADS, window) for window in WINDOWS)

    return _trace(attend, [("batch", "length", 6)] * 3)


@pytest.fixture(scope="module")
def attention(attention_graph: onnx.ModelProto) -> dict[str, Run]:
    return _runners(attention_graph)


def _queries(length: int) -> list[NDArray[np.float32]]:
    # Large scores: attention that is nearly uniform would hide a key too many.
    return [scale * _normal(BATCH, length, 6, seed=seed) for seed, scale in enumerate((2, 2, 1))]


def _full_attention(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], window: int) -> NDArray[np.float64]:
    """One masked L x L matrix in float64, its softmax taken over the visible keys alone."""
    batch, length, width = q.shape
    q, k, v = (x.astype(np.float64).reshape(batch, length, HEADS, -1) for x in (q, k, v))
    y = np.zeros_like(v)
    for t in range(length):
        seen = slice(max(0, t - window + 1), t + 1)
        scores = np.einsum("bhd,bkhd->bhk", q[:, t], k[:, seen]) / np.sqrt(width // HEADS)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        y[:, t] = np.einsum("bhk,bkhd->bhd", weights, v[:, seen])
    return y.reshape(batch, length, width)


def _around(window: int) -> list[int]:
    return sorted({1, 2, max(1, window - 1), window, window + 1, 2 * window + 3, 5 * window})


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize(
    ("window", "length"), [(window, length) for window in WINDOWS for length in (*_around(window), 1 + window // 2)]
)
def test_sliding_window_attention_is_full_masked_attention(
    attention: dict[str, Run], relative_l2: Callable[..., float], evaluator: str, window: int, length: int
) -> None:
    inputs = _queries(length)
    y = attention[evaluator](*inputs)[WINDOWS.index(window)]
    assert relative_l2(y, _full_attention(*inputs, window)) <= 1e-6


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_hidden_keys_do_not_matter_however_large(attention: dict[str, Run], evaluator: str) -> None:
    """A mask that is added must outweigh every score."""
    window, length = 4, 13
    q, k, v = _queries(length)
    huge_k, huge_v = k.copy(), v.copy()
    huge_k[:, 9:] *= 1e4
    huge_v[:, 9:] *= 1e4
    index = WINDOWS.index(window)
    small, huge = attention[evaluator](q, k, v)[index], attention[evaluator](q, huge_k, huge_v)[index]
    np.testing.assert_array_equal(huge[:, :9], small[:, :9])
    assert np.isfinite(huge).all()


@pytest.mark.parametrize(
    ("was", "becomes", "what"),
    [(3.0, 2.0, "a key too few"), (3.0, 4.0, "a key too many"), (-1e9, 0.0, "no mask"), (-1e9, -1.0, "a weak mask")],
)
def test_a_wrong_mask_fails_the_comparison(
    attention_graph: onnx.ModelProto, relative_l2: Callable[..., float], was: float, becomes: float, what: str
) -> None:
    changed = onnx.ModelProto()
    changed.CopyFrom(attention_graph)
    constants = [attribute for node in changed.graph.node for attribute in node.attribute if node.op_type == "Constant"]
    hits = [attribute for attribute in constants if attribute.name == "value_float" and attribute.f == was]
    assert hits, "the graph has no such constant"
    for attribute in hits:
        attribute.f = becomes
    run, window = _runner(changed, "onnxruntime"), 4
    errors = [
        relative_l2(run(*_queries(n))[WINDOWS.index(window)], _full_attention(*_queries(n), window))
        for n in _around(window)
    ]
    assert max(errors) > 1e-2, what


# The small ones


@pytest.fixture(scope="module")
def depthwise() -> dict[str, Run]:
    def convolve(x: Tensor, *taps: Tensor) -> tuple[Tensor, ...]:
        return tuple(operators.depthwise_causal_conv(x, weight) for weight in taps)

    return _runners(_trace(convolve, [("batch", "length", WIDTH), *((count, WIDTH) for count in TAPS)]))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 40])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_depthwise_conv_is_a_left_padded_conv1d(
    depthwise: dict[str, Run], relative_l2: Callable[..., float], evaluator: str, length: int
) -> None:
    x, taps = _normal(BATCH, length, WIDTH), [_normal(count, WIDTH, seed=count) for count in TAPS]
    channels_first = torch.from_numpy(x).double().transpose(1, 2)
    for got, weight in zip(depthwise[evaluator](x, *taps), taps, strict=True):
        padded = F.pad(channels_first, (len(weight) - 1, 0))
        want = F.conv1d(padded, torch.from_numpy(weight).double().t()[:, None], groups=WIDTH).transpose(1, 2)
        assert relative_l2(got, want.numpy()) <= 3e-7


@pytest.fixture(scope="module")
def grouped() -> dict[str, Run]:
    def apply(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(operators.grouped_linear(x, weight) for weight in weights)

    return _runners(_trace(apply, [("batch", "length", 6), *((heads, 6 // heads, 6 // heads) for heads in GROUPS)]))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (2, 40)])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_grouped_linear_is_a_grouped_conv1d_of_kernel_1(
    grouped: dict[str, Run], relative_l2: Callable[..., float], evaluator: str, shape: tuple[int, int]
) -> None:
    x, weights = _normal(*shape, 6), [_normal(heads, 6 // heads, 6 // heads, seed=heads) for heads in GROUPS]
    for got, weight in zip(grouped[evaluator](x, *weights), weights, strict=True):
        kernel = torch.from_numpy(weight).double().transpose(1, 2).reshape(6, -1, 1)  # (D, Dh in, 1)
        want = F.conv1d(torch.from_numpy(x).double().transpose(1, 2), kernel, groups=len(weight)).transpose(1, 2)
        assert relative_l2(got, want.numpy()) <= 3e-7


@pytest.fixture(scope="module")
def gather() -> dict[str, Run]:
    return _runners(_trace(operators.gather_positions, [("batch", "length", WIDTH), ("batch", "positions")]))


@pytest.mark.parametrize(
    ("length", "positions"),
    [
        (1, [[0]]),
        (1, [[0, 0, 0], [0, 0, 0]]),
        (5, [[4, 0, 2, 2, 4, 1, 3], [0, 0, 4, 3, 1, 2, 2]]),
        (9, [[8], [0], [3], [3]]),
    ],
)
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_gather_positions_takes_them_in_any_order(
    gather: dict[str, Run], evaluator: str, length: int, positions: list[list[int]]
) -> None:
    index = np.asarray(positions, np.int64)
    x = _normal(len(index), length, WIDTH)
    (got,) = gather[evaluator](x, index)
    np.testing.assert_array_equal(got, np.take_along_axis(x, index[..., None], axis=1))


@pytest.fixture(scope="module")
def head() -> dict[str, Run]:
    return _runners(_trace(operators.tied_head, [("batch", "length", 6), (11, 6)]))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (2, 40)])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_tied_head_multiplies_by_the_embedding(
    head: dict[str, Run], relative_l2: Callable[..., float], evaluator: str, shape: tuple[int, int]
) -> None:
    x, embedding = _normal(*shape, 6), _normal(11, 6, seed=1)
    (got,) = head[evaluator](x, embedding)
    assert relative_l2(got, x.astype(np.float64) @ embedding.astype(np.float64).T) <= 3e-7
