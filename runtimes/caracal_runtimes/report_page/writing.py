"""The report's files, each replaced whole: whoever reads a folder while it is written sees the former report or the new one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from caracal_runtimes.errors import InputError
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.report_page.charts import LayerError
from caracal_runtimes.report_page.markdown import to_markdown
from caracal_runtimes.report_page.page import to_html
from caracal_runtimes.whole_file import replacing

FILES = ("index.html", "parity.md", "parity.json")


def write_report(
    report: ParityReport, folder: Path, layers: Mapping[str, Sequence[LayerError]] | None = None
) -> list[Path]:
    """Writes the page, the Markdown and the JSON; the folder is made, and what else is in it stays.

    Args:
        report: of one machine or several.
        folder: for the files.
        layers: the error across the blocks by provider, for the page.

    Returns:
        The files, in the order of `FILES`.

    Raises:
        InputError: the folder is a file, or cannot be written.
    """
    # All are made before any is written: what cannot be rendered leaves the former report whole.
    texts = (
        to_html(report, layers),
        to_markdown(report),
        json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n",
    )
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"report: expected a folder, found the file {str(folder)[:200]!r}; choose another place")
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in FILES]
        for path, text in zip(paths, texts, strict=True):
            with replacing(path) as place:
                # A name from a file system may hold what is no character.
                place.write_bytes(text.encode("utf-8", "replace"))
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"report: {str(folder)[:200]!r} cannot be written ({reason})") from None
    return paths
