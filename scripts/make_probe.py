"""Writes the bundle that `caracal providers` runs. Its model is random: what it computes matters, not what it says."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from caracal_export import export_checkpoint
from caracal_runtimes.probe import PROBE

from caracal import CaracalConfig, CaracalModel, save_checkpoint

_LAGS = 8
_SEED = 7


def main() -> None:  # noqa: D103
    config = CaracalConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        sliding_window=8,
    )
    model = CaracalModel(config)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(0.2 * noise + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(0.4 * noise / parameter[0].numel() ** 0.5)
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(model, Path(folder) / "probe")
        done = export_checkpoint(Path(folder) / "probe", PROBE, overwrite=True, lags=_LAGS)
    print(f"{done.path}: {done.bytes:,} bytes")


if __name__ == "__main__":
    main()
