"""The reader of ONNX files, beside the `onnx` package's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import caracal_runtimes
import onnx
import pytest
from caracal_runtimes.errors import BundleError
from caracal_runtimes.onnx_graph import Model, _Message, _Parser, infer, parse_model, read_model
from caracal_runtimes.placement_rules import shape_only
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, attempt, damaged
from onnx import TensorProto, helper

PROBE = Path(caracal_runtimes.__file__).parent / "probe_bundle"


def example() -> onnx.ModelProto:
    """A small model that has every kind of thing: subgraphs, functions, external, sparse and typed tensors."""
    external = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights.safetensors"), ("offset", "8"), ("length", "16")):
        external.external_data.add(key=key, value=value)
    axes = helper.make_tensor("axes", TensorProto.INT64, [2], [0, -1])
    small = helper.make_tensor("small", TensorProto.INT8, [3], b"\x01\x02\x03", raw=True)
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["inner"])],
        "branch",
        [],
        [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)],
    )
    constant = helper.make_node("Constant", [], ["c"], value=helper.make_tensor("v", TensorProto.INT32, [], [7]))
    nodes = [
        constant,
        helper.make_node("MatMul", ["x", "w"], ["y"], name="product"),
        helper.make_node("Unsqueeze", ["y", "axes"], ["z"]),
        helper.make_node("Shape", ["z"], ["shape"], start=0, end=1),
        helper.make_node("Concat", ["shape", "axes"], ["target"], axis=0),
        helper.make_node("Reshape", ["z", "target"], ["r"]),
        helper.make_node("If", ["flag"], ["chosen"], then_branch=branch, else_branch=branch),
        helper.make_node("ReduceSum", ["r", "axes"], ["s"], keepdims=0),
        helper.make_node("Own", ["r"], ["o"], domain="own", floats=[1.0, 2.0], strings=["a", "b"], ints=[1, 2]),
        helper.make_node("Add", ["s", "r"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
        [external, axes, small],
        value_info=[helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
    )
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("", TensorProto.INT64, [1], [3])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))
    own = helper.make_function("own", "Own", ["a"], ["b"], [helper.make_node("Neg", ["a"], ["b"])], [_opset("", 18)])
    return helper.make_model(graph, opset_imports=[_opset("", 18), _opset("own", 1)], functions=[own])


def _opset(domain: str, version: int) -> onnx.OperatorSetIdProto:
    return helper.make_opsetid(domain, version)


EXAMPLE = example()
WHOLE = EXAMPLE.SerializeToString()


def _messages(message: Message) -> list[Message]:
    found = [message]
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                found += _messages(inner)
    return found


_INTEGERS = (0, 1, -1, 2, 7, 15, 16, 22, 255, 1024, 1025, 2**31 - 1, -(2**31), 2**32, 2**60, 2**63 - 1, -(2**63))
_TEXTS = (
    "",
    "x",
    "w",
    "axes",
    "location",
    "offset",
    "-1",
    "9" * 30,
    "٣",
    "../../etc/passwd",
    "Shape",
    "Concat",
    "\0",
    "é",
)


def _value(field: Any, draw: st.DrawFn) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return draw(st.sampled_from((0.0, -1.5, math.inf, math.nan, 1e30)))
        case FieldDescriptor.TYPE_STRING:
            return draw(st.sampled_from(_TEXTS))
        case FieldDescriptor.TYPE_BYTES:
            return draw(st.binary(max_size=20))
        case FieldDescriptor.TYPE_ENUM:
            return draw(st.sampled_from([value.number for value in field.enum_type.values]))
        case FieldDescriptor.TYPE_UINT64:
            return draw(st.sampled_from([abs(value) for value in _INTEGERS]))
        case FieldDescriptor.TYPE_INT32:
            return draw(st.sampled_from([value for value in _INTEGERS if -(2**31) <= value < 2**31]))
        case _:
            return draw(st.sampled_from(_INTEGERS))


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """The example with one to four fields set, added to, emptied or repeated, whichever the schema has."""
    model = onnx.ModelProto()
    model.CopyFrom(EXAMPLE)
    for _ in range(draw(st.integers(1, 4))):
        by_kind: dict[str, list[Message]] = {}
        for message in _messages(model):
            by_kind.setdefault(message.DESCRIPTOR.name, []).append(message)
        message = draw(st.sampled_from(by_kind[draw(st.sampled_from(sorted(by_kind)))]))
        field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
        content = getattr(message, field.name)
        nested = field.type == FieldDescriptor.TYPE_MESSAGE
        if draw(st.integers(0, 4)) == 0:
            message.ClearField(field.name)
        elif nested:
            kind = field.message_type.name
            source = draw(st.sampled_from(by_kind[kind])) if by_kind.get(kind) else None
            target = content.add() if field.is_repeated else content
            if source is None:
                target.SetInParent()
            elif source is not target:
                inner = type(source)()
                inner.CopyFrom(source)
                target.CopyFrom(inner)
        elif field.is_repeated:
            content.extend([_value(field, draw) for _ in range(draw(st.integers(1, 3)))])
        else:
            setattr(message, field.name, _value(field, draw))
    return model.SerializeToString()


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, wire: int, content: bytes | int) -> bytes:
    tag = _varint(number << 3 | wire)
    if isinstance(content, int):
        return tag + (_varint(content) if wire == 0 else content.to_bytes(8 if wire == 1 else 4, "little"))
    return tag + _varint(len(content)) + content


_NUMBER = st.sampled_from((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 20, 21, 22, 25, 100))
#: Messages in the format's own terms, of fields that the schema has or has not, one inside the other.
WIRE = st.recursive(
    st.binary(max_size=6),
    lambda inner: st.lists(
        st.builds(_field, _NUMBER, st.just(2), inner)
        | st.builds(_field, _NUMBER, st.just(0), st.integers(0, 2**64 - 1))
        | st.builds(_field, _NUMBER, st.just(5), st.integers(0, 2**32 - 1)),
        max_size=4,
    ).map(b"".join),
    max_leaves=12,
)


def understood(data: bytes) -> Model:
    """All that is read of a model anywhere: the graph, its constants, and what follows for every value."""
    model = parse_model(data, "x.onnx")
    graph = model.graph
    constants, known = graph.constants(), infer(graph)
    for name, tensor in constants.items():
        assert name in known
        assert tensor.values is None or len(tensor.values) == math.prod(tensor.dims)
    assert shape_only(graph) is not None
    assert all(graph.key(index) for index in range(len(graph.nodes)))
    return model


class Forgetful(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class Plain(_Parser):
    """The parser without what it does for speed: every message is taken apart, every time."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.types, self.attributes, self.entries = Forgetful(), Forgetful(), Forgetful()

    def plain_node(self, data: bytes, place: int, end: int) -> None:
        return None


