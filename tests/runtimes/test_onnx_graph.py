"""The reader of ONNX files beside the `onnx` package: it says the same, or refuses with a typed error."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from caracal_runtimes import onnx_graph
from caracal_runtimes.errors import BundleError
from caracal_runtimes.onnx_graph import DTYPES, UNKNOWN, Graph, Model, Tensor, infer, parse_model, read_model
from caracal_runtimes.placement_rules import shape_only
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

GRAPHS = ("forward", "extend", "step", "step_resident", "convolve", "convolve_long")
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def plain_dims(shape: Any) -> tuple[int | str | None, ...]:
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in shape.dim)


def check_value(got: onnx_graph.Value, want: Any) -> None:
    assert got.name == want.name
    if want.type.HasField("tensor_type"):
        tensor = want.type.tensor_type
        assert got.dtype == (DTYPES[tensor.elem_type] if 0 <= tensor.elem_type < len(DTYPES) else UNKNOWN)
        assert got.dims == (plain_dims(tensor.shape) if tensor.HasField("shape") else None)
    else:
        assert (got.dtype, got.dims) == (UNKNOWN, None)


def check_tensor(got: Tensor, want: Any) -> None:
    assert (got.name, got.dims) == (want.name, tuple(want.dims))
    assert got.dtype == (DTYPES[want.data_type] if 0 <= want.data_type < len(DTYPES) else UNKNOWN)
    if want.data_location == TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in want.external_data}
        assert got.external is not None
        assert got.external.location == entries.get("location", "")
        assert got.external.offset == int(entries.get("offset", 0))
        assert got.external.length == (int(entries["length"]) if "length" in entries else None)
    else:
        assert got.external is None
    if got.values is not None:
        assert list(got.values) == numpy_helper.to_array(want).ravel().astype(object).tolist()


def check_attribute(got: Any, want: Any) -> None:
    kind = want.type if not want.ref_attr_name else -1
    if kind == onnx.AttributeProto.INT:
        assert got == want.i
    elif kind == onnx.AttributeProto.FLOAT:
        assert got == want.f or (math.isnan(got) and math.isnan(want.f))
    elif kind == onnx.AttributeProto.STRING:
        assert got == want.s.decode("utf-8", "backslashreplace")
    elif kind == onnx.AttributeProto.INTS:
        assert got == tuple(want.ints)
    elif kind == onnx.AttributeProto.FLOATS:
        np.testing.assert_array_equal(got, want.floats)
    elif kind == onnx.AttributeProto.STRINGS:
        assert got == tuple(value.decode("utf-8", "backslashreplace") for value in want.strings)
    elif kind == onnx.AttributeProto.TENSOR:
        if got is None:
            assert not want.HasField("t")
        else:
            check_tensor(got, want.t)
    elif kind == onnx.AttributeProto.GRAPH:
        if got is None:
            assert not want.HasField("g")
        else:
            check_graph(got, want.g)
    elif kind == onnx.AttributeProto.TENSORS:
        for item, other in zip(got, want.tensors, strict=True):
            check_tensor(item, other)
    elif kind == onnx.AttributeProto.GRAPHS:
        for item, other in zip(got, want.graphs, strict=True):
            check_graph(item, other)
    else:
        assert got is None


def domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def check_nodes(got: Any, want: Any) -> None:
    for node, other in zip(got, want, strict=True):
        assert (node.name, node.op_type, node.domain) == (other.name, other.op_type, domain(other.domain))
        assert (node.inputs, node.outputs) == (tuple(other.input), tuple(other.output))
        assert len(node.attributes) == len(other.attribute)
        for attribute in other.attribute:
            check_attribute(node.attributes[attribute.name], attribute)


def check_graph(got: Graph, want: Any) -> None:
    assert got.name == want.name
    check_nodes(got.nodes, want.node)
    stored = {tensor.name: tensor for tensor in want.initializer}
    sparse = {tensor.values.name for tensor in want.sparse_initializer}
    assert got.initializers.keys() == stored.keys() | sparse
    for name in stored.keys() - sparse:
        check_tensor(got.initializers[name], stored[name])
    for values, others in ((got.inputs, want.input), (got.outputs, want.output), (got.value_info, want.value_info)):
        for value, other in zip(values, others, strict=True):
            check_value(value, other)


def check_model(got: Model, data: bytes, *, may_refuse: bool = False) -> None:
    """The right answer comes from the `onnx` package, which also looks at documentation and metadata."""
    try:
        want = onnx.ModelProto.FromString(data)
    except DecodeError:
        assert may_refuse
        return
    assert got.opsets == {domain(entry.domain): entry.version for entry in want.opset_import}
    assert got.ir_version == want.ir_version
    check_graph(got.graph, want.graph)
    for function, other in zip(got.functions, want.functions, strict=True):
        assert (function.name, function.domain) == (other.name, domain(other.domain))
        check_nodes(function.nodes, other.node)


def feature_model() -> Any:
    """Every kind of field that the reader knows, small."""
    graph = onnx.parser.parse_graph(
        "g (float[N, 3, ?] x, bool c) => (float[N, 3] y, float z) { y = Identity(x) z = Identity(y) }"
    )
    branch = onnx.parser.parse_graph("b () => (float[1] o) { o = Constant<value = float[1] {2.0}>() }")
    tensor = helper.make_tensor("deep", TensorProto.FLOAT, [2], [1.0, 2.0])
    external = TensorProto(name="e", data_type=TensorProto.FLOAT16, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", "4096"), ("length", "12"), ("checksum", "00")):
        external.external_data.add(key=key, value=value)
    hidden = TensorProto(name="h", data_type=TensorProto.FLOAT, dims=[1], data_location=TensorProto.EXTERNAL)
    hidden.external_data.add(key="location", value="sub/hidden.bin")
    branch.initializer.append(hidden)
    sparse = helper.make_sparse_tensor(
        helper.make_tensor("sparse", TensorProto.FLOAT, [1], [3.0]),
        helper.make_tensor("i", TensorProto.INT64, [1], [2]),
        [5],
    )
    graph.node.append(
        helper.make_node(
            "Custom", ["x", "", "c"], ["p", ""], name="custom", domain="com.example", an_int=-3, a_float=0.1, text="é",
            raw=b"\xff\x00", ints=[1, -2, 2**63 - 1], floats=[0.5, -1.0], texts=["a", b"\xfe"], tensor=tensor,
            graph=branch, tensors=[tensor, external], graphs=[branch, branch], sparse=sparse,
            type=helper.make_tensor_type_proto(TensorProto.FLOAT, [1]),
        )
    )  # fmt: skip
    graph.initializer.extend(
        [
            external,
            helper.make_tensor("i64", TensorProto.INT64, [3], [-1, 0, 2**62]),
            helper.make_tensor("i32", TensorProto.INT32, [2], [-1, 7]),
            helper.make_tensor("u8", TensorProto.UINT8, [2], [0, 255]),
            helper.make_tensor("u64", TensorProto.UINT64, [1], [2**64 - 1]),
            helper.make_tensor("flag", TensorProto.BOOL, [], [True]),
            helper.make_tensor("f", TensorProto.FLOAT, [2], [1.0, 2.0]),
            helper.make_tensor("names", TensorProto.STRING, [1], [b"x"]),
            numpy_helper.from_array(np.arange(-3, 3, dtype=np.int16), "i16"),
            numpy_helper.from_array(np.arange(4000), "long"),
            numpy_helper.from_array(np.zeros((0, 2**40), np.int64), "none"),
        ]
    )
    graph.sparse_initializer.append(sparse)
    graph.value_info.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, None))
    graph.value_info.append(helper.make_tensor_value_info("unshaped", TensorProto.BFLOAT16, None))
    function = onnx.parser.parse_function(
        """<opset_import: ["" : 18], domain: "local"> f <alpha>(a) => (b) { b = Elu<alpha: float = @alpha>(a) }"""
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.example", 2), helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=imports, functions=[function], ir_version=9)


FEATURES = feature_model().SerializeToString()


@pytest.fixture(scope="session")
def real(exported: Any) -> dict[str, bytes]:
    return {name: (exported.shipped / f"{name}.onnx").read_bytes() for name in GRAPHS}


class TestReads:
    @pytest.mark.parametrize("name", GRAPHS)
    def test_real_graphs(self, real: dict[str, bytes], exported: Any, name: str) -> None:
        model = read_model(exported.shipped / f"{name}.onnx")
        check_model(model, real[name])
        assert len(model.graph.nodes) > 10
        assert model.locations == ({"weights.safetensors"} if "convolve" not in name else set())

    def test_every_kind_of_field(self) -> None:
        model = parse_model(FEATURES)
        check_model(model, FEATURES)
        assert model.opset == 18
        stored = model.graph.initializers
        assert stored["i64"].values == (-1, 0, 2**62)
        assert stored["u64"].values == (2**64 - 1,)
        assert stored["flag"].values == (1,)
        assert stored["i16"].values == (-3, -2, -1, 0, 1, 2)
        assert stored["none"].values == ()
        assert stored["long"].values is None
        assert stored["f"].values is None
        assert stored["sparse"].dims == (5,)
        custom = model.graph.nodes[-1]
        assert custom.int_attribute("an_int") == -3
        assert custom.int_attribute("text", 5) == 5
        assert custom.ints_attribute("ints") == (1, -2, 2**63 - 1)
        assert custom.ints_attribute("floats") is None
        assert custom.attributes["sparse"] is None
        assert model.graph.key(0) == "#0"
        assert model.graph.key(2) == "custom"

    def test_files_are_found_wherever_they_are_named(self) -> None:
        """In initializers, attributes, graphs inside of nodes, functions, sparse tensors and graphs for training."""
        assert parse_model(FEATURES).locations == {"w.bin", "sub/hidden.bin"}

        def named(name: str) -> Any:
            tensor = TensorProto(name=name, data_type=1, dims=[1])
            tensor.external_data.add(key="location", value=name)
            return tensor

        model = onnx.ModelProto.FromString(FEATURES)
        model.training_info.add().initialization.initializer.append(named("training"))
        model.training_info[0].algorithm.initializer.append(named("algorithm"))
        function = model.functions[0]
        function.node[0].attribute.add(name="t", type=onnx.AttributeProto.TENSOR).t.CopyFrom(named("function"))
        function.attribute_proto.add(name="d", type=onnx.AttributeProto.TENSOR).t.CopyFrom(named("default"))
        graph = model.graph
        graph.sparse_initializer.add(dims=[2], values=named("values"), indices=named("indices"))
        # Claiming to be an integer hides a tensor from readers that look at the type alone.
        node = graph.node[0]
        node.attribute.add(name="hidden", type=onnx.AttributeProto.INT, i=3).t.CopyFrom(named("hidden"))
        node.attribute.add(name="sparse", type=12).sparse_tensors.add(values=named("sparse"), dims=[1])
        twice = named("first")
        twice.external_data.add(key="location", value="second")
        graph.initializer.append(twice)
        assert parse_model(model.SerializeToString()).locations == {
            "w.bin", "sub/hidden.bin", "training", "algorithm", "function", "default", "values", "indices", "hidden",
            "sparse", "first", "second",
        }  # fmt: skip

    def test_narrow_numbers_in_wide_fields(self) -> None:
        model = onnx.ModelProto.FromString(FEATURES)
        for dtype, values in (
            (TensorProto.BOOL, [2, 0]),
            (TensorProto.INT8, [200, -300]),
            (TensorProto.UINT8, [-1, 256]),
        ):
            model.graph.initializer.add(name=f"t{dtype}", data_type=dtype, dims=[2], int32_data=values)
        model.graph.initializer.add(name="u32", data_type=TensorProto.UINT32, dims=[1], uint64_data=[2**32 + 5])
        stored = parse_model(model.SerializeToString()).graph.initializers
        found = [stored[name].values for name in ("t9", "t3", "t2", "u32")]
        assert found == [(1, 0), (-56, -44), (255, 0), (5,)]

    def test_a_message_in_parts_is_one(self) -> None:
        """As protobuf has it: a graph may come in pieces, a weight's place too."""
        model = onnx.ModelProto.FromString(FEATURES)
        rest = onnx.ModelProto()
        rest.graph.node.add(op_type="Late", input=["y"], output=["late"])
        rest.graph.initializer.add(name="late", data_type=1).external_data.add(key="location", value="late.bin")
        data = model.SerializeToString() + rest.SerializeToString()
        check_model(parse_model(data), data)
        assert "late.bin" in parse_model(data).locations

    def test_names_of_dtypes(self) -> None:
        names = {"DOUBLE": "float64", "FLOAT": "float32", "UNDEFINED": UNKNOWN}
        for name, number in TensorProto.DataType.items():
            want = names.get(name, name.lower())
            assert number >= len(DTYPES) or want == DTYPES[number]


