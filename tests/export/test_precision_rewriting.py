"""Rewritten products and graphs against float64 arithmetic with the numbers that the stored weights stand for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from caracal_export.graph_files import check_graph, describe_graph
from caracal_export.opsets import IR_VERSIONS, OPSETS, retarget
from caracal_export.precision.formats import SCALE, BFloat16, Float16, Format, Int4, Int8
from caracal_export.precision.plan import (
    EMBEDDING,
    GROUPED,
    HEAD,
    INT4_OPERATORS,
    PRODUCT,
    TIED_HEAD,
    Planned,
    Precision,
    plan,
    roles_of,
)
from caracal_export.precision.quantizing import rewritten
from caracal_export.precision.rewriting import BLOCKED_OPSET, rewrite
from caracal_export.tracing import trace
from caracal_runtimes.errors import InputError
from numpy.typing import NDArray

from caracal import CaracalConfig, CaracalModel

Array = NDArray[Any]
K, N = 37, 11  # no multiples of anything
FORMATS: dict[str, Format] = {
    "float16": Float16(), "bfloat16": BFloat16(), "int8": Int8(), "int4": Int4(), "int4-16": Int4(16),
    "nbits": Int4(nbits=True), "nbits-16": Int4(16, nbits=True),
}  # fmt: skip
every = pytest.mark.parametrize("kind", FORMATS.values(), ids=FORMATS)
PRECISIONS = {
    **{name: Precision(name) for name in ("float16", "bfloat16", "int8", "int4")},
    "nbits": Precision("int4", block=16, operator=INT4_OPERATORS[1]),
}


def floats(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def needs(kind: Format, opset: int) -> int:
    return max(opset, BLOCKED_OPSET) if isinstance(kind, Int4) and not kind.nbits else opset


def use(role: str, opset: int, rank: int = 2, heads: int = 3) -> ir.Model:
    """A graph with one use of the weight `w`, by the name of its role."""
    kind, dims = ir.DataType.FLOAT, ["a", "b", "c"]
    result: list[int | str] = [*dims[: rank - 1], N]
    given: list[int | str] = [*dims[: rank - 1], K]
    if role == EMBEDDING:
        kind, given, result, shape, node = ir.DataType.INT64, [*dims[:rank]], [*dims[:rank], N], [K, N], ("Gather", {})
    elif role == HEAD:
        shape, node = [N, K], ("Gemm", {"transB": 1})
    elif role == GROUPED:
        given, result, shape, node = [heads, "a", K], [heads, "a", N], [heads, K, N], ("MatMul", {})
    else:
        shape, node = [K, N], ("MatMul", {})
    x = ir.Value(name="x", type=ir.TensorType(kind), shape=ir.Shape(given))
    w = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))
    w.const_value = ir.tensor(np.zeros(shape, np.float32), name="w")
    op, attributes = node
    made = ir.node(op, [w, x] if op == "Gather" else [x, w], attributes, name=f"module/{op}")
    y = made.outputs[0]
    y.name, y.type, y.shape = "y", ir.TensorType(ir.DataType.FLOAT), ir.Shape(result)
    graph = ir.Graph([x], [y], nodes=[made], initializers=[w], opset_imports={"": opset}, name="g")
    return ir.Model(graph, ir_version=IR_VERSIONS[opset])


def planned(kind: Format, role: str, shape: tuple[int, ...]) -> Planned:
    if role == HEAD and not isinstance(kind, (Float16, BFloat16)):
        return Planned("w", TIED_HEAD, kind, role, shape[::-1], turned=True)
    return Planned("w", "w", kind, role, shape)


def filled(model: ir.Model, tensors: Mapping[str, Array]) -> onnx.ModelProto:
    """The graph with its weights inside."""
    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        data = np.ascontiguousarray(tensors[tensor.name])
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.raw_data = data.tobytes()
    return proto


def ort(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return list(onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, dict(feeds)))


def reference(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    return list(onnx.reference.ReferenceEvaluator(model).run(None, dict(feeds)))


class Product:
    """One rewritten use of a random weight, and what it must give."""

    def __init__(self, kind: Format, role: str = PRODUCT, opset: int = 18, rank: int = 2, seed: int = 0) -> None:
        model = use(role, needs(kind, opset), rank)
        shape = tuple(model.graph.initializers["w"].shape.numpy())  # type: ignore[union-attr]
        self.kind, self.role, weight = kind, role, floats(*shape, seed=seed)
        self.planned = planned(kind, role, shape)
        rewrite(model, [self.planned])
        self.set(model, kind.store(np.ascontiguousarray(weight.T) if self.planned.turned else weight))

    def set(self, model: ir.Model, stored: dict[str, Array]) -> None:
        self.ir, self.stored = model, stored
        dense = self.kind.dense(stored, self.planned.shape)
        self.dense = dense.T if self.role == HEAD and not self.planned.turned else dense
        self.model = filled(model, {self.planned.stored_as + ending: tensor for ending, tensor in stored.items()})

    def run(self, x: Array) -> Array:
        (y,) = ort(self.model, {"x": x})
        assert y.dtype == np.float32
        return y

    def expected(self, x: Array) -> Array:
        """In float64; for int8 with the activations rounded by hand, each row by itself."""
        if self.role == EMBEDDING:
            return self.dense[x].astype(np.float64)
        if isinstance(self.kind, Float16):
            return np.matmul(x.astype(np.float16), self.dense, dtype=np.float64)
        if not isinstance(self.kind, Int8):
            return np.matmul(x, self.dense, dtype=np.float64)
        most = np.abs(x).max(axis=-1, keepdims=True)
        codes = np.rint(x / most / np.float32(1 / 127)).astype(np.int64)
        assert np.abs(codes).max() <= 127
        return codes @ self.stored[""].astype(np.int64) * self.stored[SCALE].astype(np.float64) * (most / 127.0)


def close(got: Array, want: Array, limit: float) -> None:
    assert got.shape == want.shape
    off = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert off.max() < limit


CASES = [
    *((kind, PRODUCT, opset, rank) for kind in FORMATS for opset in OPSETS for rank in (2, 3)),
    *((kind, HEAD, opset, 2) for kind in FORMATS for opset in (17, 18, 23)),
    *((kind, GROUPED, opset, 3) for kind in ("float16", "bfloat16") for opset in (17, 18, 23)),
]


class TestProducts:
    @pytest.mark.parametrize("name", FORMATS)
    def test_each_computes_with_the_dense_weight(self, name: str) -> None:
        """In every opset, for every role of a product, for activations of two and three axes."""
        for _, role, opset, rank in (case for case in CASES if case[0] == name):
            product = Product(FORMATS[name], role, opset, rank)
            x = floats(*{2: (5,), 3: (3, 4)}[rank], K, seed=1) * 3
            onnx.checker.check_model(product.model, full_check=True)
            close(product.run(x), product.expected(x), 1e-3 if name == "float16" else 1e-5)

    @pytest.mark.parametrize("role", [PRODUCT, HEAD])
    @pytest.mark.parametrize("name", ["float16", "bfloat16", "int8"])
    def test_by_the_standards_own_reference(self, name: str, role: str) -> None:
        product = Product(FORMATS[name], role, 20)
        x = floats(4, K, seed=1)
        (got,) = reference(product.model, {"x": x})
        close(got, product.expected(x), 1e-3 if name == "float16" else 1e-5)

    @pytest.mark.parametrize("kind", [Float16(), BFloat16(), Int8(by_row=True)], ids=["float16", "bfloat16", "int8"])
    def test_rows_of_a_table(self, kind: Format) -> None:
        for opset, rank in itertools.product(OPSETS, (1, 2)):
            product = Product(kind, EMBEDDING, opset, rank)
            x = np.array([[0, 1, K - 1], [3, 3, 0]]) if rank == 2 else np.array([K - 1, 0, 5])
            np.testing.assert_array_equal(product.run(x), product.expected(x).astype(np.float32), strict=True)
            assert [node.op_type for node in product.ir.graph].count("Gather") == (2 if isinstance(kind, Int8) else 1)

    @every
    def test_what_goes_in_and_out_stays(self, kind: Format) -> None:
        before = use(PRODUCT, needs(kind, 18), 3)
        told = describe_graph(before, "x", 18, "matmul")
        rewrite(before, [planned(kind, PRODUCT, (K, N))])
        after = describe_graph(before, "x", 18, "matmul")
        assert (after.inputs, after.outputs) == (told.inputs, told.outputs)

    def test_int4_of_the_standard_needs_its_opset(self) -> None:
        with pytest.raises(InputError, match="int4 needs opset 21, found 20; or choose --int4-operator MatMulNBits"):
            rewrite(use(PRODUCT, 20), [planned(Int4(), PRODUCT, (K, N))])

    def test_what_is_not_planned_stays(self) -> None:
        model = use(PRODUCT, 18)
        before = ir.to_proto(model).SerializeToString()
        rewrite(model, [])
        assert ir.to_proto(model).SerializeToString() == before


class TestInt8:
    def with_codes(self, codes: Array, most: int = 63) -> Product:
        product = Product(Int8())
        weight = codes.astype(np.float32)
        model = use(PRODUCT, 18)
        model.graph.initializers["w"].shape = ir.Shape(weight.shape)
        model.graph.inputs[0].shape = ir.Shape(["a", weight.shape[0]])
        model.graph.outputs[0].shape = ir.Shape(["a", weight.shape[1]])
        product.planned = Planned("w", "w", Int8(), PRODUCT, weight.shape)
        rewrite(model, [product.planned])
        product.set(model, {"": codes.astype(np.int8), SCALE: np.ones(weight.shape[1], np.float32)})
        return product

    @pytest.mark.parametrize("width", [2, 64, 1000])
    def test_the_largest_numbers_are_multiplied_exactly(self, width: int) -> None:
        """Beside weights of 127 some processors keep 32767 of 2 * 255 * 127 and say nothing; with 63 there is nothing to keep.

        The sums below, about a zero point of 128, are the furthest that there are: all bytes 255 (or 1), all weights +-63.
        """
        signs = np.where(np.random.default_rng(0).random((width, 4)) < 0.5, -1, 1)
        codes = np.concatenate([63 * signs, np.full((width, 1), 63), np.full((width, 1), -63)], axis=1)
        x = np.stack([np.full(width, 127.0), np.full(width, -127.0), 127.0 * signs[:, 0]]).astype(np.float32)
        got = self.with_codes(codes).run(x)
        want = x.astype(np.int64) @ codes
        assert np.abs(want).max() == 127 * 63 * width
        np.testing.assert_allclose(got, want, rtol=5e-7)

    def test_activations_on_the_grid_cost_nothing(self) -> None:
        codes = np.random.default_rng(0).integers(-63, 64, (K, N))
        x = np.random.default_rng(1).integers(-127, 128, (6, K)).astype(np.float32)
        x[:, 3] = 127
        scale = np.float32([[1], [0.25], [1e-20], [1e20], [3], [1e-5]])
        got = self.with_codes(codes).run(x * scale)
        np.testing.assert_allclose(got, x.astype(np.int64) @ codes * scale.astype(np.float64), rtol=1e-6)

    def test_rows_of_zeros_and_of_next_to_nothing(self) -> None:
        x = floats(4, K)
        x[1], x[2] = 0, 1e-41
        got = Product(Int8()).run(x)
        assert not got[1].any()
        assert np.abs(got[2]).max() < 1e-30
        close(got[[0, 3]], Product(Int8()).expected(x[[0, 3]]), 1e-5)

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        product, x = Product(Int8(), rank=3), floats(2, 5, K)
        alone = product.run(x[:1, :3])
        loud = x.copy()
        loud[:, 3:] *= 1e6
        loud[1] = 1e9
        np.testing.assert_array_equal(product.run(loud)[:1, :3], alone)

    @pytest.mark.parametrize("opset", [17, 18, 23])
    @pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
    def test_what_is_no_number_does_not_become_one(self, value: float, opset: int) -> None:
        """A byte has no NaN, and ReduceMax passes over one in some places."""
        product, x = Product(Int8(), opset=opset), floats(5, K)
        want = product.run(x)
        for place in range(K):
            spoilt = x.copy()
            spoilt[2, place] = value
            got = product.run(spoilt)
            assert not np.isfinite(got[2]).any(), place
            np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int4", "nbits"])
def test_what_is_no_number_stays_none(name: str) -> None:
    product, x = Product(FORMATS[name]), floats(5, K)
    want = product.run(x)
    for place, value in ((0, np.nan), (K - 1, np.nan), (5, np.inf)):
        spoilt = x.copy()
        spoilt[2, place] = value
        got = product.run(spoilt)
        assert not np.isfinite(got[2]).any()
        np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(want, 2, 0))


# Whole graphs

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"hidden_size": 36, "num_attention_heads": 3, "intermediate_size": 52, "conv_kernel": 1},
    "untied": {
        "hidden_size": 40, "num_attention_heads": 4, "intermediate_size": 50, "hidden_act": "gelu", "use_bias": False,
        "tie_word_embeddings": False, "norm_before_conv": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def traced() -> dict[str, ir.Model]:
    """A forward graph of each variant, of opset 18 and with an FFT of its own kind. Copy before you rewrite."""
    found = {}
    for name, mixing in (("tied", "dft"), ("untied", "matmul")):
        config = CaracalConfig(
            vocab_size=97,
            num_hidden_layers=2,
            sliding_window=8,
            layer_types=("mhf", "sliding_attention"),
            **VARIANTS[name],
        )
        with torch.device("meta"):
            model = CaracalModel(config).eval().requires_grad_(False)
        found[name] = trace(model, "forward", mixing, 18)
        for value in found[name].graph.initializers.values():  # of a model without values
            assert value.shape is not None and value.dtype is not None
            value.const_value = ir.ExternalTensor("none", 0, 0, value.dtype, shape=value.shape, name=value.name or "")
    return found


def shapes_of(model: ir.Model) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape.numpy()) for name, value in model.graph.initializers.items()}  # type: ignore[union-attr]


def weights_of(model: ir.Model) -> dict[str, Array]:
    found = {}
    for seed, (name, shape) in enumerate(shapes_of(model).items()):
        plain = floats(*shape, seed=seed)
        found[name] = (
            plain if name == "embed_tokens.weight" else plain / np.float32(shape[-2] ** 0.5 if len(shape) > 1 else 4)
        )
    return found


def stored_and_dense(
    weights: Mapping[str, Array], plans: Sequence[Planned]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """What a rewritten graph reads, and by name and role what that stands for in the float32 weight's layout."""
    stored, dense = dict(weights), {}
    for each in plans:
        weight = weights[each.weight]
        tensors = each.format.store(np.ascontiguousarray(weight.T) if each.turned else weight)
        stored |= {each.stored_as + ending: tensor for ending, tensor in tensors.items()}
        plain = each.format.dense(tensors, each.shape)
        dense[each.weight, each.role] = np.ascontiguousarray(plain.T) if each.turned else plain
    return stored, dense


