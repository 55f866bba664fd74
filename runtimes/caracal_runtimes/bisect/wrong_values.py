"""Where a provider begins to compute something else than the reference."""

from __future__ import annotations

import math
from collections.abc import Sequence

from caracal_runtimes.bisect.compare import compare, statistics
from caracal_runtimes.bisect.findings import Finding, OwnError
from caracal_runtimes.bisect.probe import OWN
from caracal_runtimes.bisect.scene import REACHES, Array, Scene
from caracal_runtimes.bisect.search import Located, ancestors, first_wrong

_AT_ONCE = 64  # nodes that are run alone in one graph
_MOST_SUSPECTS = 24
_MOST_TRIES = 5
_SHARE = 0.1  # of the failure's size that a node must bring about by itself to be its cause


class WrongValues:
    """For providers that compute something else than the reference."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.surgeon, self.side, self.reference = scene, scene.surgeon, scene.side, scene.reference
        self.seen: dict[str, Array] = dict(scene.outputs)
        self.answers: dict[str, bool | None] = {}

    def locate(self) -> Finding:
        """The first node that shows it."""
        scene, surgeon = self.scene, self.surgeon
        order = surgeon.values()
        parents = surgeon.parents()
        place = {name: index for index, name in enumerate(order)}
        sources: set[str] = set(scene.failing)
        for name in scene.failing:
            sources |= ancestors(name, parents, place)
        order = [name for name in order if name in sources]
        known = {name: self._wrong(name, value) for name, value in scene.outputs.items() if name in sources}
        known |= dict.fromkeys(scene.failing, True)  # by the limit of final outputs or by the recorded ones
        excused: set[str] = set()
        first: int | None = None
        for _ in range(_MOST_TRIES):
            wrong = {name: answer for name, answer in {**known, **self.answers}.items() if name not in excused}
            found = first_wrong(order, parents, wrong | dict.fromkeys(excused, False), self._measure)
            if found.hidden:
                return self._region(found)
            index = surgeon.producer[found.wrong]
            finding = self._judge(index)
            if finding is not None:
                return finding
            first = index if first is None else first
            excused |= set(surgeon.results(index))
            if excused & set(scene.failing):
                break
        assert first is not None
        return self._scan(order, first)

    def _wrong(self, name: str, value: Array) -> bool:
        return self.scene.is_wrong(compare(value, self.reference[name], self.scene.level))

    def _measure(self, names: Sequence[str]) -> dict[str, bool | None]:
        answers = self._asked(names)
        self.answers |= answers
        return answers

    def _asked(self, names: Sequence[str]) -> dict[str, bool | None]:
        """Looks at values in one run; where that makes the failure vanish, at each by itself."""
        self.scene.say("searching: looking at values inside of the graph")
        values = self._look([names])[0]
        if values is not None:
            self.seen |= values
            return {name: self._wrong(name, values[name]) for name in names}
        if len(names) == 1:
            return {names[0]: None}
        answers: dict[str, bool | None] = {}
        for name, each in zip(names, self._look([[name] for name in names]), strict=True):
            if each is None:
                answers[name] = None
            else:
                self.seen |= each
                answers[name] = self._wrong(name, each[name])
        return answers

    def _look(self, groups: Sequence[Sequence[str]]) -> list[dict[str, Array] | None]:
        """The provider's values in its run of the whole graph; None where the failure was not there."""
        scene, workshop = self.scene, self.side.workshop
        self.reference.values(name for names in groups for name in names)
        jobs = [
            workshop.job(self.surgeon.tapped(names), [scene.inputs], [*dict.fromkeys([*names, *scene.failing])])
            for names in groups
        ]
        found: list[dict[str, Array] | None] = []
        for names, result in zip(groups, self.side.run(jobs), strict=True):
            if result.death is not None:
                scene.note(
                    f"with {_few(names)} as outputs besides, it ends otherwise: {result.death} ({result.reason}); "
                    f"that is another failure and was not followed"
                )
                found.append(None)
            else:
                found.append(result.values[0] if scene.still_fails(result.values[0]) else None)
        return found

    def _judge(self, index: int) -> Finding | None:
        """Whether a node is to blame, by running it alone and by its own part in context; None if it inherits its error."""
        scene, surgeon = self.scene, self.surgeon
        scene.say("checking: the node alone and in context")
        results, reads = surgeon.results(index), surgeon.reads(index)
        right = self.reference.values([*results, *reads])
        alone = self._alone([index])[index]
        own = None if alone is None else {name: compare(alone[name], right[name], scene.level) for name in results}
        context = self._look([[*results, *(name for name in reads if name in surgeon.producer)]])[0]
        inherited: dict[str, Array] = {}
        if context is not None:
            self.seen |= context
            given = {name: context.get(name, right[name]) for name in reads}
            inherited = self._by_reference(index, given)
        errors = tuple(
            OwnError(
                name,
                compare(self.seen[name], right[name], scene.level) if name in self.seen else None,
                own[name] if own is not None else None,
                compare(inherited[name], right[name], scene.level) if name in inherited else None,
                compare(context[name], inherited[name], scene.level)
                if context is not None and name in inherited
                else None,
            )
            for name in results
        )
        wrong_alone = own is not None and any(map(scene.is_wrong, own.values()))
        wrong_here = any(error.in_context is not None and scene.is_wrong(error.in_context) for error in errors)
        if not wrong_alone and not wrong_here:
            return None
        if not self._enough({name: self.seen[name] for name in results if name in self.seen}):
            scene.note(
                f"{surgeon.key(index)} ({surgeon.nodes[index].op_type}) is off by "
                f"{_worst(errors):.1e}, which does not make the final outputs wrong; the search went on"
            )
            return None
        confirmed = ["the reference, given this node's values and computing all the rest itself, fails in the same way"]
        if wrong_alone:
            confirmed.append("run alone on the reference's inputs, the node is wrong")
            if wrong_here:
                confirmed.append("in the whole graph, it is wrong by what the provider itself gave it")
            elif context is not None:
                scene.note("alone it is wrong, in the whole graph it adds little to what it is given")
            cut: list[int] = [index]
        else:
            confirmed.append("run alone on the reference's inputs, the node is right")
            cut = self._smallest(index, results)
        if corrected := self._corrected(results):
            confirmed.append(corrected)
        return self._finding(
            "alone" if wrong_alone else "context",
            [index],
            errors,
            cut,
            alone if wrong_alone else None,
            tuple(confirmed),
        )

    def _finding(
        self,
        where: str,
        nodes: Sequence[int],
        errors: tuple[OwnError, ...],
        cut: Sequence[int],
        got: dict[str, Array] | None,
        confirmed: tuple[str, ...],
    ) -> Finding:
        scene, surgeon = self.scene, self.surgeon
        kinds = [error.own if where == "alone" else error.in_context or error.total for error in errors]
        kind = next((d.kind for d in kinds if d is not None and scene.is_wrong(d)), scene.failure)
        if kind != scene.failure:
            scene.note(f"the final outputs fail by {scene.failure}, the node by {kind}")
        inputs = surgeon.inputs_of(nodes)
        values = got if got is not None else self.seen
        return Finding(
            failure=kind if kind != "same" else scene.failure,
            where=where,  # type: ignore[arg-type]
            nodes=tuple(map(scene.name, nodes)),
            errors=errors,
            level=scene.level,
            inputs=tuple(statistics(name, value) for name, value in self.reference.values(inputs).items()),
            outputs=tuple(
                (
                    statistics(error.value, self.reference[error.value]),
                    statistics(error.value, values[error.value]) if error.value in values else None,
                )
                for error in errors
            ),
            cut=tuple(map(scene.name, cut)),
            confirmed=confirmed,
        )

    def _region(self, found: Located) -> Finding:
        """For values that cannot be looked at: the nodes between the last right and the first wrong one."""
        scene, surgeon = self.scene, self.surgeon
        nodes = sorted({surgeon.producer[name] for name in (*found.hidden, found.wrong)})
        scene.say("checking: the region by itself")
        names = surgeon.results(nodes[-1])
        confirmed = [
            f"{_few(found.right) or 'the inputs'}: right while the failure is there; {found.wrong}: wrong",
            f"with {_few(found.hidden)} as an output besides, the failure is gone",
        ]
        right = self.reference.values(names)
        result = self._cut(nodes, names)
        errors = []
        alone_wrong = False
        for name in names:
            total = compare(self.seen[name], right[name], scene.level) if name in self.seen else None
            own = compare(result[name], right[name], scene.level) if result is not None else None
            alone_wrong |= own is not None and scene.is_wrong(own)
            errors.append(OwnError(name, total, own))
        cut = nodes if alone_wrong else self._smallest(nodes[-1], names, least=nodes)
        confirmed.append(
            "cut out and run on the reference's inputs, the region is wrong"
            if alone_wrong
            else "cut out and run on the reference's inputs, the region is right"
        )
        return self._finding("looking", nodes, tuple(errors), cut, result if alone_wrong else None, tuple(confirmed))

    def _scan(self, order: Sequence[str], innocent: int) -> Finding:
        """Where the walk ends at a node that only inherits: every node alone, the first that matters."""
        scene, surgeon = self.scene, self.surgeon
        scene.say("searching: every node alone on the reference's inputs")
        nodes = sorted({surgeon.producer[name] for name in order})
        got = self._alone(nodes)
        right = self.reference.values(name for index in nodes for name in surgeon.results(index))
        own: dict[int, float] = {}
        suspects = []
        for index in nodes:
            values = got[index]
            differences = (
                [] if values is None else [compare(values[n], right[n], scene.level) for n in surgeon.results(index)]
            )
            own[index] = max(
                (math.inf if d.kind in ("nan", "shape") else d.relative_l2 for d in differences), default=0.0
            )
            if any(map(scene.is_wrong, differences)):
                suspects.append(index)
        for index in suspects[:_MOST_SUSPECTS]:
            if index != innocent and self._enough(got[index] or {}):
                finding = self._judge_alone(index, got[index] or {})
                if finding is not None:
                    return finding
        worst = sorted(nodes, key=lambda index: -own[index])[:5]
        listed = ", ".join(f"{surgeon.key(index)} {own[index]:.1e}" for index in worst)
        scene.note(f"no node alone explains the failure; the largest errors of their own: {listed}")
        scene.note(f"{surgeon.key(innocent)} is the first whose value is beyond the level, by what it inherits")
        errors = tuple(
            OwnError(name, compare(self.seen[name], right[name], scene.level) if name in self.seen else None)
            for name in surgeon.results(innocent)
        )
        return self._finding("accumulated", [innocent], errors, [], None, ("every node was run alone",))

    def _judge_alone(self, index: int, got: dict[str, Array]) -> Finding | None:
        right = self.reference.values(got)
        errors = tuple(
            OwnError(
                name,
                compare(self.seen[name], right[name], self.scene.level) if name in self.seen else None,
                compare(got[name], right[name], self.scene.level),
            )
            for name in got
        )
        confirmed = (
            "run alone on the reference's inputs, the node is wrong",
            "the reference, given this node's values and computing all the rest itself, fails in the same way",
        )
        return self._finding("alone", [index], errors, [index], got, confirmed)

    def _alone(self, nodes: Sequence[int]) -> dict[int, dict[str, Array] | None]:
        """What the provider gives for nodes by themselves, on the reference's inputs."""
        surgeon, workshop = self.surgeon, self.side.workshop
        jobs = []
        chunks = [nodes[start : start + _AT_ONCE] for start in range(0, len(nodes), _AT_ONCE)]
        for chunk in chunks:
            needed = self.reference.values(name for index in chunk for name in surgeon.reads(index))
            outputs = [name for index in chunk for name in surgeon.results(index)]
            model = surgeon.extract([[index] for index in chunk], outputs, needed, suffix=OWN)
            jobs.append(workshop.job(model, [workshop.save(needed)]))
        found: dict[int, dict[str, Array] | None] = {}
        for chunk, result in zip(chunks, self.side.run(jobs), strict=True):
            values = result.values[0] if result.death is None else None
            if values is None and len(chunk) > 1:
                for index in chunk:
                    found |= self._alone([index])
                continue
            if values is None:
                self.scene.note(f"{surgeon.key(chunk[0])} cannot be run alone: {result.death} ({result.reason})")
            for index in chunk:
                found[index] = (
                    None if values is None else {name: values[f"{name}{OWN}"] for name in surgeon.results(index)}
                )
        return found

    def _cut(self, nodes: Sequence[int], outputs: Sequence[str]) -> dict[str, Array] | None:
        """What the provider gives for some nodes by themselves, on the reference's inputs."""
        workshop = self.side.workshop
        needed = self.reference.values(self.surgeon.inputs_of(nodes))
        model = self.surgeon.extract([nodes], outputs, needed)
        result = self.side.run([workshop.job(model, [workshop.save(needed)])])[0]
        return result.values[0] if result.death is None else None

    def _smallest(self, index: int, outputs: Sequence[str], least: Sequence[int] = ()) -> list[int]:
        """The smallest cut-out before a node that is wrong on the reference's inputs; empty if none is."""
        right = self.reference.values(outputs)
        tried: list[int] = []
        for reach in REACHES:
            nodes = sorted({*self.surgeon.around(index, reach), *least})
            if nodes == tried:
                break
            tried = nodes
            got = self._cut(nodes, outputs)
            if got is not None and any(
                self.scene.is_wrong(compare(got[name], right[name], self.scene.level)) for name in outputs
            ):
                return nodes
        return []

    def _by_reference(self, index: int, given: dict[str, Array]) -> dict[str, Array]:
        """What the reference makes of a node's inputs in the provider's run."""
        side, surgeon = self.reference.side, self.surgeon
        model = surgeon.extract([[index]], surgeon.results(index), given)
        result = side.run([side.workshop.job(model, [side.workshop.save(given)])])[0]
        return result.values[0] if result.death is None else {}

    def _enough(self, values: dict[str, Array]) -> bool:
        """Whether the reference fails in the same way when it is given these values instead of its own."""
        scene = self.scene
        if any(name in values and name in scene.failing for name in values):
            return True
        side = self.reference.side
        outputs = [name for name in scene.failing if name not in values]
        given = {name: self.reference[name] for name in self.surgeon.given()} | values
        job = side.workshop.job(self.surgeon.injected(values, values), [side.workshop.save(given)], outputs)
        result = side.run([job])[0]
        # What the reference cannot go on with, such as another shape, is no small matter.
        if result.death is not None or not scene.still_fails(result.values[0]):
            return result.death is not None
        if scene.failure != "numbers":
            return True
        return any(
            compare(result.values[0][name], self.reference[name], scene.limit).relative_l2
            >= _SHARE * compare(scene.outputs[name], self.reference[name], scene.limit).relative_l2
            for name in outputs
        )

    def _corrected(self, names: Sequence[str]) -> str:
        """What becomes of the provider's final outputs when it is given the right values at a place."""
        scene, workshop = self.scene, self.side.workshop
        outputs = [name for name in scene.failing if name not in names]
        if not outputs:
            return ""
        right = self.reference.values(names)
        given = {name: self.reference[name] for name in self.surgeon.given()} | right
        result = self.side.run([workshop.job(self.surgeon.injected(right, right), [workshop.save(given)], outputs)])[0]
        if result.death is not None:
            return ""
        if not scene.still_fails(result.values[0]):
            return "given the reference's values here, the provider's final outputs are right"
        scene.note("given the reference's values here, the final outputs are still wrong: there is more than one fault")
        return ""


def _worst(errors: Sequence[OwnError]) -> float:
    return max((e.total.relative_l2 for e in errors if e.total is not None), default=0.0)


def _few(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
