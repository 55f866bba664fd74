"""Plain `torch.onnx.export` of the reference model, with nothing of this project's exporter.

Its FFT becomes the operator DFT, logits are those of all positions, and the length is that of the example: the reference works out
its transform's size in Python, which a plain export cannot keep symbolic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from caracal_export.tracing import quiet_tracing
from numpy.typing import NDArray

from caracal import CaracalModel


def export(model: CaracalModel, file: Path, length: int) -> None:
    """Exports for one length and saves, weights beside the graph."""
    with quiet_tracing():
        program = torch.onnx.export(
            model,
            (torch.zeros(1, length, dtype=torch.int64),),
            input_names=["input_ids"],
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    program.save(file, external_data=True)


class PlainExport:
    """Reads a prompt of a fixed length in ONNX Runtime, in the settings of the project's own sessions."""

    def __init__(self, model: CaracalModel, file: Path, ids: NDArray[np.int64], threads: int) -> None:
        from caracal_runtimes.providers.ort import OrtSession

        export(model, file, ids.shape[1])
        self._session = OrtSession.on_cpu(file, threads=threads)
        self._inputs = {"input_ids": ids}

    def __call__(self) -> NDArray[Any]:
        """Logits [1, L, V]."""
        return self._session.run(self._inputs, ["logits"])[0]
