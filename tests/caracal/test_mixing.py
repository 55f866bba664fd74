"""Token mixing against sums that are written here or taken from numpy and torch, never from the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from caracal import mixing

LENGTHS = (1, 2, 3, 7, 8, 17, 64, 127, 128, 129, 251, 255, 256, 257, 500, 1000)
WINDOW = 6
EDGES = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW - 1, 2 * WINDOW, 2 * WINDOW + 3, 3 * WINDOW + 5)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference in units of the largest expected value."""
    assert got.shape == expected.shape
    got, expected = got.detach().double(), expected.detach().double()
    return float((got - expected).abs().max() / expected.abs().max())


def double_loop(v: Tensor, g: Tensor) -> Tensor:
    """The definition, one product at a time: y[b, t] = sum over j = 0..t of v[b, j] * g[b, t - j]."""
    a, b = v.double().numpy(), g.double().numpy()
    y = np.zeros_like(a)
    for t in range(a.shape[1]):
        for j in range(t + 1):
            y[:, t] += a[:, j] * b[:, t - j]
    return torch.from_numpy(y)


def convolve(v: Tensor, g: Tensor) -> Tensor:
    """The same by numpy's convolution of two sequences, cut at L."""
    a, b = v.double().numpy(), g.double().numpy()
    y = np.zeros_like(a)
    for row in range(a.shape[0]):
        for channel in range(a.shape[2]):
            y[row, :, channel] = np.convolve(a[row, :, channel], b[row, :, channel])[: a.shape[1]]
    return torch.from_numpy(y)


# ---------------------------------------------------------------------------------------------------------------
# The causal convolution

CONVOLUTIONS = pytest.mark.parametrize("conv", [mixing.causal_conv_fft, mixing.causal_conv_direct])


@CONVOLUTIONS
def test_convolution_by_hand(conv: Callable[[Tensor, Tensor], Tensor]) -> None:
    """(1, 2, 3) * (4, 5, 6): 1*4; 1*5 + 2*4; 1*6 + 2*5 + 3*4."""
    v = torch.tensor([1.0, 2.0, 3.0]).reshape(1, 3, 1)
    g = torch.tensor([4.0, 5.0, 6.0]).reshape(1, 3, 1)
    torch.testing.assert_close(conv(v, g).flatten(), torch.tensor([4.0, 13.0, 28.0]))


@CONVOLUTIONS
@pytest.mark.parametrize("length", LENGTHS)
def test_convolution_equals_numpy(conv: Callable[[Tensor, Tensor], Tensor], length: int) -> None:
    v, g = randn(2, length, 3, seed=1), randn(2, length, 3, seed=2)
    y = conv(v, g)
    assert y.dtype == torch.float64
    assert relative(y, convolve(v, g)) < 1e-12


@pytest.mark.parametrize("length", LENGTHS)
def test_fft_equals_the_direct_sum(length: int) -> None:
    v, g = randn(2, length, 3, seed=3), randn(2, length, 3, seed=4)
    assert relative(mixing.causal_conv_fft(v, g), mixing.causal_conv_direct(v, g)) < 1e-12


@CONVOLUTIONS
@given(batch=st.integers(1, 3), length=st.integers(1, 40), channels=st.integers(1, 5), seed=st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None, database=None)
def test_convolution_equals_the_double_loop_at_any_shape(
    conv: Callable[[Tensor, Tensor], Tensor], batch: int, length: int, channels: int, seed: int
) -> None:
    v, g = randn(batch, length, channels, seed=seed), randn(batch, length, channels, seed=seed + 1)
    assert relative(conv(v, g), double_loop(v, g)) < 1e-12


