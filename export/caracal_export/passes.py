"""Graph passes between tracing and writing. Each states what it needs and what it leaves behind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as common

#: Where the tracer notes the modules that a node comes from.
SCOPES = "pkg.torch.onnx.name_scopes"
_CONSTANT_LIMIT = 64  # elements up to which equal constants are merged
_SHARED = "lengths"  # scope of what depends on the lengths alone


def untangle(model: ir.Model) -> None:
    """Takes what hangs together only by the way it was traced apart, in place: no Identity, one source per length."""
    common.IdentityEliminationPass()(model)
    read_lengths_from_inputs(model)


def clean(model: ir.Model) -> None:
    """Runs all passes, in place: one source per length, no repeated and no dead node, readable names."""
    untangle(model)
    common.CommonSubexpressionEliminationPass(size_limit=_CONSTANT_LIMIT)(model)
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)
    name_by_scope(model)
    drop_tracing_metadata(model)


def settle_after_conversion(model: ir.Model) -> None:
    """Merges and names what ONNX's version converter added (one unnamed constant per DFT), in place."""
    common.CommonSubexpressionEliminationPass(size_limit=_CONSTANT_LIMIT)(model)
    added: Counter[str] = Counter()
    for node in model.graph:
        if node.name:
            continue
        base = f"{_SHARED}/Converted{node.op_type}"
        added[base] += 1
        _rename(node, base if added[base] == 1 else f"{base}_{added[base]}", fixed=frozenset())


def read_lengths_from_inputs(model: ir.Model) -> None:
    """Every read of a symbolic axis reads it from the graph input that has it.

    Needs: traced values carry the symbolic shapes of the tracer. Leaves: what depends on lengths alone (the transform's
    tables, the attention mask) hangs on one Shape node each, so that merging equal nodes leaves one copy for all layers.
    """
    sources: dict[str, tuple[ir.Value, int]] = {}
    for value in model.graph.inputs:
        for axis, dim in enumerate(value.shape or ()):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                sources.setdefault(dim.value, (value, axis))
    for node in model.graph:
        if node.op_type != "Shape" or node.inputs[0] is None or node.inputs[0].shape is None:
            continue
        start = node.attributes.get_int("start", 0)
        end = node.attributes.get_int("end", len(node.inputs[0].shape))
        if end != start + 1:
            continue
        dim = node.inputs[0].shape[start]
        if isinstance(dim, ir.SymbolicDim) and dim.value in sources:
            value, axis = sources[dim.value]
            node.replace_input_with(0, value)
            node.attributes["start"] = ir.AttrInt64("start", axis)
            node.attributes["end"] = ir.AttrInt64("end", axis + 1)


def name_by_scope(model: ir.Model) -> None:
    """Nodes and values are named after the module they come from, `blocks.3.mhf.value_proj/MatMul`.

    Needs: the tracer's scope metadata. Leaves: unique names; what depends on lengths alone is under `lengths/`; names
    of graph inputs, outputs and weights are untouched.
    """
    counts: Counter[str] = Counter()
    fixed = {id(value) for value in (*model.graph.inputs, *model.graph.outputs)}
    length_only: set[ir.Node] = set()
    for node in model.graph:
        producers = [value.producer() for value in node.inputs if value is not None]
        from_lengths = node.op_type in ("Shape", "Constant") or (
            bool(producers) and all(producer in length_only for producer in producers)
        )
        if from_lengths:
            length_only.add(node)
        scope = _SHARED if from_lengths else _scope(node)
        base = f"{scope}/{node.op_type}" if scope else node.op_type
        counts[base] += 1
        _rename(node, base if counts[base] == 1 else f"{base}_{counts[base]}", fixed)


def _rename(node: ir.Node, name: str, fixed: Collection[int]) -> None:
    """Names a node and its outputs, except values whose id is in `fixed`."""
    node.name = name
    for index, value in enumerate(node.outputs):
        if id(value) not in fixed:
            value.name = name if len(node.outputs) == 1 else f"{name}:{index}"


def drop_tracing_metadata(model: ir.Model) -> None:
    """Removes stack traces and tracer notes, which name files of the exporting machine."""
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        value.metadata_props.clear()


def _scope(node: ir.Node) -> str:
    """The dotted module path of a traced node, or the operator's name for what the model itself does.

    The tracer lists ['', 'blocks.3', 'blocks.3.mhf', ..., operator], operators numbered in the order in which they came.
    """
    scopes: list[str] = [scope for scope in re.findall(r"'([^']*)'", node.metadata_props.get(SCOPES, "")) if scope]
    if len(scopes) > 1:
        return scopes[-2]
    return re.sub(r"_\d+$", "", scopes[0]) if scopes else ""
