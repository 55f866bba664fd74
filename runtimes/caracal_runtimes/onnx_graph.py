"""A strict, read-only reader of ONNX models that needs no package, for machines that have only a runtime.

An ONNX file is one protobuf message. The field numbers below are those of the public schema, `onnx.proto3`; the wire
format is protobuf's: a tag (field number and wire type) before each value, nested messages as length and bytes. What
this does not need (documentation, metadata, weights) is skipped, not read. What does not fit raises BundleError.

`infer` tells dtype and shape of a graph's values as far as the file or a small set of rules does.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Union

from caracal_runtimes.errors import BundleError

UNKNOWN = "unknown"
#: TensorProto.DataType, by number.
DTYPES = (
    UNKNOWN, "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16", "float64",
    "uint32", "uint64", "complex64", "complex128", "bfloat16", "float8e4m3fn", "float8e4m3fnuz", "float8e5m2",
    "float8e5m2fnuz", "uint4", "int4", "float4e2m1", "float8e8m0", "uint2", "int2",
)  # fmt: skip

# Letters of `struct` for the integers whose values are read.
_PACKED = {"uint8": "B", "int8": "b", "uint16": "H", "int16": "h", "int32": "i", "int64": "q", "bool": "?",
           "uint32": "I", "uint64": "Q"}  # fmt: skip
_MAX_FILE = 2**31 - 1  # protobuf's own limit for one message
_MAX_VALUES = 1024  # numbers of an integer tensor that are read: axes, sizes and bounds are far fewer
_MAX_DEPTH = 32  # graphs inside of graphs
_MAX_RANK = 64  # axes of a value that is worked out; no runtime has as many
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EXTERNAL = 1
_HOLD_TENSORS = frozenset({5, 6, 10, 11, 22, 23})  # fields of an attribute
_HOLD_GRAPHS = frozenset({6, 11})
_SHORT = 0x7F  # bytes whose number is a single byte


@dataclass(frozen=True)
class External:
    """Where a tensor's data lies outside of the graph, as the graph says it; nothing of this has been checked."""

    location: str
    offset: int = 0
    length: int | None = None


@dataclass(frozen=True)
class Tensor:
    """A stored tensor. `values` are its numbers in order, for small integer and boolean tensors inside the graph."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    external: External | None = None
    values: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Value:
    """What is known of a value: dims hold sizes, axis names and None; the whole of it is None if the rank is unknown."""

    name: str
    dtype: str = UNKNOWN
    dims: tuple[int | str | None, ...] | None = None

    @property
    def rank(self) -> int | None:
        """Number of axes."""
        return None if self.dims is None else len(self.dims)


#: An attribute's value; None for the kinds that are not read (types, sparse tensors, references of functions).
Attribute = Union[
    int,
    float,
    str,
    Tensor,
    "Graph",
    tuple[int, ...],
    tuple[float, ...],
    tuple[str, ...],
    tuple[Tensor, ...],
    tuple["Graph", ...],
    None,
]


@dataclass(frozen=True)
class Node:
    """One operator call. An empty name among inputs or outputs stands for one that is left out."""

    name: str
    op_type: str
    domain: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    def int_attribute(self, name: str, default: int | None = None) -> int | None:
        """An integer attribute, `default` where it is absent or of another kind."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) else default

    def ints_attribute(self, name: str) -> tuple[int, ...] | None:
        """An attribute that is a list of integers, None where it is absent or of another kind."""
        value = self.attributes.get(name)
        if not isinstance(value, tuple):
            return None
        numbers = tuple(item for item in value if isinstance(item, int))
        return numbers if len(numbers) == len(value) else None


@dataclass(frozen=True)
class Graph:
    """A graph; the nodes are in topological order, as ONNX wants them. `value_info` is what the file tells in between."""

    name: str = ""
    nodes: tuple[Node, ...] = ()
    initializers: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: tuple[Value, ...] = ()
    outputs: tuple[Value, ...] = ()
    value_info: tuple[Value, ...] = ()

    def key(self, index: int) -> str:
        """A node's name, or `#index` for one that has none."""
        return self.nodes[index].name or f"#{index}"

    def constants(self) -> dict[str, Tensor]:
        """Initializers and what `Constant` nodes give, by name; not the defaults of inputs, which a caller may change."""
        inputs = {value.name for value in self.inputs}
        found = {name: tensor for name, tensor in self.initializers.items() if name not in inputs}
        for node in self.nodes:
            if node.op_type == "Constant" and node.domain == "" and node.outputs:
                tensor = _constant(node)
                if tensor is not None:
                    found[node.outputs[0]] = tensor
        return found


