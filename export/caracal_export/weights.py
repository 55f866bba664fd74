"""The one weight file of a bundle, and graphs that refer to it instead of holding weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import safetensors.numpy
import torch
from caracal_runtimes.safetensors_file import SafetensorsFile

from caracal import CaracalModel
from caracal_export.errors import VerificationError
from caracal_export.graph_model import layout_of

WEIGHTS_FILE = "weights.safetensors"


def write_weights(graph: ir.Model, folder: Path) -> None:
    """Writes all initializers of a graph to `weights.safetensors` under their own names."""
    tensors = {}
    for name, value in sorted(graph.graph.initializers.items()):
        assert value.const_value is not None
        tensors[name] = np.ascontiguousarray(value.const_value.numpy())
    safetensors.numpy.save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "caracal-bundle"})


def refer_to_weights(graph: ir.Model, folder: Path) -> None:
    """Makes every initializer of a graph a reference into `weights.safetensors` (ONNX external data), in place."""
    entries = SafetensorsFile.open(folder / WEIGHTS_FILE).entries
    for name, value in graph.graph.initializers.items():
        assert value.dtype is not None and value.shape is not None
        entry = entries[name]
        value.const_value = ir.ExternalTensor(
            WEIGHTS_FILE, entry.offset, entry.bytes, value.dtype, shape=value.shape, name=name, base_dir=folder
        )


def compare_weights(model: CaracalModel, onnx_file: Path) -> int:
    """Checks, value by value, that a written graph reads the checkpoint's weights, each in its place.

    Every initializer must be a parameter of the model and the other way round; its bytes are read where the graph says
    they are, brought back to the checkpoint's layout and compared bit for bit.

    Returns:
        How many tensors were compared.

    Raises:
        VerificationError: naming the first tensor that is missing, unknown, or differs.
    """
    graph = ir.load(onnx_file)
    wanted = dict(model.named_parameters())
    found = graph.graph.initializers
    if odd := sorted(wanted.keys() ^ found.keys()):
        where = "the graph does not use" if odd[0] in wanted else "the graph has and the checkpoint has not:"
        raise VerificationError(f"weights: {where} {odd[0]} ({len(odd)} such)")
    stored = SafetensorsFile.open(onnx_file.parent / WEIGHTS_FILE).entries
    for name, parameter in wanted.items():
        tensor = found[name].const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.location != WEIGHTS_FILE:
            raise VerificationError(f"weights: {name} lies inside the graph, expected it in {WEIGHTS_FILE}")
        if name not in stored or tensor.offset != stored[name].offset:
            raise VerificationError(f"weights: the graph reads {name} from another place than {WEIGHTS_FILE} has it")
        got = layout_of(name).from_graph(torch.from_numpy(np.array(tensor.numpy())), model.config)
        if got.shape != parameter.shape:
            raise VerificationError(
                f"weights: {name} has shape {list(got.shape)}, the checkpoint {list(parameter.shape)}"
            )
        differs = got.contiguous().view(torch.int32) != parameter.detach().contiguous().view(torch.int32)
        if differs.any():
            first = [int(i) for i in differs.nonzero()[0]]
            largest = float((got - parameter).abs().max())
            raise VerificationError(
                f"weights: {name} differs from the checkpoint in {int(differs.sum())} of {differs.numel()} values, first at "
                f"{first}, by up to {largest:.3g}"
            )
    return len(wanted)
