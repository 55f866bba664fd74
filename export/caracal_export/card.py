"""The bundle's README: what it is, how to run it, what was verified."""

from __future__ import annotations

from collections import Counter

from caracal_runtimes.manifest import Manifest
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.report import parity_table

from caracal.config import CaracalConfig


def model_card(config: CaracalConfig, parameters: int, manifest: Manifest, report: ParityReport | None) -> str:
    """Markdown for `README.md` of a bundle.

    Args:
        config: of the model.
        parameters: how many numbers it has.
        manifest: of the bundle.
        report: of its verification; None if there was none.
    """
    graph = manifest.graphs["forward"]
    prompt = "--ids 1,2,3" if manifest.tokenizer is None else '-p "Once"'
    layers = ", ".join(f"{config.layer_types.count(kind)} {kind}" for kind in dict.fromkeys(config.layer_types))
    quantized = manifest.quantization is not None
    if report is None:
        verified = (
            "Nothing: it was exported with `--no-verify`. Run `caracal parity` on this folder before you trust it."
        )
    else:
        weights = (
            "Every stored weight was compared with the nearest that its format has to the float32 one"
            if quantized
            else "Every weight was compared bit for bit with the checkpoint's"
        )
        verified = (
            f"{weights}, and the graph was run with ONNX Runtime "
            f"{report.machines[0].get('onnxruntime', '')} against {report.reference}:\n\n```\n{parity_table(report)}\n```"
        )
    return f"""# A Caracal language model in ONNX

{parameters:,} parameters: {config.num_hidden_layers} layers ({layers}), width {config.hidden_size},
{config.num_attention_heads} heads, window {config.sliding_window}, vocabulary {config.vocab_size:,}.

Mixing `{graph.mixing}`, opset {graph.opset}, {manifest.precision}. Source weights: sha256 `{manifest.source["sha256"]}`.
{_precision_lines(manifest, report)}{_bound_line(manifest)}
## Run it

```
pip install 'caracal-onnx[cpu]'
caracal generate . {prompt} --max-new-tokens 64
caracal parity .
```

## What was verified

{verified}

## Files

`manifest.json` describes every file (`weights` lists those with the weights), graph, input and output; `forward.onnx` (whole sequences), `extend.onnx` (chunks that continue
them), `step.onnx` and `step_resident.onnx` (one token) read their weights from the weight files, `convolve.onnx` and `convolve_long.onnx` have none; `golden.safetensors` holds the recorded PyTorch outputs that `caracal parity` compares with.
"""


def _bound_line(manifest: Manifest) -> str:
    """How long a pass may be, where that is bounded."""
    if manifest.max_length is None:
        return ""
    how = "exactly" if manifest.static_length else "at most"
    padded = ", padded where there are fewer" if manifest.static_length else ""
    return f"\nOne pass reads {how} {manifest.max_length:,} tokens{padded}; longer texts are read in several.\n"


def _precision_lines(manifest: Manifest, report: ParityReport | None) -> str:
    """What fewer bits are where, and what they cost; empty for float32."""
    quantization = manifest.quantization
    if quantization is None:
        return ""
    counts = Counter(quantization.weights.values())
    stored = ", ".join(f"{count} are {precision}" for precision, count in sorted(counts.items()))
    lines = f"\nOf its weights, {stored}; all others and the mixing are float32.\n"
    if report is None:
        return lines
    (row,) = report.providers
    measured = [case.metrics for case in row.cases if case.metrics is not None and case.metrics.kl_mean is not None]
    positions = sum(each.positions for each in measured)
    if positions:
        mean = sum((each.kl_mean or 0.0) * each.positions for each in measured) / positions
        most = max(each.kl_max or 0.0 for each in measured)
        lines += (
            f"Against float32: KL {mean:.1e} nats on average over {positions:,} recorded positions, at most {most:.1e}"
        )
        text = row.text
        if text is not None and text.bits_per_byte is not None and text.difference is not None:
            lines += f"; {text.bits_per_byte:.4f} bits per byte of a passage, {text.difference:+.4f}"
        lines += ".\n"
    return lines
