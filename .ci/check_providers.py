"""Runs the demo bundles on every provider that a machine without accelerators can run, and holds them to what must hold.

Arguments: the matmul bundle, the dft bundle, a folder for reports, and the ICD file of the software Vulkan for WebGPU.
Exit code 1 with the reason when something does not hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Every golden; and few of them where each new shape takes seconds to compile, or each run is a process.
WHOLE = ("cpu", "openvino", "openvino-native", "webgpu", "reference", "tract", "mnn")
QUICK = ("iree:llvm-cpu", "iree:vulkan", "qnn")
LIMIT = 1e-5
# What it should take with installing; a busy machine may need more, and only far more is a fault of ours.
SECONDS, AT_MOST = 12 * 60, 25 * 60
NO_DEVICE = "offers no device on this machine"
SOFTWARE = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"


def caracal(*args: str, codes: tuple[int, ...] = (0,), **variables: str) -> str:
    """Standard output of a command that must end with one of `codes`."""
    done = subprocess.run(
        ["caracal", *args], capture_output=True, text=True, timeout=1500, env={**os.environ, **variables}
    )
    if done.returncode not in codes:
        raise SystemExit(f"caracal {' '.join(args)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def rows(file: Path) -> dict[str, Any]:
    """A report's rows by provider."""
    return {row["ep"]: row for row in json.loads(file.read_text())["providers"]}


def check_right(found: dict[str, Any], names: tuple[str, ...]) -> None:
    """Every provider passed, with the greedy text of the reference and no computing node elsewhere."""
    for name in names:
        row = found[name]
        worst = max(case["metrics"]["relative_l2"] for case in row["cases"])
        limit = row["tolerance"]["relative_l2"] if row["level"] == "half" else LIMIT
        tokens = [(greedy["agreeing"], greedy["new_tokens"]) for greedy in row["greedy"]]
        elsewhere = sum(len(part["elsewhere"]) for part in (row["placement"] or {}).values())
        print(
            f"{row['verdict']}  {name}  worst relative L2 {worst:.1e}  limit {limit:.0e}  greedy {tokens}  {row['seconds']:.0f} s"
        )
        if row["verdict"] != "PASSED" or not worst <= limit or elsewhere:
            raise SystemExit(
                f"providers: {name}: {row['verdict']}, {worst:.1e}, {elsewhere} nodes elsewhere, {row['reason']}"
            )
        if row["level"] != "half" and any(agreeing != wanted for agreeing, wanted in tokens):
            raise SystemExit(f"providers: {name} writes another text: {tokens}")


def check_dft(bundle: str, report: str) -> None:
    """No list says who cannot run the DFT: the matrix has to find out, placement to tell, and bisect to name the node."""
    caracal("parity", bundle, "--ep", "cpu,mnn", "--quick", "--json", report, codes=(1,))
    verdicts = {ep: row["verdict"] for ep, row in rows(Path(report)).items()}
    if verdicts["cpu"] != "PASSED" or verdicts["mnn"] == "PASSED":
        raise SystemExit(f"providers: the DFT: {verdicts}")
    for ep in ("mnn", "iree:llvm-cpu"):
        line = caracal("bisect", bundle, "--ep", ep, codes=(1,)).splitlines()[-1]
        if "(DFT)" not in line:
            raise SystemExit(f"providers: bisect does not name the DFT: {line}")
        print(line)
    refused = subprocess.run(
        ["caracal", "generate", bundle, "--ep", "qnn", "-p", "And", "-n", "1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    if refused.returncode != 1 or "DFT on CPUExecutionProvider" not in refused.stderr:
        raise SystemExit(f"providers: qnn runs the DFT elsewhere and said {refused.stderr!r}, {refused.returncode}")
    print(refused.stderr.strip().splitlines()[-1])


def main() -> None:
    matmul, dft, folder, icd = sys.argv[1:5]
    # Installing counts: what matters is a fresh machine.
    began, out = float(os.environ.get("PROVIDERS_BEGAN") or time.time()), Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    vulkan = {"VK_ICD_FILENAMES": icd, SOFTWARE: "1"}
    # IREE gets the system's own Vulkan: the newer one takes minutes to compile its shaders.
    told = caracal("providers", "--ep", ",".join((*WHOLE, "qnn")), **vulkan)
    print(told)
    # The plugin offers Intel's devices and no others; on another processor there is nothing to check it on.
    absent = any(line.split()[:1] == ["openvino"] and NO_DEVICE in line for line in told.splitlines())
    here = tuple(name for name in WHOLE if name != "openvino" or not absent)
    if absent:
        print("NOT RUN  openvino  its plugin offers no device on this machine")
    report = str(out / "whole.json")
    caracal("parity", matmul, "--ep", ",".join(here), "--json", report, **vulkan)
    check_right(rows(Path(report)), here)
    # Each of these keeps one core busy.
    quick = [str(out / f"quick{index}.json") for index in range(len(QUICK))]
    with ThreadPoolExecutor(2) as pool:
        for done in [
            pool.submit(caracal, "parity", matmul, "--ep", ep, "--quick", "--json", file)
            for ep, file in reversed(list(zip(QUICK, quick, strict=True)))
        ]:
            done.result()
    for ep, file in zip(QUICK, quick, strict=True):
        check_right(rows(Path(file)), (ep,))
    print(caracal("parity", "merge", report, *quick, "--report", str(out / "report")).splitlines()[-1])
    check_dft(dft, str(out / "dft.json"))
    seconds = time.time() - began
    print(f"{'PASSED' if seconds < SECONDS else 'FAILED'}  providers  {seconds:.0f} s  limit {SECONDS} s")
    if seconds >= AT_MOST:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
