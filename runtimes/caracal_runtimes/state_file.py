"""Decode states on disk: one safetensors file, tied to the bundle that it belongs to.

The file's metadata has `format`, `version`, `bundle` (the bundle's id), `sha256` of all that comes after the header,
and `rows`: JSON with what is not a tensor. Tensors of row i, all float32 but the ids:

    i.ids        int64 [n]                tokens that were read
    i.streams    [N, 2, n, D]             v and g of each MHF layer
    i.pending    [N, m, D]                what they add to positions n .. n + m - 1
    i.conv, i.keys, i.values              see `Carried`
    i.logits     [V]                      after the last token
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.decode_graphs import Carried, DecodeGraphs
from caracal_runtimes.decode_state import Row, queue_for
from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.generation import Progress
from caracal_runtimes.history import History
from caracal_runtimes.safetensors_file import SafetensorsFile, write_safetensors
from caracal_runtimes.sampling import Generator
from caracal_runtimes.schedule import ALONE, SETTLED, Schedule
from caracal_runtimes.whole_file import replacing

FORMAT, VERSION = "caracal-state", 1


def save(path: Path, bundle_id: str, rows: Sequence[Row], progress: Progress) -> None:
    """Writes rows and their progress, whole or not at all. Raises InputError."""
    tensors: dict[str, NDArray[Any]] = {}
    entries = []
    for index, row in enumerate(rows):
        row.queue.finish()
        n = row.known
        tensors[f"{index}.ids"] = np.asarray(row.ids, dtype=np.int64)
        tensors[f"{index}.streams"] = row.history.streams(0, n)
        tensors[f"{index}.pending"] = row.history.pending(n, row.history.pending_stop)
        tensors[f"{index}.conv"] = row.carried.conv
        tensors[f"{index}.keys"], tensors[f"{index}.values"] = row.carried.keys, row.carried.values
        tensors[f"{index}.logits"] = np.asarray(progress.logits[index], np.float32)
        entries.append({"spans": row.schedule.spans, "unread": progress.unread[index]})
    data = {
        "lags": rows[0].schedule.lags,
        "rows": entries,
        "seed": progress.seed,
        "generators": [generator.state for generator in progress.generators],
    }
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "bundle": bundle_id,
        "sha256": _digest(tensors, data),
        "rows": json.dumps(data),
    }
    try:
        if not path.name:
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        path = path.resolve()  # a link stays a link
        with replacing(path) as place:
            write_safetensors(place, tensors, metadata)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"state: {str(path)[:200]!r} cannot be written ({reason})") from None


def load(path: Path, bundle_id: str, graphs: DecodeGraphs) -> tuple[list[Row], Progress]:
    """Reads what `save` wrote. Raises InputError for anything else, and for a state of another bundle or version."""
    try:
        exists = path.is_file()
    except (OSError, ValueError) as error:
        raise InputError(f"state: {str(path)[:60]!r} is no path ({error})") from None
    if not exists:
        raise InputError(f"state: no file at {str(path)!r}; expected one that a session saved")
    try:
        file = SafetensorsFile.open(path)
        metadata = file.metadata
        if metadata.get("format") != FORMAT:
            raise InputError(f"state: {path} is no saved state; expected a file that a session saved")
        if metadata.get("version") != str(VERSION):
            raise InputError(
                f"state: {path} is of version {metadata.get('version')!r:.20}, this version reads {VERSION}; read the "
                f"prompt again"
            )
        if metadata.get("bundle") != bundle_id:
            raise InputError(
                f"state: {path} belongs to the bundle {metadata.get('bundle')!r:.20}…, this one is {bundle_id[:16]}…; a "
                f"state has a meaning only in the bundle that made it, read the prompt again"
            )
        data = json.loads(metadata["rows"])
        tensors = {name: np.array(file.tensor(name)) for name in file.entries}
        if metadata.get("sha256") != _digest(tensors, data):
            raise InputError(f"state: {path} was altered, its sha256 is not the one it states; read the prompt again")
        return _rows(tensors, data, graphs)
    except (BundleError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise InputError(f"state: {path} is no whole saved state ({error}); read the prompt again") from None


def _rows(
    tensors: Mapping[str, NDArray[Any]], data: dict[str, Any], graphs: DecodeGraphs
) -> tuple[list[Row], Progress]:
    """The rows in a file's contents. Raises ValueError, KeyError or TypeError for what `save` does not write."""
    if data["lags"] != graphs.lags:
        raise ValueError(f"its steps mix {data['lags']!r:.40} tokens, this bundle's {graphs.lags}")
    rows, logits, unread = [], [], []
    for index, entry in enumerate(data["rows"]):
        found = _checked(index, tensors, graphs)
        ids = found["ids"].tolist()
        spans = [(end, reach) for end, reach in entry["spans"]]
        _check_tokens(index, ids, spans, entry["unread"], graphs)
        history = History(len(graphs.mhf), graphs.spec.hidden_size)
        history.append(found["streams"])
        history.add(len(ids), found["pending"])
        carried = Carried(found["conv"], found["keys"], found["values"])
        rows.append(Row(ids, Schedule(graphs.lags, spans), history, queue_for(graphs, history), carried))
        logits.append(found["logits"])
        unread.append(list(entry["unread"]))
    if len(tensors) != len(rows) * len(_shapes(0, 0, graphs)):
        raise ValueError("it has tensors of other rows")
    states, seed = data["generators"], data["seed"]
    if not _integers([*states, *([] if seed is None else [seed])], 1 << 64):
        raise ValueError("its random numbers cannot be")
    if len(states) != (0 if seed is None else len(rows)):
        raise ValueError("its random numbers are of other rows")
    generators = [Generator.resume(state) for state in states]
    contexts = [[*row.ids, *waiting] for row, waiting in zip(rows, unread, strict=True)]
    return rows, Progress(contexts, np.stack(logits), unread, generators, seed)