def with_dense(
    model: ir.Model, weights: Mapping[str, Array], dense: Mapping[tuple[str, str], Array]
) -> onnx.ModelProto:
    """The float32 graph with dense weights; a tied table has one for each of its roles."""
    proto = filled(model, {**weights, **{name: array for (name, role), array in dense.items() if role != HEAD}})
    for (name, role), array in dense.items():
        if role == HEAD:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "head"))
            (gemm,) = (node for node in proto.graph.node if node.op_type == "Gemm" and node.input[1] == name)
            gemm.input[1] = "head"
    return proto


IDS = np.random.default_rng(5).integers(0, 97, (2, 13))
FEEDS = {
    "input_ids": IDS, "lengths": np.array([13, 9]), "logit_positions": np.array([[0, 5, 12], [1, 7, 8]]),
}  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("variant", VARIANTS)
class TestGraphs:
    def test_the_whole_is_the_float32_graph_with_dense_weights(
        self, traced: dict[str, ir.Model], variant: str, precision: Precision
    ) -> None:
        """Within what rounding activations costs, which in bfloat16 and int4 none are."""
        model = traced[variant]
        weights, plans = weights_of(model), plan(precision, roles_of([model]), shapes_of(model))
        stored, dense = stored_and_dense(weights, plans)
        wanted = ort(with_dense(model, weights, dense), FEEDS)
        found = ort(filled(rewritten(copied(model), plans), stored), FEEDS)
        assert wanted[0].shape == (2, 3, 97)
        for got, want in zip(found, wanted, strict=True):
            close(got.reshape(1, -1), want.reshape(1, -1), {"float16": 5e-3, "int8": 5e-2}.get(precision.name, 1e-5))

    def test_it_is_valid_and_has_the_same_face(
        self, traced: dict[str, ir.Model], variant: str, precision: Precision, tmp_path: Path
    ) -> None:
        plain = traced[variant]
        roles, shapes = roles_of([plain]), shapes_of(plain)
        plans = plan(precision, roles, shapes)
        model = rewritten(copied(plain), plans)
        onnx.save(filled(model, stored_and_dense(weights_of(plain), plans)[0]), tmp_path / "g.onnx")
        check_graph(tmp_path / "g.onnx")
        before, after = (describe_graph(each, "g", 18, "matmul") for each in (plain, model))
        assert (after.inputs, after.outputs) == (before.inputs, before.outputs)
        names = [node.name for node in model.graph]
        values = [value.name for node in model.graph for value in node.outputs]
        values += [*model.graph.initializers, *(value.name for value in model.graph.inputs)]
        assert all(names)
        assert (max(Counter(names).values()), max(Counter(values).values())) == (1, 1)

        # No copy in float32 is left, and what is not planned stays as it is.
        heads = {
            each.stored_as + ending: head for each in plans for ending, head in each.format.heads(each.shape).items()
        }
        kept = shapes.keys() - {each.weight for each in plans}
        assert model.graph.initializers.keys() == heads.keys() | kept
        for name, value in model.graph.initializers.items():
            assert value.uses(), name
            assert (value.dtype == ir.DataType.FLOAT) == (name in kept or name.endswith(SCALE)), name
        # All matrices of products, the table and the head; nothing else but, in half precision, those of a head each.
        products = {name for name, some in roles.items() if PRODUCT in some or HEAD in some or EMBEDDING in some}
        grouped = {name for name, some in roles.items() if GROUPED in some}
        halves = precision.name in ("float16", "bfloat16")
        assert {each.weight for each in plans} == products | (grouped if halves else set())
        head, ffn = (1, 2) if variant == "untied" else (0, 3)  # gelu has no gate
        assert len(products) == 1 + 3 + 4 + 2 * ffn + head
        if precision.name == "int8":
            # Value and gate of the mixing, q, k and v, gate and up: what they share is rounded once.
            count = 3 + 4 + 2 * ffn + 1
            assert after.operators["MatMulInteger"] == count
            assert after.operators["QuantizeLinear"] == after.operators["ReduceMax"] == count - 1 - 2 - 2 * (ffn - 2)


def copied(model: ir.Model) -> ir.Model:
    return ir.from_proto(ir.to_proto(model))


@pytest.mark.parametrize("opset", OPSETS)
def test_other_opsets_give_the_same(traced: dict[str, ir.Model], opset: int) -> None:
    plain = traced["untied"]
    plans = plan(PRECISIONS["int8"], roles_of([plain]), shapes_of(plain))
    stored, _ = stored_and_dense(weights_of(plain), plans)
    want, *_ = ort(filled(rewritten(copied(plain), plans), stored), FEEDS)
    model = rewritten(retarget(copied(plain), opset), plans)
    assert model.graph.opset_imports[""] == opset
    got, *_ = ort(filled(model, stored), FEEDS)
    close(got, want, 1e-6)
