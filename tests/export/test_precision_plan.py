"""Which weight gets which format: by what graphs do with it, and by what was asked for."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest
from caracal_export.precision.formats import BFloat16, Float16, Int4, Int8
from caracal_export.precision.plan import (
    EMBEDDING,
    GROUPED,
    HEAD,
    OTHER,
    PRODUCT,
    TIED_HEAD,
    Planned,
    Precision,
    check_bound,
    plan,
    role_of,
    roles_of,
)
from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import PRECISIONS

ROLES = {
    "embed": {EMBEDDING, HEAD}, "a.q": {PRODUCT}, "a.k": {PRODUCT}, "a.conv": {GROUPED}, "norm": {OTHER},
    "both": {PRODUCT, OTHER},
}  # fmt: skip
SHAPES = {"embed": (50, 8), "a.q": (8, 9), "a.k": (8, 9), "a.conv": (2, 4, 4), "norm": (8,), "both": (8, 8)}


def told(found: list[Planned]) -> dict[tuple[str, str], tuple[Any, str, tuple[int, ...], bool]]:
    return {(each.weight, each.role): (each.format, each.stored_as, each.shape, each.turned) for each in found}


@pytest.mark.parametrize(("name", "kind"), [("float16", Float16), ("bfloat16", BFloat16)])
def test_halves_take_every_matrix_as_it_lies(name: str, kind: type) -> None:
    found = told(plan(Precision(name), ROLES, SHAPES))
    assert {key: value[1:] for key, value in found.items()} == {
        ("embed", EMBEDDING): ("embed", (50, 8), False),
        ("embed", HEAD): ("embed", (50, 8), False),
        ("a.q", PRODUCT): ("a.q", (8, 9), False),
        ("a.k", PRODUCT): ("a.k", (8, 9), False),
        ("a.conv", GROUPED): ("a.conv", (2, 4, 4), False),
    }
    assert {type(value[0]) for value in found.values()} == {kind}


@pytest.mark.parametrize(
    ("precision", "whole"),
    [
        (Precision("int8"), Int8()),
        (Precision("int4"), Int4(32)),
        (Precision("int4", block=64), Int4(64)),
        (Precision("int4", block=16, operator="MatMulNBits"), Int4(16, nbits=True)),
    ],
)
def test_whole_numbers_take_products_and_tables(precision: Precision, whole: Any) -> None:
    assert told(plan(precision, ROLES, SHAPES)) == {
        ("embed", EMBEDDING): (Int8(by_row=True), "embed", (50, 8), False),
        ("embed", HEAD): (whole, TIED_HEAD, (8, 50), True),
        ("a.q", PRODUCT): (whole, "a.q", (8, 9), False),
        ("a.k", PRODUCT): (whole, "a.k", (8, 9), False),
    }


def test_float32_changes_nothing() -> None:
    assert plan(Precision("float32"), ROLES, SHAPES) == []


@pytest.mark.parametrize("name", PRECISIONS[1:])
def test_the_order_is_that_of_the_names(name: str) -> None:
    """And not that of a set's contents, which differs between runs: a bundle is the same whenever it is written."""
    found = plan(Precision(name), {key: frozenset(value) for key, value in ROLES.items()}, SHAPES)
    assert [(each.weight, each.role) for each in found] == sorted((each.weight, each.role) for each in found)


def test_higher_is_int8_beside_int4_and_float32_beside_all_others() -> None:
    found = told(plan(Precision("int4"), ROLES, SHAPES, higher=["a.q", "embed"]))
    assert [found["a.q", PRODUCT][0], found["a.k", PRODUCT][0]] == [Int8(), Int4(32)]
    assert [found["embed", EMBEDDING][0], found["embed", HEAD][0]] == [Int8(by_row=True), Int8()]
    for name in ("float16", "bfloat16", "int8"):
        left = {each.weight for each in plan(Precision(name), ROLES, SHAPES, higher=["a.q", "embed"])}
        assert left == {"a.k"} | ({"a.conv"} if name != "int8" else set())


def test_keep() -> None:
    found = plan(Precision("int8", keep=("a.*", "*.q")), ROLES, SHAPES)
    assert {each.weight for each in found} == {"embed"}
    assert {each.weight for each in plan(Precision("int8", keep=("embed",)), ROLES, SHAPES)} == {"a.q", "a.k"}


@pytest.mark.parametrize("pattern", ["", "q", "A.q", "norm", "both", "a.conv", "a.q ", "nothing*"])
def test_a_pattern_that_keeps_nothing_is_refused(pattern: str) -> None:
    """Also one that fits weights which would not be changed anyway."""
    with pytest.raises(InputError) as caught:
        plan(Precision("int8", keep=("a.k", pattern)), ROLES, SHAPES)
    assert f"--keep: {pattern!r} fits no weight that int8 would change; weights are called like a.k, a.q" in str(
        caught.value
    )


