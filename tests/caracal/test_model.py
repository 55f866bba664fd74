"""The whole model: sizes, the numpy reference, causality, padding, gradients, half precisions."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caracal.config import PRESETS, CaracalConfig
from caracal.model import CaracalModel, gather_positions, init_weights

MakeConfig = Callable[..., CaracalConfig]
MakeModel = Callable[..., CaracalModel]
MakeIds = Callable[..., Tensor]

VOCABULARY, WINDOW = 19, 4  # of the tiny model

#: Every choice a configuration offers, at least once away from its default, and in company.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "gelu": {"hidden_act": "gelu", "intermediate_size": 0},
    "untied": {"tie_word_embeddings": False},
    "no_bias": {"use_bias": False},
    "norm_before_conv": {"norm_before_conv": True},
    "kernel_1": {"conv_kernel": 1},
    "kernel_5": {"conv_kernel": 5},
    "one_head": {"num_attention_heads": 1},
    "heads_of_one": {"num_attention_heads": 12},
    "window_1": {"sliding_window": 1},
    "window_100": {"sliding_window": 100},
    "only_mhf": {"layer_types": ("mhf", "mhf", "mhf")},
    "only_swa": {"layer_types": ("sliding_attention",) * 3},
    "swa_first": {"layer_types": ("sliding_attention", "mhf"), "num_hidden_layers": 2},
    "large_eps": {"layer_norm_eps": 0.1, "norm_before_conv": True},
    "all_at_once": {
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "use_bias": False,
        "norm_before_conv": True,
        "conv_kernel": 4,
        "num_attention_heads": 2,
        "sliding_window": 3,
        "layer_norm_eps": 1e-2,
        "layer_types": ("mhf", "sliding_attention", "sliding_attention", "mhf"),
        "num_hidden_layers": 4,
    },
}
EACH_VARIANT = pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the largest expected value."""
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max())


# ---------------------------------------------------------------------------------------------------------------
# Sizes and names


@pytest.mark.parametrize(("name", "millions"), [("tiny", 63), ("small", 120), ("medium", 345), ("large", 724)])
def test_presets_have_the_published_number_of_parameters(name: str, millions: int) -> None:
    with torch.device("meta"):
        model = CaracalModel(PRESETS[name])
    assert abs(model.num_parameters() / (millions * 1e6) - 1) < 0.01


def test_number_of_parameters_by_hand(tiny_config: MakeConfig) -> None:
    """V 19, D 12, 3 heads, FFN 20, kernel 3."""
    mhf = 12 * 3 + 2 * 12 + 3 * (12 * 12 + 12) + (12 * 4 + 12)
    swa = 2 * 12 + 4 * (12 * 12 + 12)
    ffn = 2 * 12 + 2 * (20 * 12 + 20) + (12 * 20 + 12)
    tied = 19 * 12 + 2 * mhf + swa + 3 * ffn + 2 * 12
    assert CaracalModel(tiny_config()).num_parameters() == tied
    assert CaracalModel(tiny_config(tie_word_embeddings=False)).num_parameters() == tied + 19 * 12


def test_names_of_the_parameters_are_those_of_stored_checkpoints(tiny_config: MakeConfig) -> None:
    """A renamed module would make every checkpoint on disk unreadable."""

    def pairs(prefix: str, *modules: str) -> set[str]:
        return {f"{prefix}.{module}.{kind}" for module in modules for kind in ("weight", "bias")}

    expected = {"embed_tokens.weight", "lm_head.weight", "norm.weight", "norm.bias"}
    for layer in (0, 1):
        expected |= {f"blocks.{layer}.mhf.pre_conv.weight"}
        expected |= pairs(
            f"blocks.{layer}.mhf", "input_norm", "norm", "value_proj", "gate_proj", "gate_conv", "out_proj"
        )
    expected |= pairs("blocks.2.swa", "norm", "q_proj", "k_proj", "v_proj", "out_proj")
    for layer in (0, 1, 2):
        expected |= pairs(f"blocks.{layer}.ffn", "norm", "gate_proj", "up_proj", "down_proj")
    assert set(CaracalModel(tiny_config(norm_before_conv=True)).state_dict()) == expected


