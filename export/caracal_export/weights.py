"""The weights of a checkpoint as a bundle has them, and graphs that refer to them instead of holding them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from caracal_runtimes.safetensors_file import SafetensorsFiles
from numpy.typing import NDArray

from caracal import CaracalConfig
from caracal_export.errors import VerificationError
from caracal_export.graph_model import layout_of

Shapes = Mapping[str, tuple[int, ...]]


def graph_shapes(shapes: Shapes, config: CaracalConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of parameters as they lie in the bundle.

    Args:
        shapes: of the checkpoint's parameters, by name.
        config: of the model.
    """
    return {
        name: tuple(layout_of(name).to_graph(torch.empty(shape, device="meta"), config).shape)
        for name, shape in shapes.items()
    }


def graph_weight(name: str, parameter: torch.Tensor, config: CaracalConfig) -> NDArray[np.float32]:
    """A parameter of the checkpoint as it lies in the bundle; a copy only where that is another layout."""
    weight: NDArray[np.float32] = layout_of(name).to_graph(parameter.detach(), config).contiguous().numpy()
    return weight


def compare_weights(
    graphs: Sequence[Path],
    files: Sequence[str],
    names: Collection[str],
    parameter: Callable[[str], torch.Tensor],
    config: CaracalConfig,
) -> int:
    """Checks, value by value, that written graphs read the checkpoint's weights, each in its place.

    Every initializer must be a parameter of the checkpoint and the other way round, and be read from where the header of
    a weight file has its name. The bytes there are brought back to the checkpoint's layout and compared bit for bit.

    Args:
        graphs: `.onnx` files of one folder, which all read the same weights.
        files: names of the weight files in that folder.
        names: of the checkpoint's parameters.
        parameter: gives one of them, float32 in the checkpoint's layout; called once for each.
        config: of the model.

    Returns:
        How many tensors were compared.

    Raises:
        VerificationError: naming the first tensor that is missing, unknown, or differs.
        BundleError: a weight file is damaged, or two have the same tensor.
    """
    stored = SafetensorsFiles.open(graphs[0].parent / file for file in files)
    if unread := sorted(stored.holders.keys() - set(names)):
        where = stored.holders[unread[0]].path.name
        raise VerificationError(f"weights: {where} has {unread[0]}, the checkpoint has not ({len(unread)} such)")
    reads = [_references(graph, names, stored) for graph in graphs]
    for name in sorted(names):
        # All graphs read this place, as was just checked; the first is asked for its bytes.
        tensor = reads[0][name]
        got = layout_of(name).from_graph(torch.from_numpy(np.array(tensor.numpy())), config)
        tensor.release()
        _compare(name, got, parameter(name))
    return len(names)


def _references(graph: Path, names: Collection[str], stored: SafetensorsFiles) -> dict[str, ir.ExternalTensor]:
    """A graph's weights, all of which are in the files where the graph looks for them."""
    found = ir.load(graph).graph.initializers
    if odd := sorted(set(names) ^ found.keys()):
        where = "the graph does not use" if odd[0] in names else "the graph has and the checkpoint has not:"
        raise VerificationError(f"weights: {where} {odd[0]} ({len(odd)} such)")
    references = {}
    for name in names:
        tensor = found[name].const_value
        if not isinstance(tensor, ir.ExternalTensor):
            raise VerificationError(
                f"weights: {name} lies inside the graph {graph.name}, expected it in a file beside it"
            )
        file = stored.holders.get(name)
        if file is None:
            raise VerificationError(f"weights: {graph.name} reads {name} from {tensor.location}, no weight file has it")
        entry = file.entries[name]
        if (str(tensor.location), tensor.offset, tensor.length) != (file.path.name, entry.offset, entry.bytes):
            raise VerificationError(
                f"weights: {graph.name} reads {name} from another place ({tensor.location}, offset {tensor.offset}) than "
                f"where it is ({file.path.name}, offset {entry.offset})"
            )
        if tensor.dtype != ir.DataType.FLOAT or tensor.shape.numpy() != entry.shape:
            raise VerificationError(
                f"weights: {graph.name} reads {name} as {tensor.dtype.name.lower()} {list(tensor.shape.numpy())}, "
                f"{file.path.name} has it as {entry.dtype} {list(entry.shape)}"
            )
        references[name] = tensor
    return references


def _compare(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if got.shape != wanted.shape:
        raise VerificationError(f"weights: {name} has shape {list(got.shape)}, the checkpoint {list(wanted.shape)}")
    # As integers: a NaN is equal to itself and the two zeros are not.
    differs = got.contiguous().view(torch.int32) != wanted.detach().contiguous().view(torch.int32)
    if differs.any():
        first = [int(i) for i in differs.nonzero()[0]]
        largest = float((got - wanted).abs().max())
        raise VerificationError(
            f"weights: {name} differs from the checkpoint in {int(differs.sum())} of {differs.numel()} values, first at "
            f"{first}, by up to {largest:.3g}"
        )
