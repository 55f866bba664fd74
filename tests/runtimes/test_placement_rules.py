"""Nodes that only work out sizes are told by how they are used, on small graphs made for one question each."""

from __future__ import annotations

from typing import Any

import onnx
import onnx.parser
import pytest
from caracal_runtimes.onnx_graph import Graph, parse_model, read_model
from caracal_runtimes.placement_rules import SHAPE_INPUTS, shape_only
from onnx import TensorProto, helper


def graph(body: str, inputs: str = "float[B, L, 4] x", outputs: str = "y", constants: str = "") -> Graph:
    """A graph whose nodes are named after their first outputs."""
    head = f'<ir_version: 8, opset_import: ["" : 18, "other" : 1]> g ({inputs}) => ({outputs}) <{constants}>'
    model = onnx.parser.parse_model(f"{head} {{ {body} }}")
    for node in model.graph.node:
        node.name = node.output[0]
    return parse_model(model.SerializeToString()).graph


def names(body: str, **more: str) -> set[str]:
    return shape_only(graph(body, **more))


class TestForward:
    def test_sizes_and_what_follows_from_them(self) -> None:
        body = """
            n = Shape(x) one = Constant<value_ints = [1]>() l = Gather(n, one) m = Add(l, one) r = Reshape(x, m)
            y = Neg(r)
        """
        assert names(body) == {"n", "one", "l", "m"}

    def test_even_where_they_are_used_as_numbers(self) -> None:
        """A position is a size of the input; what is done with it is computation."""
        assert names("n = Size(x) m = Cast<to = 1>(n) y = Mul(x, m)") == {"n"}

    def test_floats_on_the_way_to_a_size(self) -> None:
        body = "n = Size(x) f = Cast<to = 1>(n) s = Sqrt(f) c = Ceil(s) i = Cast<to = 7>(c) r = Range(i, n, i) y = Cast<to = 1>(r)"
        assert names(body) == {"n", "f", "s", "c", "i", "r"}

    def test_booleans(self) -> None:
        body = "n = Size(x) b = Less(k, n) c = Cast<to = 7>(b) t = ReduceSum<keepdims = 0>(c) y = Cast<to = 1>(t)"
        assert names(body, constants="int64[3] k = {1, 2, 4}") == {"n", "b", "c", "t"}

    def test_indices_made_from_sizes(self) -> None:
        """A list of integers from sizes: runtimes keep it on the CPU, the Gather that uses it computes."""
        body = "n = Size(x) r = Range(zero, n, one) i = Mod(r, n) y = Gather<axis = 1>(x, i)"
        assert names(body, constants="int64 zero = {0}, int64 one = {1}") == {"n", "r", "i"}

    def test_a_float_table_made_from_sizes_is_computation(self) -> None:
        body = (
            "n = Size(x) f = Cast<to = 1>(n) r = Range(zero, f, one) c = Cos(r) s = Sin(r) t = Add(c, s) y = Mul(x, t)"
        )
        assert names(body, constants="float zero = {0.0}, float one = {1.0}") == {"n", "f"}

    def test_a_table_of_integers_is_computation(self) -> None:
        body = "n = Size(x) r = Range(zero, n, one) c = Unsqueeze(r, axis) p = Mul(r, c) y = Cast<to = 1>(p)"
        assert names(body, constants="int64 zero = {0}, int64 one = {1}, int64[1] axis = {1}") == {"n", "r"}

    def test_a_range_that_feeds_a_mask(self) -> None:
        """A range of floats is no list of sizes: only what it is made from is."""
        body = "n = Size(x) m = Add(n, one) f = Cast<to = 1>(m) r = Range(zero, f, step) k = Mul(r, step) y = Add(x, k)"
        constants = "int64 one = {1}, float zero = {0.0}, float step = {1.0}"
        assert names(body, constants=constants) == {"n", "m", "f"}

    def test_an_integer_range_that_feeds_a_mask(self) -> None:
        body = "n = Size(x) r = Range(zero, n, one) f = Cast<to = 1>(r) y = Add(x, f)"
        assert names(body, constants="int64 zero = {0}, int64 one = {1}") == {"n", "r"}

    def test_token_data_is_none(self) -> None:
        body = "m = Add(ids, ids) n = Shape(ids) y = Gather(m, n)"
        assert names(body, inputs="int64[L] ids") == {"n"}

    def test_a_result_of_the_graph_is_none(self) -> None:
        assert names("n = Shape(x) y = Add(n, n)") == {"n"}

    def test_constants_that_something_computes_with_are_none(self) -> None:
        assert names("k = Constant<value_float = 2.0>() y = Mul(x, k)") == set()

    def test_random_numbers_are_none(self) -> None:
        body = "n = Shape(x) f = Cast<to = 1>(n) r = RandomUniformLike<dtype = 7>(f) s = Add(r, r) y = Cast<to = 1>(s)"
        assert names(body) == {"n"}


