"""The weight files of a bundle, written tensor by tensor, and graphs that refer to them instead of holding weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
import torch
from caracal_runtimes.errors import InputError
from caracal_runtimes.safetensors_file import SafetensorsFiles, TensorEntry, header_bytes
from caracal_runtimes.sizes import format_bytes
from numpy.typing import NDArray

from caracal import CaracalConfig
from caracal_export.errors import VerificationError
from caracal_export.graph_model import layout_of

WEIGHTS_FILE = "weights.safetensors"
#: Smaller files would hold little but their own headers.
MIN_SHARD_BYTES = 1000

_METADATA = {"format": "caracal-bundle"}
_DTYPE, _FLOAT = "F32", 4
_CHUNK = 64 << 20  # bytes that are written between two reports

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class WeightFile:
    """A file that is to be written: its size, and where each tensor lies in it, in the file's order."""

    name: str
    bytes: int
    tensors: dict[str, TensorEntry]


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


def plan_files(shapes: Shapes, max_shard_bytes: int | None) -> list[WeightFile]:
    """Deals float32 tensors out to files: sorted by name, a new file where the next would make the last too large.

    Args:
        shapes: of all tensors in the bundle's layout, by name.
        max_shard_bytes: how large a file may become, its header included; None puts everything into one. A tensor that
            is larger than this gets a file of its own, for it cannot be split.

    Returns:
        One file `weights.safetensors`, or several `weights-00001-of-00003.safetensors`.

    Raises:
        InputError: the limit is too small to make sense.
    """
    check_shard_size(max_shard_bytes)
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    for name in sorted(shapes):
        grown = {**groups[-1], name: tuple(shapes[name])}
        if groups[-1] and max_shard_bytes is not None and _planned("", grown).bytes > max_shard_bytes:
            groups.append({name: tuple(shapes[name])})
        else:
            groups[-1] = grown
    if len(groups) == 1:
        return [_planned(WEIGHTS_FILE, groups[0])]
    stem, suffix = WEIGHTS_FILE.split(".")
    return [
        _planned(f"{stem}-{number:05}-of-{len(groups):05}.{suffix}", group) for number, group in enumerate(groups, 1)
    ]


def check_shard_size(max_shard_bytes: int | None) -> None:
    """Refuses a limit that is no number of bytes or too small. Raises InputError."""
    if max_shard_bytes is None:
        return
    if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < MIN_SHARD_BYTES:
        raise InputError(
            f"--max-shard-size: expected at least {format_bytes(MIN_SHARD_BYTES)}, found {max_shard_bytes!r:.60}; "
            f"weights are often split at 2GB or 4GB"
        )


def write_files(
    files: Sequence[WeightFile],
    read: Callable[[str], NDArray[np.float32]],
    folder: Path,
    progress: Callable[[int, int], None],
) -> None:
    """Writes planned files with one tensor in memory at a time.

    Args:
        files: from `plan_files`.
        read: gives a tensor in the bundle's layout; called once for each, in the order of the files.
        folder: where the files go.
        progress: called with bytes of tensors written and their total.

    Raises:
        InputError: a tensor has not the shape that was planned, or is not float32.
        OSError: a write failed.
    """
    total = sum(entry.bytes for file in files for entry in file.tensors.values())
    done = 0

    def count(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    progress(0, total)
    for file in files:
        with (folder / file.name).open("wb") as out:
            out.write(_header({name: entry.shape for name, entry in file.tensors.items()}))
            for name, entry in file.tensors.items():
                _write_tensor(out, name, entry, read, count)


def refer_to_weights(graph: ir.Model, files: Sequence[WeightFile], folder: Path) -> None:
    """Makes every initializer of a graph a reference into the weight files (ONNX external data), in place.

    Raises:
        VerificationError: an initializer is none of the weights.
    """
    places = {name: (file.name, entry) for file in files for name, entry in file.tensors.items()}
    for name, value in graph.graph.initializers.items():
        if name not in places:
            raise VerificationError(f"weights: the graph has and the checkpoint has not: {name}")
        assert value.dtype is not None and value.shape is not None
        location, entry = places[name]
        value.const_value = ir.ExternalTensor(
            location, entry.offset, entry.bytes, value.dtype, shape=value.shape, name=name, base_dir=folder
        )


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


def _planned(name: str, shapes: Shapes) -> WeightFile:
    place = len(_header(shapes))
    tensors = {}
    for tensor, shape in shapes.items():
        size = _FLOAT * math.prod(shape)
        tensors[tensor] = TensorEntry(_DTYPE, shape, place, size)
        place += size
    return WeightFile(name, place, tensors)


def _header(shapes: Shapes) -> bytes:
    return header_bytes({name: (_DTYPE, shape) for name, shape in shapes.items()}, _METADATA)


def _write_tensor(
    out: BinaryIO,
    name: str,
    entry: TensorEntry,
    read: Callable[[str], NDArray[np.float32]],
    count: Callable[[int], None],
) -> None:
    tensor = read(name)
    if tensor.dtype != np.dtype("<f4") or tensor.shape != entry.shape:
        raise InputError(
            f"weights: expected {name} as float32 {list(entry.shape)}, found {tensor.dtype} {list(tensor.shape)}; the "
            f"checkpoint may have changed while it was read, export it again"
        )
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    for start in range(0, entry.bytes, _CHUNK):
        count(out.write(data[start : start + _CHUNK].data))


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
