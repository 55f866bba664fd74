"""Parity in Node beside parity in Python: the same bundle, one report."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
from caracal_runtimes.cli import main
from caracal_runtimes.merge import read_report
from caracal_runtimes.probe import PROBE

ROOT = Path(__file__).parents[2]
WEB = ROOT / "runtimes/web"

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (WEB / "node_modules/onnxruntime-node").is_dir(),
    reason="needs Node.js, and `npm ci` in runtimes/web",
)


def node(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", WEB / name, *map(str, words)], capture_output=True, text=True, timeout=240)


def test_a_report_of_node_merges_with_one_of_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = tmp_path / "node.json", tmp_path / "python.json"
    done = node("parity.mjs", PROBE, "--ep", "wasm", "--threads", 1, "--json", theirs)
    assert done.returncode == 0, done.stderr
    data = json.loads(theirs.read_text())
    jsonschema.validate(data, json.loads((ROOT / "docs/parity.schema.json").read_text()))
    assert main(["parity", str(PROBE), "--json", str(ours)]) == 0
    mine = json.loads(ours.read_text())
    assert data["bundle_id"] == mine["bundle_id"]

    def names(report: dict[str, list[dict[str, list[dict[str, str]]]]]) -> list[str]:
        (row,) = report["providers"]
        return [result["name"] for kind in ("cases", "greedy") for result in row[kind]]

    assert names(data) == names(mine)
    capsys.readouterr()
    assert main(["parity", "merge", str(ours), str(theirs)]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("PASSED  parity matmul float32 on 2 providers")


def test_a_verdict_of_node_is_worked_out_anew(tmp_path: Path) -> None:
    file = tmp_path / "node.json"
    assert node("parity.mjs", PROBE, "--quick", "--json", file).returncode == 0
    data = json.loads(file.read_text())
    data["providers"][0]["cases"][0]["metrics"]["relative_l2"] = 1.0
    file.write_text(json.dumps(data))
    assert read_report(file).verdict == "FAILED"
