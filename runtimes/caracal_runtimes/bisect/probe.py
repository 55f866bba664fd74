"""The side that runs: graphs handed to a provider in a process of its own, and what came of each."""

from __future__ import annotations

import importlib.util
import itertools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.bisect.surgery import spec_of
from caracal_runtimes.bisect.worker import Worker, requests
from caracal_runtimes.errors import BundleError, InputError, NotRunError, RuntimeToolError
from caracal_runtimes.isolation import Emit, Ended, Event
from caracal_runtimes.manifest import GraphSpec, TensorSpec
from caracal_runtimes.providers import Provider, Settings, parse
from caracal_runtimes.session import Misplaced

if TYPE_CHECKING:
    from onnx import ModelProto

Arrays = Mapping[str, NDArray[Any]]
#: Goes after the name of a value that a node or a block computes by itself.
OWN = "/own"
#: How a run can fail by itself; what it computes can be wrong besides.
Death = Literal["load", "raised", "crash", "hang", "memory"]


@dataclass(frozen=True)
class Job:
    """A graph to load, and sets of inputs to run it on. `outputs` are all of the graph's when None."""

    model: Path
    spec: GraphSpec
    inputs: tuple[Path, ...]
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Result:
    """What came of a job.

    Args:
        values: outputs for each set of inputs, as far as it came.
        death: how it ended if not well.
        phase: where: `loading` or `running`.
        reason: in one line.
        misplaced: nodes that another provider runs, where the runtime tells.
        told: whether it tells.
        placed: how many nodes each provider runs.
        threads: how many the session uses.
    """

    values: tuple[dict[str, NDArray[Any]], ...] = ()
    death: Death | None = None
    phase: str = ""
    reason: str = ""
    misplaced: tuple[Misplaced, ...] = ()
    told: bool = False
    placed: Mapping[str, int] = field(default_factory=dict)
    threads: int = 0


class Workshop:
    """A temporary folder with cut graphs, their weights beside them, and inputs."""

    def __init__(self, folder: Path, weights: Sequence[Path]) -> None:
        self.folder = folder
        self.models, self.arrays = folder / "models", folder / "arrays"
        for each in (self.models, self.arrays):
            each.mkdir(parents=True)
        for file in weights:
            # No links: readers of external data refuse a file that has several names, this one and the bundle's own.
            shutil.copyfile(file, self.models / file.name)
        self._number = itertools.count()
        #: Values of the whole graph that are known: they tell types that a cut-out graph does not.
        self.known: dict[str, NDArray[Any]] = {}

    def save(self, arrays: Arrays) -> Path:
        """Writes arrays to a file that `Job.inputs` takes."""
        path = self.arrays / f"{next(self._number)}.npz"
        np.savez(path, **_numbered(arrays))
        return path

    def job(self, model: ModelProto, inputs: Iterable[Path], outputs: Sequence[str] | None = None) -> Job:
        """Writes a graph."""
        path = self.models / f"{next(self._number)}.onnx"
        path.write_bytes(model.SerializeToString())
        spec = spec_of(model, path.name)
        # Sizes of what comes out are left open: one that is wrong is a finding, not a reason to refuse.
        told = tuple(map(self._told, spec.outputs))
        return Job(path, replace(spec, outputs=told), tuple(inputs), None if outputs is None else tuple(outputs))

    def _told(self, tensor: TensorSpec) -> TensorSpec:
        value = self.known.get(tensor.name.removesuffix(OWN))
        if value is None:
            return replace(tensor, shape=("?",) * len(tensor.shape))
        return TensorSpec(tensor.name, value.dtype.name, ("?",) * value.ndim)

    def place(self) -> Path:
        """A new folder for results."""
        path = self.arrays / str(next(self._number))
        path.mkdir()
        return path


