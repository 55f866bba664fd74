"""Parity on the page: it gives the verdict that the command gives, as a report that joins the command's, and can fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from browsing import PROBE, ROOT, Visit, run_caracal, served
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.safetensors_file import SafetensorsFile

pytestmark = pytest.mark.slow

SCHEMA = json.loads((ROOT / "docs/parity.schema.json").read_text(encoding="utf-8"))
Begin = Callable[..., Visit]


def worst_l2(report: dict[str, Any]) -> float:
    (provider,) = report["providers"]
    return max(float(case["metrics"]["relative_l2"]) for case in provider["cases"])


def merged(report: dict[str, Any], bundle: Path, folder: Path, code: int = 0) -> dict[str, Any]:
    """The report joined with the command's own quick one of the same bundle."""
    jsonschema.validate(report, SCHEMA, jsonschema.Draft202012Validator)
    here, page, joined = folder / "here.json", folder / "page.json", folder / "joined.json"
    page.write_text(json.dumps(report), encoding="utf-8")
    run_caracal("parity", bundle, "--quick", "--json", here, code=code)
    run_caracal("parity", "merge", here, page, "--json", joined, code=code)
    return dict(json.loads(joined.read_text(encoding="utf-8")))


@pytest.mark.parametrize("threads", [1, 2])
def test_all_goldens_pass_in_webassembly(visit: Begin, demo: Path, demo_url: str, tmp_path: Path, threads: int) -> None:
    tab = visit().tab(demo_url)
    tab.reopen(threads=threads)
    report = tab.compare()
    assert report["verdict"] == "PASSED"
    assert "PASSED" in tab.shown("#verdict")
    (provider,) = report["providers"]
    golden = Bundle.open(demo).manifest.golden
    assert {case.name for case in golden.cases} <= {case["name"] for case in provider["cases"]}
    assert {one["name"] for one in provider["greedy"]} == {one.name for one in golden.greedy}
    assert provider["text"]["verdict"] == "PASSED"
    assert not provider["quick"]
    assert provider["threads"] == threads
    assert 0 < worst_l2(report) <= 1e-5
    joined = merged(report, demo, tmp_path)
    assert joined["verdict"] == "PASSED"
    assert [one["ep"] for one in joined["providers"]] == ["cpu", "wasm"]
    assert {one["verdict"] for one in joined["providers"]} == {"PASSED"}


def test_webgpu_passes_and_computes_everything_itself(visit: Begin, probe_url: str, tmp_path: Path) -> None:
    tab = visit(gpu=True).tab(probe_url)
    tab.reopen("webgpu")
    assert tab.fact("Runs on").startswith("WebGPU (")
    report = tab.compare(quick=True, seconds=250)  # some seconds where nothing else runs
    assert report["verdict"] == "PASSED"
    assert 0 < worst_l2(report) <= 1e-4
    (provider,) = report["providers"]
    assert provider["ep"] == "webgpu"
    placement = provider["placement"]
    assert {"forward", "step_resident"} <= placement.keys()
    for graph, nodes in placement.items():
        assert nodes["nodes"]["WebGpuExecutionProvider"] > 0, graph
        assert nodes["elsewhere"] == [], graph
    assert merged(report, PROBE, tmp_path)["verdict"] == "PASSED"


@pytest.fixture
def forged(tmp_path: Path) -> Path:
    """The probe's bundle with one weight changed and its hash made right again."""
    bundle = tmp_path / "forged"
    shutil.copytree(PROBE, bundle)
    file = bundle / "weights.safetensors"
    entries = SafetensorsFile.open(file).entries
    entry = next(entries[name] for name in entries if name.endswith("_proj.weight"))
    weight = np.memmap(file, "<f4", "r+", offset=entry.offset, shape=entry.shape)
    weight[0, 0] += 0.05
    weight.flush()
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"][file.name]["sha256"] = sha256(file.read_bytes()).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return bundle


def test_one_altered_weight_fails(visit: Begin, forged: Path, tmp_path: Path) -> None:
    with served(forged) as url:
        tab = visit().tab(url)
        report = tab.compare(quick=True)
    assert report["verdict"] == "FAILED"
    assert tab.shown("#verdict").startswith("FAILED")
    assert tab.page.locator("#verdict").get_attribute("data-verdict") == "FAILED"
    assert tab.page.locator("#parity-rows tr[data-verdict=FAILED]").count() > 0
    assert merged(report, forged, tmp_path, code=1)["verdict"] == "FAILED"