def tag(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def varint(value: int) -> bytes:
    found = b""
    while value > 0x7F:
        found += bytes([value & 0x7F | 0x80])
        value >>= 7
    return found + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return tag(number, 2) + varint(len(content)) + content


OPSET = message(8, tag(2, 0) + b"\x12")


class TestRefuses:
    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "expected a graph, found none"),
            (message(7, b""), "expected the versions of its operators"),
            (OPSET + tag(7, 0) + b"\x01", "another kind of value in field 7, found wire type 0"),
            (OPSET + tag(7, 2) + varint(2**31), "bytes more of field 7, found the end"),
            (OPSET + tag(7, 2) + varint(2**63), "bytes more of field 7, found the end"),
            (OPSET + tag(7, 2) + b"\xff" * 9 + b"\x7f", "at most 64 bits"),
            (OPSET + tag(7, 2) + b"\xff" * 12, "at most 64 bits"),
            (OPSET + tag(7, 2), "found a longer one or the end"),
            (OPSET + tag(7, 3), "wire type 0, 1, 2 or 5 for field 7, found 3"),
            (OPSET + tag(7, 7), "found 7"),
            (OPSET + tag(0, 2), "field number from 1"),
            (OPSET + tag(1 << 29, 0) + b"\0", "field number from 1"),
            (OPSET + tag(99, 5) + b"\0\0\0", "1 bytes more of field 99"),
            (OPSET + message(7, message(1, b"")), "name its operator"),
            (OPSET + message(7, message(1, message(4, b"\xff"))), "UTF-8"),
            (OPSET + message(7, message(5, tag(1, 0) + varint(2**64 - 1))), "sizes of at least 0, found -1"),
            (OPSET + message(7, message(5, tag(1, 0) + b"\x05" + tag(2, 0) + b"\x07")), "expected 5 numbers"),
            (OPSET + message(7, message(5, tag(2, 0) + b"\x07" + message(9, b"abc"))), "1 numbers of int64 .* 3 bytes"),
            (OPSET + message(7, message(5, tag(2, 0) + b"\x07" + message(7, b"\1\1"))), "1 numbers in field 7, found more"),
            (OPSET + message(7, message(15, b"")), "sparse tensor to have values"),
            (message(8, tag(2, 0) + b"\x11") + OPSET + message(7, b""), "one version of the operators"),
            (message(8, b"") + message(7, b""), "one version of the operators"),
        ],
    )  # fmt: skip
    def test_what_does_not_fit(self, data: bytes, words: str) -> None:
        with pytest.raises(BundleError, match=words) as caught:
            parse_model(data, "some.onnx")
        assert str(caught.value).startswith("some.onnx is no whole ONNX model: expected ")
        assert "export the bundle again" in str(caught.value)

    @pytest.mark.parametrize(("key", "value"), [("offset", "x"), ("length", ""), ("offset", "1" * 21), ("length", "٣")])
    def test_a_place_that_is_no_number(self, key: str, value: str) -> None:
        model = onnx.ModelProto.FromString(FEATURES)
        tensor = model.graph.initializer.add(name="w", data_type=1, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key=key, value=value)
        with pytest.raises(BundleError, match=f"a number for the {key} of 'w'"):
            parse_model(model.SerializeToString())

    def test_two_attributes_of_one_name(self) -> None:
        node = message(4, b"X") + 2 * message(5, message(1, b"axis"))
        with pytest.raises(BundleError, match="one attribute 'axis'"):
            parse_model(OPSET + message(7, message(1, node)))

    def test_two_attributes_of_one_name_that_were_read_before(self) -> None:
        attribute = message(5, message(1, b"axis"))
        nodes = [message(1, message(4, b"X") + times * attribute) for times in (1, 2)]
        with pytest.raises(BundleError, match="one attribute 'axis'"):
            parse_model(OPSET + message(7, b"".join(nodes)))

    def test_a_short_graph_that_was_read_before_may_be_too_deep_elsewhere(self) -> None:
        def nested(graph: bytes, depth: int) -> bytes:
            for _ in range(depth):
                graph = message(
                    1, message(4, b"If") + message(5, message(1, b"g") + tag(20, 0) + b"\5" + message(6, graph))
                )
            return graph

        short = nested(b"", 3)
        assert len(short) < 0x7F
        assert len(parse_model(OPSET + message(7, short + nested(short, 29))).graph.nodes) == 2
        with pytest.raises(BundleError, match="at most 32 deep"):
            parse_model(OPSET + message(7, short + nested(short, 30)))

    @pytest.mark.parametrize("depth", [33, 3000])
    def test_graphs_nested_without_end(self, depth: int) -> None:
        graph = b""
        for _ in range(depth):
            graph = message(
                1, message(4, b"If") + message(5, message(1, b"g") + tag(20, 0) + b"\5" + message(6, graph))
            )
        with pytest.raises(BundleError, match="at most 32 deep"):
            parse_model(OPSET + message(7, graph))

    def test_a_file_too_big_is_not_read(self, tmp_path: Path) -> None:
        file = tmp_path / "big.onnx"
        with file.open("wb") as writer:
            writer.truncate(2**31)
        with pytest.raises(BundleError, match=r"big\.onnx is no ONNX model: .* found 2,147,483,648"):
            read_model(file)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match="cannot be read"):
            read_model(tmp_path / "none.onnx")
        with pytest.raises(BundleError, match="cannot be read"):
            read_model(tmp_path)


