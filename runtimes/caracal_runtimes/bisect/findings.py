"""What a bisection found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from caracal_runtimes.bisect.compare import Difference, Statistics
from caracal_runtimes.bisect.layers import LayerError
from caracal_runtimes.parity_report import EXIT_CODES, Verdict
from caracal_runtimes.records import jsonable

#: How a provider can fail. numbers, nan, shape: what it computes; load, raised, crash, hang, memory: how it ends;
#: placement: it is right, but another provider computed.
Failure = Literal["numbers", "nan", "shape", "load", "raised", "crash", "hang", "memory", "placement"]
#: alone: the node fails by itself; context: only among others; looking: it goes when the values in question are looked
#: at, so that there is a region instead of a node; accumulated: no node is beyond its level, all together are.
Where = Literal["alone", "context", "looking", "accumulated"]


@dataclass(frozen=True)
class NodeName:
    """A node: its name (`#index` where it has none), operator, and place among all nodes of the file."""

    name: str
    operator: str
    index: int


@dataclass(frozen=True)
class OwnError:
    """What a node does to the error.

    Args:
        value: the output.
        total: the provider's value in its own run against the reference's.
        own: the node run alone by the provider on the reference's inputs, against the reference.
        inherited: the reference's node on the provider's inputs, against the reference: what a right node would have
            given here. None where the inputs could not be looked at.
        in_context: the provider's value against that; None likewise.
    """

    value: str
    total: Difference | None
    own: Difference | None = None
    inherited: Difference | None = None
    in_context: Difference | None = None


@dataclass(frozen=True)
class Finding:
    """The first node that fails.

    Args:
        failure: how.
        where: see `Where`.
        nodes: the node, or the region where it is not one alone.
        errors: of its outputs.
        level: what a node's own error is held to.
        inputs: figures of the reference's values that go in.
        outputs: figures of the reference's and of the provider's values that come out.
        cut: nodes of the smallest cut-out that fails by itself on the reference's inputs; empty where none does.
        reason: what the provider said, for failures that say something.
        confirmed: the checks that the answer passed.
    """

    failure: Failure
    where: Where
    nodes: tuple[NodeName, ...]
    errors: tuple[OwnError, ...] = ()
    level: float = 0.0
    inputs: tuple[Statistics, ...] = ()
    outputs: tuple[tuple[Statistics, Statistics | None], ...] = ()
    cut: tuple[NodeName, ...] = ()
    reason: str = ""
    confirmed: tuple[str, ...] = ()

    @property
    def node(self) -> NodeName:
        """The node, or the last one of the region."""
        return self.nodes[-1]


@dataclass(frozen=True)
class BisectReport:
    """What `caracal bisect` found.

    Args:
        verdict: PASSED: the provider is right; FAILED: it is not; NOT RUN: nothing could be compared or reproduced.
        ep, against, inner: the provider, what its outputs were compared with, where inner values come from.
        graph, case: what was run on which inputs.
        figure, limit: of the final outputs: the worst relative L2, and what it is held to.
        reason: one line for a verdict that has no finding.
        finding: where the failure begins.
        failing: final outputs that are wrong.
        misplaced: nodes that another provider ran.
        layers: error of each block.
        notes: what else was seen on the way.
        folder: of the reproduction, where one was written.
        nodes: how many nodes of the graph compute.
        processes: how many were started.
    """

    verdict: Verdict
    bundle: str
    bundle_id: str
    ep: str
    against: str
    inner: str
    graph: str
    case: str = ""
    figure: float | None = None
    limit: float | None = None
    failure: Failure | None = None
    reason: str = ""
    finding: Finding | None = None
    failing: tuple[str, ...] = ()
    misplaced: tuple[NodeName, ...] = ()
    layers: tuple[LayerError, ...] = ()
    notes: tuple[str, ...] = ()
    folder: str | None = None
    nodes: int = 0
    processes: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 right, 1 a finding, 3 not run."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON; infinities and NaN become strings, which JSON has no numbers for."""
        plain: dict[str, Any] = jsonable(asdict(self))
        return plain