@pytest.mark.parametrize("hidden_act", ["silu", "gelu"])
def test_without_bias_only_the_norms_have_one(hidden_act: str, tiny_config: MakeConfig) -> None:
    with_bias, without = (CaracalModel(tiny_config(hidden_act=hidden_act, use_bias=use)) for use in (True, False))
    names = set(with_bias.state_dict())
    biases = {name for name in names if name.endswith(".bias") and not name.endswith("norm.bias")}
    assert set(without.state_dict()) == names - biases
    assert len(biases) == 2 * 4 + 4 + 3 * (3 if hidden_act == "silu" else 2)


def test_tied_head_is_the_embedding(tiny_config: MakeConfig) -> None:
    tied, untied = CaracalModel(tiny_config()), CaracalModel(tiny_config(tie_word_embeddings=False))
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert untied.lm_head.weight is not untied.embed_tokens.weight


# ---------------------------------------------------------------------------------------------------------------
# The same model in numpy


@EACH_VARIANT
@pytest.mark.parametrize("length", [1, WINDOW, 13])
def test_model_equals_the_numpy_reference(
    overrides: dict[str, Any], length: int, random_model: MakeModel, random_ids: MakeIds, numpy_reference: ModuleType
) -> None:
    model, ids = random_model(**overrides), random_ids(2, length)
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    config = model.config.to_dict()
    expected = np.stack([numpy_reference.forward(arrays, config, row) for row in ids.tolist()])
    assert relative(model(ids), torch.from_numpy(expected)) < 1e-10


def test_numpy_reference_on_figures_worked_by_hand(numpy_reference: ModuleType) -> None:
    column = np.array([[1.0], [2.0], [3.0]])
    assert numpy_reference.causal_sum(column, column + 3).tolist() == [[4.0], [13.0], [28.0]]
    assert numpy_reference.depthwise(np.array([[[2.0, 3.0, 5.0]]]), column).tolist() == [[5.0], [13.0], [23.0]]
    assert numpy_reference.silu(np.array(math.log(3))) == pytest.approx(math.log(3) * 3 / 4, rel=1e-15)
    assert numpy_reference.gelu(np.array(1.0)) == pytest.approx(0.8413447460685429, rel=1e-15)  # Phi(1)


def test_every_parameter_moves_the_logits(random_model: MakeModel, random_ids: MakeIds) -> None:
    """Otherwise the comparison with the reference could not see a parameter that both forget.

    The exception is the keys' bias: it adds the same to all scores of a query, which softmax removes.
    """
    model, ids = random_model(norm_before_conv=True, tie_word_embeddings=False), random_ids(1, 9)
    before = model(ids)
    still = []
    for name, parameter in model.named_parameters():
        backup = parameter.detach().clone()
        with torch.no_grad():
            parameter += 0.1 * torch.randn_like(parameter)
            if relative(model(ids), before) < 1e-8:
                still.append(name)
            parameter.copy_(backup)
    assert still == ["blocks.2.swa.k_proj.bias"]


def test_float32_is_close_to_float64(random_model: MakeModel, random_ids: MakeIds) -> None:
    ids = random_ids(2, 50)
    logits = random_model(dtype=torch.float32)(ids)
    assert logits.dtype == torch.float32
    assert relative(logits, random_model()(ids)) < 2e-5


# ---------------------------------------------------------------------------------------------------------------
# Causality


