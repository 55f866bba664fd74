"""The reference model through torch.compile with its default backend, compiled for each length."""

from __future__ import annotations

import shutil

import torch
from torch import Tensor

from benchmarks.outcome import NotMeasuredError
from caracal import CaracalModel
from caracal.model import gather_positions


class TorchCompiled:
    """Reads a prompt of a fixed length; the first call compiles.

    Raises:
        NotMeasuredError: there is no C++ compiler, which the backend needs.
    """

    def __init__(self, model: CaracalModel, ids: Tensor) -> None:
        if not any(shutil.which(compiler) for compiler in ("c++", "g++", "clang++")):
            raise NotMeasuredError("torch.compile needs a C++ compiler: install g++ or clang")

        def read(
            ids: Tensor, last: Tensor
        ) -> Tensor:  # the model's own call looks at values, which would break the graph
            return torch.as_tensor(model.lm_head(model.norm(gather_positions(model.hidden_states(ids), last))))

        self._read = torch.compile(read, dynamic=False)
        self._ids, self._last = ids, torch.tensor([[ids.shape[1] - 1]])

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Logits [1, 1, V]."""
        return torch.as_tensor(self._read(self._ids, self._last))
