"""Writes the table of `docs/checkpoints.md`: each form of checkpoint and what happens, from the list that the tests run.

    python scripts/generate_checkpoint_table.py

A test compares the page with what this gives, so that no row is without a test and no form without a row.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import groupby
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
FORMS = ROOT / "tests" / "caracal" / "checkpoint_forms.py"
PAGE = ROOT / "docs" / "checkpoints.md"
BEGIN, END = "<!-- generated: forms -->", "<!-- end of what is generated -->"


def load_forms() -> ModuleType:
    """The module with the list."""
    spec = importlib.util.spec_from_file_location("checkpoint_forms", FORMS)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot load {FORMS}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["checkpoint_forms"] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def table() -> str:
    """The text between the marks."""
    parts = []
    for group, forms in groupby(load_forms().FORMS, key=lambda form: form.group):
        rows = [f"| {_cell(form.what)} | {_cell(form.then)} |" for form in forms]
        parts.append("\n".join([f"### {group}", "", "| form | what happens |", "| --- | --- |", *rows]))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(text: str) -> str:
    """The page with the table of today. Raises SystemExit when the marks are gone."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} must hold {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
