"""Where a provider begins to crash, hang, run out of memory, refuse the graph, or leave nodes to others."""

from __future__ import annotations

from collections.abc import Sequence

from caracal_runtimes.bisect.compare import statistics
from caracal_runtimes.bisect.findings import Finding
from caracal_runtimes.bisect.probe import Result
from caracal_runtimes.bisect.scene import REACHES, NotReproducedError, Scene
from caracal_runtimes.bisect.search import first_failing


class Endings:
    """For providers that crash, hang, run out of memory, refuse the graph, or leave nodes to others."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.surgeon, self.side = scene, scene.surgeon, scene.side

    def locate(self) -> Finding:
        """The first node that shows it; raises NotReproducedError where the failure comes and goes."""
        scene, surgeon = self.scene, self.surgeon
        scene.say("searching: running beginnings of the graph")
        count = len(surgeon.steps)
        # A hang costs the whole time limit each time: fewer rounds then, with more to run in each.
        length = first_failing(count, self._first, 24 if scene.failure == "hang" else 7)
        if length is None:
            return Finding(
                scene.failure,
                "looking",
                tuple(scene.name(index) for index in surgeon.steps[-1:]),
                confirmed=("with the unused values of all nodes as outputs, the failure is gone",),
            )
        index = surgeon.steps[length - 1]
        scene.say("checking: the node alone and in context")
        before, failing = ([length - 1] if length > 1 else []), [length]
        if self._first(before) is not None or self._first(failing) is None:
            raise NotReproducedError(f"the failure ({scene.failure}) comes and goes at {surgeon.key(index)}")
        confirmed = [f"the graph up to {surgeon.key(index)} fails in the same way, without that node it does not"]
        cut: list[int] = []
        tried: list[int] = []
        reason = ""
        for reach in (0, *REACHES):
            nodes = surgeon.around(index, reach)
            if nodes == tried:
                break
            tried = nodes
            result = self._run_cut(nodes)
            if self._same(result):
                cut, reason = nodes, result.reason
                break
        where = "alone" if len(cut) == 1 else "context"
        alone = "fails in the same way" if where == "alone" else "does not fail"
        confirmed.append(f"run alone on the reference's inputs, the node {alone}")
        inputs = self.scene.reference.values(surgeon.reads(index))
        outputs = self.scene.reference.values(surgeon.results(index))
        return Finding(
            failure=scene.failure,
            where=where,  # type: ignore[arg-type]
            nodes=(scene.name(index),),
            level=scene.level,
            inputs=tuple(statistics(name, value) for name, value in inputs.items()),
            outputs=tuple((statistics(name, value), None) for name, value in outputs.items()),
            cut=tuple(map(scene.name, cut)),
            reason=reason,
            confirmed=tuple(confirmed),
        )

    def _run_cut(self, nodes: Sequence[int]) -> Result:
        workshop = self.side.workshop
        needed = self.scene.reference.values(self.surgeon.inputs_of(nodes))
        model = self.surgeon.extract([nodes], self.surgeon.ends(nodes), needed)
        return self.side.run([workshop.job(model, [workshop.save(needed)])])[0]

    def _same(self, result: Result) -> bool:
        return result.death == self.scene.failure and _gist(result.reason) == _gist(self.scene.reason)

    def _first(self, lengths: Sequence[int]) -> int | None:
        """The first of some beginnings that fails in the same way; shorter ones are run before it in the same process."""
        if not lengths:
            return None
        jobs = [self.side.workshop.job(self.surgeon.prefix(length), [self.scene.inputs]) for length in lengths]
        start = 0
        while start < len(jobs):
            results = self.side.run(jobs[start:], stop=True)
            last = results[-1]
            if last.death is None:
                return None
            if self._same(last):
                return start + len(results) - 1
            self.scene.note(
                f"the first {lengths[start + len(results) - 1]} nodes alone end otherwise: {last.death} "
                f"({last.reason}); that is another failure and was not followed"
            )
            start += len(results)
        return None


def _gist(reason: str) -> str:
    """How a reason begins, without what differs from graph to graph: another complaint is another failure."""
    return " ".join(word for word in reason.split() if not any(c.isdigit() for c in word))[:48]
