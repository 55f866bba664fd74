"""The error across the blocks of the model: what a provider's own run has by then, and what each block adds."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from caracal_runtimes.errors import NotRunError

if TYPE_CHECKING:
    from caracal_runtimes.bisect.probe import Side
    from caracal_runtimes.bisect.reference import Reference
    from caracal_runtimes.bisect.surgery import Surgeon
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.providers import Settings

_BLOCK = re.compile(r"blocks\.(\d+)([./])")


@dataclass(frozen=True)
class LayerError:
    """Error of what one block hands on.

    Args:
        label: the block and its kind.
        tensor: the value in the graph.
        relative_l2: in the provider's own run, so with what it inherited.
        own_relative_l2: of the block run alone on the reference's values; None where that could not be run.
    """

    label: str
    tensor: str
    relative_l2: float
    own_relative_l2: float | None


@dataclass(frozen=True)
class Block:
    """Nodes of one block and the value it hands on."""

    label: str
    tensor: str
    nodes: tuple[int, ...]


def layer_errors(
    bundle: Bundle,
    ep: str,
    settings: Settings,
    *,
    against: str = "cpu",
    graph: str = "forward",
    case: str | None = None,
    time_limit: float = 60.0,
) -> list[LayerError]:
    """Errors of all blocks of a graph, in order.

    Args:
        bundle: an opened bundle.
        ep: the provider, as `--ep` takes it.
        settings: threads, options and the like; the device comes from `ep`.
        against: the provider that the values are compared with.
        graph: `forward`, `extend` or `step`.
        case: a golden's name; the largest when None.
        time_limit: seconds without a sign of life.

    Raises:
        InputError: no such provider, graph or golden.
        NotRunError: one of the two could not run it.
    """
    from caracal_runtimes.bisect.inputs import cases_for
    from caracal_runtimes.bisect.probe import Side, Workshop
    from caracal_runtimes.bisect.reference import Reference
    from caracal_runtimes.bisect.surgery import Surgeon
    from caracal_runtimes.providers import Settings as Plain

    surgeon = Surgeon(bundle.file(bundle.manifest.graphs[graph].file)) if graph in bundle.manifest.graphs else None
    with tempfile.TemporaryDirectory(prefix="caracal-bisect-") as folder:
        workshop = Workshop(Path(folder), [bundle.file(name) for name in bundle.manifest.weights])
        chosen = cases_for(bundle, graph, case, workshop, time_limit)[-1]
        assert surgeon is not None
        inputs = workshop.save(chosen.feeds)
        blocks = blocks_of(surgeon, bundle.manifest.model.layer_types)
        with (
            Side(against, Plain(threads=settings.threads), workshop, time_limit) as right,
            Side(ep, settings, workshop, time_limit) as side,
        ):
            reference = Reference(right, surgeon, inputs, chosen.feeds, {})
            return measure_layers(side, surgeon, reference, inputs, blocks)


def blocks_of(surgeon: Surgeon, kinds: Sequence[str] = ()) -> list[Block]:
    """The blocks of a graph by the names that the exporter gives its nodes; empty for a graph that has none."""
    members: dict[int, list[int]] = {}
    ends: dict[int, int] = {}
    for index in surgeon.steps:
        found = _BLOCK.match(surgeon.nodes[index].name)
        if found:
            members.setdefault(int(found[1]), []).append(index)
            if found[2] == "/":  # the residual sums stand in the block itself, everything else in its parts
                ends[int(found[1])] = index
    return [
        Block(
            f"{number} {kinds[number]}" if number < len(kinds) else str(number),
            surgeon.results(ends[number])[0],
            tuple(members[number]),
        )
        for number in sorted(ends)
    ]


def measure_layers(
    side: Side, surgeon: Surgeon, reference: Reference, inputs: Path, blocks: Sequence[Block]
) -> list[LayerError]:
    """Runs the whole graph and all blocks by themselves. Raises NotRunError when the provider cannot run the graph."""
    from caracal_runtimes.bisect.compare import compare
    from caracal_runtimes.bisect.probe import OWN

    if not blocks:
        return []
    workshop = side.workshop
    names = [block.tensor for block in blocks]
    groups = [block.nodes for block in blocks]
    needed = {name for group in groups for name in surgeon.inputs_of(group)}
    right = reference.values([*names, *needed])
    alone = surgeon.extract(groups, names, right, suffix=OWN)
    given = workshop.save({name: right[name] for name in needed})
    whole, own = side.run(
        [
            workshop.job(surgeon.tapped(names), [inputs], names),
            workshop.job(alone, [given], [f"{name}{OWN}" for name in names]),
        ]
    )
    if whole.death is not None or not whole.values:
        raise NotRunError(f"provider {side.ep}: the blocks' values cannot be had: {whole.reason or whole.death}")
    separate = own.values[0] if own.death is None and own.values else None

    def error(got: NDArray[Any], name: str) -> float:
        difference = compare(got, right[name], 0.0)
        return float("nan") if difference.kind == "nan" else difference.relative_l2

    return [
        LayerError(
            block.label,
            block.tensor,
            error(whole.values[0][block.tensor], block.tensor),
            None if separate is None else error(separate[f"{block.tensor}{OWN}"], block.tensor),
        )
        for block in blocks
    ]
