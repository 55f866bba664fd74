"""Runs an exported bundle in an environment that has no PyTorch: every torch-free command, and their start-up time."""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

START_UP_SECONDS = 0.5
START_UP_BARE = 30  # times a bare interpreter; importing torch alone takes about twice as many


def caracal(*args: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(["caracal", *args], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"caracal {' '.join(args)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def seconds(*command: str) -> float:
    """Median wall time of a command over five runs after one that warms the file cache."""
    samples = []
    for _ in range(6):
        began = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        samples.append(time.perf_counter() - began)
    return statistics.median(samples[1:])


def main() -> None:
    bundle, text = sys.argv[1:3]
    for package in ("torch", "onnx", "onnxscript", "onnx_ir", "safetensors"):
        if importlib.util.find_spec(package) is not None:
            raise SystemExit(f"light: {package} is installed here, so this shows nothing")
    from caracal_runtimes import Bundle, SamplingOptions

    model = Bundle.open(bundle).model()
    (passage,) = model.generate("In the beginning", max_new_tokens=20, options=SamplingOptions(temperature=0))
    streamed = caracal("generate", bundle, "-p", "In the beginning", "-n", "20", "--temperature", "0")
    if streamed != f"{passage.text}\n" or not passage.text:
        raise SystemExit(f"light: the command wrote {streamed!r}, the API {passage.text!r}")
    bits = json.loads(caracal("score", bundle, text, "--format", "json"))["bits_per_byte"]
    if not bits < 2.0:
        raise SystemExit(f"light: {bits} bits per byte on the held-out text, expected less than 2")
    short = json.loads(caracal("score", bundle, text, "--context", "64", "--format", "json"))["bits_per_byte"]
    if not bits < short:
        raise SystemExit(f"light: {bits} bits per byte with 1024 tokens of context, {short} with 64; expected less")
    verdict = caracal("parity", bundle).splitlines()[-1]
    if not verdict.startswith("PASSED"):
        raise SystemExit(f"light: {verdict}")
    bench = json.loads(
        caracal("bench", bundle, "--contexts", "64,512", "-n", "32", "--repeats", "1", "--format", "json")
    )
    if [result["context"] for result in bench["results"]] != [64, 512] or "onnxruntime" not in bench["environment"]:
        raise SystemExit(f"light: bench reported {bench}")
    caracal(
        "generate", bundle, "-p", "In the beginning", "-n", "8", "--temperature", "0", "--save-state", "story.state"
    )
    rest = caracal("generate", bundle, "--load-state", "story.state", "-n", "12", "--temperature", "0")
    if not (passage.text or "").endswith(rest.rstrip("\n")):
        raise SystemExit(f"light: a loaded state went on with {rest!r}, one run wrote {passage.text!r}")
    checked = caracal("verify", bundle).splitlines()[-1]
    if not checked.startswith("PASSED"):
        raise SystemExit(f"light: {checked}")
    refused = subprocess.run(["caracal", "export", bundle, "-o", "x"], capture_output=True, text=True, timeout=60)
    if refused.returncode != 3 or "torch" not in refused.stderr or Path("x").exists():
        raise SystemExit(f"light: export without torch said {refused.stderr!r} with exit code {refused.returncode}")
    times = {
        name: seconds("caracal", *args) for name, args in {"--help": ("--help",), "info": ("info", bundle)}.items()
    }
    # On a machine that is slow to start anything, a start is measured by that.
    limit = max(START_UP_SECONDS, START_UP_BARE * seconds(sys.executable, "-c", "pass"))
    slow = {name: value for name, value in times.items() if value > limit}
    figures = ", ".join(f"{name} {value:.2f} s" for name, value in times.items())
    print(f"{'FAILED' if slow else 'PASSED'}  start-up  {figures}  limit {limit:.2f} s")
    if slow:
        raise SystemExit(1)
    print(verdict)
    print(f"PASSED  score  {bits:.4f} bits per byte at 1024 tokens of context, {short:.4f} at 64  limit 2")


if __name__ == "__main__":
    main()
