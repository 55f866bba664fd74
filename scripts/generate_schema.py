"""Writes `docs/parity.schema.json`, the JSON Schema of what `caracal parity` writes as JSON, from the classes that write it.

    python scripts/generate_schema.py

A test compares the file with what this gives, so that a changed field is published with the change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from caracal_runtimes.parity_report import FORMAT, FORMAT_VERSION, ParityReport, Verdict
from caracal_runtimes.records import schema

FILE = Path(__file__).parent.parent / "docs" / "parity.schema.json"


def parity_schema() -> dict[str, Any]:
    """The schema of a whole report.

    What `ParityReport.to_dict` adds to the fields is not read back, so only readers of the schema learn of it here.
    """
    found = schema(ParityReport)
    verdict = {"enum": list(get_args(Verdict))}
    head = {"format": {"const": FORMAT}, "format_version": {"const": FORMAT_VERSION}, "verdict": verdict}
    found["properties"] = {**head, **found["properties"]}
    found["required"] = [*head, *found["required"]]
    definitions = found["$defs"]
    definitions["ProviderReport"]["properties"]["verdict"] = verdict
    definitions["ProviderReport"]["required"].append("verdict")
    definitions["Metrics"]["properties"]["outlier_ratio"] = {"type": "number"}
    definitions["Metrics"]["required"].append("outlier_ratio")
    return {"$schema": found.pop("$schema"), "title": "Caracal parity report", **found}


def to_text() -> str:
    """The file's content."""
    return json.dumps(parity_schema(), indent=2) + "\n"


if __name__ == "__main__":
    FILE.write_text(to_text(), encoding="utf-8")