@pytest.mark.parametrize("keep", [("*",), ("embed", "a.*")])
@pytest.mark.parametrize("name", PRECISIONS[1:])
def test_keeping_everything_is_refused(name: str, keep: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=f"--keep leaves no weight to store as {name}"):
        plan(Precision(name, keep=keep), ROLES, SHAPES)


class TestPrecision:
    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ("FP16", "float16"),
            (" bf16 ", "bfloat16"),
            ("Int8", "int8"),
            ("f32", "float32"),
            *((name, name) for name in PRECISIONS),
        ],
    )
    def test_names(self, given: str, name: str) -> None:
        assert Precision.parse(given).name == name

    @pytest.mark.parametrize("name", ["", "int3", "float", "8", "int8,int4", "float64", "int-8"])
    def test_unknown_names(self, name: str) -> None:
        with pytest.raises(
            InputError, match="--precision must be one of float32, float16, bfloat16, int8, int4, found"
        ):
            Precision.parse(name)

    @pytest.mark.parametrize("block", [0, -1, 1, 8, 31, 33, 512, True])
    def test_blocks(self, block: int) -> None:
        with pytest.raises(InputError, match="--block-size must be 16, 32, 64, 128 or 256, found"):
            Precision("int4", block=block)

    def test_operators(self) -> None:
        with pytest.raises(InputError, match="--int4-operator must be one of DequantizeLinear, MatMulNBits, found 'x'"):
            Precision("int4", operator="x")

    @pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf"), "1", None, True, 1])
    def test_bounds(self, bound: object) -> None:
        with pytest.raises(InputError, match="--max-kl: expected a number of nats above 0"):
            check_bound(bound)
        check_bound(1e-9)


# Roles


def node(
    op: str, weight: tuple[int, ...], place: int, inputs: int = 2, **attributes: Any
) -> tuple[ir.Node, int, ir.Value]:
    value = ir.Value(name="w", shape=ir.Shape(weight), type=ir.TensorType(ir.DataType.FLOAT))
    others: list[ir.Value] = [ir.Value(name=f"x{index}") for index in range(inputs)]
    others[place] = value
    return ir.node(op, others, attributes), place, value


@pytest.mark.parametrize(
    ("given", "role"),
    [
        (node("MatMul", (8, 9), 1), PRODUCT),
        (node("MatMul", (2, 8, 9), 1), GROUPED),
        (node("MatMul", (2, 2, 8, 9), 1), OTHER),
        (node("MatMul", (8,), 1), OTHER),
        (node("MatMul", (8, 9), 0), OTHER),
        (node("Gemm", (9, 8), 1, transB=1), HEAD),
        (node("Gemm", (9, 8), 1, transB=1, alpha=1.0, beta=1.0, transA=0), HEAD),
        (node("Gemm", (9, 8), 1, transB=1, alpha=2.0), OTHER),
        (node("Gemm", (9, 8), 1, transB=1, transA=1), OTHER),
        (node("Gemm", (9, 8), 1, transB=0), OTHER),
        (node("Gemm", (9, 8), 1), OTHER),
        (node("Gemm", (9, 8), 1, inputs=3, transB=1), OTHER),
        (node("Gemm", (9, 8), 0, transB=1), OTHER),
        (node("Gather", (9, 8), 0), EMBEDDING),
        (node("Gather", (9, 8), 0, axis=0), EMBEDDING),
        (node("Gather", (9, 8), 0, axis=1), OTHER),
        (node("Gather", (9,), 0), OTHER),
        (node("Gather", (9, 8), 1), OTHER),
        (node("Mul", (8, 9), 1), OTHER),
    ],
    ids=lambda given: "" if isinstance(given, str) else f"{given[0].op_type}-{given[2].shape}-{given[1]}",
)
def test_what_a_node_does_with_a_weight(given: tuple[ir.Node, int, ir.Value], role: str) -> None:
    assert role_of(*given) == role


def test_roles_of_several_graphs_add_up() -> None:
    def graph(op: str, place: int, **attributes: Any) -> ir.Model:
        made, _, weight = node(op, (9, 8), place, **attributes)
        return ir.Model(
            ir.Graph([], made.outputs, nodes=[made], initializers=[weight], opset_imports={"": 18}), ir_version=8
        )

    graphs = [graph("Gather", 0), graph("Gemm", 1, transB=1), graph("Gather", 0)]
    assert roles_of(graphs) == {"w": {EMBEDDING, HEAD}}
    assert roles_of([*graphs, graph("Mul", 0)]) == {"w": {EMBEDDING, HEAD, OTHER}}
