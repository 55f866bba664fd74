"""The bundle's README: what it is, how to run it, what was verified."""

from __future__ import annotations

from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.report import parity_table

from caracal import CaracalConfig


def model_card(
    config: CaracalConfig,
    parameters: int,
    graph: GraphSpec,
    source_sha256: str,
    report: ParityReport | None,
    *,
    reads_text: bool,
) -> str:
    """Markdown for `README.md` of a bundle."""
    prompt = '-p "Once"' if reads_text else "--ids 1,2,3"
    layers = ", ".join(f"{config.layer_types.count(kind)} {kind}" for kind in dict.fromkeys(config.layer_types))
    if report is None:
        verified = (
            "Nothing: it was exported with `--no-verify`. Run `caracal parity` on this folder before you trust it."
        )
    else:
        verified = (
            f"Every weight was compared bit for bit with the checkpoint's, and the graph was run with ONNX Runtime "
            f"{report.machines[0].get('onnxruntime', '')} against {report.reference}:\n\n```\n{parity_table(report)}\n```"
        )
    return f"""# A Caracal language model in ONNX

{parameters:,} parameters: {config.num_hidden_layers} layers ({layers}), width {config.hidden_size},
{config.num_attention_heads} heads, window {config.sliding_window}, vocabulary {config.vocab_size:,}.

Mixing `{graph.mixing}`, opset {graph.opset}, float32. Source weights: sha256 `{source_sha256}`.

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
