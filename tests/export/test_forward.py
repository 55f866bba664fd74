"""The exported graph in ONNX Runtime against the PyTorch reference, over lengths, batches and configurations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from caracal_export.graph_files import check_graph, refer_to_weights
from caracal_export.tracing import trace
from caracal_export.weight_files import float32, plan_files, write_files
from caracal_export.weights import compare_weights, graph_shapes, graph_weight
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.forward import ForwardPass
from numpy.typing import NDArray

from caracal import CaracalConfig, CaracalModel, load_checkpoint, save_checkpoint

LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 25, 40, 127, 128, 129, 255, 256, 257, 1000)
LIMIT = 1e-5
WINDOW = 8

# Together they take every choice of the configuration with every other one's neighbours; the full product would be hours.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gelu, untied, no bias, norm before conv, kernel 5, one head, large epsilon": (
        "matmul",
        {
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "use_bias": False,
            "norm_before_conv": True,
            "conv_kernel": 5,
            "num_attention_heads": 1,
            "layer_norm_eps": 0.05,
        },
    ),
    "gelu, biases, norm before conv, kernel 2, a head per channel, window 1": (
        "dft",
        {
            "hidden_act": "gelu",
            "norm_before_conv": True,
            "conv_kernel": 2,
            "hidden_size": 6,
            "num_attention_heads": 6,
            "sliding_window": 1,
        },
    ),
    "mhf only, kernel 1, untied": (
        "matmul",
        {"layer_types": ("mhf",) * 3, "conv_kernel": 1, "tie_word_embeddings": False},
    ),
    "attention only, window beyond every length, no bias": (
        "dft",
        {"layer_types": ("sliding_attention",) * 2, "num_hidden_layers": 2, "sliding_window": 5000, "use_bias": False},
    ),
    "attention first, bfloat16 on disk, odd sizes, window 3": (
        "matmul",
        {
            "layer_types": ("sliding_attention", "mhf"),
            "num_hidden_layers": 2,
            "torch_dtype": "bfloat16",
            "vocab_size": 101,
            "hidden_size": 35,
            "num_attention_heads": 5,
            "intermediate_size": 51,
            "sliding_window": 3,
        },
    ),
    "one of everything": (
        "dft",
        {
            "layer_types": ("mhf",),
            "num_hidden_layers": 1,
            "vocab_size": 1,
            "hidden_size": 1,
            "num_attention_heads": 1,
            "intermediate_size": 1,
            "sliding_window": 1,
            "conv_kernel": 1,
        },
    ),
}


@torch.no_grad()
def _reference(
    model: CaracalModel, ids: NDArray[np.int64], positions: NDArray[np.int64] | None = None
) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = model(
        torch.from_numpy(ids), None if positions is None else torch.from_numpy(positions)
    ).numpy()
    return logits


@pytest.fixture(scope="module", params=["matmul", "dft"])
def forward(request: pytest.FixtureRequest, bundle: Callable[[str], Path]) -> ForwardPass:
    return Bundle.open(bundle(request.param)).model(threads=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_forward_is_the_reference(
    forward: ForwardPass, model: CaracalModel, relative_l2: Callable[..., float], length: int
) -> None:
    rng = np.random.default_rng(length)
    ids = rng.integers(0, model.config.vocab_size, (2, length))
    positions = rng.integers(0, length, (2, min(length, 50)))
    got = forward.forward(ids, positions)
    assert got.dtype == np.float32
    assert relative_l2(got, _reference(model, ids, positions)) <= LIMIT


def test_forward_is_the_direct_sum_in_float64(
    forward: ForwardPass, model: CaracalModel, relative_l2: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is not its own judge: float64, the O(L^2) sum for the mixing and one L x L score matrix."""
    from caracal import mixing

    exact = CaracalModel(model.config).double()
    exact.load_state_dict(model.state_dict())
    monkeypatch.setattr(mixing, "causal_conv_fft", mixing.causal_conv_direct)
    monkeypatch.setattr(mixing, "sliding_window_attention", mixing.sliding_window_attention_direct)
    for length in (1, 7, 8, 9, 63, 130):
        ids = np.random.default_rng(length).integers(0, model.config.vocab_size, (2, length))
        assert relative_l2(forward.forward(ids), _reference(exact, ids)) <= LIMIT, length


