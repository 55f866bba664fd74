"""All layers of a graph from the trace of a few: tracing takes longest by far, and a layer is traced like every other of its kind.

What is traced is the model's first layer, then one of each kind that follows it (`few_layers`). In the traced graph the nodes of a
layer are those in its scope that depend on a weight or on the state; the rest, the transform's tables and the attention's mask, all
layers share. `unroll` repeats the nodes of a kind for each of its layers, with that layer's weights and state, and hands the hidden
states from one to the next. The result is what tracing every layer gives, node for node (tests/export/test_unrolling.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from caracal_export.passes import SCOPES

_BLOCK = re.compile(r"(blocks|past|present)\.(\d+)(?=[.']|$)")


class UnrollingError(AssertionError):
    """A traced graph is not what `unroll` expects of one: a fault of the exporter, never of its input."""


def few_layers(kinds: Sequence[str]) -> list[int]:
    """Indices of the layers to trace: the first, and the first of each kind after it."""
    return [0, *sorted({kind: index for index, kind in reversed(list(enumerate(kinds))) if index}.values())]


@dataclass(frozen=True)
class _Layer:
    """What is repeated: the nodes in their order, and the value that the next layer reads."""

    nodes: tuple[ir.Node, ...]
    hidden: ir.Value


def unroll(
    graph: ir.Graph,
    traced: Sequence[str],
    kinds: Sequence[str],
    weights: Mapping[str, torch.Tensor],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> None:
    """Makes a graph of all layers from one of a few, in place.

    Needs: the scopes of the tracer; sizes are read from inputs that are no state (`passes.untangle`).

    Args:
        graph: the traced one.
        traced: kinds of its layers, those of `few_layers`.
        kinds: kinds of all layers.
        weights: every parameter of the whole model by its name, in the order in which the graph is to have them.
        inputs: names of all inputs of the whole graph, in order.
        outputs: names of its outputs.

    Raises:
        UnrollingError: the traced layers are connected in another way than one behind the other.
    """
    source = [0, *(traced.index(kind, 1) for kind in kinds[1:])]  # of each layer, which traced one it repeats
    layers = _layers(graph, len(traced))
    in_layers = {node for layer in layers for node in layer.nodes}
    rest = [(node, _index(node)) for node in graph if node not in in_layers]
    known = {value.name: value for value in (*graph.inputs, *graph.initializers.values(), *graph.outputs)}
    # Of each layer, what became of the values of the traced one; the first stays as it is.
    made = [{value: value for node in layers[0].nodes for value in node.outputs}]
    last = layers[0].nodes[-1]
    for index, at in enumerate(source[1:], 1):
        entry = {layers[at - 1].hidden: made[-1][layers[source[index - 1]].hidden]}
        nodes, own = _repeat(layers[at], at, index, entry, known)
        if at in source[:index]:
            graph.insert_after(last, nodes)
        else:  # Among what it shares with others, where the tracer put it.
            for node, clone in zip(layers[at].nodes, nodes, strict=True):
                graph.insert_after(node, clone)
        last = nodes[-1]
        made.append(own)
    owners = {value: at for at, layer in enumerate(layers) for node in layer.nodes for value in node.outputs}
    for node, traced_in in rest:
        if traced_in is None:
            _reconnect(node, owners, [layer.hidden for layer in layers], source, made)
        elif traced_in:  # what all layers share is named after the first that has it
            _rename(node, traced_in, source.index(traced_in))
    graph.inputs[:] = [known[name] for name in inputs]
    graph.outputs[:] = [known[name] for name in outputs]
    graph.remove([node for layer in layers[1:] for node in layer.nodes], safe=True)
    graph.initializers.clear()
    for name in weights:
        value = known[name]
        value.const_value = TorchTensor(weights[name], name=name)
        graph.initializers[name] = value


def _layers(graph: ir.Graph, count: int) -> list[_Layer]:
    """The layers of a traced graph."""
    shared = {value for value in graph.inputs if not str(value.name).startswith("past.")}
    nodes: list[list[ir.Node]] = [[] for _ in range(count)]
    for node in graph:
        if all(value is None or value in shared for value in node.inputs):
            shared.update(node.outputs)
            continue
        index = _index(node)
        if index is not None:
            nodes[index].append(node)
    layers: list[_Layer] = []
    for index, own in enumerate(nodes):
        if not own:
            raise UnrollingError(f"layer {index} of the traced graph has no nodes")
        inside = {value for node in own for value in node.outputs}
        for value in {value for node in own for value in node.inputs if value is not None}:
            foreign = _BLOCK.match(str(value.name))
            fits = (
                value in inside
                or value in shared
                or (foreign is not None and int(foreign[2]) == index and value.producer() is None)
                or (index > 0 and value is layers[-1].hidden)
                or (index == 0 and value.producer() is not None and _index(value.producer()) is None)
            )
            if not fits:
                raise UnrollingError(f"layer {index} of the traced graph reads {value.name}, which is not its own")
        (hidden,) = own[-1].outputs
        if any(use in own for use, _ in hidden.uses()) or not hidden.uses():
            raise UnrollingError(f"layer {index} of the traced graph does not end with what the next one reads")
        layers.append(_Layer(tuple(own), hidden))
    return layers


def _index(node: ir.Node | None) -> int | None:
    """The layer in whose scope a node was traced."""
    scopes = "" if node is None else node.metadata_props.get(SCOPES, "")
    found = re.search(r"'blocks\.(\d+)'", scopes)
    return None if found is None else int(found[1])


def _renamed(text: str, at: int, index: int) -> str:
    """Names of one layer, as those of another."""
    return _BLOCK.sub(lambda m: f"{m[1]}.{index}" if int(m[2]) == at else m[0], text)


def _rename(node: ir.Node, at: int, index: int) -> None:
    """Gives a node the scopes of another layer."""
    node.metadata_props.update({key: _renamed(text, at, index) for key, text in node.metadata_props.items()})


def _like(value: ir.Value, name: str | None) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type)


def _repeat(
    layer: _Layer,
    at: int,
    index: int,
    entry: Mapping[ir.Value, ir.Value],
    known: dict[str | None, ir.Value],
) -> tuple[list[ir.Node], dict[ir.Value, ir.Value]]:
    """A layer's nodes once more, as those of another layer, and what became of each value."""
    made, clones = dict(entry), []

    def stands_for(value: ir.Value | None) -> ir.Value | None:
        if value is None or value in made:
            return None if value is None else made[value]
        own = _BLOCK.match(str(value.name))
        if value.producer() is not None or own is None:
            return value  # shared
        name = _renamed(str(value.name), at, index)
        made[value] = known.setdefault(name, _like(value, name))
        return made[value]

    for node in layer.nodes:
        values = [_like(value, None) for value in node.outputs]
        for value, new in zip(node.outputs, values, strict=True):
            made[value] = new
            if value.is_graph_output():
                new.name = _renamed(str(value.name), at, index)
                known[new.name] = new
        clones.append(
            ir.Node(
                node.domain,
                node.op_type,
                [stands_for(value) for value in node.inputs],
                list(node.attributes.values()),
                overload=node.overload,
                outputs=values,
                version=node.version,
                metadata_props={key: _renamed(text, at, index) for key, text in node.metadata_props.items()},
            )
        )
    return clones, made