class Side:
    """A provider with its settings, run in a process of its own, and in a new one when that dies.

    Args:
        ep: as `--ep` takes it.
        settings: its device comes from `ep`.
        workshop: where graphs and arrays lie.
        time_limit: seconds without a sign of life.
    """

    def __init__(self, ep: str, settings: Settings, workshop: Workshop, time_limit: float) -> None:
        provider, device = parse(ep)
        self.provider = provider
        self.ep = f"{provider.name}:{device}" if device else provider.name
        # Nodes that run elsewhere are told, not refused: what they compute is looked at all the same.
        self.settings = replace(settings, device=device, allow_fallback=True, weights=())
        self.workshop, self.time_limit = workshop, time_limit
        self.processes = 0
        self.versions: dict[str, str] = {}
        self.devices: list[str] = []
        self.applied: dict[str, str] = {}
        self.plugin = False
        self.threads = settings.threads
        self._worker: Worker | None = None

    def close(self) -> None:
        """Ends the provider's process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, jobs: Sequence[Job], *, stop: bool = False) -> list[Result]:
        """Runs jobs one after the other; a process that dies is replaced by a new one for the rest.

        Args:
            jobs: what to run.
            stop: leave out what comes after the first job that does not end well.

        Returns:
            A result for each job, or with `stop` up to the first that did not end well.

        Raises:
            InputError: an option or a device that the provider does not have.
            NotRunError: the provider does not work on this machine at all.
        """
        results: list[Result] = []
        while len(results) < len(jobs):
            results += self._process(jobs[len(results) :], stop)
            if stop and results[-1].death is not None:
                break
        return results

    def _process(self, jobs: Sequence[Job], stop: bool) -> list[Result]:
        results = [Result() for _ in jobs]
        place = self.workshop.place()
        settings = self.settings
        current, done = -1, 0

        def listen(event: Event) -> None:
            nonlocal current, done
            if "versions" in event:
                self.versions, self.devices = event["versions"], event["devices"]
                self.applied, self.plugin = event["applied"], event["plugin"]
                return
            current = event["job"]
            result = results[current]
            if "tensors" in event:
                loaded = {name: np.load(place / file, mmap_mode="r") for name, file in event["tensors"].items()}
                result = replace(result, values=(*result.values, loaded))
            if "placement" in event:
                result = replace(
                    result,
                    told=True,
                    placed=event["placement"]["nodes"],
                    misplaced=tuple(Misplaced(**node) for node in event["placement"]["elsewhere"]),
                )
            if "failed" in event:
                result = replace(result, death=event["failed"], reason=event["reason"])
            if "threads" in event:
                result = replace(result, threads=event["threads"])
                self.threads = event["threads"]
            results[current] = replace(result, phase=event.get("phase", result.phase))
            done = current + 1 if event.get("phase") == "done" or "failed" in event else done

        if self._worker is None:
            self.processes += 1
            arguments = {
                "ep": self.ep,
                "settings": {
                    "threads": settings.threads,
                    "fast": settings.fast,
                    "options": dict(settings.options),
                },
            }
            target = "caracal_runtimes.bisect.probe:serve"
            self._worker = Worker(target, arguments, self.workshop.place(), self.time_limit)
        request = {"place": str(place), "stop": stop, "jobs": [_plain(job) for job in jobs]}
        ended = self._worker.ask(request, listen)
        if ended is None:
            return results[:done]
        self._worker = None
        if current < 0 or ended.outcome == "raised":  # what a graph raises is caught there and said
            self._never_began(ended)
        # It may die between two jobs, or while it ends after the last: by then all has been said.
        if done > current:
            return results[:done]
        results[current] = replace(results[current], death=_death(ended), reason=ended.reason)
        return results[: current + 1]

    def _never_began(self, ended: Ended) -> None:
        if ended.outcome == "raised" and ended.exit_code == InputError.exit_code:
            raise InputError(ended.reason)
        raise NotRunError(f"provider {self.ep}: {ended.reason or 'it did not start'}")


def serve(arguments: Mapping[str, Any], emit: Emit) -> None:
    """The process's own side: loads and runs the jobs, and says what comes of each while it goes on."""
    emit({"idle": True})  # loading the runtime's libraries takes a while by itself
    provider, device = parse(arguments["ep"])
    settings = Settings(device=device, allow_fallback=True, **arguments["settings"])
    found = provider.detect()
    if found.state != "ready":
        raise NotRunError(found.reason + (f"; {found.remedy}" if found.remedy else ""))
    plugin = getattr(provider, "plugin", None)
    emit(
        {
            "versions": dict(found.versions),
            "devices": list(found.devices),
            "applied": provider.applied(settings),
            "plugin": plugin is not None and importlib.util.find_spec(plugin) is not None,
        }
    )
    requests(Path(arguments["place"]), emit, lambda request: _answer(provider, settings, request, emit))


