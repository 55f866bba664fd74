"""What the library in `runtimes/web` shares with Python, or was recorded from it, is what Python has and gives today."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_one_table_of_tolerances() -> None:
    tables = script("generate_web_tables")
    assert tables.TARGET.read_text(encoding="utf-8") == tables.table()


@pytest.mark.parametrize("name", ["sampling.json", "texts.json", "metrics.json", "generation.json", "factors.json"])
def test_what_was_recorded_is_what_python_gives(name: str) -> None:
    recorder = script("record_web_fixtures")
    assert set(recorder.FIXTURES) == {file.name for file in recorder.TARGET.iterdir()}
    recorded = json.loads((recorder.TARGET / name).read_text(encoding="utf-8"))
    found = json.loads(json.dumps(recorder.FIXTURES[name]()))
    if name == "metrics.json":  # the last digits of sums are the machine's
        for one, other in zip(recorded, found, strict=True):
            for key, value in one.pop("metrics").items():
                figure = other["metrics"][key]
                assert figure == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), key
            del other["metrics"]
    if name == "sampling.json":
        for one, other in zip(recorded["cases"], found["cases"], strict=True):
            assert one.pop("logprobs") == pytest.approx(other.pop("logprobs"), rel=1e-12)
    assert recorded == found
