"""HTML and SVG built so that nothing can be forgotten: whatever is not markup by its type is escaped where it is put."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

_VOID = frozenset({"meta", "br", "wbr", "hr", "col"})
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
#: Where a long name or a path may be broken: after what separates its parts.
_BREAKS = re.compile(r"(?<=[_/\\:.,;=-])(?=[^\s_/\\:.,;=-])")


class Html(str):
    """Markup that is finished."""

    __slots__ = ()


def element(tag: str, *children: object, **attributes: object) -> Html:
    """One element. A trailing underscore of an attribute's name is dropped, an inner one becomes a hyphen.

    Args:
        tag: its name.
        children: what is in it; text is escaped, None is left out.
        attributes: escaped as well; None and False are left out, True is an attribute without a value.
    """
    parts = [f"<{tag}"]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        name = name.rstrip("_").replace("_", "-")
        parts.append(f" {name}" if value is True else f' {name}="{plain(value)}"')
    parts.append(">")
    if tag in _VOID:
        return Html("".join(parts))
    return Html("".join([*parts, join(children), f"</{tag}>"]))


def join(children: Iterable[object], between: str = "") -> Html:
    """Children one after the other, escaped as in `element`."""
    return Html(
        between.join(child if isinstance(child, Html) else plain(child) for child in children if child is not None)
    )


def plain(value: object) -> str:
    """Text as HTML, also in an attribute. Control characters, which HTML has no way to write, become visible marks."""
    return escape(_CONTROL.sub("\ufffd", str(value)), quote=True)


def breakable(text: str) -> Html:
    """A name that may be broken between its parts, so that a narrow column does not break it anywhere else."""
    return join(_BREAKS.split(text), "<wbr>")