def _answer(provider: Provider, settings: Settings, request: Mapping[str, Any], emit: Emit) -> None:
    place = Path(request["place"])
    number = itertools.count()
    for index, job in enumerate(request["jobs"]):
        given, gives = (
            tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in job[which])
            for which in ("graph_inputs", "graph_outputs")
        )
        spec = GraphSpec(job["file"], job["opset"], "", given, gives)
        emit({"job": index, "phase": "loading"})
        phase = "load"
        try:
            session = provider.open(Path(job["model"]), spec, settings)
            takes = {tensor.name for tensor in spec.inputs}
            names = job["outputs"] or [tensor.name for tensor in spec.outputs]
            emit({"job": index, "phase": "running", "threads": session.threads})
            phase = "raised"
            for file in job["inputs"]:
                feeds = {name: array for name, array in read_arrays(Path(file)).items() if name in takes}
                tensors = {}
                for name, array in zip(names, session.run(feeds, names), strict=True):
                    tensors[name] = f"{next(number)}.npy"
                    np.save(place / tensors[name], np.asarray(array))
                emit({"job": index, "phase": "running", "tensors": tensors})
            placement = session.placement()
            event: dict[str, Any] = {"job": index, "phase": "done"}
            if placement is not None:
                elsewhere = [vars(node) for node in placement.elsewhere]
                event["placement"] = {"nodes": placement.nodes, "elsewhere": elsewhere}
            emit(event)
            del session
        except MemoryError:
            emit({"job": index, "failed": "memory", "reason": "out of memory"})
        except Exception as error:
            if phase == "load" and isinstance(error, InputError) and not isinstance(error, BundleError):
                raise  # an option or a device that there is not: nobody's fault but the caller's
            said = str(error) if isinstance(error, RuntimeToolError) else f"{type(error).__name__}: {error}"
            emit({"job": index, "failed": phase, "reason": " ".join(said.split())[:400]})
        else:
            continue
        if request["stop"]:
            return


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """What `Workshop.save` wrote."""
    with np.load(path, allow_pickle=False) as stored:
        names = stored["names"].tolist()
        return {name: stored[f"array_{index}"] for index, name in enumerate(names)}


def _numbered(arrays: Arrays) -> dict[str, Any]:
    """Arrays under numbers, since the names of values hold characters that file names cannot have."""
    numbered = {f"array_{index}": np.asarray(a) for index, a in enumerate(arrays.values())}
    return {"names": np.asarray(list(arrays), dtype=np.str_), **numbered}


def _plain(job: Job) -> dict[str, Any]:
    return {
        "model": str(job.model),
        "file": job.spec.file,
        "opset": job.spec.opset,
        "graph_inputs": [[t.name, t.dtype, list(t.shape)] for t in job.spec.inputs],
        "graph_outputs": [[t.name, t.dtype, list(t.shape)] for t in job.spec.outputs],
        "inputs": [str(path) for path in job.inputs],
        "outputs": None if job.outputs is None else list(job.outputs),
    }


def _death(ended: Ended) -> Death:
    deaths: dict[str, Death] = {"timed out": "hang", "out of memory": "memory"}
    return deaths.get(ended.outcome, "crash")