def assert_causal(model: CaracalModel, ids: Tensor, t: int) -> None:
    """Changes token `t`: no earlier logit may move beyond rounding, and the logits at `t` must move."""
    changed = ids.clone()
    changed[:, t] = (changed[:, t] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(ids), model(changed)
    moved = ((after - before).abs() / before.abs().max()).amax(dim=(0, 2))
    assert bool((moved[:t] < 1e-12).all()), f"token {t} reaches back, by up to {float(moved[:t].max())}"
    assert moved[t] > 1e-3


@pytest.mark.parametrize("t", [0, 1, WINDOW - 1, WINDOW, 15, 16, 17, 31, 32, 38])
@pytest.mark.parametrize("overrides", [{}, VARIANTS["all_at_once"]], ids=["default", "all_at_once"])
def test_no_token_reaches_back(overrides: dict[str, Any], t: int, random_model: MakeModel, random_ids: MakeIds) -> None:
    """In float64: a transform spreads rounding over all positions, so bits differ, at 1e-16 of the largest."""
    assert_causal(random_model(**overrides), random_ids(2, 39), t)


def circular_convolution(v: Tensor, g: Tensor) -> Tensor:
    """Without zero padding the end of the sequence wraps around to its start."""
    return torch.fft.irfft(torch.fft.rfft(v, dim=1) * torch.fft.rfft(g, dim=1), n=v.shape[1], dim=1)


def barely_padded_convolution(v: Tensor, g: Tensor) -> Tensor:
    """Padding to the next power of two, not to twice the length."""
    length = v.shape[1]
    size = 1 << (length - 1).bit_length()
    product = torch.fft.rfft(v, n=size, dim=1) * torch.fft.rfft(g, n=size, dim=1)
    return torch.fft.irfft(product, n=size, dim=1)[:, :length]


def centred_depthwise(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), weight, groups=x.shape[2], padding="same").transpose(1, 2)


def attention_without_mask(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("causal_conv_fft", circular_convolution),
        ("causal_conv_fft", barely_padded_convolution),
        ("depthwise_causal_conv", centred_depthwise),
        ("sliding_window_attention", attention_without_mask),
    ],
)
def test_causality_check_catches_a_mixing_that_looks_ahead(
    name: str,
    broken: Callable[..., Tensor],
    random_model: MakeModel,
    random_ids: MakeIds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"caracal.mixing.{name}", broken)
    with pytest.raises(AssertionError, match="reaches back"):
        assert_causal(random_model(), random_ids(2, 39), 38)


def test_first_token_is_remembered_far_beyond_the_window(random_model: MakeModel, random_ids: MakeIds) -> None:
    model, ids = random_model(), random_ids(1, 200)
    changed = ids.clone()
    changed[0, 0] = (changed[0, 0] + 1) % VOCABULARY
    last = torch.tensor([[199]])
    assert relative(model(changed, last), model(ids, last)) > 1e-3


def test_attention_alone_forgets_what_left_the_windows(random_model: MakeModel, random_ids: MakeIds) -> None:
    """Three layers of window W reach back 3(W - 1) tokens, and not one more."""
    model, ids = random_model(**VARIANTS["only_swa"]), random_ids(1, 30)
    reach = 3 * (WINDOW - 1)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCABULARY
    moved = ((model(changed) - model(ids)).abs() / model(ids).abs().max()).amax(dim=(0, 2))
    assert bool((moved[5 : 5 + reach + 1] > 1e-6).all())
    assert bool((moved[5 + reach + 1 :] < 1e-14).all())


# ---------------------------------------------------------------------------------------------------------------
# Padding and batches


def right_padded(rows: list[Tensor], length: int, pad: int) -> Tensor:
    return torch.stack([F.pad(row, (0, length - row.numel()), value=pad) for row in rows])


@pytest.mark.parametrize("pad", [0, VOCABULARY - 1])
def test_right_padded_rows_equal_single_rows(pad: int, random_model: MakeModel, random_ids: MakeIds) -> None:
    model = random_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 16, 17, 33)]
    batch = model(right_padded(rows, 33, pad))
    for got, row in zip(batch, rows, strict=True):
        assert relative(got[: row.numel()], model(row[None])[0]) < 1e-12