class TestBackward:
    @pytest.mark.parametrize(
        "use",
        ["Reshape(x, m)", "Expand(x, m)", "ConstantOfShape(m)", "Tile(x, m)", "Slice(x, m, ends)", "Slice(x, ends, m)",
         "Slice(x, ends, ends, m)", "Slice(x, ends, ends, ends, m)", "Pad(x, m)", "Pad(x, ends, , m)", "Squeeze(x, m)",
         "Unsqueeze(x, m)", "ReduceSum(x, m)", "ReduceMax(x, m)"],
    )  # fmt: skip
    def test_inputs_that_are_shapes(self, use: str) -> None:
        """Even where they come from a caller: the runtime reads them on the CPU."""
        body = f"m = Add(given, given) y = {use}"
        more = {"inputs": "float[B, L, 4] x, int64[K] given", "constants": "int64[2] ends = {0, 1}"}
        assert names(body, **more) == {"m"}

    @pytest.mark.parametrize("use", ["CumSum(x, m)", "TopK(x, m)", "DFT(x, m)", "Range(m, m, m)", "Trilu(x, m)"])
    def test_numbers_that_are_sizes(self, use: str) -> None:
        assert names(f"m = Add(given, given) y = {use}", inputs="float[B, L, 2] x, int64 given") == {"m"}

    @pytest.mark.parametrize(
        "use", ["Gather(x, m)", "Pad(x, ends, m)", "Reshape(m, ends)", "Slice(m, ends, ends)", "Neg(m)"]
    )
    def test_inputs_that_are_data(self, use: str) -> None:
        more = {"inputs": "int64[L] x, int64[K] given", "constants": "int64[1] ends = {1}"}
        assert names(f"m = Add(given, given) y = {use}", **more) == set()

    def test_one_other_use_is_enough(self) -> None:
        body = "m = Add(given, given) r = Reshape(x, m) k = Cast<to = 1>(m) y = Add(r, k)"
        assert names(body, inputs="float[L] x, int64[K] given") == set()

    def test_through_other_nodes(self) -> None:
        body = "a = Neg(given) b = Mul(a, a) c = Concat<axis = 0>(b, given) y = Reshape(x, c)"
        assert names(body, inputs="float[L] x, int64[K] given") == {"a", "b", "c"}

    def test_a_size_does_not_make_what_has_it_shape_only(self) -> None:
        """What is only asked for its shape is still not a number on the CPU."""
        body = "a = Exp(x) n = Shape(a) y = Expand(x, n)"
        assert names(body) == {"n"}

    def test_a_search_through_data_is_computation(self) -> None:
        """It gives a single number, but reads everything."""
        body = "p = Softmax(x) m = ReduceMax<keepdims = 0>(p) i = Cast<to = 7>(m) y = Range(zero, i, i)"
        assert names(body, constants="int64 zero = {0}") == {"i"}

    def test_what_cannot_be_told_computes(self) -> None:
        body = "a = other.Thing(given) y = Reshape(x, a)"
        assert names(body, inputs="float[L] x, int64[K] given") == set()
        body = "a = other.Thing(given) b = Add(a, a) y = Reshape(x, b)"
        assert names(body, inputs="float[L] x, int64[K] given") == set()

    def test_the_same_operator_of_another_domain_is_another(self) -> None:
        assert names(
            "n = Shape(x) f = Add(given, given) y = other.Reshape(x, f)", inputs="float[L] x, int64[K] given"
        ) == {"n"}

    def test_what_nothing_uses_computes(self) -> None:
        assert names("a = Neg(given) y = Neg(given)", inputs="int64[K] given") == set()


def test_a_graph_inside_of_a_node_counts_as_a_use() -> None:
    inner = helper.make_graph(
        [helper.make_node("Identity", ["m"], ["o"])],
        "b",
        [],
        [helper.make_tensor_value_info("o", TensorProto.INT64, None)],
    )
    nodes = [
        helper.make_node("Add", ["given", "given"], ["m"], name="m"),
        helper.make_node("Reshape", ["x", "m"], ["r"], name="r"),
        helper.make_node("If", ["c"], ["y"], name="y", then_branch=inner, else_branch=inner),
    ]
    inputs = [helper.make_tensor_value_info(*each) for each in (
        ("x", TensorProto.FLOAT, ["L"]), ("given", TensorProto.INT64, ["K"]), ("c", TensorProto.BOOL, []))]  # fmt: skip
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "r")]
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 18)], ir_version=8
    )
    assert shape_only(parse_model(model.SerializeToString()).graph) == set()


def test_nodes_without_a_name_or_with_the_same_one() -> None:
    body = "n = Shape(x) m = Add(n, n) r = Reshape(x, m) y = Neg(r)"
    parsed = graph(body)
    nameless = Graph(
        nodes=tuple(type(node)("", node.op_type, "", node.inputs, node.outputs) for node in parsed.nodes),
        inputs=parsed.inputs,
        outputs=parsed.outputs,
    )
    assert shape_only(nameless) == {"#0", "#1"}
    shared = Graph(
        nodes=tuple(
            type(node)("same" if node.name != "m" else "m", node.op_type, "", node.inputs, node.outputs)
            for node in parsed.nodes
        ),
        inputs=parsed.inputs,
        outputs=parsed.outputs,
    )
    assert shape_only(shared) == {"m"}


@pytest.mark.parametrize("name", ["forward", "extend", "step", "step_resident", "convolve", "convolve_long"])
def test_real_graphs(exported: Any, name: str) -> None:
    """All that touches weights, tokens or activations computes; all `Shape` nodes are shape-only."""
    found = read_model(exported.shipped / f"{name}.onnx").graph
    by_design = shape_only(found)
    kinds = {node.op_type for node in found.nodes if node.name in by_design}
    computing = {
        "MatMul",
        "Gemm",
        "LayerNormalization",
        "Softmax",
        "Sigmoid",
        "Transpose",
        "Split",
        "Pad",
        "DFT",
        "Neg",
    }
    assert not kinds & computing
    assert all(node.name in by_design for node in found.nodes if node.op_type in ("Shape", "Range"))
    assert len(by_design) < len(found.nodes) // 2
    for node in found.nodes:
        if node.op_type == "Reshape":
            producer = next((p for p in found.nodes if node.inputs[1] in p.outputs), None)
            assert producer is None or producer.name in by_design


def test_the_table_names_operators_of_the_standard_and_inputs_they_have() -> None:
    for operator, places in SHAPE_INPUTS.items():
        schema = onnx.defs.get_schema(operator, 9 if operator == "Upsample" else 26)
        assert places is None or max(places) < len(schema.inputs)
