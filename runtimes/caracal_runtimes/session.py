"""What a loaded graph can do, whoever runs it: the protocol that every provider's sessions keep, and what they report."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import InputError

_MAX_THREADS = 4096


@dataclass(frozen=True)
class Placement:
    """Nodes of the optimised graph by the provider they were assigned to, and by operator.

    Args:
        nodes: number of nodes by the provider's own name.
        operators: the same by operator.
        elsewhere: nodes that another provider runs although they compute, each with why as far as it can be told.
        shape_only: how many nodes another provider runs because they only work out sizes, as runtimes do by design.
        own: how many the provider itself runs; None where the runtime has but one.
    """

    nodes: dict[str, int]
    operators: dict[str, dict[str, int]]
    elsewhere: tuple[Misplaced, ...] = ()
    shape_only: int = 0
    own: int | None = None

    def problem(self) -> str:
        """What is wrong with it as the placement of one graph; empty where nothing is."""
        if self.elsewhere:
            return describe_fallback(self)
        if not self.nodes:
            return "no node was recorded to run at all"
        return "it runs no computing node of a graph" if self.own == 0 else ""

    @classmethod
    def sum(cls, parts: Iterable[Placement]) -> Placement:
        """Several graphs' placements as one."""
        nodes: Counter[str] = Counter()
        operators: dict[str, Counter[str]] = {}
        elsewhere: list[Misplaced] = []
        shape_only = 0
        own: int | None = None
        for part in parts:
            nodes.update(part.nodes)
            for ep, counts in part.operators.items():
                operators.setdefault(ep, Counter()).update(counts)
            elsewhere += part.elsewhere
            shape_only += part.shape_only
            own = own if part.own is None else (own or 0) + part.own
        by_operator = {ep: dict(counts) for ep, counts in operators.items()}
        return cls(dict(nodes), by_operator, tuple(elsewhere), shape_only, own)


@dataclass(frozen=True)
class Misplaced:
    """A computing node that ran on another provider than the one that was asked for."""

    graph: str
    node: str
    operator: str
    ran_on: str
    why: str = ""


class Binding(Protocol):
    """Arrays tied to a session's inputs and outputs, for calls that read and write the same arrays again and again."""

    def input(self, name: str, array: NDArray[Any]) -> None:
        """Ties an input to a contiguous array in main memory."""

    def output(self, name: str, array: NDArray[Any]) -> None:
        """Ties an output to a contiguous array in main memory, which must have the output's shape."""

    def run(self) -> None:
        """Runs the graph. Raises NotRunError with the runtime's own words when it fails."""


class Session(Protocol):
    """One graph, loaded by one provider. Inputs and outputs are numpy arrays.

    Attributes:
        name: the graph's file, for messages.
        ep: the provider, with its device where one was asked for.
        threads: how many the provider was told to use; results may differ in the last digits with this number.
    """

    name: str
    ep: str
    threads: int

    def run(self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str] | None = None) -> list[NDArray[Any]]:
        """Runs the graph; `outputs` are names, all in the graph's order when None.

        Raises:
            NotRunError: with the runtime's own words when it fails.
        """

    def binding(self) -> Binding:
        """For calls that read and write the same arrays again and again."""

    def inputs(self) -> dict[str, list[int | str | None]]:
        """The graph's inputs and their shapes, as the graph itself has them."""

    def placement(self) -> Placement | None:
        """Which provider each node was assigned to, as the runtime records it; None where it does not tell."""


class DeviceArray(Protocol):
    """A float32 array in the memory in which a provider computes, when that is not the host's.

    Attributes:
        device: the runtime's name of that memory.
        nbytes: its size.
    """

    device: str
    nbytes: int

    def write(self, array: NDArray[np.float32]) -> None:
        """Copies an array of the same shape there."""

    def read(self) -> NDArray[np.float32]:
        """A copy in main memory."""


class DeviceBinding(Binding, Protocol):
    """A binding that also takes arrays that lie where the provider computes; a run moves nothing of these.

    One array must not be bound as an input and as an output.
    """

    def device_input(self, name: str, array: DeviceArray) -> None:
        """Ties an input to an array of the same session."""

    def device_output(self, name: str, array: DeviceArray) -> None:
        """Ties an output to an array of the same session, which must have the output's shape."""


@runtime_checkable
class DeviceSession(Session, Protocol):
    """A session that can keep arrays where its provider computes."""

    def device_array(self, shape: Sequence[int]) -> DeviceArray:
        """A new array there, whose contents are not defined."""

    def device_binding(self) -> DeviceBinding:
        """For calls that read and write the same arrays again and again."""


class CopyBinding:
    """A binding for runtimes that have none of their own: each run copies the results into the arrays."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._inputs: dict[str, NDArray[Any]] = {}
        self._outputs: dict[str, NDArray[Any]] = {}

    def input(self, name: str, array: NDArray[Any]) -> None:
        """Ties an input to an array."""
        self._inputs[name] = array

    def output(self, name: str, array: NDArray[Any]) -> None:
        """Ties an output to an array, which must have the output's shape."""
        self._outputs[name] = array

    def run(self) -> None:
        """Runs the graph. Raises NotRunError with the runtime's own words when it fails."""
        for array, value in zip(
            self._outputs.values(), self._session.run(self._inputs, list(self._outputs)), strict=True
        ):
            array[...] = value


def check_threads(threads: object) -> None:
    """Refuses a number of threads that cannot be meant. Raises InputError."""
    if isinstance(threads, bool) or not isinstance(threads, int) or not 0 <= threads <= _MAX_THREADS:
        raise InputError(f"--threads must be an integer from 0 to {_MAX_THREADS}, found {threads!r}")


def default_threads() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def contiguous(inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """The same arrays, copied where their memory is strided: what every runtime's interface takes."""
    # `ascontiguousarray` would turn a scalar into a vector of one.
    return {name: np.asarray(value, order="C") for name, value in inputs.items()}


def describe_fallback(placement: Placement, most: int = 3) -> str:
    """What ran elsewhere, in a line: how many nodes by operator and provider, then the first ones by name and why."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for node in placement.elsewhere:
        groups.setdefault((node.operator, node.ran_on, node.why), []).append(node.node)
    parts = [
        f"{len(nodes)} {operator} on {ran_on}"
        + (f" ({why})" if why else "")
        + f", such as {nodes[0] or 'a nameless one'}"
        for (operator, ran_on, why), nodes in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    more = f", and {len(parts) - most} kinds more" if len(parts) > most else ""
    return f"{len(placement.elsewhere)} computing nodes ran elsewhere: {'; '.join(parts[:most])}{more}"


def first_line(error: BaseException) -> str:
    """What a library said, in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
