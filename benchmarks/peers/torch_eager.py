"""The reference model in PyTorch eager, as one would run it for the next token: logits of the last position only."""

from __future__ import annotations

import torch
from torch import Tensor

from caracal import CaracalModel


class TorchEager:
    """Reads a prompt of a fixed length."""

    def __init__(self, model: CaracalModel, ids: Tensor) -> None:
        self._model, self._ids = model, ids
        self._last = torch.tensor([[ids.shape[1] - 1]])

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Logits [1, 1, V]."""
        return torch.as_tensor(self._model(self._ids, self._last))
