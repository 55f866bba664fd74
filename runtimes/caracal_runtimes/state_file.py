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

import contextlib
import errno
import hashlib
import json
import os
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
from caracal_runtimes.schedule import Schedule

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
    temporary = path.parent / f".{path.name[:40]}.{os.getpid()}.tmp"  # shorter than the longest name there may be
    try:
        if not path.name:
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        write_safetensors(temporary, tensors, metadata)
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"state: {str(path)[:200]!r} cannot be written ({reason})") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()


def load(path: Path, bundle_id: str, graphs: DecodeGraphs) -> tuple[list[Row], Progress]:
    """Reads what `save` wrote. Raises InputError for anything else, and for a state of another bundle or version."""
    try:
        exists = path.is_file()
    except (OSError, ValueError) as error:
        raise InputError(f"state: {str(path)[:60]!r} is no path ({error})") from None
    if not exists:
        raise InputError(f"state: no file at {path}; expected one that a session saved")
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
    spec, rows, logits, contexts, unread = graphs.spec, [], [], [], []
    if data["lags"] != graphs.lags:
        raise ValueError(f"its steps mix {data['lags']} tokens, this bundle's {graphs.lags}")
    for index, entry in enumerate(data["rows"]):
        ids = tensors[f"{index}.ids"].tolist()
        spans = [(int(end), int(reach)) for end, reach in entry["spans"]]
        streams, pending = tensors[f"{index}.streams"], tensors[f"{index}.pending"]
        if streams.shape != (len(graphs.mhf), 2, len(ids), spec.hidden_size) or spans[-1][0] != len(ids):
            raise ValueError(f"row {index} has streams of shape {list(streams.shape)} for {len(ids)} tokens")
        ends = [0, *(end for end, _ in spans)]
        waiting = entry["unread"]
        if sorted(set(ends)) != ends or len(waiting) > 1 or not all(0 <= i < spec.vocab_size for i in [*ids, *waiting]):
            raise ValueError(f"row {index} has tokens that cannot be")
        history = History(len(graphs.mhf), spec.hidden_size)
        history.append(streams)
        history.add(len(ids), pending)
        carried = Carried(*(tensors[f"{index}.{name}"] for name in ("conv", "keys", "values")))
        rows.append(Row(ids, Schedule(graphs.lags, spans), history, queue_for(graphs, history), carried))
        logits.append(tensors[f"{index}.logits"])
        unread.append([int(token) for token in entry["unread"]])
        contexts.append([*ids, *unread[-1]])
    if {int(name.partition(".")[0]) for name in tensors} != set(range(len(rows))):
        raise ValueError("its tensors are of other rows")
    if len(data["generators"]) not in (0, len(rows)) or not all(0 <= state < 1 << 64 for state in data["generators"]):
        raise ValueError("its random numbers are of other rows")
    generators = [Generator.resume(int(state)) for state in data["generators"]]
    return rows, Progress(contexts, np.stack(logits), unread, generators, data["seed"])


def _digest(tensors: Mapping[str, NDArray[Any]], data: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor).data if tensor.size else b"")
    return digest.hexdigest()
