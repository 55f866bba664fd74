"""Each onnxscript lowering alone, in ONNX Runtime and in ONNX's own reference evaluator, against float64 in numpy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from caracal_export import lowerings, operators, transform
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
# Block and lags of a product whose tables serve one call: K >= L, equal, twice as long, longer, square and not.
PAIRS = ((1, 1), (1, 2), (1, 9), (2, 3), (4, 4), (5, 7), (8, 16), (33, 66), (64, 64), (100, 257), (500, 1023))

Run = Callable[..., list[NDArray[Any]]]


@torch.library.custom_op("caracal_test::roots_of_unity", mutates_args=())
def _roots_of_unity(x: Tensor) -> Tensor:
    raise NotImplementedError("traced only")


@_roots_of_unity.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2, 2 * x.shape[0])


def _lower_roots_of_unity(x: Any) -> Any:
    cos, sin = transform.roots_of_unity(op.Shape(x, start=0, end=1))
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
    function: Callable[..., Any],
    shapes: Sequence[tuple[int | str, ...]],
    mixing: str = "matmul",
    integers: Collection[int] = (),
) -> onnx.ModelProto:
    """The graph of a function; named axes are symbolic. Inputs are called x0, x1, ...; `integers` are those of int64."""
    sizes = {"batch": 2, "length": 5, "longer": 11, "positions": 3, "size": 7}
    examples, dynamic = [], []
    for index, shape in enumerate(shapes):
        dtype = torch.int64 if index in integers else torch.float32
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


# The convolution


@pytest.fixture(scope="module")
def conv_graphs() -> dict[str, onnx.ModelProto]:
    shape = ("batch", "length", WIDTH)
    return {mixing: _trace(operators.convolve, [shape, shape], mixing) for mixing in MIXINGS}


@pytest.fixture(scope="module")
def conv(conv_graphs: dict[str, onnx.ModelProto]) -> dict[str, dict[str, Run]]:
    return {mixing: _runners(graph) for mixing, graph in conv_graphs.items()}


def _direct_sum(v: NDArray[Any], g: NDArray[Any]) -> NDArray[np.float64]:
    """`y[t] = sum_j v[j] g[t-j]` for all t of v [B, L, D] and g [B, K, D], in float64, without a transform: [B, L+K, D]."""
    v, g = v.astype(np.float64), g.astype(np.float64)
    y = np.zeros((v.shape[0], v.shape[1] + g.shape[1], v.shape[2]))  # the last row stays zero
    for row in range(v.shape[0]):
        for channel in range(v.shape[2]):
            y[row, :-1, channel] = np.convolve(v[row, :, channel], g[row, :, channel])
    return y


def _streams(batch: int, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return _normal(batch, length, WIDTH, seed=1), _normal(batch, length, WIDTH, seed=2)


def _conv_error(run: Run, length: int, relative_l2: Callable[..., float]) -> float:
    v, g = _streams(BATCH, length)
    first, whole = run(v, g)
    want = _direct_sum(v, g)
    return max(relative_l2(first, want[:, :length]), relative_l2(whole, want))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("mixing", MIXINGS)
def test_convolve_is_the_direct_sum(
    conv: dict[str, dict[str, Run]], relative_l2: Callable[..., float], mixing: str, evaluator: str, length: int
) -> None:
    assert _conv_error(conv[mixing][evaluator], length, relative_l2) <= 1e-6


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_row_of_convolve_is_right(conv: dict[str, dict[str, Run]], mixing: str, length: int) -> None:
    """A norm over all rows would forgive a few that are wrong in their last digits."""
    v, g = _streams(BATCH, length)
    want = _direct_sum(v, g)
    _, whole = conv[mixing]["onnxruntime"](v, g)
    assert np.abs(whole - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("length", [4095, 8192, 10007, 16385, 32768, 65536])
def test_long_convolutions_keep_their_digits(
    conv: dict[str, dict[str, Run]], relative_l2: Callable[..., float], length: int
) -> None:
    """By numpy's FFT in float64: at these lengths the defining sum takes minutes."""
    v, g = _streams(1, length)
    spectra = (np.fft.rfft(x.astype(np.float64), 2 * length, axis=1) for x in (v, g))
    want = np.fft.irfft(math.prod(spectra), 2 * length, axis=1)
    first, whole = conv["matmul"]["onnxruntime"](v, g)
    assert relative_l2(first, want[:, :length]) <= 1e-6
    assert relative_l2(whole, want) <= 1e-6


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_convolve_takes_any_batch(
    conv: dict[str, dict[str, Run]], relative_l2: Callable[..., float], mixing: str, batch: int
) -> None:
    v, g = _streams(batch, 9)
    for run in conv[mixing].values():
        first, whole = run(v, g)
        assert relative_l2(first, _direct_sum(v, g)[:, :9]) <= 1e-6
        assert relative_l2(whole, _direct_sum(v, g)) <= 1e-6


