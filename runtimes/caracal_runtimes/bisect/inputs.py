"""What a graph is run on: the recorded passes for `forward`, and for the others what they get while one of those is decoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes import replay
from caracal_runtimes.bisect.probe import Workshop, read_arrays
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_graphs import LONG_BLOCK, DecodeGraphs
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.graph_interface import lags_of
from caracal_runtimes.isolation import Emit, run_isolated
from caracal_runtimes.manifest import GRAPHS, WEIGHTLESS, GoldenCase
from caracal_runtimes.providers import Settings, provider
from caracal_runtimes.session import CopyBinding, DeviceArray, Placement, Session

_LEAST = 4  # tokens of a pass that can be read in pieces
_RECORDED = "recorded on the cpu while decoding"


@dataclass(frozen=True)
class Case:
    """One set of inputs, and where PyTorch's outputs were recorded for them, those.

    Args:
        name: of the golden.
        feeds: inputs by name.
        logits: PyTorch's.
        columns: the vocabulary ids they were recorded for; all when None.
    """

    name: str
    feeds: dict[str, NDArray[Any]]
    logits: NDArray[Any] | None = None
    columns: NDArray[Any] | None = None


def cases_for(bundle: Bundle, graph: str, wanted: str | None, workshop: Workshop, time_limit: float) -> list[Case]:
    """Sets of inputs for a graph, the smallest first.

    Args:
        bundle: an opened bundle.
        graph: one of its graphs.
        wanted: a golden's name; all of them, or a fitting one, when None.
        workshop: for files.
        time_limit: seconds without a sign of life.

    Raises:
        InputError: no such graph or golden.
        NotRunError: the inputs cannot be made.
    """
    if graph not in GRAPHS:
        raise InputError(f"--graph must be one of {', '.join(GRAPHS)}, found {graph!r:.40}")
    known = {case.name: case for case in bundle.manifest.golden.cases}
    if wanted is not None and graph in WEIGHTLESS:
        raise InputError(f"--case: the graph {graph} takes no recorded pass but random streams; leave it out")
    if wanted is not None and wanted not in known:
        raise InputError(f"--case must be one of {', '.join(known) or 'none at all'}, found {wanted!r:.40}")
    if graph in WEIGHTLESS:
        return [_streams(LONG_BLOCK if graph == "convolve_long" else 129)]
    chosen = sorted(
        [known[wanted]] if wanted is not None else known.values(),
        key=lambda case: (case.batch * case.length, case.columns),
    )
    if not chosen:
        raise NotRunError("the bundle has no golden forward pass to run; export it again")
    if graph == "forward":
        return [_forward(bundle, case) for case in chosen]
    # What is read before the first chunk, a single token, and then at least two at once.
    least = lags_of(bundle.manifest.model, bundle.manifest.graphs["step"]) + 4 if graph == "extend" else _LEAST
    long_enough = [case for case in chosen if case.length >= least]
    if not long_enough:
        lengths = ", ".join(str(case.length) for case in chosen)
        raise InputError(f"--case: the graph {graph} needs a golden of at least {least} tokens, found {lengths}")
    return [_decoded(bundle, graph, long_enough[0], workshop, time_limit)]


def _forward(bundle: Bundle, case: GoldenCase) -> Case:
    tensors = bundle.golden()
    names = ("input_ids", "lengths", "logit_positions")
    feeds = bundle.manifest.lengths.padded({name: np.array(tensors.tensor(f"{case.name}/{name}")) for name in names})
    columns = np.array(tensors.tensor(f"{case.name}/columns")) if case.columns else None
    return Case(case.name, feeds, np.array(tensors.tensor(f"{case.name}/logits")), columns)


def _streams(block: int) -> Case:
    """Random streams, as parity takes for these graphs."""
    rng = np.random.default_rng(block)
    sizes = {"v_block": block, "g_block": block, "v_lags": 2 * block, "g_lags": 2 * block}
    feeds = {name: rng.standard_normal((2, size, 3)).astype(np.float32) for name, size in sizes.items()}
    return Case(f"random streams, block {block}", feeds)


def _decoded(bundle: Bundle, graph: str, case: GoldenCase, workshop: Workshop, time_limit: float) -> Case:
    place = workshop.place()
    files: list[str] = []
    ended = run_isolated(
        "caracal_runtimes.bisect.inputs:record",
        {"bundle": str(bundle.path), "graph": graph, "case": case.name, "place": str(place)},
        lambda event: files.append(event["file"]),
        time_limit=time_limit,
    )
    if ended.outcome != "done" or not files:
        reason = ended.reason or "decoding did not use that graph"
        raise NotRunError(f"the inputs of the graph {graph} could not be {_RECORDED}: {reason}")
    return Case(f"{case.name}, {_RECORDED}", read_arrays(Path(files[-1])))


def record(arguments: Mapping[str, Any], emit: Emit) -> None:
    """In a process of its own: decodes a golden on the cpu and keeps what the graph was last given."""
    bundle = Bundle.open(arguments["bundle"], check_hashes=False)
    wanted, place = arguments["graph"], Path(arguments["place"])
    graphs = bundle.manifest.graphs
    last: dict[str, NDArray[Any]] = {}

    def open_session(graph: str, *, packed: bool = False) -> Session:
        session = provider("cpu").open(bundle.file(graphs[graph].file), graphs[graph], Settings(threads=1))
        return _Recorder(session, last) if graph == wanted else session

    resident = wanted == "step_resident"
    decode = DecodeGraphs(
        bundle.manifest.model, graphs, open_session, resident=resident, lengths=bundle.manifest.lengths
    )
    tensors = bundle.golden()
    ids, lengths = (np.asarray(tensors.tensor(f"{arguments['case']}/{name}")) for name in ("input_ids", "lengths"))
    rows = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
    (replay.by_steps if resident or wanted == "step" else replay.by_chunks)(decode, rows)
    if last:
        workshop = Workshop(place / "recorded", ())
        emit({"file": str(workshop.save(last))})


class _HostArray:
    """What `caracal_runtimes.session.DeviceArray` says, in main memory."""

    device = "cpu"

    def __init__(self, shape: Sequence[int]) -> None:
        self.values = np.zeros(shape, np.float32)
        self.nbytes = self.values.nbytes

    def write(self, array: NDArray[np.float32]) -> None:
        """Takes the array's values."""
        self.values[...] = array

    def read(self) -> NDArray[np.float32]:
        """A copy."""
        return self.values.copy()