@CONVOLUTIONS
@pytest.mark.parametrize("shift", [0, 1, 5, 16])
def test_filter_with_a_single_one_shifts_the_content(conv: Callable[[Tensor, Tensor], Tensor], shift: int) -> None:
    v, g = randn(1, 17, 2), torch.zeros(1, 17, 2, dtype=torch.float64)
    g[:, shift] = 1
    expected = F.pad(v, (0, 0, shift, 0))[:, :17]
    torch.testing.assert_close(conv(v, g), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("length", [1, 17, 257])
def test_float32_is_within_its_own_rounding(length: int) -> None:
    v, g = randn(1, length, 4, seed=5, dtype=torch.float32), randn(1, length, 4, seed=6, dtype=torch.float32)
    y = mixing.causal_conv_fft(v, g)
    assert y.dtype == torch.float32
    assert relative(y, convolve(v, g)) < 2e-6


HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])


@HALVES
def test_half_precision_is_the_float32_result_rounded_once(half: torch.dtype) -> None:
    v, g = randn(2, 129, 3, seed=7, dtype=half), randn(2, 129, 3, seed=8, dtype=half)
    y = mixing.causal_conv_fft(v, g)
    assert y.dtype == half
    assert torch.equal(y, mixing.causal_conv_fft(v.float(), g.float()).to(half))


@HALVES
def test_half_precision_is_half_a_unit_from_the_exact_sum(half: torch.dtype) -> None:
    """Each value is off by one rounding to `half` and the error of float32, and by nothing else."""
    v, g = randn(2, 129, 3, seed=7, dtype=half), randn(2, 129, 3, seed=8, dtype=half)
    exact = convolve(v, g)
    error = (mixing.causal_conv_fft(v, g).double() - exact).abs()
    assert bool((error <= 0.5 * torch.finfo(half).eps * exact.abs() + 2e-6 * exact.abs().max()).all())


@HALVES
def test_both_half_streams_are_widened_before_the_transform(half: torch.dtype, rfft_dtypes: list[torch.dtype]) -> None:
    mixing.causal_conv_fft(randn(1, 9, 2, dtype=half), randn(1, 9, 2, dtype=half))
    assert rfft_dtypes == [torch.float32, torch.float32]


@CONVOLUTIONS
def test_convolution_reads_strided_input_and_keeps_it(conv: Callable[[Tensor, Tensor], Tensor]) -> None:
    v, g = randn(3, 2, 40, seed=1).transpose(1, 2)[:, ::2], randn(2, 20, 6, seed=2)[:1, :, ::3].expand(3, -1, -1)
    before = v.clone(), g.clone()
    assert relative(conv(v, g), double_loop(v, g)) < 1e-12
    assert torch.equal(v, before[0])
    assert torch.equal(g, before[1])


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_fft_gradients_equal_numerical_ones(length: int) -> None:
    v, g = randn(1, length, 2, seed=1).requires_grad_(), randn(1, length, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(mixing.causal_conv_fft, (v, g))


def test_rows_and_channels_do_not_meet() -> None:
    """Row 0 and channel 0 are large; nothing of them may appear elsewhere."""
    v, g = torch.zeros(2, 9, 2, dtype=torch.float64), torch.ones(2, 9, 2, dtype=torch.float64)
    v[0, :, 0] = 1e6
    y = mixing.causal_conv_fft(v, g)
    assert bool((y[1] == 0).all())
    assert bool((y[0, :, 1] == 0).all())
    assert bool((y[0, :, 0] > 0).all())


# ---------------------------------------------------------------------------------------------------------------
# The depthwise convolution


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 17])
def test_depthwise_equals_conv1d(taps: int, length: int) -> None:
    x, weight = randn(2, length, 4, seed=1), randn(4, 1, taps, seed=2)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (taps - 1, 0)), weight, groups=4).transpose(1, 2)
    torch.testing.assert_close(mixing.depthwise_causal_conv(x, weight), expected, rtol=1e-13, atol=1e-14)


def test_last_tap_meets_the_current_position() -> None:
    x = torch.tensor([1.0, 10.0, 100.0]).reshape(1, 3, 1)
    weight = torch.tensor([2.0, 3.0, 5.0]).reshape(1, 1, 3)
    assert mixing.depthwise_causal_conv(x, weight).flatten().tolist() == [5.0, 3.0 + 50.0, 2.0 + 30.0 + 500.0]


# ---------------------------------------------------------------------------------------------------------------
# Sliding-window attention


