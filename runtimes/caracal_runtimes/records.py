"""Dataclasses to JSON and back, checked, and the JSON Schema of them: one description of a record serves all three."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from caracal_runtimes.errors import InputError

T = TypeVar("T")
_NOT_FINITE = ("inf", "-inf", "nan")


def jsonable(value: Any) -> Any:
    """The same for JSON: tuples as lists, infinities and NaN, which it has no numbers for, as strings."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def build(kind: type[T], data: Any, where: str) -> T:
    """A dataclass from what `jsonable(asdict(...))` wrote; keys that it does not have are ignored.

    Raises:
        InputError: naming the place, what was expected and what was found.
    """
    return _parse(kind, data, where)  # type: ignore[no-any-return]


def schema(kind: type) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of what `build` reads."""
    definitions: dict[str, Any] = {}
    top = _describe(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **definitions.pop(top["$ref"].rpartition("/")[2]),
        "$defs": definitions,
    }


def _parse(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, Mapping):
            raise _unexpected(where, "an object", data)
        hints = get_type_hints(kind)
        given = {}
        for field in dataclasses.fields(kind):
            if field.name in data:
                given[field.name] = _parse(hints[field.name], data[field.name], f"{where}.{field.name}")
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise InputError(f"{where}.{field.name} is missing")
        return kind(**given)  # type: ignore[operator]
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _parse(inner, data, where)
    if origin is Literal:
        if data not in arguments:
            raise _unexpected(where, f"one of {', '.join(map(str, arguments))}", data)
        return data
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise _unexpected(where, "a list", data)
        return tuple(_parse(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise _unexpected(where, "an object", data)
        return {key: _parse(arguments[1], item, f"{where}.{key:.40}") for key, item in data.items()}
    if kind is float:
        if isinstance(data, str) and data in _NOT_FINITE:
            return float(data)
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            try:
                return float(data)
            except OverflowError:
                raise InputError(f"{where}: expected a number, found an integer that no float holds") from None
        raise _unexpected(where, "a number", data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise _unexpected(where, {str: "a string", int: "an integer", bool: "true or false"}[kind], data)
    if kind is int and abs(data) >= 1 << 63:
        raise InputError(f"{where}: expected an integer of 64 bits, found a larger one")
    # What ends a line or steers a terminal has no place in a report's words.
    return "".join(c if c.isprintable() else " " for c in data) if kind is str else data


def _describe(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}
            hints = get_type_hints(kind)
            needed = [
                field.name
                for field in dataclasses.fields(kind)
                if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            ]
            definitions[name] = {
                "type": "object",
                "description": (kind.__doc__ or "").strip().partition("\n")[0],
                "properties": {field: _describe(hint, definitions) for field, hint in hints.items()},
                "required": needed,
            }
        return {"$ref": f"#/$defs/{name}"}
    if origin in (Union, types.UnionType):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return {"anyOf": [_describe(inner, definitions), {"type": "null"}]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        return {"type": "array", "items": _describe(arguments[0], definitions)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe(arguments[1], definitions)}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(_NOT_FINITE)}]}
    return {"type": {str: "string", int: "integer", bool: "boolean"}[kind]}


def _unexpected(where: str, wanted: str, found: Any) -> InputError:
    return InputError(f"{where}: expected {wanted}, found {found!r:.60}")