@pytest.mark.parametrize("mixing", MIXINGS)
def test_convolve_looks_at_no_later_input(conv: dict[str, dict[str, Run]], mixing: str) -> None:
    """Wrapped-around terms of a transform that is too short would show here at full size."""
    v, g = _streams(BATCH, 40)
    later_v, later_g = v.copy(), g.copy()
    later_v[:, 25:] += 1
    later_g[:, 25:] -= 1
    for run in conv[mixing].values():
        for before, after in zip(run(v, g), run(later_v, later_g), strict=True):
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
        elif node.op_type == "Sub" and all(name in producer and producer[name].op_type == "Mul" for name in node.input):
            parts = [producer[name] for name in producer[node.input[1]].input if name in producer]
            if any(part.op_type == "Div" and part.input[0] == node.input[0] for part in parts):
                continue  # a remainder: with the other sign it names the same root, one period later
            found.append((index, "Add"))  # of two products: a complex one, or an angle reduced to its quarter
    return found


@pytest.mark.parametrize(("mixing", "signs"), [("matmul", 8), ("dft", 1)])
def test_one_wrong_sign_fails_the_comparison(
    conv_graphs: dict[str, onnx.ModelProto], relative_l2: Callable[..., float], mixing: str, signs: int
) -> None:
    found = _signs(conv_graphs[mixing])
    assert len(found) == signs
    for index, wrong in found:
        run = _runner(_changed(conv_graphs[mixing], index, wrong), "onnxruntime")
        assert max(_conv_error(run, length, relative_l2) for length in LENGTHS[:9]) > 1e-2, index


# Two products at once


