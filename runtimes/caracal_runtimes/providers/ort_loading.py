"""From a graph's file to ONNX Runtime's session of it, by way of the cache of optimised graphs where that is asked for."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caracal_runtimes.graph_cache import Entry, entry

if TYPE_CHECKING:
    import onnxruntime

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
#: Settings of a session that change what the optimiser makes of a graph.
_OPTIMISING = ("session.disable_prepacking", "session.qdq_matmulnbits_accuracy_level")


def load(
    ort: Any, path: Path, options: Any, providers: list[Any] | None, depends: Sequence[object] = ()
) -> onnxruntime.InferenceSession:
    """A session of a graph.

    Args:
        ort: the module `onnxruntime`.
        path: the `.onnx` file.
        options: the session's; after a start from the cache they do not fit another graph.
        providers: what goes to the constructor.
        depends: what the optimised graph depends on besides the file, the options and the runtime, as JSON; the graph is then
            taken from the cache, or what is optimised now goes there. Empty: it is optimised anew, and not kept.

    Raises:
        Exception: whatever ONNX Runtime raises for the file itself, never for what is in the cache.
    """
    digest = _digest(path) if depends else ""
    place = _entry(ort, options, [digest, *depends]) if digest else None
    if place is None:
        return _session(ort, str(path), options, providers)
    found = _from_cache(ort, path, options, providers, place)
    return found if found is not None else _into_cache(ort, path, options, providers, place, digest)


def _from_cache(
    ort: Any, path: Path, options: Any, providers: list[Any] | None, place: Entry
) -> onnxruntime.InferenceSession | None:
    graph = place.read()
    if graph is None:
        return None
    level = options.graph_optimization_level
    # Bytes have no folder beside which the weights would lie.
    options.add_session_config_entry(_WEIGHTS_FOLDER, str(path.resolve().parent))
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        return _session(ort, graph, options, providers)
    except Exception:  # noqa: BLE001 - whole as it is, it is of no use; whether the file is at fault, the file will show
        place.drop()
        options.graph_optimization_level = level
        return None


def _into_cache(
    ort: Any, path: Path, options: Any, providers: list[Any] | None, place: Entry, digest: str
) -> onnxruntime.InferenceSession:
    with place.staging() as written:
        if written is not None:
            options.optimized_model_filepath = str(written)
            try:
                made = _session(ort, str(path), options, providers)
            except Exception:  # noqa: BLE001 - a full disk, or the graph, and then it is said below
                options.optimized_model_filepath = ""
            else:
                if _digest(path) == digest:  # the very file that the key is of
                    place.store(written)
                return made
    return _session(ort, str(path), options, providers)


def _session(ort: Any, graph: str | bytes, options: Any, providers: list[Any] | None) -> onnxruntime.InferenceSession:
    # enable_fallback=0: a provider that fails must not turn into a CPU session without a word.
    made: onnxruntime.InferenceSession = ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)
    return made


def _entry(ort: Any, options: Any, depends: Sequence[object]) -> Entry | None:
    settings = {}
    for name in _OPTIMISING:
        with contextlib.suppress(Exception):  # it is an error to ask for what was not set
            settings[name] = options.get_session_config_entry(name)
    return entry(
        {
            "depends": list(depends),
            "runtime": [ort.__version__, ort.get_build_info()],
            "level": str(options.graph_optimization_level),
            "settings": settings,
        }
    )


def _digest(path: Path) -> str:
    """sha256 of a file in hex; empty where it cannot be read, which loading it will say."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