def only_typed_errors(data: bytes) -> Model | None:
    try:
        return parse_model(data)
    except BundleError:
        return None


class TestFuzz:
    @FUZZ
    @given(st.binary(max_size=400))
    def test_any_bytes(self, data: bytes) -> None:
        only_typed_errors(data)
        only_typed_errors(OPSET + message(7, data))
        only_typed_errors(OPSET + message(7, message(1, message(4, b"X") + message(5, data))))
        only_typed_errors(OPSET + message(7, message(5, data)))

    @FUZZ
    @given(st.data())
    def test_altered_graphs_are_refused_or_read_as_onnx_reads_them(
        self, real: dict[str, bytes], data: st.DataObject
    ) -> None:
        original = data.draw(st.sampled_from([FEATURES, FEATURES, real["convolve"], real["step"]]), label="graph")
        altered = bytearray(original)
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, max(0, len(altered) - 1)))
            kind = data.draw(st.sampled_from(["set", "cut", "insert", "end"]))
            if kind == "set" and altered:
                altered[place] = data.draw(st.integers(0, 255))
            elif kind == "cut":
                del altered[place : place + data.draw(st.integers(1, 8))]
            elif kind == "insert":
                altered[place:place] = data.draw(st.binary(max_size=8))
            else:
                del altered[place:]
        model = only_typed_errors(bytes(altered))
        if model is not None:
            check_model(model, bytes(altered), may_refuse=True)
            infer(model.graph)
            shape_only(model.graph)

    def test_every_cut(self) -> None:
        for end in range(len(FEATURES)):
            model = only_typed_errors(FEATURES[:end])
            if model is not None:
                check_model(model, FEATURES[:end], may_refuse=True)