class _HostBinding(CopyBinding):
    def device_input(self, name: str, array: DeviceArray) -> None:
        """Ties an input to an array."""
        assert isinstance(array, _HostArray)
        self.input(name, array.values)

    def device_output(self, name: str, array: DeviceArray) -> None:
        """Ties an output to an array."""
        assert isinstance(array, _HostArray)
        self.output(name, array.values)


class _Recorder:
    """A session that keeps a copy of what it was last given."""

    def __init__(self, session: Session, last: dict[str, NDArray[Any]]) -> None:
        self._session, self._last = session, last
        self.name, self.ep, self.threads = session.name, session.ep, session.threads

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> list[NDArray[Any]]:
        """Runs the graph."""
        self._last.clear()
        self._last.update({name: np.array(value) for name, value in inputs.items()})
        return self._session.run(inputs, outputs)

    def binding(self) -> CopyBinding:
        """Bindings run by copying, so that what is bound is seen."""
        return CopyBinding(self)

    def device_array(self, shape: Sequence[int]) -> _HostArray:
        """Main memory stands for a device's."""
        return _HostArray(shape)

    def device_binding(self) -> _HostBinding:
        """As `binding`."""
        return _HostBinding(self)

    def inputs(self) -> dict[str, list[int | str | None]]:
        """The graph's inputs."""
        return self._session.inputs()

    def placement(self) -> Placement | None:
        """The session's own."""
        return self._session.placement()
