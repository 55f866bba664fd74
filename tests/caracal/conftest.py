"""Tiny models with weights of a size at which every term of the model shows in the logits."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from caracal.config import CaracalConfig
from caracal.model import CaracalModel

TINY: dict[str, Any] = {
    "vocab_size": 19,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 20,
    "sliding_window": 4,
}


@pytest.fixture(scope="session")
def numpy_reference() -> ModuleType:
    """The float64 model in NumPy."""
    return importlib.import_module("numpy_reference")


@pytest.fixture(scope="session")
def forms() -> ModuleType:
    """The list of forms in which a checkpoint may arrive, and what writes them."""
    return importlib.import_module("checkpoint_forms")


def _tiny_config(**overrides: Any) -> CaracalConfig:
    return CaracalConfig(**{**TINY, **overrides})


def _random_model(*, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any) -> CaracalModel:
    model = CaracalModel(_tiny_config(**overrides))
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: Tensor, mean: float, std: float) -> None:
        # Drawn in float64 and rounded to float32, so that a model of another dtype has the same weights.
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.copy_((mean + std * values).float())

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                normal(parameter, 0.0, 0.3)
            elif parameter.dim() == 1:
                normal(parameter, 1.0, 0.3)
            elif name in ("embed_tokens.weight", "lm_head.weight"):
                normal(parameter, 0.0, 1.0)
            else:
                normal(parameter, 0.0, 1 / math.sqrt(parameter[0].numel()))
    return model.to(dtype)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., CaracalConfig]:
    """`tiny_config(**overrides)`: V 19, D 12, 3 layers (MHF, MHF, SWA), 3 heads, window 4."""
    return _tiny_config


@pytest.fixture(scope="session")
def random_model() -> Callable[..., CaracalModel]:
    """`random_model(seed=0, dtype=float64, **overrides)`: a tiny model in which no parameter is zero or one.

    A fresh model has zero biases and LayerNorms that scale by one: code that forgets them would still look right.
    """
    return _random_model


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., Tensor]:
    """`random_ids(batch, length, seed=0)`: token ids below the tiny vocabulary, [B, L]."""

    def make(batch: int, length: int, seed: int = 0) -> Tensor:
        return torch.randint(TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))

    return make


class _LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return out


@pytest.fixture
def largest_tensor() -> Callable[[], Any]:
    """`with largest_tensor() as largest:` records in `largest.elements` the size of the largest tensor made inside."""
    return _LargestTensor


@pytest.fixture
def rfft_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes that entered `torch.fft.rfft` so far, in order."""
    seen: list[torch.dtype] = []
    original = torch.fft.rfft

    def record(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(x.dtype)
        return original(x, *args, **kwargs)

    monkeypatch.setattr(torch.fft, "rfft", record)
    return seen