def test_all_positions_are_those_asked_one_by_one(forward: ForwardPass) -> None:
    ids = np.random.default_rng(0).integers(0, 97, (2, 19))
    every = forward.forward(ids)
    for position in (0, 7, 8, 18):
        one = forward.forward(ids, [[position], [position]])
        np.testing.assert_allclose(one[:, 0], every[:, position], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [17, 40, 129])
def test_a_token_changes_no_earlier_logit(forward: ForwardPass, length: int) -> None:
    """Within rounding: a transform spreads a change over all positions and takes it back."""
    ids = np.random.default_rng(length).integers(0, 97, (1, length))
    before = forward.forward(ids)[0]
    size = np.sqrt(np.mean(before**2))
    for t in (1, WINDOW - 1, WINDOW, length // 2, length - 1):
        changed = ids.copy()
        changed[0, t] = (changed[0, t] + 1) % 97
        difference = np.abs(forward.forward(changed)[0] - before).max(axis=-1) / size
        assert difference[:t].max() <= 5e-5, t
        assert difference[t] > 0.1, t


@pytest.mark.parametrize("pad", [0, 96])
def test_right_padded_rows_equal_each_row_alone(
    forward: ForwardPass, relative_l2: Callable[..., float], pad: int
) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 97, n) for n in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3, 70)]
    ids = np.full((len(rows), 70), pad, np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    together = forward.forward(ids)
    assert np.isfinite(together).all()
    for index, row in enumerate(rows):
        assert relative_l2(together[index, : len(row)], forward.forward(row[None])[0]) <= LIMIT, len(row)


def test_rows_of_a_batch_do_not_meet(forward: ForwardPass) -> None:
    ids = np.random.default_rng(0).integers(0, 97, (3, 21))
    other = ids.copy()
    other[1] = (other[1] + 5) % 97
    before, after = forward.forward(ids), forward.forward(other)
    np.testing.assert_allclose(after[[0, 2]], before[[0, 2]], rtol=1e-5, atol=1e-5)
    assert np.abs(after[1] - before[1]).max() > 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_is_the_reference(
    name: str,
    random_model: Callable[..., CaracalModel],
    run_graph: Callable[[Path, CaracalConfig], ForwardPass],
    relative_l2: Callable[..., float],
    tmp_path: Path,
) -> None:
    mixing, overrides = CONFIGS[name]
    save_checkpoint(random_model(**overrides), tmp_path / "checkpoint")
    model = load_checkpoint(tmp_path / "checkpoint")
    graph = trace(model, "forward", mixing, 18)
    weights = dict(model.named_parameters())
    files = plan_files(
        float32(graph_shapes({key: tuple(each.shape) for key, each in weights.items()}, model.config)), None
    )
    write_files(files, lambda key: graph_weight(key, weights[key], model.config), tmp_path, lambda done, total: None)
    refer_to_weights(graph, files, tmp_path)
    ir.save(graph, tmp_path / "forward.onnx")
    check_graph(tmp_path / "forward.onnx")
    names = [file.name for file in files]
    compare_weights([tmp_path / "forward.onnx"], names, weights.keys(), weights.__getitem__, model.config)
    forward = run_graph(tmp_path / "forward.onnx", model.config)
    rng = np.random.default_rng(0)
    for length in (1, 2, 3, 4, 7, 9, 16, 40, 127, 300):
        ids = rng.integers(0, model.config.vocab_size, (2, length))
        positions = rng.integers(0, length, (2, 60))
        assert relative_l2(forward.forward(ids, positions), _reference(model, ids, positions)) <= LIMIT, length
