"""Inputs that no writer made: valid documents with something changed, and the one question that is asked of a parser.

A parser gives a right object or one of our own errors, whatever it is fed; in a time and a memory that have a bound.
"""

from __future__ import annotations

import copy
import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

Result = TypeVar("Result")

#: Inputs that were tried, by parser.
TRIED: Counter[str] = Counter()
ACCEPTED: Counter[str] = Counter()

VARIABLE = "CARACAL_FUZZ_EXAMPLES"
EXAMPLES = int(os.environ.get(VARIABLE, "300"))
FUZZ = settings(
    max_examples=EXAMPLES,
    # The same inputs every time by default, so that a change of ours is what makes a run fail; others in a long run.
    derandomize=VARIABLE not in os.environ,
    database=None,
    # Of one example: a hang, not a slow machine.
    deadline=timedelta(seconds=10),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def attempt(errors: type[Exception], parse: Callable[..., Result], *given: Any) -> Result | None:
    """What `parse` makes of an input, None where it refuses it with one of `errors` in one short line.

    Any other exception goes on, and fails the property.
    """
    name = getattr(parse, "__qualname__", str(parse))
    TRIED[name] += 1
    try:
        result = parse(*given)
    except errors as error:
        line = str(error)
        steering = {unicodedata.category(character) for character in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
        assert not steering, f"not one line that does nothing to a terminal: {line!r}"
        assert 10 < len(line) < 2000, line
        return None
    ACCEPTED[name] += 1
    return result


# JSON


@dataclass(frozen=True)
class Raw:
    """A piece of JSON, or of what is none, as it stands."""

    text: str


@dataclass(frozen=True)
class Twice:
    """The member of an object that stands there twice."""

    first: Any
    second: Any


def dump(value: Any) -> str:
    """JSON with `Raw` and `Twice` in it."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Twice):  # it has moved out of its object
        return dump(value.first)
    if isinstance(value, dict):
        members = []
        for key, item in value.items():
            twice = (item.first, item.second) if isinstance(item, Twice) else (item,)
            members += [f"{json.dumps(key)}: {dump(one)}" for one in twice]
        return "{" + ", ".join(members) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(dump, value)) + "]"
    return json.dumps(value)


_STRINGS = (
    "", " ", "\n", "\0", "\x1b[31m", "\u202e", "\ud800", "e\u0301", "🦁", "..", "/", "../x", "C:\\x", "a/b", "NUL", "x" * 5000,
    "mhf", "float32", "int64", "F32", "BF16", "true", "1", "1e9", "__metadata__", "__class__", "%s{0}{x}",
)  # fmt: skip
_NUMBERS = (
    "0", "-0", "-1", "1", "2", "127", "255", "256", "65536", "2147483647", "2147483648", "4294967296",
    "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551616", "1152921504606846976",
    "9" * 400, "9" * 5000, "-" + "9" * 30, "0.0", "-0.0", "0.5", "1.0", "1e-5", "1e-320", "1e308", "1e309", "-1e400", "NaN", "Infinity",
    "-Infinity", "1e", "01", "+1", "0x10", "1_000", "\u0661",
)  # fmt: skip
_TEXTS = (
    "null", "true", "false", "[]", "{}", "[[]]", "[{}]", '{"": null}', "nul", "", "{", "]", '"', "//", "'a'", "\ufeff", '"\\ud800"',
    '"\\udc00\\ud800"', '"\\u0000"', '"\\x"', '"\t"',
    *(opening * depth + closing * depth for opening, closing in (("[", "]"), ('{"a":', "}")) for depth in (20, 150, 500, 990)),
    "[" * 100_000, '{"a":' * 100_000,
)  # fmt: skip
#: Values that trip programs up, and any others.
ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(_STRINGS),
    st.sampled_from([Raw(text) for text in _NUMBERS]),
    st.sampled_from([Raw(text) for text in _TEXTS]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    ),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in a document, its own first."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += _places(item, (*path, key))
    return found


def mutants(document: Any) -> st.SearchStrategy[str]:
    """Texts of JSON documents that differ from a valid one in one to three places.

    Places that differ in the index of a list only are one kind, and all kinds are met equally often.
    """
    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    places = _places(document)
    for path in places:
        kinds.setdefault(tuple("*" if isinstance(key, int) else key for key in path), []).append(path)

    @st.composite
    def mutant(draw: st.DrawFn) -> str:
        data = [copy.deepcopy(document)]
        for _ in range(draw(st.integers(1, 3))):
            kind = draw(st.sampled_from(list(kinds.values())))
            _change(data, (0, *draw(st.sampled_from(kind))), draw)
        text = dump(data[0])
        if draw(st.integers(0, 19)) == 0:
            cut = draw(st.integers(0, len(text)))
            text = text[:cut] if draw(st.booleans()) else text[:cut] + draw(st.text(max_size=3)) + text[cut:]
        return text

    def _change(data: list[Any], path: tuple[Any, ...], draw: st.DrawFn) -> None:
        holder: Any = data
        for key in path[:-1]:
            try:
                holder = holder[key]
            except (KeyError, IndexError, TypeError):  # an earlier change has removed it
                return
        key = path[-1]
        if not isinstance(holder, (dict, list)):
            return
        try:
            value = holder[key]
        except (KeyError, IndexError, TypeError):
            return
        match draw(st.sampled_from(("odd", "odd", "like", "drop", "twice", "other", "rename", "insert"))):
            case "odd":
                holder[key] = draw(ODD)
            case "like" if isinstance(value, str):
                holder[key] = value + draw(st.sampled_from(_STRINGS))
            case "like" if isinstance(value, int):
                holder[key] = draw(st.sampled_from((value + 1, value - 1, -value, 2 * value, float(value), str(value))))
            case "drop" if len(path) > 1:
                del holder[key]
            case "twice" if isinstance(holder, dict):
                holder[key] = Twice(value, draw(ODD) if draw(st.booleans()) else value)
            case "twice" if len(path) > 1:
                holder.insert(key, value)
            case "other":  # a right value in a wrong place
                other: Any = document
                for step in draw(st.sampled_from(places)):
                    other = other[step]
                holder[key] = copy.deepcopy(other)
            case "rename" if isinstance(holder, dict):
                holder[draw(st.sampled_from(_STRINGS) | st.text(max_size=6))] = holder.pop(key)
            case "insert" if isinstance(value, dict):
                value[draw(st.sampled_from(_STRINGS) | st.text(max_size=6))] = draw(ODD)
            case "insert" if isinstance(value, list):
                value.insert(draw(st.integers(0, len(value))), draw(ODD))
            case _:
                holder[key] = draw(ODD)

    return mutant()


def encoded(text: str) -> bytes:
    """The bytes of a text that may have halves of characters in it."""
    return text.encode("utf-8", "surrogatepass")


# Bytes

_PIECES = (
    b"\0", b"\xff", b"\x80", b"\x7f", b"\0" * 8, b"\xff" * 8, b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\xff\xff\xff\xff\x0f",
    (2**31 - 1).to_bytes(4, "little"), (2**63 - 1).to_bytes(8, "little"), (2**60).to_bytes(8, "little"), b"{}", b"\n",
    b"\xed\xa0\x80",
)  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, data: bytes, first: int | None = None) -> bytes:
    """The bytes of a valid file with one to four faults: altered, cut, moved or added bytes.

    Args:
        draw: given by Hypothesis.
        data: the whole file.
        first: how many bytes from the start are worth it; None for all. The end may be cut anywhere.
    """
    content = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        stop = max(0, min(len(content), len(content) if first is None else first) - 1)
        at = draw(st.integers(0, stop))
        match draw(st.sampled_from(("flip", "flip", "set", "insert", "overwrite", "delete", "copy", "cut"))):
            case "flip" if content:
                content[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if content:
                content[at] = draw(st.integers(0, 255))
            case "insert":
                content[at:at] = draw(st.sampled_from(_PIECES) | st.binary(max_size=12))
            case "overwrite":
                piece = draw(st.sampled_from(_PIECES))
                content[at : at + len(piece)] = piece
            case "delete":
                del content[at : at + draw(st.integers(1, 64))]
            case "copy":
                start = draw(st.integers(0, stop))
                content[at:at] = content[start : start + draw(st.integers(1, 200))]
            case _:
                del content[draw(st.integers(0, len(content))) :]
    return bytes(content)
