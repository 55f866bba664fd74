"""Shell scripts and the commands that documents and workflows tell people to run: that they are what exists."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes.cli import build_parser

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "benchmarks/cuda_parity.sh"
VULKAN = ROOT / "scripts/software-vulkan.sh"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
#: Documents and workflows whose `caracal` commands are held to the parser.
COMMANDED = [
    *(
        ROOT / "docs" / name
        for name in ("recipes.md", "ci.md", "adding-a-provider.md", "checkpoints.md", "security.md", "web.md")
    ),
    *WORKFLOWS,
]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="scripts for bash")


def bash(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("BUNDLE", "CUDA_PARITY"))}
    return subprocess.run(
        ["bash", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**kept, **variables},
    )


def refusal(words: list[str]) -> str:
    """Why the command line does not take these words after `caracal`; empty if it does."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            build_parser().parse_args(words)
    except SystemExit as exit_:
        return said.getvalue() if exit_.code else ""
    return ""


# benchmarks/cuda_parity.sh


def planned(tmp_path: Path, *arguments: str, **variables: str) -> list[tuple[str, list[str]]]:
    """The commands of a dry run as (program, arguments), without environments' paths and variables."""
    done = bash(CUDA, "--dry-run", *arguments, CUDA_PARITY_DIR=str(tmp_path / "dir"), **variables)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []  # nothing was run
    commands = []
    for line in done.stdout.splitlines():
        if line.startswith("+ "):
            words = shlex.split(line[2:])
            if words[0] == "env":
                words = [word for word in words[1:] if not re.match(r"[A-Z0-9_]+=", word)]
            commands.append((Path(words[0]).name, words[1:]))
    return commands


def outline(commands: list[tuple[str, list[str]]]) -> list[str]:
    found = []
    for program, words in commands:
        if program == "caracal" and words[0] == "parity":
            found.append("merge" if words[1] == "merge" else f"parity {words[words.index('--ep') + 1]}")
        elif program == "caracal":
            found.append(words[0])
        else:
            found.append("venv" if program == "python3" else program)
    return found


def test_cuda_parity_plans_everything_in_order(tmp_path: Path) -> None:
    commands = planned(tmp_path)
    expected = "venv, pip, export, export, venv, pip, pip, providers, parity cuda:0, python, parity tensorrt:0, parity cuda:0, merge"
    assert outline(commands) == expected.split(", ")
    assert [words for program, words in commands if words[:1] == ["export"]][1][-3:] == [
        "--mixing",
        "dft",
        "--overwrite",
    ]
    installs = [" ".join(words) for program, words in commands if program == "pip"]
    assert "onnxruntime-gpu[cuda,cudnn]" in installs[1]
    exact = [words for program, words in commands if words[0] == "parity" and "--ep" in words]
    assert ["--fast" in words for words in exact] == [True, True, False]


def test_cuda_parity_with_a_bundle_needs_no_exporter(tmp_path: Path) -> None:
    commands = planned(tmp_path, "--device", "1", BUNDLE="mine")
    expected = "venv, pip, pip, providers, parity cuda:1, python, parity tensorrt:1, merge"
    assert outline(commands) == expected.split(", ")
    assert not [words for _, words in commands if "export" in words or "requirements.txt" in words]
    both = planned(tmp_path, BUNDLE="mine", BUNDLE_DFT="mine-dft")
    assert "mine-dft" in both[-2][1]


def test_cuda_parity_uses_flags_that_exist(tmp_path: Path) -> None:
    commands = [words for program, words in planned(tmp_path) if program == "caracal"]
    assert len(commands) == 7
    for words in commands:
        assert refusal(words) == "", words


