"""The README's promises: two commands, a snippet that runs, a table that lists what exists, a transcript that is real."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The contents of the README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def shape_of(output: str) -> list[str]:
    """Output without what differs between machines: numbers, and the sampled passage's words stay."""
    lines = [re.sub(r"[0-9][0-9.,e+-]*", "#", line) for line in output.splitlines()]
    lines = [re.sub(r"\([a-z_#]+\)", "(case)", re.sub(r"vocabulary_#", "vocabulary", line)) for line in lines]
    return [re.sub(r"[\s-]+", " ", line).strip() for line in lines if line.strip()]


def test_exactly_two_commands_set_up_and_run() -> None:
    main, tests = blocks("sh")
    setup = "python3 -m venv .venv && . .venv/bin/activate && pip install -r {} -e . && {}\n"
    assert main == setup.format("requirements.txt", "caracal demo")
    assert tests == setup.format("requirements-dev.txt", "pytest")


def test_table_lists_every_command() -> None:
    table = set(re.findall(r"^\| `caracal (\w+)", README, flags=re.MULTILINE))
    assert table == {entry.name for entry in entry_points(group="caracal.commands")}


def test_flags_named_in_the_table_exist() -> None:
    for command, row in re.findall(r"^\| `caracal (\w+)(.*)$", README, flags=re.MULTILINE):
        done = subprocess.run(
            [sys.executable, "-m", "caracal_runtimes", command, "--help"], capture_output=True, text=True, check=True
        )
        for flag in re.findall(r"--[a-z][a-z-]+", row):
            assert flag in done.stdout, f"caracal {command} has no {flag}"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / target).exists(), target


def test_no_registry_is_named() -> None:
    """Commands use whatever registry the reader's client is set up for."""
    for path in ROOT.glob("*.*"):
        if path.suffix in (".md", ".toml", ".txt"):
            assert not re.search(r"pypi\.org|pythonhosted|npmjs|index-url", path.read_text(encoding="utf-8")), path.name


@pytest.mark.slow
def test_demo_prints_the_transcript_and_the_snippet_runs(tmp_path: Path) -> None:
    demo = subprocess.run(["caracal", "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert demo.returncode == 0, demo.stderr
    (transcript,) = (block for block in blocks("text") if block.startswith("== "))
    # Which providers there are depends on the machine; each has a row, and all of them are in the last line.
    (printed, found), (shown, _) = (text.split("== every provider", 1) for text in (demo.stdout, transcript))
    assert shape_of(printed) == shape_of(shown)
    rows = {
        line.split()[0]: line.split()[1] for line in found.splitlines()[3:] if line and not line.startswith("PASSED")
    }
    assert {"cpu", "reference"} <= rows.keys()
    assert set(rows.values()) == {"PASSED"}
    assert [line.split()[0] for line in demo.stdout.splitlines()[-3:]] == ["PASSED"] * 3

    (snippet,) = blocks("python")
    ran = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "PASSED"

    shutil.copytree(ROOT / "export/caracal_export/checkpoints/kjv", tmp_path / "my-checkpoint")
    for line in "".join(blocks("console")).splitlines():
        command = line.removeprefix("$ ")
        assert command.startswith("caracal ")
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    assert sorted(path.name for path in (tmp_path / "my-bundle").iterdir()) == sorted(
        re.findall(r"^  (\S+)", next(block for block in blocks("text") if block.startswith("my-bundle/")), re.MULTILINE)
    )
