"""The searches, without any runtime: they ask an oracle, about values or about beginnings of a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

#: True: wrong; False: right; None: it cannot be looked at, because looking makes the failure vanish.
Answers = Mapping[str, bool | None]


@dataclass(frozen=True)
class Located:
    """A value that is wrong although all it is computed from is right.

    Args:
        wrong: the value.
        right: the nearest values before it that were looked at; all of them are right.
        hidden: values between those and `wrong` that cannot be looked at; empty where the answer is exact.
        rounds: how often the oracle was asked.
    """

    wrong: str
    right: tuple[str, ...]
    hidden: tuple[str, ...]
    rounds: int


def first_wrong(
    order: Sequence[str],
    parents: Mapping[str, Sequence[str]],
    known: Answers,
    measure: Callable[[Sequence[str]], Answers],
    width: int = 8,
) -> Located:
    """Walks a graph of values from one that is wrong to one whose own inputs are all right.

    A value that is right lets the values before it be taken for right at first, which makes the walk a binary search. The
    answer does not rest on that: it is given only when every input of the wrong value has been looked at.

    Args:
        order: all values that can be asked for, each after those that it is computed from.
        parents: what each is computed from; names that are not in `order` are inputs and count as right.
        known: values about which is known already whether they are wrong; at least one is.
        measure: the oracle, asked for at most `width` values at once; it must answer for each of them.
        width: how many values to ask for at once.

    Raises:
        ValueError: no value is known to be wrong.
    """
    place = {name: index for index, name in enumerate(order)}
    answers = {name: wrong for name, wrong in known.items() if name in place}
    rounds = 0

    def ask(names: Iterable[str]) -> None:
        nonlocal rounds
        for chunk in _chunks(sorted(names, key=place.__getitem__), width):
            rounds += 1
            found = measure(chunk)
            for name in chunk:
                answers[name] = found[name]

    while True:
        wrong = min((name for name, answer in answers.items() if answer), key=place.__getitem__, default=None)
        if wrong is None:
            raise ValueError("no value is known to be wrong")
        before = ancestors(wrong, parents, place)
        presumed: set[str] = set()
        for name in before:
            if answers.get(name) is False and name not in presumed:
                presumed |= ancestors(name, parents, place)
        unknown = sorted(
            (name for name in before if name not in answers and name not in presumed), key=place.__getitem__
        )
        if unknown:
            ask(spread(unknown, width))
            continue
        right, hidden = _border(wrong, parents, place, answers)
        unseen = [name for name in right if name not in answers]
        if not unseen:
            return Located(wrong, tuple(right), tuple(hidden), rounds)
        ask(unseen[:width])


def first_failing(count: int, fails: Callable[[Sequence[int]], int | None], width: int = 7) -> int | None:
    """The shortest beginning of a list that fails, given that longer ones than one that fails do so as well.

    Args:
        count: length of the list.
        fails: told lengths in growing order, gives the index of the first that fails, None if none does.
        width: how many lengths to try at once.

    Returns:
        A length that fails while the one before was tried and did not (or is 0); None if not even the whole fails.
    """
    low, high = 0, count + 1
    while high - low > 1:
        lengths = [int(length) for length in spread([str(value) for value in range(low + 1, high)], width)]
        if high > count and lengths[-1] < count:
            lengths.append(count)
        first = fails(lengths)
        if first is None:
            low = lengths[-1]
        else:
            high = lengths[first]
            low = lengths[first - 1] if first else low
    return high if high <= count else None


def spread(names: Sequence[str], width: int) -> list[str]:
    """At most `width` of the names, evenly apart, none of the ends unless all of them fit."""
    if len(names) <= width:
        return list(names)
    return [names[(index + 1) * len(names) // (width + 1)] for index in range(width)]


def ancestors(name: str, parents: Mapping[str, Sequence[str]], among: Mapping[str, object]) -> set[str]:
    """Everything that a value is computed from, as far as it is in `among`."""
    found: set[str] = set()
    left = [name]
    while left:
        for parent in parents.get(left.pop(), ()):
            if parent in among and parent not in found:
                found.add(parent)
                left.append(parent)
    return found


def _border(
    wrong: str, parents: Mapping[str, Sequence[str]], place: Mapping[str, int], answers: Answers
) -> tuple[list[str], list[str]]:
    """The nearest values before `wrong` that can be looked at, and those in between that cannot."""
    right: dict[str, None] = {}
    hidden: dict[str, None] = {}
    left = [wrong]
    while left:
        for parent in parents.get(left.pop(), ()):
            if parent not in place:
                continue
            if parent in answers and answers[parent] is None:
                if parent not in hidden:
                    hidden[parent] = None
                    left.append(parent)
            else:
                right[parent] = None
    return (sorted(right, key=place.__getitem__), sorted(hidden, key=place.__getitem__))


def _chunks(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]
