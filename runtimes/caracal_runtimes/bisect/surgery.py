"""Cutting graphs: values made outputs, nodes taken out alone or with those around them, values put in from outside."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from caracal_runtimes.errors import BundleError, NotRunError
from caracal_runtimes.manifest import GraphSpec, TensorSpec, safe_name
from caracal_runtimes.session import first_line

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto

Values = Mapping[str, NDArray[Any]]
_MAX_FILE = 2**31 - 2**20  # protobuf's limit, with room for the nodes


class Surgeon:
    """A graph whose nodes can be taken apart. Nothing here alters it; every cut is a new model.

    Attributes:
        nodes: all nodes, in the file's order, which is one in which they can run.
        steps: indices of those that compute; a `Constant` goes with whoever reads it.
        producer: which of them gives a value.
        outputs: names of the graph's outputs.
    """

    def __init__(self, path: Path) -> None:
        onnx = import_onnx()
        try:
            self.model: ModelProto = onnx.load(str(path), load_external_data=False)
        except Exception as error:  # noqa: BLE001 - protobuf's errors are no part of an interface
            raise BundleError(f"{path.name} cannot be read as ONNX ({first_line(error)})") from None
        graph = self.model.graph
        self.name = path.name
        self.nodes: list[NodeProto] = list(graph.node)
        self.steps = [index for index, node in enumerate(self.nodes) if node.op_type != "Constant"]
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._inputs = {value.name: value for value in graph.input if value.name not in self._initializers}
        self.outputs = [value.name for value in graph.output]
        self.producer = {name: index for index in self.steps for name in self.nodes[index].output if name}
        self._constants = {
            name: index for index, node in enumerate(self.nodes) if node.op_type == "Constant" for name in node.output
        }
        self._types = self._inferred()

    def given(self) -> list[str]:
        """Names of the graph's inputs."""
        return list(self._inputs)

    def key(self, index: int) -> str:
        """A node's name, or `#index` for one that has none."""
        return self.nodes[index].name or f"#{index}"

    def results(self, index: int) -> list[str]:
        """What a node gives."""
        return [name for name in self.nodes[index].output if name]

    def reads(self, index: int) -> list[str]:
        """What a node is computed from: the graph's inputs and other nodes' values; no weights and constants."""
        return [
            name for name in dict.fromkeys(_reads(self.nodes[index])) if name in self.producer or name in self._inputs
        ]

    def values(self) -> list[str]:
        """All values that nodes compute, in order."""
        return [name for index in self.steps for name in self.results(index)]

    def parents(self) -> dict[str, list[str]]:
        """What each value is computed from."""
        return {name: reads for index in self.steps for reads in (self.reads(index),) for name in self.results(index)}

    def around(self, index: int, steps: int) -> list[int]:
        """A node and those that lie at most so many steps before it."""
        found, edge = {index}, {index}
        for _ in range(steps):
            edge = {self.producer[name] for node in edge for name in self.reads(node) if name in self.producer} - found
            found |= edge
        return sorted(found)

    def tapped(self, names: Iterable[str]) -> ModelProto:
        """The whole graph, with more values as outputs."""
        model = self._copy()
        for name in names:
            if name not in self.outputs:
                model.graph.output.append(self._value_info(name, {}))
        return model

    def injected(self, names: Collection[str], values: Values) -> ModelProto:
        """The whole graph, with values taken from outside that it would compute; whoever else needs them gets these."""
        model = self._copy()
        graph = model.graph
        for node in graph.node:
            for place, name in enumerate(node.output):
                if name in names:
                    node.output[place] = f"{name}/computed"
        for name in names:
            graph.input.append(self._value_info(name, values))
        # An output that comes from outside is no output of the computation, and some runtimes refuse one.
        kept = [value for value in graph.output if value.name not in names]
        del graph.output[:]
        graph.output.extend(kept)
        return model

    def extract(
        self, groups: Sequence[Sequence[int]], outputs: Sequence[str], values: Values, *, suffix: str = ""
    ) -> ModelProto:
        """Groups of nodes by themselves: what comes from outside of its group becomes an input of the model.

        Args:
            groups: indices of nodes; a node is in one group at most.
            outputs: values that the groups compute and the model gives.
            values: arrays, for the types of inputs that the graph does not tell.
            suffix: goes after the name of every value that a group computes, so that other groups can read the same
                value from outside.
        """
        import onnx

        nodes: list[NodeProto] = []
        wanted: dict[str, None] = {}
        constants: dict[int, None] = {}
        for group in groups:
            inside = {name for index in group for name in self.results(index)}
            for index in group:
                node = onnx.NodeProto()
                node.CopyFrom(self.nodes[index])
                for name in _reads(node):
                    if name in self._constants:
                        constants[self._constants[name]] = None
                    elif name not in inside:
                        wanted[name] = None
                for place, name in enumerate(node.input):
                    if name in inside:
                        node.input[place] = name + suffix
                for place, name in enumerate(node.output):
                    if name:
                        node.output[place] = name + suffix
                nodes.append(node)
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        model.ClearField("graph")
        graph = onnx.helper.make_graph(
            [*(self.nodes[index] for index in constants), *nodes],
            self.model.graph.name,
            [self._value_info(name, values) for name in wanted if name not in self._initializers],
            [self._value_info(name, values, suffix) for name in outputs],
            [self._initializers[name] for name in wanted if name in self._initializers],
        )
        model.graph.CopyFrom(graph)
        return model

    def prefix(self, count: int) -> ModelProto:
        """The first nodes that compute, with everything as outputs that none of them uses."""
        group = self.steps[:count]
        return self.extract([group], self.ends(group), {})

    def ends(self, group: Sequence[int]) -> list[str]:
        """What nodes compute and none of them uses, and the graph's own outputs among the rest."""
        used = {name for index in group for name in _reads(self.nodes[index])}
        return [name for index in group for name in self.results(index) if name not in used or name in self.outputs]

    def inputs_of(self, group: Sequence[int]) -> list[str]:
        """What nodes read from outside of their group."""
        inside = {name for index in group for name in self.results(index)}
        return list(dict.fromkeys(name for index in group for name in self.reads(index) if name not in inside))

    def _copy(self) -> ModelProto:
        import onnx

        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        return model

    def _inferred(self) -> dict[str, ValueInfoProto]:
        import onnx

        graph = self.model.graph
        try:
            inferred = onnx.shape_inference.infer_shapes(self.model, data_prop=True).graph
            found = {value.name: value for value in inferred.value_info}
        except Exception:  # noqa: BLE001 - without it types come from the file and from the values
            found = {}
        told = [*graph.value_info, *graph.input, *graph.output]
        return found | {value.name: value for value in told}

    def _value_info(self, name: str, values: Values, suffix: str = "") -> ValueInfoProto:
        """Name and type of a value. Sizes stay symbolic where they are, lest a fixed one hides what depends on it."""
        import onnx

        known = self._types.get(name)
        if known is not None and known.type.tensor_type.elem_type:
            copy = onnx.ValueInfoProto()
            copy.CopyFrom(known)
            copy.name = name + suffix
            tensor = copy.type.tensor_type
            if name in values and not _fits(copy, values[name].shape):
                tensor.ClearField("shape")
                self._any_size(copy, values[name].ndim)
            for axis, dim in enumerate(tensor.shape.dim):
                if not dim.HasField("dim_value") and not dim.dim_param.isidentifier():
                    # An expression of axes, or nothing: a name of its own makes no claim.
                    dim.dim_param = f"{_identifier(name)}_{axis}"
            return copy
        value = values.get(name)
        if value is None:
            return onnx.helper.make_empty_tensor_value_info(name + suffix)
        copy = onnx.helper.make_tensor_value_info(
            name + suffix, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), [None] * value.ndim
        )
        self._any_size(copy, value.ndim)
        return copy

    @staticmethod
    def _any_size(value: ValueInfoProto, rank: int) -> None:
        shape = value.type.tensor_type.shape
        del shape.dim[:]
        value.type.tensor_type.shape.SetInParent()
        for axis in range(rank):
            shape.dim.add().dim_param = f"{_identifier(value.name)}_{axis}"