class TestInfer:
    @pytest.mark.parametrize("name", GRAPHS)
    def test_real_graphs_are_known_without_what_the_file_tells(self, real: dict[str, bytes], name: str) -> None:
        """Everything the shape inference of `onnx` finds is found, and the same."""
        model = onnx.ModelProto.FromString(real[name])
        want = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
        del model.graph.value_info[:]
        known = infer(parse_model(model.SerializeToString()).graph)
        assert len(want.graph.value_info) > len(model.graph.node) // 2
        for value in want.graph.value_info:
            got = known[value.name]
            tensor = value.type.tensor_type
            assert got.dtype == DTYPES[tensor.elem_type]
            if tensor.HasField("shape"):
                assert got.rank == len(tensor.shape.dim)
                sizes = zip(got.dims or (), plain_dims(tensor.shape), strict=True)
                assert all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))

    @pytest.mark.parametrize(
        ("text", "dtype", "dims"),
        [
            ("y = Neg(x)", "float32", ("B", "L", 4)),
            ("y = Shape(x)", "int64", (3,)),
            ("y = Shape<start = 1>(x)", "int64", (2,)),
            ("y = Shape<start = -1, end = 9>(x)", "int64", (1,)),
            ("y = Size(x)", "int64", ()),
            ("y = Cast<to = 7>(x)", "int64", ("B", "L", 4)),
            ("y = Greater(x, f)", "bool", ("B", "L", 4)),
            ("y = Where(c, f, x)", "float32", ("B", "L", 4)),
            ("y = Gather(x, i)", "float32", (None, None, None)),
            ("y = Gather(i, s)", "int64", ()),
            ("y = ArgMax<keepdims = 0>(x)", "int64", (None, None)),
            ("y = ArgMax(x)", "int64", (1, "L", 4)),
            ("y = ReduceSum(x)", "float32", (1, 1, 1)),
            ("y = ReduceSum(x, two)", "float32", (1, "L", 1)),
            ("y = ReduceMax<axes = [-2]>(x)", "float32", ("B", 1, 4)),
            ("y = ReduceSum(x, i)", "float32", (None, None, None)),
            ("y = ReduceSum<noop_with_empty_axes = 1>(x)", "float32", (None, None, None)),
            ("n = Constant<value_ints = [4, 5, 6]>() l = ReduceSum(n) y = Reshape(x, l)", "float32", (None,)),
            ("y = ReduceSum<keepdims = 0>(x)", "float32", ()),
            ("y = ReduceSum<keepdims = 0>(x, two)", "float32", (None,)),
            ("y = ReduceMax<keepdims = 0, axes = [1]>(x)", "float32", (None, None)),
            ("y = ReduceSum<keepdims = 0>(x, i)", "float32", None),
            ("y = Unsqueeze(x, two)", "float32", (1, "B", 1, "L", 4)),
            ("y = Squeeze(x, one)", "float32", ("B", 4)),
            ("y = Squeeze(x)", "float32", None),
            ("y = Reshape(x, two)", "float32", (None, None)),
            ("n = Shape(x) y = Reshape(x, n)", "float32", (None, None, None)),
            ("n = Shape(x) m = Concat<axis = 0>(n, two, one) y = ConstantOfShape(m)", "float32", (None,) * 6),
            ("y = ConstantOfShape<value = bool[1] {1}>(two)", "bool", (None, None)),
            ("y = Expand(f, two)", "float32", (None, None)),
            ("y = Concat<axis = 2>(x, x)", "float32", (None, None, None)),
            ("y = MatMul(x, x)", "float32", (None, None, None)),
            ("a = Constant<value_ints = [1, 2]>() y = Add(a, a)", "int64", (2,)),
            ("a = Constant<value_float = 1.0>() y = Mul(a, a)", "float32", ()),
            ("y = Range(s, s, s)", "int64", (None,)),
            ("y = Nonsense(x)", UNKNOWN, None),
            ("y = other.Neg(x)", UNKNOWN, None),
            ("a = other.Neg(x) y = Neg(a)", UNKNOWN, None),
            ("a = other.Neg(x) y = Add(a, f)", "float32", None),
        ],
    )
    def test_rules(self, text: str, dtype: str, dims: tuple[int | str | None, ...] | None) -> None:
        head = (
            '<ir_version: 8, opset_import: ["" : 18, "other" : 1]> g (float[B, L, 4] x, float f, bool c, int64[K] i, int64 s)'
            " => (y) <int64[2] two = {0, 2}, int64[1] one = {1}>"
        )
        known = infer(parse_model(onnx.parser.parse_model(f"{head} {{ {text} }}").SerializeToString()).graph)
        assert (known["y"].dtype, known["y"].dims) == (dtype, dims)

    def test_several_outputs(self) -> None:
        text = "v, k = TopK(x, one) a, b = Split<num_outputs = 2>(x) n, mean = LayerNormalization(x, f)"
        head = '<ir_version: 8, opset_import: ["" : 18]> g (float16[B, 4] x, float16[4] f) => (v) <int64[1] one = {1}>'
        known = infer(parse_model(onnx.parser.parse_model(f"{head} {{ {text} }}").SerializeToString()).graph)
        assert {name: known[name].dtype for name in ("v", "k", "b", "n", "mean")} == {
            "v": "float16", "k": "int64", "b": "float16", "n": "float16", "mean": "float32",
        }  # fmt: skip

    def test_the_file_is_believed_before_the_rules(self) -> None:
        graph = onnx.parser.parse_graph("g (float[2] x) => (float[2] z) { y = Nonsense(x) z = Identity(y) }")
        graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.INT32, [7, "K"]))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
        known = infer(parse_model(model.SerializeToString()).graph)
        assert (known["y"].dtype, known["y"].dims) == ("int32", (7, "K"))

    def test_graphs_made_to_fill_the_memory(self) -> None:
        shape = TensorProto(name="n", data_type=TensorProto.INT64, dims=[2**40], data_location=TensorProto.EXTERNAL)
        graph = onnx.parser.parse_graph("g (int64[1, 1] x) => (z) { y = Reshape(x, n) a0 = Gather(x, x) }")
        graph.initializer.append(shape)
        graph.node.extend(helper.make_node("Gather", [f"a{i}", f"a{i}"], [f"a{i + 1}"]) for i in range(60))
        graph.node.append(helper.make_node("Constant", [], ["z"]))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
        known = infer(parse_model(model.SerializeToString()).graph)
        assert known["a2"].rank == 9
        assert (known["a60"].rank, known["y"].rank, known["z"].dtype) == (None, None, UNKNOWN)

    def test_a_default_of_an_input_is_no_constant(self) -> None:
        """A caller may give another shape than the one in the file."""
        graph = onnx.parser.parse_graph("g (float[2] x, int64[K] n) => (y) { y = Reshape(x, n) }")
        graph.initializer.append(numpy_helper.from_array(np.array([1, 2]), "n"))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
        parsed = parse_model(model.SerializeToString()).graph
        assert "n" not in parsed.constants()
        assert infer(parsed)["y"].dims is None
