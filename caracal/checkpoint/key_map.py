r"""Key maps: a user's rules from the names of another layout to the model's.

A TOML file of rules; for each stored name the first rule counts whose `match` matches all of it:

    [[rule]]
    match = 'layers\.(\d+)\.attn\.query\.(weight|bias)'     # Python regular expression
    name = 'blocks.\1.swa.q_proj.\2'                        # \1 or \g<1>: what a group matched

    [[rule]]
    match = '.*\.inv_freq'
    drop = true                                             # not a parameter: leave it out

    [[rule]]
    match = 'head\.weight'
    name = 'lm_head.weight'
    transpose = true                                        # stored [in, out]

Names that no rule matches are read as usual. A rule that matches nothing is refused: it is misspelt, or of another
checkpoint.
"""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caracal.errors import CheckpointError

_KEYS = {"match": str, "name": str, "drop": bool, "transpose": bool}
_MAX_BYTES = 1 << 20  # a device or a pipe may have no end
_MAX_RULES = 10_000


@dataclass(frozen=True)
class Rule:
    """One rule: `name` is None where the tensor is dropped; `transpose` is None where the shape may tell."""

    pattern: re.Pattern[str]
    name: str | None
    transpose: bool | None = None


@dataclass(frozen=True)
class Renamed:
    """What a rule made of a stored name; `name` is None for a tensor that is left out."""

    name: str | None
    transpose: bool | None


@dataclass(frozen=True)
class KeyMap:
    """The rules of a file, in order."""

    source: str
    rules: tuple[Rule, ...]

    @classmethod
    def from_file(cls, path: str | Path) -> KeyMap:
        """Reads a key map. Raises CheckpointError naming the rule that is wrong."""
        try:
            with Path(path).open("rb") as file:
                raw = file.read(_MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"--key-map: {str(path)[:80]!r} cannot be read ({reason}); name a TOML file"
            ) from None
        if len(raw) > _MAX_BYTES:
            raise CheckpointError(f"--key-map: {path} has more than {_MAX_BYTES:,} bytes, which is no key map")
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"--key-map: {path} is not UTF-8 text (byte {error.start}); save it as UTF-8"
            ) from None
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, source: str = "key map") -> KeyMap:
        """Parses the text of a key map. Raises CheckpointError."""
        try:
            data = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
            raise CheckpointError(
                f"--key-map: {source} is not TOML ({_one_line(error)}); expected [[rule]] tables with match and name, "
                f"in single quotes"
            ) from None
        rules = data.pop("rule", None)
        if data or not isinstance(rules, list) or not rules:
            found = ", ".join(sorted(data))[:60] or ("no rules" if rules is None or rules == [] else "one [rule]")
            raise CheckpointError(f"--key-map: {source} must hold [[rule]] tables and nothing else, found {found}")
        if len(rules) > _MAX_RULES:
            raise CheckpointError(f"--key-map: {source} has {len(rules):,} rules, at most {_MAX_RULES:,} are read")
        return cls(source, tuple(_rule(rule, f"{source}, rule {number}") for number, rule in enumerate(rules, 1)))

    def rename(self, keys: Iterable[str]) -> dict[str, Renamed]:
        """What becomes of each of these names that a rule matches.

        Raises:
            CheckpointError: a rule matches none of them.
        """
        renamed: dict[str, Renamed] = {}
        used = [False] * len(self.rules)
        for key in keys:
            for index, rule in enumerate(self.rules):
                if (match := rule.pattern.fullmatch(key)) is None:
                    continue
                # A later rule for the same name is shadowed, not misspelt: it has matched as well.
                if key not in renamed:
                    renamed[key] = Renamed(None if rule.name is None else match.expand(rule.name), rule.transpose)
                used[index] = True
        for index, rule in enumerate(self.rules):
            if not used[index]:
                raise CheckpointError(
                    f"--key-map: {self.source}, rule {index + 1} ({rule.pattern.pattern!r:.80}) matches no name of the "
                    f"checkpoint; correct or remove it (`caracal info` lists the names)"
                )
        return renamed


def _rule(data: Any, where: str) -> Rule:
    if not isinstance(data, dict):
        raise CheckpointError(f"--key-map: {where} must be a [[rule]] table, found {data!r:.60}")
    for key, value in data.items():
        if key not in _KEYS:
            raise CheckpointError(f"--key-map: {where} has the key {key!r:.60}, expected {', '.join(_KEYS)}")
        if not isinstance(value, _KEYS[key]):
            raise CheckpointError(f"--key-map: {where}.{key} must be {_KEYS[key].__name__}, found {value!r:.60}")
    match, name, drop = data.get("match"), data.get("name"), data.get("drop", False)
    if match is None or (name is None) == (not drop):
        raise CheckpointError(f"--key-map: {where} must have match, and either name or drop = true")
    if name is None and "transpose" in data:
        raise CheckpointError(f"--key-map: {where} drops the tensor, so transpose means nothing; remove one of them")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of expressions that a later Python may read otherwise
            pattern = re.compile(match)
        if name is not None:
            pattern.sub(name, "")  # compiles the replacement: a wrong group is found now and not when it is used
    except (re.error, IndexError, RecursionError, OverflowError, ValueError) as error:
        raise CheckpointError(
            f"--key-map: {where} is no regular expression with a replacement for it ({_one_line(error)}); correct it, "
            f"and put it into single quotes"
        ) from None
    return Rule(pattern, name, data.get("transpose"))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