@dataclass(frozen=True)
class Function:
    """A function that the model defines as an operator of its own."""

    name: str
    domain: str
    opsets: Mapping[str, int]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Model:
    """A whole file. `opsets` are versions by domain, the standard one as "".

    `locations` are all the files that any tensor anywhere in the model refers to, subgraphs and functions included.
    """

    opsets: Mapping[str, int]
    graph: Graph
    functions: tuple[Function, ...] = ()
    locations: frozenset[str] = frozenset()
    ir_version: int = 0

    @property
    def opset(self) -> int:
        """Version of the standard operators, 0 where the model uses none."""
        return self.opsets.get("", 0)


def read_model(path: Path) -> Model:
    """Reads an `.onnx` file, not its external data. Raises BundleError."""
    try:
        size = path.stat().st_size
        if size > _MAX_FILE:
            raise BundleError(
                f"{path.name} is no ONNX model: expected at most {_MAX_FILE:,} bytes, found {size:,}; "
                "weights belong outside of the graph, export the bundle again"
            )
        data = path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error})") from None
    return parse_model(data, path.name)


def parse_model(data: bytes, name: str = "the graph") -> Model:
    """Reads a serialised model.

    Args:
        data: the bytes of an `.onnx` file.
        name: what to call it in messages.

    Raises:
        BundleError: the bytes are no whole ONNX model.
    """
    if len(data) > _MAX_FILE:
        raise BundleError(f"{name} is no ONNX model: expected at most {_MAX_FILE:,} bytes, found {len(data):,}")
    return _Parser(name).model(_Message(data, 0, len(data), name))