def masked_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """All L x L scores, each forbidden pair written out, softmax by torch's own attention."""
    length = q.shape[1]
    visible = torch.tensor([[0 <= t - j < window for j in range(length)] for t in range(length)])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(1, 2)


def qkv(batch: int, length: int, heads: int, head_dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (randn(batch, length, heads, head_dim, seed=3 * seed + i) for i in range(3))
    return q, k, v


ATTENTIONS = pytest.mark.parametrize(
    "attend", [mixing.sliding_window_attention, mixing.sliding_window_attention_direct]
)


@ATTENTIONS
@pytest.mark.parametrize("window", [1, 2, WINDOW, 100])
@pytest.mark.parametrize("length", EDGES)
def test_attention_equals_masked_full_attention(attend: Callable[..., Tensor], length: int, window: int) -> None:
    q, k, v = qkv(2, length, 3, 5)
    got, expected = attend(q, k, v, window), masked_attention(q, k, v, window)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@given(
    batch=st.integers(1, 2),
    length=st.integers(1, 40),
    window=st.integers(1, 45),
    heads=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    seed=st.integers(0, 1 << 20),
)
@settings(max_examples=60, deadline=None, database=None)
def test_attention_equals_masked_full_attention_at_any_shape(
    batch: int, length: int, window: int, heads: int, head_dim: int, seed: int
) -> None:
    q, k, v = qkv(batch, length, heads, head_dim, seed)
    got, expected = mixing.sliding_window_attention(q, k, v, window), masked_attention(q, k, v, window)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


def test_window_of_one_returns_the_values() -> None:
    q, k, v = qkv(2, 9, 2, 4)
    assert torch.equal(mixing.sliding_window_attention(q, k, v, 1), v)


def test_window_beyond_the_length_is_causal_attention() -> None:
    q, k, v = qkv(2, 23, 2, 4)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    for window in (23, 24, 10_000):
        torch.testing.assert_close(mixing.sliding_window_attention(q, k, v, window), expected, rtol=1e-12, atol=1e-13)


def test_window_counts_the_token_itself() -> None:
    """Equal scores make every visible token count the same: token 5 with W = 3 averages tokens 3, 4 and 5."""
    q = k = torch.zeros(1, 6, 1, 1)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]).reshape(1, 6, 1, 1)
    y = mixing.sliding_window_attention(q, k, v, 3).flatten()
    expected = [1.0, 3 / 2, 7 / 3, 14 / 3, 28 / 3, 56 / 3]
    torch.testing.assert_close(y, torch.tensor(expected))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = qkv(1, 13, 2, 4)
    q, k = (1e4 * q).float(), (1e4 * k).float()
    y = mixing.sliding_window_attention(q, k, v.float(), 5)
    assert bool(torch.isfinite(y).all())
    torch.testing.assert_close(y, masked_attention(q, k, v.float(), 5), rtol=1e-5, atol=1e-6)


def test_attention_makes_no_square_of_the_length(largest_tensor: Callable[[], Any]) -> None:
    """The largest thing at L = 4096 is the block scores, H * L * 2W elements: a 32nd of one L x L matrix per head."""
    length, window, heads = 4096, 64, 2
    q, k, v = (x.float() for x in qkv(1, length, heads, 4))
    with largest_tensor() as largest:
        mixing.sliding_window_attention(q, k, v, window)
    assert largest.elements < length * length
    assert largest.elements <= heads * length * 2 * window


def test_the_recorder_sees_a_square_of_the_length(largest_tensor: Callable[[], Any]) -> None:
    q, k, v = qkv(1, 256, 1, 2)
    with largest_tensor() as largest:
        mixing.sliding_window_attention_direct(q, k, v, 8)
    assert largest.elements == 256 * 256


def test_convolution_makes_no_square_of_the_length(largest_tensor: Callable[[], Any]) -> None:
    v, g = randn(1, 4096, 2, dtype=torch.float32), randn(1, 4096, 2, dtype=torch.float32)
    with largest_tensor() as largest:
        mixing.causal_conv_fft(v, g)
    assert largest.elements <= 2 * 2 * 4096
