"""From the reference model to a clean ONNX graph in memory, weights still attached."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import onnx
import onnx_ir as ir
import torch
from caracal_runtimes.errors import InputError

from caracal import CaracalConfig, CaracalModel
from caracal_export import passes
from caracal_export.graph_model import ForwardGraph
from caracal_export.lowerings import translation_table

TRACED_OPSET = 18
OPSETS = range(17, 24)
# The oldest IR that may carry an opset: a newer one would keep older runtimes from loading a graph that they can run.
_IR_VERSIONS = {17: 8, 18: 8, 19: 9, 20: 9, 21: 10, 22: 10, 23: 11}


def trace_forward(model: CaracalModel, mixing: str, opset: int) -> ir.Model:
    """Traces the forward graph: `input_ids` [batch, length], `lengths` [batch], `logit_positions` [batch, positions] -> `logits`.

    Args:
        model: float32, in eval mode.
        mixing: `matmul` or `dft`.
        opset: within `OPSETS`.

    Returns:
        A graph in which batch, length and positions are symbolic, named after the modules it came from.
    """
    config: CaracalConfig = model.config
    graph = ForwardGraph.from_reference(model, config)
    example = tuple(torch.zeros(*shape, dtype=torch.int64) for shape in ((2, 5), (2,), (2, 3)))
    shapes = {
        "input_ids": {0: "batch", 1: "length"},
        "lengths": {0: "batch"},
        "logit_positions": {0: "batch", 1: "positions"},
    }
    with _quiet():
        program = torch.onnx.export(
            graph,
            example,
            input_names=list(shapes),
            output_names=["logits"],
            dynamic_shapes=shapes,
            custom_translation_table=translation_table(mixing),
            opset_version=TRACED_OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    traced = program.model
    passes.clean(traced)
    traced.graph.name = "forward"
    traced.ir_version = _IR_VERSIONS[TRACED_OPSET]
    traced.producer_name, traced.producer_version = "caracal-onnx", None
    return retarget(traced, opset)


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
                del node.attributes["num_outputs"]  # opset 17 splits evenly over the outputs there are
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
    result.ir_version = _IR_VERSIONS[opset]
    return result


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the tracer's remarks about its own internals away from users; errors still come through."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
