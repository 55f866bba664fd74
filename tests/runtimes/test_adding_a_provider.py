"""docs/adding-a-provider.md: its example is made a distribution of its own, found by its entry point, and compared."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from caracal_runtimes.providers import GROUP, Detection, State
from caracal_runtimes.session import Session
from caracal_runtimes.tolerances import TOLERANCES

from .conftest import Exported

TEXT = (Path(__file__).parents[2] / "docs/adding-a-provider.md").read_text(encoding="utf-8")
RESULT = "return values"

Run = Callable[..., subprocess.CompletedProcess[str]]


def block(language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    return str(found)


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that, on PYTHONPATH, is what installing the example leaves behind."""
    project = tomllib.loads(block("toml"))["project"]
    (tmp_path / "plain_provider.py").write_text(block("python"), encoding="utf-8")
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    points = "".join(f"{name} = {target}\n" for name, target in project["entry-points"][GROUP].items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}", encoding="utf-8")
    return tmp_path


@pytest.fixture
def caracal_with(installed: Path) -> Run:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "caracal_runtimes", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "PYTHONPATH": str(installed)},
        )

    return run


def test_the_example_passes_parity(exported: Exported, caracal_with: Run, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    done = caracal_with("parity", exported.bundle, "--ep", "plain", "--fast", "--threads", 1, "--json", result)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASSED")
    exact, fast = json.loads(result.read_text(encoding="utf-8"))["providers"]
    assert (exact["ep"], exact["mode"], exact["verdict"], exact["threads"]) == ("plain", "exact", "PASSED", 1)
    assert (exact["settings"], fast["settings"]) == ({"optimise": "off"}, {"optimise": "all"})
    assert exact["versions"].keys() == {"onnxruntime"}
    assert len(exact["cases"]) > 10
    assert exact["placement"]["forward"]["nodes"].keys() == {"CPUExecutionProvider"}
    unoptimised, optimised = (sum(row["placement"]["forward"]["nodes"].values()) for row in (exact, fast))
    assert optimised < unoptimised  # so the option is obeyed


def test_an_example_that_computes_otherwise_fails(exported: Exported, caracal_with: Run, installed: Path) -> None:
    module = installed / "plain_provider.py"
    code = module.read_text(encoding="utf-8")
    assert code.count(RESULT) == 1
    module.write_text(code.replace(RESULT, "return [value * 1.001 for value in values]"), encoding="utf-8")
    done = caracal_with("parity", exported.bundle, "--ep", "plain", "--threads", 1)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("FAILED")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ep", "plain", "--ep-option", "optimise=most"], "takes optimise=off or optimise=all"),
        (["--ep", "plain:gpu"], "has the device cpu, found 'gpu'"),
    ],
)
def test_the_example_refuses_what_it_does_not_have(
    exported: Exported, caracal_with: Run, arguments: list[str], said: str
) -> None:
    done = caracal_with("parity", exported.bundle, "--threads", 1, *arguments)
    assert done.returncode in (2, 3), done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_providers_lists_the_example(caracal_with: Run) -> None:
    done = caracal_with("providers", "--ep", "plain", "--no-probe", "--format", "json")
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    assert (entry["name"], entry["state"]) == ("plain", "ready")


def test_the_page_names_what_the_protocol_has() -> None:
    states = re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.MULTILINE)
    assert [state for state in states if not state.endswith("Error")] == list(get_args(State))
    for field in fields(Detection):
        assert f"`{field.name}`" in TEXT or field.name == "state"
    for level, _ in TOLERANCES:
        assert f"`{level}`" in TEXT
    for method in ("run", "binding", "inputs", "placement"):
        assert hasattr(Session, method)
        assert f"- `{method}(" in TEXT
