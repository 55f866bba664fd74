"""Plots of what the JSON files hold. matplotlib is imported where it is needed: nothing else here needs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Reports = Mapping[str, dict[str, Any]]


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write(reports: Reports, folder: Path) -> None:
    """All plots for which there are figures, as PNG files named as in `PLOTS`."""
    for name, (draw, _) in PLOTS.items():
        figure, axes = _figure()
        if draw(reports, axes):
            _save(figure, folder / f"{name}.png")


def decode(report: dict[str, Any], file: Path) -> None:
    """Milliseconds per token against the context, of all methods of `benchmarks.decoding`."""
    figure, axes = _figure()
    for name, by_context in report["decode"].items():
        contexts = sorted(map(int, by_context))
        axes.plot(contexts, [by_context[str(c)]["p50"] for c in contexts], marker="o", label=name)
    _lengths(axes, "context, tokens", "ms per token, median")
    axes.set_title(f"Caracal {report['preset']}, {report['threads']} threads, float32")
    _save(figure, file)


def _figure() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(7, 4.5))


def _save(figure: Any, file: Path) -> None:
    from matplotlib import pyplot

    for axes in figure.axes:
        axes.grid(visible=True, which="both", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    figure.savefig(file, metadata={"Software": None})  # the same figures give the same file
    pyplot.close(figure)


def _lengths(axes: Any, across: str, up: str) -> None:
    axes.set(yscale="log", xlabel=across, ylabel=up)
    axes.set_xscale("log", base=2)


def _by_length(entries: Mapping[str, dict[str, Any]], axes: Any) -> None:
    """A line per side through its medians."""
    lengths = sorted(entries, key=int)
    for side in dict.fromkeys(name for length in lengths for name in entries[length]):
        at = [length for length in lengths if side in entries[length]]
        axes.plot(
            [int(length) for length in at],
            [entries[length][side]["median_ms"] for length in at],
            marker="o",
            label=side,
        )


def _mixing_details(reports: Reports) -> dict[str, Any]:
    found: dict[str, Any] = reports.get("mixing-dft", {}).get("details", {})
    return found if found.get("lengths") else {}


def _mixing_time(reports: Reports, axes: Any) -> bool:
    details = _mixing_details(reports)
    if details:
        _by_length({length: entry["sides"] for length, entry in details["lengths"].items()}, axes)
        _lengths(axes, "length, tokens", "ms, median")
        axes.set_title(f"One convolution of D = {details['width']} on the CPU")
    return bool(details)


def _cost_model(reports: Reports, axes: Any) -> bool:
    details = _mixing_details(reports)
    if details:
        lengths = sorted(map(int, details["lengths"]))
        entries = [details["lengths"][str(length)] for length in lengths]
        axes.plot(lengths, [entry["sides"]["matmul"]["median_ms"] for entry in entries], marker="o", label="measured")
        axes.plot(lengths, [entry["predicted_ms"] for entry in entries], marker="x", linestyle="--", label="cost model")
        _lengths(axes, "length, tokens", "ms")
        axes.set_title("The matmul lowering: counted work at the measured ceilings, and the measured time")
    return bool(details)


def _roofline(reports: Reports, axes: Any) -> bool:
    details = _mixing_details(reports)
    if not details:
        return False
    ceilings, entries = details["ceilings"], details["lengths"]
    intensities = [2.0**exponent for exponent in range(-2, 10)]
    roof = [min(ceilings["gflops_float32"], ceilings["gbps_copy"] * intensity) for intensity in intensities]
    axes.plot(intensities, roof, color="black", label="ceilings: float32 product, copy in memory")
    for length in sorted(entries, key=int):
        entry = entries[length]
        intensity = entry["gflop"] / entry["gigabytes"]
        axes.plot([intensity], [entry["gflops"]], marker="o", linestyle="", label=f"matmul, {int(length):,} tokens")
    axes.set(yscale="log", xlabel="FLOP per byte of the stages' inputs and outputs", ylabel="GFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_title("Roofline of the mixing")
    return True


def _prefill(reports: Reports, axes: Any) -> bool:
    # Of one file, so that all sides of a length are of one run.
    details = reports.get("prefill-plain-export", {}).get("details", {})
    entries = {length: entry["sides"] for length, entry in details.get("lengths", {}).items()}
    if entries:
        _by_length(entries, axes)
        _lengths(axes, "prompt, tokens", "ms, median")
        axes.set_title("A whole prompt, small, float32")
    return bool(entries)


def _decode_peers(reports: Reports, axes: Any) -> bool:
    contexts = reports.get("decode-peers", {}).get("details", {}).get("contexts", {})
    by_context: dict[str, dict[str, Any]] = {}
    for key, sides in contexts.items():
        by_context.setdefault(key.rpartition(" ")[2], {}).update(sides)
    if by_context:
        _by_length(by_context, axes)
        _lengths(axes, "context, tokens", "ms per token, median")
        axes.set_title("One token: Caracal small, and a Llama of the same size elsewhere")
    return bool(by_context)


def _memory(reports: Reports, axes: Any) -> bool:
    bars: dict[str, float] = {}
    for name, megabytes in reports.get("memory-shared", {}).get("details", {}).get("loaded_mb", {}).items():
        bars[f"loaded: {name}"] = megabytes
    for name, peaks in reports.get("export-cost", {}).get("details", {}).get("peak_bytes", {}).items():
        bars[f"export, peak: {name}"] = sorted(peaks)[len(peaks) // 2] / 1e6
    if bars:
        axes.barh(list(bars)[::-1], list(bars.values())[::-1])
        axes.set(xlabel="MB in memory")
        axes.set_title("Memory of the small model, 120M parameters, float32")
    return bool(bars)


#: By file name: what draws it, returning False where there are no figures, and what it shows.
PLOTS: dict[str, tuple[Callable[[Reports, Any], bool], str]] = {
    "mixing-time": (_mixing_time, "Time of the mixing against the length"),
    "mixing-cost-model": (_cost_model, "Cost model against measurement"),
    "mixing-roofline": (_roofline, "Roofline, with ceilings of the same run"),
    "prefill-time": (_prefill, "Time of a whole prompt against its length"),
    "decode-peers": (_decode_peers, "Time of a token against the context, beside other runtimes"),
    "memory": (_memory, "Memory"),
}