def outcome(parser: type[_Parser], data: bytes) -> str:
    """What a parser makes of a model; as text, in which NaN is NaN."""
    try:
        return repr(parser("x.onnx").model(_Message(data, 0, len(data), "x.onnx")))
    except BundleError as error:
        return str(error)


def check(data: bytes) -> None:
    assert outcome(_Parser, data) == outcome(Plain, data)
    model = attempt(BundleError, understood, data)
    if model is None:
        return
    theirs = onnx.ModelProto()
    try:
        theirs.ParseFromString(data)
    except DecodeError:
        return
    # What no hash covers must not be read: no file that another reader finds may be missing here.
    for message in _messages(theirs):
        if isinstance(message, TensorProto) and message.data_location == TensorProto.EXTERNAL:
            for entry in message.external_data:
                assert entry.key != "location" or not entry.value or entry.value in model.locations
    assert [node.op_type for node in model.graph.nodes] == [node.op_type for node in theirs.graph.node]
    for node, their in zip(model.graph.nodes, theirs.graph.node, strict=True):
        assert (node.name, node.inputs, node.outputs) == (their.name, tuple(their.input), tuple(their.output))
    assert {tensor.name for tensor in theirs.graph.initializer} <= model.graph.initializers.keys()
    assert [value.name for value in model.graph.inputs] == [value.name for value in theirs.graph.input]


def test_the_example_itself_is_read() -> None:
    check(WHOLE)
    assert understood(WHOLE).locations == {"weights.safetensors"}


@FUZZ
@given(changed())
def test_models_with_changed_fields(data: bytes) -> None:
    check(data)


@FUZZ
@given(damaged(WHOLE))
def test_damaged_models(data: bytes) -> None:
    check(data)


@FUZZ
@given(WIRE | st.builds(lambda graph, rest: _field(7, 2, graph) + _field(8, 2, b"\x10\x12") + rest, WIRE, WIRE))
def test_messages_of_any_kind(data: bytes) -> None:
    check(data)


@pytest.mark.parametrize("name", ["convolve.onnx", "step.onnx"])
def test_damaged_graphs_of_a_bundle(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / name

    @FUZZ
    @given(damaged((PROBE / name).read_bytes()))
    def prop(data: bytes) -> None:
        path.write_bytes(data)
        assert outcome(_Parser, data) == outcome(Plain, data)
        model = attempt(BundleError, read_model, path)
        if model is not None:
            infer(model.graph)

    prop()


@pytest.mark.parametrize("depth", [10, 33, 1000, 20_000])
def test_graphs_inside_of_graphs(depth: int) -> None:
    graph = b""
    for _ in range(depth):  # node { attribute { name "g", type GRAPH, g { … } } }
        attribute = _field(1, 2, b"g") + _field(20, 0, 5) + _field(6, 2, graph)
        graph = _field(1, 2, _field(4, 2, b"If") + _field(5, 2, attribute))
    check(_field(7, 2, graph) + _field(8, 2, b"\x10\x12"))