@pytest.fixture(scope="module")
def pair_graphs() -> dict[tuple[str, str], onnx.ModelProto]:
    """By mixing and form: `square` as in `extend`, `short` and `long` as in the two graphs of block products."""
    block, lags = ("batch", "length", WIDTH), ("batch", "longer", WIDTH)

    def square(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return operators.convolve_pairs(a, b, c, d, True, True)

    def short(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return operators.convolve_pairs(a, b, c, d, False, True)

    def long(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        return operators.convolve_pairs(a, b, c, d, False, False)

    return {
        (mixing, form.__name__): _trace(form, shapes, mixing)
        for form, shapes in ((square, [block] * 4), (short, [block, lags] * 2), (long, [block, lags] * 2))
        for mixing in MIXINGS
    }


@pytest.fixture(scope="module")
def pairs(pair_graphs: dict[tuple[str, str], onnx.ModelProto]) -> dict[tuple[str, str], dict[str, Run]]:
    return {key: _runners(graph) for key, graph in pair_graphs.items()}


def _pairs_error(run: Run, batch: int, length: int, longer: int, relative_l2: Callable[..., float]) -> float:
    a, c = _streams(batch, length)
    b, d = _normal(batch, longer, WIDTH, seed=3), _normal(batch, longer, WIDTH, seed=4)
    first, whole = run(a, b, c, d)
    want = _direct_sum(a, b) + _direct_sum(c, d)
    return max(relative_l2(first, want[:, :length]), relative_l2(whole, want))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("mixing", MIXINGS)
def test_square_pairs_are_the_direct_sums(
    pairs: dict[tuple[str, str], dict[str, Run]],
    relative_l2: Callable[..., float],
    mixing: str,
    evaluator: str,
    length: int,
) -> None:
    assert _pairs_error(pairs[mixing, "square"][evaluator], BATCH, length, length, relative_l2) <= 1e-6


@pytest.mark.parametrize(("length", "longer"), PAIRS)
@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("form", ["short", "long"])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_pairs_of_two_lengths_are_the_direct_sums(
    pairs: dict[tuple[str, str], dict[str, Run]],
    relative_l2: Callable[..., float],
    mixing: str,
    form: str,
    evaluator: str,
    length: int,
    longer: int,
) -> None:
    assert _pairs_error(pairs[mixing, form][evaluator], BATCH, length, longer, relative_l2) <= 1e-6


@pytest.mark.parametrize("form", ["square", "short", "long"])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_pairs_take_any_batch(
    pairs: dict[tuple[str, str], dict[str, Run]], relative_l2: Callable[..., float], mixing: str, form: str
) -> None:
    for batch in (1, 3, 7):
        for run in pairs[mixing, form].values():
            assert _pairs_error(run, batch, 9, 9 if form == "square" else 13, relative_l2) <= 1e-6


@pytest.mark.parametrize("form", ["short", "long"])
@pytest.mark.parametrize("mixing", MIXINGS)
def test_pairs_do_not_wrap_around(pairs: dict[tuple[str, str], dict[str, Run]], mixing: str, form: str) -> None:
    """Each input's last row reaches the rows from its own place on, and none before."""
    a, c = _streams(BATCH, 16)
    b, d = _normal(BATCH, 40, WIDTH, seed=3), _normal(BATCH, 40, WIDTH, seed=4)
    for run in pairs[mixing, form].values():
        before = run(a, b, c, d)[1]
        for index, last in enumerate((15, 39, 15, 39)):
            inputs = [x.copy() for x in (a, b, c, d)]
            inputs[index][:, last] += 1
            after = run(*inputs)[1]
            np.testing.assert_allclose(after[:, :last], before[:, :last], atol=2e-5)
            assert np.abs(after[:, last] - before[:, last]).max() > 0.1


# The tables' twiddle factors are multiplied in where they serve one call: twice as many products to get wrong.
@pytest.mark.parametrize(
    ("mixing", "form", "signs"),
    [
        ("matmul", "square", 8),
        ("matmul", "short", 8),
        ("matmul", "long", 17),
        ("dft", "square", 2),
        ("dft", "short", 2),
        ("dft", "long", 2),
    ],
)
def test_one_wrong_sign_of_pairs_fails_the_comparison(
    pair_graphs: dict[tuple[str, str], onnx.ModelProto],
    relative_l2: Callable[..., float],
    mixing: str,
    form: str,
    signs: int,
) -> None:
    graph = pair_graphs[mixing, form]
    found = _signs(graph)
    assert len(found) == signs
    for index, wrong in found:
        run = _runner(_changed(graph, index, wrong), "onnxruntime")
        errors = [
            _pairs_error(run, BATCH, length, length if form == "square" else longer, relative_l2)
            for length, longer in PAIRS
        ]
        assert max(errors) > 1e-2, index


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


WRONG_MASKS = [
    (3.0, 2.0, "a key too few"),
    (3.0, 4.0, "a key too many"),
    (-1e9, 0.0, "no mask"),
    (-1e9, -1.0, "a weak mask"),
]


def _with_another_constant(graph: onnx.ModelProto, was: float, becomes: float) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(graph)
    constants = [attribute for node in changed.graph.node for attribute in node.attribute if node.op_type == "Constant"]
    hits = [attribute for attribute in constants if attribute.name == "value_float" and attribute.f == was]
    assert hits, "the graph has no such constant"
    for attribute in hits:
        attribute.f = becomes
    return changed


@pytest.mark.parametrize(("was", "becomes", "what"), WRONG_MASKS)
def test_a_wrong_mask_fails_the_comparison(
    attention_graph: onnx.ModelProto, relative_l2: Callable[..., float], was: float, becomes: float, what: str
) -> None:
    run, window = _runner(_with_another_constant(attention_graph, was, becomes), "onnxruntime"), 4
    errors = [
        relative_l2(run(*_queries(n))[WINDOWS.index(window)], _full_attention(*_queries(n), window))
        for n in _around(window)
    ]
    assert max(errors) > 1e-2, what


# Attention of a chunk that continues a sequence


@pytest.fixture(scope="module")
def chunk_graphs() -> dict[int, onnx.ModelProto]:
    """By window. Keys and values have W rows more than the queries, so that their length is an axis of its own."""

    def graph(window: int) -> onnx.ModelProto:
        def attend(q: Tensor, k: Tensor, v: Tensor, past_k: Tensor, past_v: Tensor, starts: Tensor) -> Tensor:
            k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
            return operators.chunk_attention(q, k, v, starts, HEADS, window)

        shapes = [*[("batch", "length", 6)] * 3, *[("batch", window, 6)] * 2, ("batch",)]
        return _trace(attend, shapes, integers=[5])

    return {window: graph(window) for window in WINDOWS}


@pytest.fixture(scope="module")
def chunk(chunk_graphs: dict[int, onnx.ModelProto]) -> dict[int, dict[str, Run]]:
    return {window: _runners(graph) for window, graph in chunk_graphs.items()}


def _chunk_inputs(window: int, length: int, starts: Sequence[int]) -> list[NDArray[Any]]:
    """What stands in the rows before a sequence's beginning is large, so that it would show."""
    batch = len(starts)
    q, k, v, past_k, past_v = (
        scale * _normal(batch, rows, 6, seed=seed)
        for seed, (scale, rows) in enumerate(((2, length), (2, length), (1, length), (2, window), (1, window)))
    )
    for row, start in enumerate(starts):
        past_k[row, : max(0, window - start)] = 1e4
        past_v[row, : max(0, window - start)] = 1e4
    return [q, k, v, past_k, past_v, np.asarray(starts, np.int64)]


def _continued_attention(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], past_k: NDArray[Any], past_v: NDArray[Any], starts: NDArray[Any]
) -> NDArray[np.float64]:
    """A loop over rows, queries and heads; each query sees its own and the W - 1 positions before it, from 0 on."""
    window = past_k.shape[1]
    keys, values = np.concatenate((past_k, k), axis=1), np.concatenate((past_v, v), axis=1)
    y = np.zeros(q.shape)
    size = q.shape[2] // HEADS
    for row in range(len(q)):
        for t in range(q.shape[1]):
            seen = slice(window + t - min(window - 1, t + int(starts[row])), window + t + 1)
            for head in range(HEADS):
                part = slice(head * size, (head + 1) * size)
                y[row, t, part] = _attend(q[row, t, part], keys[row, seen, part], values[row, seen, part])
    return y


def _attend(query: NDArray[Any], keys: NDArray[Any], values: NDArray[Any]) -> NDArray[np.float64]:
    """One query [Dh] over keys and values [N, Dh], in float64."""
    scores = keys.astype(np.float64) @ query.astype(np.float64) / np.sqrt(len(query))
    weights = np.exp(scores - scores.max())
    return weights @ values.astype(np.float64) / weights.sum()


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize(("window", "length"), [(window, length) for window in WINDOWS for length in _around(window)])
def test_chunk_attention_is_a_loop_over_what_each_query_sees(
    chunk: dict[int, dict[str, Run]], relative_l2: Callable[..., float], evaluator: str, window: int, length: int
) -> None:
    """Rows that begin at the chunk, less than a window before it, and long before it: a float would round 2^40 + 1."""
    starts = sorted({0, 1, window // 2, window - 1, window, window + 1, 2**40 + 1})
    inputs = _chunk_inputs(window, length, starts)
    (y,) = chunk[window][evaluator](*inputs)
    assert relative_l2(y, _continued_attention(*inputs)) <= 1e-6


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("window", WINDOWS)
def test_chunks_continue_a_whole_sequence(
    chunk: dict[int, dict[str, Run]], relative_l2: Callable[..., float], evaluator: str, window: int
) -> None:
    q, k, v = _queries(45)
    whole = _full_attention(q, k, v, window)
    padded_k, padded_v = (np.pad(x, ((0, 0), (window, 0), (0, 0))) for x in (k, v))
    for begin, end in ((0, 1), (1, 2), (2, 5), (5, 20), (20, 45)):
        past = slice(begin, begin + window)
        starts = np.full(BATCH, begin, np.int64)
        (y,) = chunk[window][evaluator](
            *(x[:, begin:end] for x in (q, k, v)), padded_k[:, past], padded_v[:, past], starts
        )
        assert relative_l2(y, whole[:, begin:end]) <= 1e-6, (begin, end)


@pytest.mark.parametrize(("was", "becomes", "what"), WRONG_MASKS)
def test_a_wrong_mask_of_a_chunk_fails_the_comparison(
    chunk_graphs: dict[int, onnx.ModelProto], relative_l2: Callable[..., float], was: float, becomes: float, what: str
) -> None:
    run, window = _runner(_with_another_constant(chunk_graphs[4], was, becomes), "onnxruntime"), 4
    errors = []
    for length in _around(window):
        inputs = _chunk_inputs(window, length, [0, 2, 9])
        errors.append(relative_l2(run(*inputs)[0], _continued_attention(*inputs)))
    assert max(errors) > 1e-2, what


# Attention of one position


@pytest.fixture(scope="module")
def ring() -> dict[int, dict[str, Run]]:
    """By window."""
    row = ("batch", 6)
    return {
        window: _runners(
            _trace(
                operators.ring_attention,
                [row, row, row, ("batch", HEADS, 3, window), ("batch", HEADS, window, 3), ("batch", window)],
            )
        )
        for window in WINDOWS
    }


def _ring_inputs(batch: int, window: int, known: int) -> list[NDArray[np.float32]]:
    """A ring of which `known` slots are in use, in no order; the others are masked, and large, so that they would show."""
    q, k, v = (scale * _normal(batch, 6, seed=seed) for seed, scale in enumerate((2, 2, 1)))
    keys, values = 2 * _normal(batch, HEADS, 3, window, seed=3), _normal(batch, HEADS, window, 3, seed=4)
    mask = np.zeros((batch, window), np.float32)
    for row in range(batch):
        unused = np.random.default_rng([row, window]).permutation(window)[known:]
        mask[row, unused] = -1e9
        keys[row][..., unused] = values[row][:, unused] = 1e4
    return [q, k, v, keys, values, mask]


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("window", "known"), [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (4, 4), (16, 0), (16, 9), (16, 15), (16, 16)]
)
def test_ring_attention_is_a_loop_over_the_slots_in_use(
    ring: dict[int, dict[str, Run]],
    relative_l2: Callable[..., float],
    evaluator: str,
    batch: int,
    window: int,
    known: int,
) -> None:
    inputs = _ring_inputs(batch, window, known)
    q, k, v, keys, values, mask = inputs
    want = np.zeros((batch, 6))
    for row in range(batch):
        used = np.flatnonzero(mask[row] == 0)
        for head in range(HEADS):
            part = slice(3 * head, 3 * head + 3)
            all_keys = np.vstack((keys[row, head][:, used].T, k[row, part]))
            all_values = np.vstack((values[row, head][used], v[row, part]))
            want[row, part] = _attend(q[row, part], all_keys, all_values)
    (y,) = ring[window][evaluator](*inputs)
    assert relative_l2(y, want) <= 1e-6


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_a_ring_has_no_order(ring: dict[int, dict[str, Run]], evaluator: str) -> None:
    q, k, v, keys, values, mask = _ring_inputs(BATCH, 16, 9)
    order = np.random.default_rng(0).permutation(16)
    (one,) = ring[16][evaluator](q, k, v, keys, values, mask)
    (other,) = ring[16][evaluator](
        q, k, v, np.ascontiguousarray(keys[..., order]), np.ascontiguousarray(values[:, :, order]), mask[:, order]
    )
    np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


# The small ones


@pytest.fixture(scope="module")
def padding() -> dict[str, Run]:
    def pad(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(operators.zeros_before(x, count) for count in (0, 1, 4))

    return _runners(_trace(pad, [("batch", "length", WIDTH)]))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (2, 40)])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_zeros_before_puts_rows_in_front(padding: dict[str, Run], evaluator: str, shape: tuple[int, int]) -> None:
    x = _normal(*shape, WIDTH)
    for got, count in zip(padding[evaluator](x), (0, 1, 4), strict=True):
        np.testing.assert_array_equal(got, np.concatenate((np.zeros((shape[0], count, WIDTH)), x), axis=1))


@pytest.fixture(scope="module")
def depthwise() -> dict[int, dict[str, Run]]:
    """By the number of taps."""
    shape = ("batch", "length", WIDTH)
    return {count: _runners(_trace(operators.depthwise_conv, [shape, (count, WIDTH)])) for count in TAPS}


@pytest.mark.parametrize("count", TAPS)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 40])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_depthwise_conv_is_a_sum_over_the_taps(
    depthwise: dict[int, dict[str, Run]], relative_l2: Callable[..., float], evaluator: str, length: int, count: int
) -> None:
    x, taps = _normal(BATCH, count - 1 + length, WIDTH), _normal(count, WIDTH, seed=count)
    (got,) = depthwise[count][evaluator](x, taps)
    want = np.zeros((BATCH, length, WIDTH))
    for t in range(length):
        for tap in range(count):
            want[:, t] += taps[tap].astype(np.float64) * x[:, t + tap]
    assert relative_l2(got, want) <= 3e-7
    conv1d = F.conv1d(
        torch.from_numpy(x).double().transpose(1, 2), torch.from_numpy(taps).double().t()[:, None], groups=WIDTH
    )
    assert relative_l2(got, conv1d.transpose(1, 2).numpy()) <= 3e-7