@pytest.mark.parametrize("arguments", [["--device"], ["--device", "x"], ["--fast"], ["extra"]])
def test_cuda_parity_refuses_bad_usage(arguments: list[str]) -> None:
    done = bash(CUDA, *arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def row(nodes: Mapping[str, int], elsewhere: list[Any]) -> dict[str, Any]:
    return {"nodes": nodes, "elsewhere": elsewhere, "shape_only": 3, "operators": {}}


ON_CUDA, ON_CPU = {"CUDAExecutionProvider": 90, "CPUExecutionProvider": 3}, {"CPUExecutionProvider": 93}


@pytest.mark.parametrize(
    ("placement", "code", "said"),
    [
        ({"forward": row(ON_CUDA, []), "step": row(ON_CUDA, [])}, 0, "PASSED"),
        ({"forward": row(ON_CUDA, [{"operator": "DFT"}]), "step": row(ON_CUDA, [])}, 1, "not all on CUDA: forward"),
        ({"forward": row(ON_CUDA, []), "step": row(ON_CPU, [])}, 1, "not all on CUDA: step"),
        (None, 3, "NOT RUN"),
    ],
)
def test_cuda_parity_checks_where_nodes_ran(placement: Any, code: int, said: str, tmp_path: Path) -> None:
    (snippet,) = re.findall(r"<<'PY'\n(.*?)^PY$", CUDA.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    fast = {"mode": "fast", "placement": None, "reason": ""}
    exact = {"mode": "exact", "placement": placement, "reason": "no driver"}
    report = tmp_path / "cuda.json"
    report.write_text(json.dumps({"providers": [exact, fast]}), encoding="utf-8")
    done = subprocess.run([sys.executable, "-", report], input=snippet, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert said in done.stdout.splitlines()[-1]


# scripts/software-vulkan.sh


def test_software_vulkan_fails_the_eval_with_it() -> None:
    done = bash(VULKAN, "one", "two")
    assert (done.returncode, done.stdout) == (1, "false\n")
    assert "expected one folder at most" in done.stderr


def test_software_vulkan_says_where_it_works(tmp_path: Path) -> None:
    for tool in ("bash", "id", "rm"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / tool).symlink_to(found)
    done = subprocess.run(
        [tmp_path / "bash", VULKAN, tmp_path / "there"],
        capture_output=True, text=True, timeout=60, env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "false\n")
    assert "Debian and Ubuntu" in done.stderr or "is not there" in done.stderr
    assert not (tmp_path / "there").exists()


def test_no_host_is_named() -> None:
    for path in (VULKAN, CUDA, *COMMANDED):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"debian\.org|ubuntu\.com|pypi|pythonhosted|npmjs|index-url", text), path.name


@pytest.mark.parametrize("script", [CUDA, VULKAN], ids=lambda path: path.name)
def test_scripts_are_clean(script: Path) -> None:
    assert bash("-n", script).returncode == 0
    checker = shutil.which("shellcheck")
    if checker is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([checker, script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


# What documents and workflows say


def commands_in(text: str) -> list[list[str]]:
    """`caracal …` at the start of a line, after a prompt, a dash or `&&`; continued lines are joined."""
    joined = re.sub(r"[\\`]\n\s*", " ", text)
    found = re.findall(
        r"^\s*(?:- |- run: |run: |\$ |> |.* && |if )?(caracal [a-z][^|;&#\n]*)", joined, flags=re.MULTILINE
    )
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}", "VALUE", command).replace("…", "REST"))[1:] for command in found]


@pytest.mark.parametrize("path", COMMANDED, ids=lambda path: path.name)
def test_commands_that_are_told_exist(path: Path) -> None:
    commands = commands_in(path.read_text(encoding="utf-8"))
    if path.suffix == ".md" or path.name == "parity.yml":
        assert commands
    for words in commands:
        assert refusal(words) == "", f"{path.name}: caracal {shlex.join(words)}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_are_limited(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 60, name
        assert "permissions" not in job, name
        for step in job["steps"]:
            assert re.fullmatch(r"actions/[a-z-]+@(v\d+|[0-9a-f]{40})", step.get("uses", "actions/none@v1")), name


def test_every_linux_runtime_is_in_the_workflow() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github/workflows/parity.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    compared = {
        name for job in jobs.values() for each in job.get("strategy", {}).get("matrix", {}).get("include", [])
        for name in (ep.partition(":")[0] for ep in each["ep"].split(","))
    }  # fmt: skip
    known = {
        "cpu",
        "openvino",
        "webgpu",
        "tract",
        "iree",
        "reference",
        "openvino-native",
        "mnn",
        "ggml",
        "qnn",
        "coreml",
        "directml",
    }
    assert compared == known


# scripts/generate_checkpoint_table.py


def test_the_table_of_checkpoints_is_the_tests_own_list() -> None:
    spec = importlib.util.spec_from_file_location("table", ROOT / "scripts/generate_checkpoint_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(text), "run scripts/generate_checkpoint_table.py"
    assert text.count("\n| ") > 100