def _shapes(tokens: int, pending: int, graphs: DecodeGraphs) -> dict[str, tuple[int, ...]]:
    spec, layers, attention = graphs.spec, len(graphs.mhf), len(graphs.swa)
    return {
        "ids": (tokens,),
        "streams": (layers, 2, tokens, spec.hidden_size),
        "pending": (layers, pending, spec.hidden_size),
        "conv": (layers, spec.conv_kernel - 1, spec.hidden_size),
        "keys": (attention, spec.sliding_window, spec.hidden_size),
        "values": (attention, spec.sliding_window, spec.hidden_size),
        "logits": (spec.vocab_size,),
    }


def _checked(index: int, tensors: Mapping[str, NDArray[Any]], graphs: DecodeGraphs) -> dict[str, NDArray[Any]]:
    """A row's tensors, each of the shape and type that it must have."""
    tokens, pending = tensors[f"{index}.ids"].size, tensors[f"{index}.pending"].shape[1]
    found = {}
    for name, shape in _shapes(tokens, pending, graphs).items():
        tensor, dtype = tensors[f"{index}.{name}"], np.int64 if name == "ids" else np.float32
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"row {index} has {name} of {tensor.dtype} {list(tensor.shape)}, expected {list(shape)}")
        if name != "ids" and not np.isfinite(tensor).all():
            raise ValueError(f"row {index} has {name} that are not finite")
        found[name] = tensor
    return found


def _check_tokens(
    index: int, ids: Sequence[int], spans: Sequence[tuple[int, int]], unread: Sequence[int], graphs: DecodeGraphs
) -> None:
    ends = [0, *(end for end, _ in spans)]
    reaches = {ALONE, SETTLED, *(graphs.lags << e for e in range(40))}
    if not _integers(ends, 1 << 62) or sorted(set(ends)) != ends or ends[-1] != len(ids):
        raise ValueError(f"row {index} has runs of tokens that cannot be")
    if any(type(reach) is not int or reach not in reaches for _, reach in spans):
        raise ValueError(f"row {index} has runs of tokens that cannot be")
    if len(unread) > 1 or not ids or not _integers([*ids, *unread], graphs.spec.vocab_size):
        raise ValueError(f"row {index} has tokens that cannot be")


def _integers(values: Sequence[object], stop: int) -> bool:
    return all(type(value) is int and 0 <= value < stop for value in values)


def _digest(tensors: Mapping[str, NDArray[Any]], data: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor).data if tensor.size else b"")
    return digest.hexdigest()