def test_last_logits_of_a_padded_batch_are_gathered_at_each_length(
    random_model: MakeModel, random_ids: MakeIds
) -> None:
    model = random_model()
    rows = [random_ids(1, n, seed=n)[0] for n in (3, 9, 5)]
    got = model(right_padded(rows, 12, 0), torch.tensor([[2], [8], [4]]))
    expected = torch.stack([model(row[None])[0, -1:] for row in rows])
    assert relative(got, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tail_of_padding_gives_no_nan(dtype: torch.dtype, random_model: MakeModel) -> None:
    """Whole blocks of the attention hold nothing but padding here, and one row holds nothing else at all."""
    model = random_model(dtype=dtype)
    ids = torch.zeros(2, 12 * WINDOW + 1, dtype=torch.int64)
    ids[0, 0] = 7
    assert bool(torch.isfinite(model(ids)).all())


def test_left_padding_changes_the_results(random_model: MakeModel, random_ids: MakeIds) -> None:
    """The filter counts from the start of the sequence: nobody may pad there and believe the logits."""
    model, ids = random_model(), random_ids(1, 9)
    padded = F.pad(ids, (5, 0), value=0)
    assert relative(model(padded)[:, 5:], model(ids)) > 1e-2


def test_rows_of_a_batch_do_not_meet(random_model: MakeModel, random_ids: MakeIds) -> None:
    model, ids = random_model(), random_ids(3, 11)
    order = [2, 0, 1]
    assert relative(model(ids[order]), model(ids)[order]) < 1e-13
    assert relative(model(ids[1:2]), model(ids)[1:2]) < 1e-13


@pytest.mark.parametrize(
    "positions",
    [[[0], [8]], [[8, 0, 3], [1, 1, 7]], [[4, 4, 4, 4], [0, 8, 0, 8]], [list(range(9))] * 2, [list(range(9)) * 2] * 2],
    ids=["one", "unordered", "repeated", "all", "more_than_all"],
)
def test_logit_positions_are_rows_of_the_full_logits(
    positions: list[list[int]], random_model: MakeModel, random_ids: MakeIds
) -> None:
    model, ids = random_model(), random_ids(2, 9)
    full = model(ids)
    expected = torch.stack([torch.stack([full[b, t] for t in row]) for b, row in enumerate(positions)])
    assert relative(model(ids, torch.tensor(positions)), expected) < 1e-14


def test_gather_positions_by_hand() -> None:
    x = torch.arange(12.0).reshape(2, 3, 2)
    got = gather_positions(x, torch.tensor([[2, 0], [1, 1]]))
    assert got.tolist() == [[[4.0, 5.0], [0.0, 1.0]], [[8.0, 9.0], [8.0, 9.0]]]


def test_one_position_costs_no_logits_of_the_others(tiny_config: MakeConfig, largest_tensor: Callable[[], Any]) -> None:
    length, vocabulary = 64, 1000
    model = CaracalModel(tiny_config(vocab_size=vocabulary))
    ids = torch.zeros(1, length, dtype=torch.int64)
    with torch.no_grad(), largest_tensor() as one:
        model(ids, torch.tensor([[length - 1]]))
    with torch.no_grad(), largest_tensor() as all_of_them:
        model(ids)
    assert one.elements <= vocabulary * 12  # the head's matrix itself
    assert all_of_them.elements == length * vocabulary


# ---------------------------------------------------------------------------------------------------------------
# Training


@EACH_VARIANT
def test_gradient_reaches_every_parameter(
    overrides: dict[str, Any], random_model: MakeModel, random_ids: MakeIds
) -> None:
    """With a window of one, softmax over a single score is 1 whatever the query and the key are.

    The keys' bias never has a gradient, see `test_every_parameter_moves_the_logits`.
    """
    model, ids = random_model(**overrides), random_ids(2, 11)
    F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    without = ("k_proj.bias",)
    if overrides.get("sliding_window") == 1:
        without = ("k_proj.bias", "k_proj.weight", "q_proj.bias", "q_proj.weight")
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        largest = float(parameter.grad.abs().max())
        assert largest < 1e-12 if name.endswith(without) else largest > 1e-6, name


def test_gradient_of_the_whole_model_equals_differences(random_model: MakeModel, random_ids: MakeIds) -> None:
    """Along one random direction through all parameters at once."""
    model, ids = random_model(), random_ids(2, 11)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]

    def loss() -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def loss_at(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += step * d
            value = float(loss())
            for p, d in zip(parameters, direction, strict=True):
                p -= step * d
        return value

    gradients = torch.autograd.grad(loss(), parameters)
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    assert slope == pytest.approx((loss_at(1e-6) - loss_at(-1e-6)) / 2e-6, rel=1e-5)


def test_initial_weights_have_the_documented_spread(tiny_config: MakeConfig) -> None:
    config = tiny_config(vocab_size=300, hidden_size=64, num_attention_heads=4, intermediate_size=128)
    model = CaracalModel(config)
    torch.manual_seed(0)
    init_weights(model)
    residual = 0.02 / math.sqrt(2 * 3)
    for name, parameter in model.named_parameters():
        if name.endswith("pre_conv.weight"):
            assert parameter[..., -1].mean().item() == pytest.approx(1, abs=0.06), name
            assert parameter[..., :-1].std().item() == pytest.approx(0.1, rel=0.3), name
        elif name.endswith(("out_proj.weight", "down_proj.weight")):
            assert parameter.std().item() == pytest.approx(residual, rel=0.1), name
        elif parameter.dim() > 1:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
        else:
            assert parameter.unique().tolist() == [0.0 if name.endswith("bias") else 1.0], name
    assert model.lm_head.weight is model.embed_tokens.weight


def test_initial_loss_is_that_of_a_guess(tiny_config: MakeConfig) -> None:
    model = CaracalModel(tiny_config(vocab_size=300, hidden_size=64, num_attention_heads=4, intermediate_size=128))
    torch.manual_seed(0)
    init_weights(model)
    ids, targets = torch.randint(300, (2, 4, 64))
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    assert loss.item() == pytest.approx(math.log(300), rel=0.02)


def test_a_few_steps_learn_a_sequence_by_heart(tiny_config: MakeConfig) -> None:
    torch.manual_seed(0)
    model = CaracalModel(tiny_config())
    init_weights(model, std=0.1)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert torch.equal(model(ids)[:, :-1].argmax(-1), ids[:, 1:])


# ---------------------------------------------------------------------------------------------------------------
# Half precision


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)])
@pytest.mark.parametrize("length", [1, 37])
def test_half_weights_run_with_the_mixing_in_float32(
    dtype: torch.dtype,
    bound: float,
    length: int,
    random_model: MakeModel,
    random_ids: MakeIds,
    rfft_dtypes: list[torch.dtype],
) -> None:
    ids = random_ids(2, length)
    half, single = random_model(dtype=dtype), random_model(dtype=dtype).float()
    logits = half(ids)
    assert rfft_dtypes == [torch.float32] * 4  # two streams in each of two MHF layers
    assert logits.dtype == dtype
    assert bool(torch.isfinite(logits).all())
    assert relative(logits, single(ids)) < bound


def test_double_runs_the_mixing_in_float64(
    random_model: MakeModel, random_ids: MakeIds, rfft_dtypes: list[torch.dtype]
) -> None:
    random_model()(random_ids(1, 5))
    assert rfft_dtypes == [torch.float64] * 4


def test_input_ids_of_32_bits_give_the_same_logits(random_model: MakeModel, random_ids: MakeIds) -> None:
    model, ids = random_model(), random_ids(2, 7)
    assert torch.equal(model(ids.int()), model(ids))


def test_token_beyond_the_vocabulary_is_an_error(random_model: MakeModel) -> None:
    model = random_model()
    for token in (VOCABULARY, -1):
        with pytest.raises(IndexError):
            model(torch.tensor([[0, token]]))