def spec_of(model: ModelProto, file: str) -> GraphSpec:
    """What a manifest would say of a graph."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    return GraphSpec(file, opset, "", _specs(model.graph.input), _specs(model.graph.output))


def inlined(model: ModelProto, folder: Path) -> ModelProto:
    """A copy with its weights inside.

    Args:
        model: a graph.
        folder: where the files lie that it refers to.

    Raises:
        BundleError: the weights cannot be read or are too many for one file.
    """
    import onnx

    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    size = 0
    for tensor in whole.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            told = {entry.key: entry.value for entry in tensor.external_data}
            # Read here: the package refuses a file that has a second name, which a bundle's file may well have.
            file = folder / safe_name(told.get("location"), f"{tensor.name}: the weights' file")
            try:
                with file.open("rb") as data:
                    data.seek(int(told.get("offset", 0)))
                    tensor.raw_data = data.read(int(told["length"]) if "length" in told else -1)
            except (OSError, ValueError) as error:
                raise BundleError(f"the weights cannot be read ({first_line(error)})") from None
            del tensor.external_data[:]
            tensor.data_location = onnx.TensorProto.DEFAULT
        size += len(tensor.raw_data)
        if size >= _MAX_FILE:
            raise BundleError("the cut-out graph's weights take more than 2 GiB, which is too much for one ONNX file")
    return whole


def import_onnx() -> Any:
    """The package `onnx`. Raises NotRunError that says how to install it."""
    try:
        import onnx
    except ImportError as error:
        raise NotRunError(
            f"cutting graphs needs the package onnx ({error}): pip install 'caracal-onnx[bisect]'"
        ) from None
    return onnx


def _reads(node: NodeProto) -> Iterator[str]:
    """Names that a node reads, those that its subgraphs take from outside included."""
    for name in node.input:
        if name:
            yield name
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            yield from _outer(graph)


def _outer(graph: GraphProto) -> Iterator[str]:
    inside = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        for name in _reads(node):
            if name not in inside:
                yield name
        inside.update(node.output)
    for value in graph.output:
        if value.name and value.name not in inside:
            yield value.name


def _specs(values: Iterable[ValueInfoProto]) -> tuple[TensorSpec, ...]:
    import onnx

    found = []
    for value in values:
        tensor = value.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name if tensor.elem_type else "float32"
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim)
        found.append(TensorSpec(value.name, dtype, shape))
    return tuple(found)


def _fits(value: ValueInfoProto, shape: tuple[int, ...]) -> bool:
    tensor = value.type.tensor_type
    if not tensor.HasField("shape") or len(tensor.shape.dim) != len(shape):
        return False
    return all(
        not dim.HasField("dim_value") or dim.dim_value == size
        for dim, size in zip(tensor.shape.dim, shape, strict=True)
    )


def _identifier(name: str) -> str:
    return "".join(character if character.isalnum() else "_" for character in name)