def _reconnect(
    node: ir.Node,
    owners: Mapping[ir.Value, int],
    hidden: Sequence[ir.Value],
    source: Sequence[int],
    made: Sequence[Mapping[ir.Value, ir.Value]],
) -> None:
    """Puts what follows the layers behind the last of them; where it reads something of every layer, it reads it of all.

    Args:
        node: traced outside of the layers.
        owners: the traced layer that each value belongs to.
        hidden: what each traced layer hands on.
        source: of each layer, the traced one that it repeats.
        made: of each layer, what became of the traced one's values.
    """
    read = [value for value in node.inputs if value is not None and value in owners]
    if not read:
        return
    if all(value is hidden[-1] for value in read):
        for place, value in enumerate(node.inputs):
            if value in owners:
                node.replace_input_with(place, made[-1][hidden[source[-1]]])
        return
    if node.op_type != "Concat" or len(read) != len(node.inputs):
        raise UnrollingError(f"{node.op_type} behind the layers reads something of a layer within the traced graph")
    wanted = [made[index][value] for index, at in enumerate(source) for value in read if owners[value] == at]
    axis = node.attributes["axis"].as_int()
    (output,) = node.outputs
    sizes = [value.shape[axis] for value in wanted if value.shape is not None]
    if output.shape is None or not all(isinstance(size, int) for size in sizes):
        raise UnrollingError(f"the sizes that {output.name} is made of are not known")
    shape = list(output.shape)
    shape[axis] = sum(size for size in sizes if isinstance(size, int))
    output.shape = ir.Shape(shape)
    node.resize_inputs(len(wanted))
    for place, value in enumerate(wanted):
        node.replace_input_with(place, value)
