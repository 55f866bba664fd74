"""Run an exported Caracal bundle, and prove what ran: numpy, onnxruntime and tokenizers only.

from caracal_runtimes import Bundle, SamplingOptions

model = Bundle.open("my-bundle").model()
logits = model.forward([[1, 2, 3]])
print(model.generate("In the beginning", options=SamplingOptions(temperature=0)))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.errors import BundleError, InputError, NotRunError, NumericError, RuntimeToolError
    from caracal_runtimes.generation import Generated
    from caracal_runtimes.model import CausalLM
    from caracal_runtimes.parity import run_parity
    from caracal_runtimes.parity_report import ParityReport
    from caracal_runtimes.sampling import SamplingOptions
    from caracal_runtimes.scoring import Score

__all__ = [
    "Bundle",
    "BundleError",
    "CausalLM",
    "Generated",
    "InputError",
    "NotRunError",
    "NumericError",
    "ParityReport",
    "RuntimeToolError",
    "SamplingOptions",
    "Score",
    "run_parity",
]

_HOMES = {
    "Bundle": "bundle",
    "BundleError": "errors",
    "CausalLM": "model",
    "Generated": "generation",
    "InputError": "errors",
    "NotRunError": "errors",
    "NumericError": "errors",
    "ParityReport": "parity_report",
    "RuntimeToolError": "errors",
    "SamplingOptions": "sampling",
    "Score": "scoring",
    "run_parity": "parity",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: `caracal --help` must not wait for numpy.
    if name not in _HOMES:
        raise AttributeError(f"module 'caracal_runtimes' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"caracal_runtimes.{_HOMES[name]}"), name)