class _Message:
    """One protobuf message, taken apart into fields; the accessors check the wire type."""

    def __init__(self, data: bytes, start: int, end: int, where: str) -> None:
        self.data = data
        self.where = where
        # By field number, in the file's order: wire type, then the value or where it starts, then where it ends.
        self.fields: dict[int, list[tuple[int, int, int]]] = {}
        place = start
        fields = self.fields
        while place < end:
            # Almost every tag and length is a single byte: a call for each would take half of the time.
            tag = data[place]
            place += 1
            if tag > 0x7F:
                tag, place = self._varint(place - 1, end)
            number, wire = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                raise self.wrong(f"expected a field number from 1 to {(1 << 29) - 1}, found {number}")
            if wire == _VARINT:
                value, place = self._varint(place, end)
                stop = place
            elif wire == _BYTES:
                if place < end and data[place] < 0x80:
                    length, value = data[place], place + 1
                else:
                    length, value = self._varint(place, end)
                place = stop = value + length
            elif wire in (_FIXED32, _FIXED64):
                value, place = place, place + (4 if wire == _FIXED32 else 8)
                stop = place
            else:
                raise self.wrong(f"expected wire type 0, 1, 2 or 5 for field {number}, found {wire}")
            if place > end:
                raise self.wrong(f"expected {place - end:,} bytes more of field {number}, found the end")
            if number in fields:
                fields[number].append((wire, value, stop))
            else:
                fields[number] = [(wire, value, stop)]

    def wrong(self, what: str) -> BundleError:
        """The error for this message, for the caller to raise."""
        return BundleError(f"{self.where} is no whole ONNX model: {what}; export the bundle again")

    def number(self, field_number: int) -> int:
        """A signed 64-bit number; of several the last counts."""
        found = self._all(field_number, _VARINT)
        return _signed(found[-1][1]) if found else 0

    def number32(self, field_number: int) -> int:
        """A signed 32-bit number or an enumeration: the format says that higher bits are cut off."""
        low = self.number(field_number) & 0xFFFFFFFF
        return low - (1 << 32) if low >> 31 else low

    def decimal(self, field_number: int) -> float:
        """A 32-bit floating-point number."""
        found = self._all(field_number, _FIXED32)
        return float(struct.unpack_from("<f", self.data, found[-1][1])[0]) if found else 0.0

    def raw(self, field_number: int) -> bytes:
        """A string of bytes."""
        found = self._all(field_number, _BYTES)
        return self.data[found[-1][1] : found[-1][2]] if found else b""

    def raws(self, field_number: int) -> list[bytes]:
        """Several strings of bytes."""
        return [self.data[start:stop] for _, start, stop in self._all(field_number, _BYTES)]

    def spans(self, field_number: int) -> list[tuple[int, int]]:
        """Where several strings of bytes or nested messages start and end."""
        return [(start, stop) for _, start, stop in self._all(field_number, _BYTES)]

    def text(self, field_number: int) -> str:
        """A text."""
        return self._decoded(field_number, self.raw(field_number))

    def texts(self, field_number: int) -> tuple[str, ...]:
        """Several texts."""
        return tuple(self._decoded(field_number, value) for value in self.raws(field_number))

    def numbers(self, field_number: int, limit: int | None = None) -> tuple[int, ...]:
        """Several signed 64-bit numbers, packed into one field or one by one; `limit` is how many there may be."""
        found: list[int] = []
        for wire, start, stop in self.fields.get(field_number, ()):
            if wire == _VARINT:
                found.append(_signed(start))
            elif wire == _BYTES:
                place = start
                while place < stop:
                    value, place = self._varint(place, stop)
                    found.append(_signed(value))
                    if limit is not None and len(found) > limit:
                        break
            else:
                raise self._wire(field_number, wire)
            if limit is not None and len(found) > limit:
                raise self.wrong(f"expected {limit:,} numbers in field {field_number}, found more")
        return tuple(found)

    def decimals(self, field_number: int) -> tuple[float, ...]:
        """Several 32-bit floating-point numbers, packed into one field or one by one."""
        found: list[float] = []
        for wire, start, stop in self.fields.get(field_number, ()):
            if wire not in (_FIXED32, _BYTES) or (stop - start) % 4:
                raise self._wire(field_number, wire)
            found += struct.unpack_from(f"<{(stop - start) // 4}f", self.data, start)
        return tuple(found)

    def message(self, field_number: int) -> _Message | None:
        """A nested message. The format says that several are one, their fields together."""
        parts = self.messages(field_number)
        for part in parts[1:]:
            for number, values in part.fields.items():
                parts[0].fields.setdefault(number, []).extend(values)
        return parts[0] if parts else None

    def messages(self, field_number: int) -> list[_Message]:
        """Several nested messages."""
        return [_Message(self.data, start, stop, self.where) for _, start, stop in self._all(field_number, _BYTES)]

    def _all(self, field_number: int, wire: int) -> Sequence[tuple[int, int, int]]:
        found = self.fields.get(field_number, ())
        for kind, _, _ in found:
            if kind != wire:
                raise self._wire(field_number, kind)
        return found

    def _decoded(self, field_number: int, value: bytes) -> str:
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise self.wrong(f"expected UTF-8 text in field {field_number}, found something else") from None

    def _wire(self, field_number: int, wire: int) -> BundleError:
        return self.wrong(f"expected another kind of value in field {field_number}, found wire type {wire}")

    def _varint(self, place: int, end: int) -> tuple[int, int]:
        """A number of up to 64 bits, seven in a byte, and the place after it."""
        value = shift = 0
        while place < end and shift < 70:
            byte = self.data[place]
            place += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    break
                return value, place
            shift += 7
        raise self.wrong("expected a number of at most 64 bits, found a longer one or the end")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _cut(value: int, letter: str) -> int:
    """A number in the width and sign that a letter of `struct` stands for."""
    bits = 8 * struct.calcsize(f"<{letter}")
    low = value & ((1 << bits) - 1)
    return low - (1 << bits) if letter.islower() and low >> (bits - 1) else low


