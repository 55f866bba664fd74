"""Opsets of a bundle's graphs: which there may be, and turning a graph into one of another."""

from __future__ import annotations

import onnx
import onnx_ir as ir
from caracal_runtimes.errors import InputError

from caracal_export import passes

TRACED_OPSET = 18
OPSETS = range(17, 24)
# The oldest IR that may carry an opset: a newer one would keep older runtimes from loading a graph that they can run.
IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}


def retarget(model: ir.Model, opset: int) -> ir.Model:
    """The same graph for another opset.

    Opset 17 has every operator used here with the same meaning, but for one attribute of Split. Later ones go through
    ONNX's own converter (the DFT's axis becomes an input at 20, for instance).
    """
    if opset == TRACED_OPSET:
        return model
    if opset not in OPSETS:
        raise InputError(f"--opset must be from {OPSETS.start} to {OPSETS.stop - 1}, found {opset}")
    if opset < TRACED_OPSET:
        for node in model.graph:
            if node.op_type == "Split":
                node.attributes.pop("num_outputs", None)  # opset 17 splits evenly over the outputs there are
        model.graph.opset_imports[""] = opset
        return model
    weights = {name: value.const_value for name, value in model.graph.initializers.items()}
    for value in model.graph.initializers.values():  # the converter needs no data, and copies what it gets
        assert value.shape is not None and value.dtype is not None
        value.const_value = ir.ExternalTensor("none", 0, 0, value.dtype, shape=value.shape, name=value.name or "")
    converted = onnx.version_converter.convert_version(ir.to_proto(model), opset)
    result = ir.from_proto(converted)
    for name, tensor in weights.items():
        result.graph.initializers[name].const_value = tensor
    passes.settle_after_conversion(result)
    result.ir_version = IR_VERSIONS[opset]
    return result