@pytest.fixture(scope="module")
def tail() -> dict[str, Run]:
    def positions(lengths: Tensor) -> tuple[Tensor, ...]:
        return tuple(operators.tail_positions(lengths, count) for count in (1, 2, 8))

    return _runners(_trace(positions, [("batch",)], integers=[0]))


@pytest.mark.parametrize("lengths", [[0], [1], [5, 1, 3], [2**40, 7]])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_tail_positions_count_on_from_each_length(tail: dict[str, Run], evaluator: str, lengths: list[int]) -> None:
    for got, count in zip(tail[evaluator](np.asarray(lengths, np.int64)), (1, 2, 8), strict=True):
        assert got.dtype == np.int64
        assert got.tolist() == [list(range(length, length + count)) for length in lengths]


@pytest.fixture(scope="module")
def valid() -> dict[str, Run]:
    return _runners(_trace(operators.valid_positions, [("batch", "length"), ("batch",)], integers=[0, 1]))


@pytest.mark.parametrize(("length", "lengths"), [(1, [1]), (1, [1, 1]), (2, [1, 2]), (40, [40, 1, 39, 17])])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_valid_positions_are_those_below_each_length(
    valid: dict[str, Run], evaluator: str, length: int, lengths: list[int]
) -> None:
    (got,) = valid[evaluator](np.zeros((len(lengths), length), np.int64), np.asarray(lengths, np.int64))
    assert got.dtype == np.float32
    assert got[..., 0].tolist() == [[float(t < count) for t in range(length)] for count in lengths]


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
def grouped_step() -> dict[str, Run]:
    def apply(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(operators.grouped_linear_step(x, weight) for weight in weights)

    return _runners(_trace(apply, [("batch", 6), *((heads, 6 // heads, 6 // heads) for heads in GROUPS)]))


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_grouped_linear_step_is_one_matrix_per_head(
    grouped_step: dict[str, Run], relative_l2: Callable[..., float], evaluator: str, batch: int
) -> None:
    x, weights = _normal(batch, 6), [_normal(heads, 6 // heads, 6 // heads, seed=heads) for heads in GROUPS]
    for got, weight in zip(grouped_step[evaluator](x, *weights), weights, strict=True):
        parts = np.split(x.astype(np.float64), len(weight), axis=1)
        want = np.concatenate([part @ matrix for part, matrix in zip(parts, weight, strict=True)], axis=1)
        assert relative_l2(got, want) <= 3e-7


@pytest.fixture(scope="module")
def gather() -> dict[str, Run]:
    return _runners(
        _trace(operators.gather_positions, [("batch", "length", WIDTH), ("batch", "positions")], integers=[1])
    )


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


@pytest.fixture(scope="module")
def step_head() -> dict[str, Run]:
    return _runners(_trace(operators.tied_head, [("batch", 6), (11, 6)]))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_tied_head_takes_one_position_per_row(
    step_head: dict[str, Run], relative_l2: Callable[..., float], evaluator: str, batch: int
) -> None:
    x, embedding = _normal(batch, 6), _normal(11, 6, seed=1)
    (got,) = step_head[evaluator](x, embedding)
    assert relative_l2(got, x.astype(np.float64) @ embedding.astype(np.float64).T) <= 3e-7