class _Parser:
    """Makes the dataclasses of messages, and collects every external file that is referred to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.locations: set[str] = set()
        # What was made of the same bytes before: types, attributes and entries repeat in every layer of a model.
        self.types: dict[bytes, tuple[str, tuple[int | str | None, ...] | None]] = {}
        self.attributes: dict[bytes, tuple[str, Attribute]] = {}
        self.entries: dict[bytes, tuple[str, str]] = {}

    def model(self, message: _Message) -> Model:
        graph = message.message(7)
        if graph is None:
            raise message.wrong("expected a graph, found none")
        opsets = self.opsets(message.messages(8))
        if not opsets:
            raise message.wrong("expected the versions of its operators, found none")
        main = self.graph(graph, 0)
        functions = tuple(
            Function(part.text(1), _domain(part.text(10)), self.opsets(part.messages(9)), self.nodes(part, 7, 0))
            for part in message.messages(25)
        )
        # Graphs that are for training are not run, but a reader may open their files.
        for training in message.messages(20):
            for part in (training.message(1), training.message(2)):
                if part is not None:
                    self.graph(part, 0)
        # Defaults of a function's attributes are read for the same reason.
        for part in message.messages(25):
            for attribute in part.messages(11):
                self.attribute(attribute, 0)
        return Model(opsets, main, functions, frozenset(self.locations), message.number(1))

    def opsets(self, messages: list[_Message]) -> dict[str, int]:
        found: dict[str, int] = {}
        for message in messages:
            domain, version = _domain(message.text(1)), message.number(2)
            if found.setdefault(domain, version) != version or version < 1:
                raise message.wrong(f"expected one version of the operators of {domain!r:.60}, found {version}")
        return found

    def graph(self, message: _Message, depth: int) -> Graph:
        if depth > _MAX_DEPTH:
            raise message.wrong(f"expected graphs inside of graphs at most {_MAX_DEPTH} deep, found more")
        initializers = {tensor.name: tensor for tensor in map(self.tensor, message.messages(5))}
        for sparse in message.messages(15):
            tensor = self.sparse(sparse)
            initializers[tensor.name] = tensor
        return Graph(
            message.text(2),
            self.nodes(message, 1, depth),
            initializers,
            *(tuple(map(self.value, message.messages(number))) for number in (11, 12, 13)),
        )

    def nodes(self, message: _Message, field_number: int, depth: int) -> tuple[Node, ...]:
        data, where = message.data, message.where
        found = []
        for start, stop in message.spans(field_number):
            node = self.plain_node(data, start, stop)
            found.append(self.node(_Message(data, start, stop, where), depth) if node is None else node)
        return tuple(found)

    def plain_node(self, data: bytes, place: int, end: int) -> Node | None:
        """A node as nearly all of them are written, in one walk over its bytes; None for any other, which `node` judges.

        Only single-byte tags and lengths, texts, and attributes that were read before, from the same bytes.
        """
        name = op_type = domain = b""
        inputs: list[str] = []
        outputs: list[str] = []
        attributes: dict[str, Attribute] = {}
        try:
            while place < end:
                tag, length = data[place], data[place + 1]
                if length > _SHORT:
                    return None
                start = place + 2
                place = start + length
                part = data[start:place]
                if tag == 0x0A:  # each a field number times 8, and 2 for bytes
                    inputs.append(part.decode())
                elif tag == 0x12:
                    outputs.append(part.decode())
                elif tag == 0x1A:
                    name = part
                elif tag == 0x22:
                    op_type = part
                elif tag == 0x3A:
                    domain = part
                elif tag == 0x2A and part in self.attributes:
                    key, value = self.attributes[part]
                    if key in attributes:
                        return None
                    attributes[key] = value
                else:
                    return None
            if place != end or not op_type:
                return None
            return Node(
                name.decode(), op_type.decode(), _domain(domain.decode()), tuple(inputs), tuple(outputs), attributes
            )
        except (IndexError, UnicodeDecodeError):
            return None

    def node(self, message: _Message, depth: int) -> Node:
        attributes: dict[str, Attribute] = {}
        for start, stop in message.spans(5):
            # A stored tensor is long, and not looked up.
            written = message.data[start:stop] if stop - start <= _SHORT else b""
            known = self.attributes.get(written)
            if known is None:
                part = _Message(message.data, start, stop, message.where)
                known = part.text(1), self.attribute(part, depth)
                # How deep graphs may be depends on where they are.
                if written and part.fields.keys().isdisjoint(_HOLD_GRAPHS):
                    self.attributes[written] = known
            name, value = known
            if name in attributes:
                raise message.wrong(f"expected one attribute {name!r:.60} of a node, found two")
            attributes[name] = value
        op_type = message.text(4)
        if not op_type:
            raise message.wrong("expected every node to name its operator, found one without")
        return Node(message.text(3), op_type, _domain(message.text(7)), message.texts(1), message.texts(2), attributes)

    def attribute(self, message: _Message, depth: int) -> Attribute:
        kind = message.number32(20)
        tensor: Tensor | None = None
        graph: Graph | None = None
        tensors: tuple[Tensor, ...] = ()
        graphs: tuple[Graph, ...] = ()
        if not message.fields.keys().isdisjoint(_HOLD_TENSORS):
            # Whatever kind it claims to be, every tensor in it is looked at: one may name a file.
            single, inner = message.message(5), message.message(6)
            tensor = None if single is None else self.tensor(single)
            graph = None if inner is None else self.graph(inner, depth + 1)
            tensors = tuple(map(self.tensor, message.messages(10)))
            graphs = tuple(self.graph(part, depth + 1) for part in message.messages(11))
            for sparse in [*message.messages(22), *message.messages(23)]:
                self.sparse(sparse)
        if message.text(21):  # stands for an attribute of the function that the node is in
            return None
        match kind:
            case 1:
                return message.decimal(2)
            case 2:
                return message.number(3)
            case 3:
                return _readable(message.raw(4))
            case 4:
                return tensor
            case 5:
                return graph
            case 6:
                return message.decimals(7)
            case 7:
                return message.numbers(8)
            case 8:
                return tuple(map(_readable, message.raws(9)))
            case 9:
                return tensors
            case 10:
                return graphs
            case _:
                return None

    def value(self, message: _Message) -> Value:
        name = message.text(1)
        spans = message.spans(2)
        written = message.data[spans[0][0] : spans[0][1]] if len(spans) == 1 else b""
        if written in self.types:
            return Value(name, *self.types[written])
        kind = message.message(2)
        if kind is None or 1 not in kind.fields:
            return Value(name)
        if kind.fields.keys() & {4, 5, 7, 8, 9}:
            raise message.wrong(f"expected one type of {name!r:.60}, found several")
        tensor = kind.message(1)
        assert tensor is not None
        shape = tensor.message(2)
        dims = None if shape is None else tuple(map(_dim, shape.messages(1)))
        found = _dtype(tensor.number32(1)), dims
        if written:
            self.types[written] = found
        return Value(name, *found)

    def sparse(self, message: _Message) -> Tensor:
        values, indices = message.message(1), message.message(2)
        if indices is not None:
            self.tensor(indices)
        if values is None:
            raise message.wrong("expected a sparse tensor to have values, found none")
        stored = self.tensor(values)
        return Tensor(stored.name, stored.dtype, self.dims(message, 3), stored.external)

    def dims(self, message: _Message, field_number: int) -> tuple[int, ...]:
        dims = message.numbers(field_number)
        if any(dim < 0 for dim in dims):
            raise message.wrong(f"expected sizes of at least 0, found {min(dims)}")
        return dims

    def tensor(self, message: _Message) -> Tensor:
        name, dtype, dims = message.text(8), _dtype(message.number32(2)), self.dims(message, 1)
        pairs = [self.entry(message, start, stop) for start, stop in message.spans(13)]
        entries = dict(pairs)
        # Of repeated entries each is listed: which one another reader takes is its choice.
        self.locations.update(place for key, place in pairs if key == "location" and place)
        if message.number32(14) == _EXTERNAL:
            return Tensor(name, dtype, dims, self.external(message, name, entries))
        count = 0 if 0 in dims else math.prod(dims)
        if dtype not in _PACKED or count > _MAX_VALUES:
            return Tensor(name, dtype, dims)
        return Tensor(name, dtype, dims, None, self.integers(message, name, dtype, count))

    def entry(self, message: _Message, start: int, stop: int) -> tuple[str, str]:
        written = message.data[start:stop]
        found = self.entries.get(written)
        if found is None:
            part = _Message(message.data, start, stop, message.where)
            found = self.entries[written] = part.text(1), part.text(2)
        return found

    def external(self, message: _Message, name: str, entries: Mapping[str, str]) -> External:
        numbers: dict[str, int] = {}
        for key in ("offset", "length"):
            text = entries.get(key)
            if text is not None:
                if len(text) > 20 or not (text.isascii() and text.removeprefix("-").isdigit()):
                    raise message.wrong(f"expected a number for the {key} of {name!r:.60}, found {text!r:.40}")
                numbers[key] = int(text)
        return External(entries.get("location", ""), numbers.get("offset", 0), numbers.get("length"))

    def integers(self, message: _Message, name: str, dtype: str, count: int) -> tuple[int, ...]:
        letter = _PACKED[dtype]
        values: tuple[int, ...]
        if 9 in message.fields:
            raw = message.raw(9)
            if len(raw) != count * struct.calcsize(f"<{letter}"):
                raise message.wrong(f"expected {count:,} numbers of {dtype} in {name!r:.60}, found {len(raw):,} bytes")
            values = struct.unpack(f"<{count}{letter}", raw)
        else:
            # Narrow types are stored in wide ones; as everywhere in the format, higher bits are cut off.
            wide = message.numbers({"int64": 7, "uint32": 11, "uint64": 11}.get(dtype, 5), count)
            values = tuple(map(bool, wide)) if dtype == "bool" else tuple(_cut(value, letter) for value in wide)
        if len(values) != count:
            raise message.wrong(f"expected {count:,} numbers in {name!r:.60}, found {len(values):,}")
        return tuple(map(int, values))


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name


def _dtype(number: int) -> str:
    return DTYPES[number] if 0 <= number < len(DTYPES) else UNKNOWN


def _dim(message: _Message) -> int | str | None:
    if 1 in message.fields and 2 in message.fields:
        raise message.wrong("expected a size or a name of an axis, found both")
    if 1 in message.fields:
        return message.number(1)
    return message.text(2) or None


def _readable(value: bytes) -> str:
    """A string attribute, which may hold any bytes."""
    return value.decode("utf-8", "backslashreplace")


def _constant(node: Node) -> Tensor | None:
    """What a `Constant` node gives."""
    for name, value in node.attributes.items():
        if name == "value" and isinstance(value, Tensor):
            return value
        if name == "value_int" and isinstance(value, int):
            return Tensor(node.outputs[0], "int64", (), None, (value,))
        if name == "value_float":
            return Tensor(node.outputs[0], "float32", ())
        if name == "value_ints":
            ints = node.ints_attribute(name)
            return None if ints is None else Tensor(node.outputs[0], "int64", (len(ints),), None, ints)
        if name == "value_floats" and isinstance(value, tuple):
            return Tensor(node.outputs[0], "float32", (len(value),))
        if name == "value_string":
            return Tensor(node.outputs[0], "string", ())
        if name == "value_strings" and isinstance(value, tuple):
            return Tensor(node.outputs[0], "string", (len(value),))
    return None


def infer(graph: Graph) -> dict[str, Value]:
    """What can be said of every value of a graph: from the file where it tells, else from the operators.

    The rules cover the operators of exported language models. What they do not cover, and what follows from it, stays
    `unknown`: nothing is guessed. Sizes that depend on the input are None.
    """
    stated = {value.name: value for value in (*graph.inputs, *graph.outputs, *graph.value_info)}
    constants = graph.constants()
    known = {name: Value(name, tensor.dtype, tensor.dims) for name, tensor in constants.items()}
    known |= {value.name: value for value in graph.inputs}
    for node in graph.nodes:
        taken = [known.get(name) or Value(name) for name in node.inputs]
        for index, name in enumerate(node.outputs):
            if not name or name in known:
                continue
            told = stated.get(name) or Value(name)
            dtype, dims = told.dtype, told.dims
            if dtype == UNKNOWN:
                dtype = _infer_dtype(node, index, taken)
            if dims is None:
                dims = _infer_dims(node, taken, constants)
                # A file that is made for it could double the rank with every node.
                dims = None if dims is not None and len(dims) > _MAX_RANK else dims
            known[name] = Value(name, dtype, dims)
    return known


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators of the standard domain, and ONNX Runtime's own that its optimiser puts in their place, whose first output has
#: the dtype of their inputs.
_SAME_DTYPE = _words(
    "Abs Add BiasGelu BiasSplitGelu BitShift Ceil Clip Concat Conv ConvTranspose Cos CumSum DFT DepthToSpace Div Dropout "
    "Einsum Elu Erf Exp Expand FastGelu Flatten Floor FusedConv FusedGemm FusedMatMul Gather GatherElements GatherND Gelu "
    "Gemm HardSigmoid HardSwish Identity LayerNormalization LeakyRelu Log LogSoftmax MatMul MatMulNBits Max Mean Min Mod "
    "Mul Neg Pad Pow QuickGelu RMSNormalization Range Reciprocal ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean "
    "ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize Round ScatterElements ScatterND Sigmoid Sign "
    "SimplifiedLayerNormalization Sin SkipLayerNormalization SkipSimplifiedLayerNormalization Slice Softmax Softplus "
    "SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh TensorScatter Tile TopK Transpose Trilu Unsqueeze"
)
#: Of those, the ones whose inputs all have one dtype, so that any of them tells it.
_ALL_ALIKE = _words("Add Concat Div Gemm FusedGemm FusedMatMul MatMul Max Mean Min Mod Mul Range Sub Sum")
_BOOLEAN = _words("And Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Not Or Xor")
_INT64 = _words("ArgMax ArgMin NonZero Shape Size")
#: Operators whose output has as many axes as their inputs, broadcast.
_BROADCAST = _words(
    "Add And BiasGelu BitShift Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min Mod Mul Or Pow Sub Sum Where "
    "Xor"
)
#: Operators whose outputs have the shape of the first input.
_SAME_DIMS = _words(
    "Abs Cast CastLike Ceil Clip Cos CumSum Dropout Elu Erf Exp FastGelu Floor Gelu HardSigmoid HardSwish Identity IsInf "
    "IsNaN LayerNormalization LeakyRelu Log LogSoftmax Neg Not QuickGelu RMSNormalization Reciprocal Relu Round ScatterElements "
    "ScatterND Sigmoid Sign SimplifiedLayerNormalization Sin Softmax Softplus Sqrt Tan Tanh TensorScatter Trilu"
)
#: Operators whose outputs have as many axes as the first input.
_SAME_RANK = _words("Conv ConvTranspose DFT FusedConv Pad Slice Split Tile TopK Transpose")
_DOMAINS = ("", "com.microsoft")


def _infer_dtype(node: Node, index: int, taken: list[Value]) -> str:
    op, dtypes = node.op_type, [value.dtype for value in taken]
    if node.domain not in _DOMAINS:
        return UNKNOWN
    first = dtypes[0] if dtypes else UNKNOWN
    if op in ("LayerNormalization", "TopK", "Dropout", "Clip") and index:
        return {"TopK": "int64", "Dropout": "bool", "LayerNormalization": "float32"}.get(op, UNKNOWN)
    if index and op != "Split":
        return UNKNOWN
    if op in _ALL_ALIKE:
        return next((dtype for dtype in dtypes if dtype != UNKNOWN), UNKNOWN)
    if op in _SAME_DTYPE:
        return first
    if op in _BOOLEAN:
        return "bool"
    if op in _INT64:
        return "int64"
    if op == "Cast":
        return _dtype(node.int_attribute("to", 0) or 0)
    if op == "ConstantOfShape":
        value = node.attributes.get("value")
        return value.dtype if isinstance(value, Tensor) else "float32"
    place = {"CastLike": 1, "Where": 1, "DequantizeLinear": 1, "OneHot": 2, "QuantizeLinear": 2}.get(op)
    return dtypes[place] if place is not None and place < len(dtypes) else UNKNOWN


def _infer_dims(node: Node, taken: list[Value], constants: Mapping[str, Tensor]) -> tuple[int | str | None, ...] | None:
    op = node.op_type
    if node.domain not in _DOMAINS or not taken:
        return None
    first = taken[0].dims
    if op == "Shape":
        return (_shape_length(node, first),)
    if op == "Size":
        return ()
    if op == "Range":
        return (None,)
    if op in _SAME_DIMS:
        return first
    if op in _SAME_RANK:
        return first and (None,) * len(first)
    if op in _BROADCAST:
        return _broadcast([value.dims for value in taken])
    if op == "Concat":
        return _concat(node, [value.dims for value in taken])
    if op in ("Reshape", "ConstantOfShape", "Expand"):
        shape = taken[0 if op == "ConstantOfShape" else min(1, len(taken) - 1)].dims
        length = shape[0] if shape is not None and len(shape) == 1 else None
        if not isinstance(length, int) or not 0 <= length <= _MAX_RANK:
            return None
        if op == "Expand":
            return None if first is None else (None,) * max(len(first), length)
        return (None,) * length
    if op in ("Unsqueeze", "Squeeze"):
        return _squeeze(node, first, _axes(node, constants), insert=op == "Unsqueeze")
    if op.startswith("Reduce") or op in ("ArgMax", "ArgMin"):
        return _reduced(node, first, _axes(node, constants))
    second = taken[1].dims if len(taken) > 1 else None
    if first is None or second is None:
        return None
    if op == "Gather":
        return (None,) * (len(first) - 1 + len(second)) if len(first) != 1 else second
    if op == "GatherElements":
        return second
    if op in ("MatMul", "FusedMatMul") and len(first) and len(second):
        return (None,) * (max(len(first), len(second), 2) - (len(first) == 1) - (len(second) == 1))
    if op in ("Gemm", "FusedGemm"):
        return (None, None)
    return None


def _axes(node: Node, constants: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """The axes an operator works on, by attribute (old opsets) or constant input; None where that is not said."""
    if len(node.inputs) > 1 and node.inputs[1]:
        tensor = constants.get(node.inputs[1])
        return None if tensor is None else tensor.values
    axis = node.int_attribute("axis")
    return node.ints_attribute("axes") or (None if axis is None else (axis,))


def _shape_length(node: Node, dims: tuple[int | str | None, ...] | None) -> int | None:
    if dims is None:
        return None
    return len(range(*slice(node.int_attribute("start", 0), node.int_attribute("end")).indices(len(dims))))


def _broadcast(shapes: list[tuple[int | str | None, ...] | None]) -> tuple[int | str | None, ...] | None:
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes):
        return None
    rank = max(map(len, known))
    found: list[int | str | None] = []
    for axis in range(rank):
        sizes = {shape[axis - rank + len(shape)] for shape in known if axis >= rank - len(shape)} - {1}
        found.append(1 if not sizes else sizes.pop() if len(sizes) == 1 else None)
    return tuple(found)


def _concat(node: Node, shapes: list[tuple[int | str | None, ...] | None]) -> tuple[int | str | None, ...] | None:
    ranks = {len(shape) for shape in shapes if shape is not None}
    if ranks != {1}:
        return (None,) * ranks.pop() if len(ranks) == 1 else None
    total = 0
    for shape in shapes:
        size = shape[0] if shape is not None else None
        if not isinstance(size, int):
            return (None,)
        total += size
    return (total,)


def _squeeze(
    node: Node, dims: tuple[int | str | None, ...] | None, axes: tuple[int, ...] | None, *, insert: bool
) -> tuple[int | str | None, ...] | None:
    if dims is None or axes is None:
        return None
    rank = len(dims) + len(axes) if insert else len(dims)
    places = {axis % rank for axis in axes} if rank else set()
    if insert:
        rest = iter(dims)
        return tuple(1 if axis in places else next(rest, None) for axis in range(rank))
    return tuple(size for axis, size in enumerate(dims) if axis not in places)


def _reduced(
    node: Node, dims: tuple[int | str | None, ...] | None, axes: tuple[int, ...] | None
) -> tuple[int | str | None, ...] | None:
    if dims is None:
        return None
    arg = node.op_type in ("ArgMax", "ArgMin")
    keep = node.int_attribute("keepdims", 1)
    if not axes:
        # No axes at all means all of them, unless the operator is told otherwise or they are computed.
        computed = axes is None and len(node.inputs) > 1 and bool(node.inputs[1])
        if computed or node.int_attribute("noop_with_empty_axes", 0):
            return (None,) * len(dims) if keep else None
        axes = (0,) if arg else tuple(range(len(dims)))
    if not keep:
        return (None,) * max(0, len(dims) - len(axes))
    places = {axis % len(dims) for axis in axes} if dims else set()
    return tuple(1 if place in places else size for place, size in enumerate(dims))
