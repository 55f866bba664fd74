"""Formats of weights against PyTorch's, ONNX's and ONNX Runtime's own reading of the same bits, and against arithmetic."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime
import pytest
import torch
from caracal_export.precision.formats import SCALE, BFloat16, Float16, Format, Int4, Int8
from caracal_runtimes.errors import InputError
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

Array = NDArray[Any]
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
# Magnitudes that weights have, denormal numbers, and numbers that no weight has.
VALUES = st.one_of(
    st.floats(-4, 4, width=32),
    st.floats(-(2**-10), 2**-10, width=32),
    st.sampled_from([0.0, -0.0, 1e-40, -1e-45, 3e38, -1e20]),
)
MATRICES = hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40), elements=VALUES)
WHOLE: list[Format] = [Int8(), Int8(by_row=True), Int4(), Int4(16), Int4(nbits=True), Int4(16, nbits=True)]
ALL: list[Format] = [Float16(), BFloat16(), *WHOLE]
TINY = np.finfo(np.float32).tiny


def matrix(rows: int, columns: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def name_of(each: Format) -> str:
    return repr(each) if isinstance(each, (Int8, Int4)) else each.name


every = pytest.mark.parametrize("kind", ALL, ids=name_of)
every_whole = pytest.mark.parametrize("kind", WHOLE, ids=name_of)


class TestHalves:
    @given(hnp.arrays(np.float32, 50, elements=st.floats(-65504, 65504, width=32)))
    @example(np.float32([65504, -65504, 6e-8, 2**-25, 3 * 2**-25, -0.0, 2049, 2051] * 7)[:50])
    def test_float16_is_ieee_half(self, values: Array) -> None:
        stored = Float16().store(values[None])
        want = torch.from_numpy(values[None].copy()).to(torch.float16)
        assert stored.keys() == {""}
        np.testing.assert_array_equal(stored[""].view(np.uint16), want.numpy().view(np.uint16), strict=True)
        np.testing.assert_array_equal(Float16().dense(stored, (1, 50)), want.to(torch.float32).numpy(), strict=True)

    def test_every_exponent_and_tie_of_bfloat16(self) -> None:
        """Each upper half, below, at and above the tie to the next one: 65536 halves with 5 lower halves each."""
        upper = np.arange(1 << 16, dtype=np.uint32) << 16
        bits = (upper[:, None] | np.uint32([0, 1, 0x7FFF, 0x8000, 0x8001])).astype(np.uint32)
        values = bits.view(np.float32)
        values = values[np.isfinite(values).all(axis=1)]
        want = torch.from_numpy(values).to(torch.bfloat16)
        finite = torch.isfinite(want).all(dim=1).numpy()
        assert not finite.all(), "some round to infinity"
        stored = BFloat16().store(values[finite])
        np.testing.assert_array_equal(stored[""], want[finite].view(torch.uint16).numpy(), strict=True)
        dense = BFloat16().dense(stored, values[finite].shape)
        np.testing.assert_array_equal(dense.view(np.uint32), want[finite].to(torch.float32).numpy().view(np.uint32))

    @given(hnp.arrays(np.float32, (5, 7), elements=FLOATS.filter(lambda value: abs(value) < 3.38e38)))
    def test_bfloat16_of_anything(self, values: Array) -> None:
        want = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(BFloat16().store(values)[""], want, strict=True)

    def test_bfloat16_of_what_does_not_lie_in_order(self) -> None:
        values = matrix(6, 4).T
        want = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
        np.testing.assert_array_equal(BFloat16().store(values)[""], want, strict=True)

    @pytest.mark.parametrize(
        ("kind", "most"), [(Float16(), 65504.0), (BFloat16(), float.fromhex("0x1.fep127"))], ids=["float16", "bfloat16"]
    )
    @pytest.mark.parametrize("sign", [1, -1])
    def test_the_largest_fits_and_what_rounds_beyond_is_refused(self, kind: Format, most: float, sign: int) -> None:
        values = np.full((2, 2), sign * most, np.float32)
        np.testing.assert_array_equal(kind.dense(kind.store(values), (2, 2)), values)
        values[1, 0] *= np.float32(1 + 2**-8)
        with pytest.raises(InputError, match=f"{kind.name} ends at .*, found .*"):
            kind.store(values)


class TestWholeNumbers:
    @every_whole
    @given(weight=MATRICES)
    @example(weight=np.zeros((3, 5), np.float32))
    @example(weight=np.full((1, 1), -0.0, np.float32))
    @example(weight=np.full((33, 2), 1e-42, np.float32))
    @example(weight=np.full((17, 3), -3e38, np.float32))
    @settings(max_examples=40)
    def test_a_weight_is_off_by_half_a_step_where_it_is_not_clipped(self, kind: Format, weight: Array) -> None:
        stored = kind.store(weight)
        assert {ending: head[1] for ending, head in kind.heads(weight.shape).items()} == {
            ending: tensor.shape for ending, tensor in stored.items()
        }
        dense = kind.dense(stored, weight.shape)
        assert (dense.dtype, dense.shape, np.isfinite(dense).all()) == (np.float32, weight.shape, True)
        steps = steps_of(kind, stored, weight.shape)
        assert (steps > 0).all()
        off = np.abs(dense.astype(np.float64) - weight) / steps
        if isinstance(kind, Int4):
            # Clipped to -8 or 7: at least so far out, and no further than the largest value with the smallest factor.
            codes = dense / steps
            clipped = np.isclose(codes, 7) | np.isclose(codes, -8)
            assert (off[clipped] <= 7 / 0.7 - 7 + 0.51).all()
            off = off[~clipped]
        assert (off <= 0.5 + 1e-4).all()

    @every_whole
    @pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 3), (31, 7), (33, 5), (37, 3), (64, 4)], ids=str)
    def test_its_own_numbers_come_back(self, kind: Format, shape: tuple[int, int]) -> None:
        """What is rounded already is not rounded further: codes that span their range."""
        stored = kind.store(matrix(*shape))
        dense = kind.dense(stored, shape)
        again = kind.codes(dense, stored[SCALE])
        np.testing.assert_array_equal(again, stored[""], strict=True)

    def test_int8_by_hand(self) -> None:
        weight = np.float32([[63, 0, 1e-42, -2], [-31.5, 0, 0, 0.9], [0.49, -0.0, 0, 0.5]])
        stored = Int8().store(weight)
        np.testing.assert_array_equal(stored[SCALE], np.float32([1, 1, 1, 2 / 63]), strict=True)
        np.testing.assert_array_equal(
            stored[""], np.int8([[63, 0, 0, -63], [-32, 0, 0, 28], [0, 0, 0, 16]]), strict=True
        )
        by_row = Int8(by_row=True).store(np.ascontiguousarray(weight.T))
        np.testing.assert_array_equal(by_row[""], stored[""].T, strict=True)
        np.testing.assert_array_equal(by_row[SCALE], stored[SCALE][:, None], strict=True)

    @given(weight=MATRICES)
    def test_int8_never_leaves_seven_bits(self, weight: Array) -> None:
        assert np.abs(Int8().store(weight)[""].astype(int)).max() <= 63

    @pytest.mark.parametrize("nbits", [False, True])
    def test_one_huge_value_costs_its_own_block_only(self, nbits: bool) -> None:
        weight = matrix(96, 3)
        weight[40, 1] = 1e4
        kind = Int4(nbits=nbits)
        dense = kind.dense(kind.store(weight), weight.shape)
        off = np.abs(dense - weight)
        hurt = np.zeros(weight.shape, bool)
        hurt[32:64, 1] = True
        assert off[~hurt].max() < 0.5
        assert np.count_nonzero(dense[32:64, 1]) == 1

    @pytest.mark.parametrize("nbits", [False, True])
    def test_finer_steps_with_a_clipped_value_are_taken_where_they_are_closer(self, nbits: bool) -> None:
        """Most are 0.7 of the largest: with a step of a seventh of the largest they fall between two codes."""
        weight = np.full((32, 1), 0.65, np.float32)
        weight[5] = 1.0
        kind = Int4(nbits=nbits)
        off = np.linalg.norm(kind.dense(kind.store(weight), weight.shape) - weight)
        naive = np.linalg.norm(np.rint(weight * 7) / 7 - weight)
        assert off < naive

    @given(exponent=st.integers(-100, 60))
    def test_int4_is_the_same_at_any_magnitude(self, exponent: int) -> None:
        """Squares of 1e30 and of 1e-30 are no float32."""
        weight, kind = matrix(64, 3), Int4()
        plain, scaled = kind.store(weight), kind.store(np.ldexp(weight, exponent))
        np.testing.assert_array_equal(plain[""], scaled[""])
        np.testing.assert_array_equal(np.ldexp(plain[SCALE], exponent), scaled[SCALE])


def steps_of(kind: Format, stored: Any, shape: tuple[int, ...]) -> Array:
    """The factor of each weight, laid out by the documentation."""
    scales = stored[SCALE].astype(np.float64)
    if isinstance(kind, Int8):
        return np.broadcast_to(scales, shape)
    assert isinstance(kind, Int4)
    if kind.nbits:
        scales = scales.T
    return np.stack([scales[row // kind.block] for row in range(shape[0])])


SIZES = [(16, 1), (17, 3), (32, 2), (36, 5), (37, 7), (64, 4), (100, 3)]


class TestPacking:
    @pytest.mark.parametrize("block", [16, 32])
    @pytest.mark.parametrize("shape", SIZES, ids=str)
    def test_the_standards_dequantization_reads_the_same(self, shape: tuple[int, int], block: int) -> None:
        kind, weight = Int4(block), matrix(*shape)
        stored = kind.store(weight)
        node = onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["y"], axis=0, block_size=block)
        initializers = [
            onnx.TensorProto(name="w", data_type=onnx.TensorProto.INT4, dims=shape, raw_data=stored[""].tobytes()),
            onnx.numpy_helper.from_array(stored[SCALE], "s"),
        ]
        output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)
        model = onnx.helper.make_model(
            onnx.helper.make_graph([node], "g", [], [output], initializers),
            opset_imports=[onnx.helper.make_opsetid("", 21)],
            ir_version=10,
        )
        dense = kind.dense(stored, shape)
        np.testing.assert_array_equal(onnxruntime.InferenceSession(model.SerializeToString()).run(None, {})[0], dense)
        if shape[0] % block == 0:  # it cannot do other ones
            np.testing.assert_array_equal(onnx.reference.ReferenceEvaluator(model).run(None, {})[0], dense)
        else:
            codes = onnx.numpy_helper.to_array(initializers[0]).astype(np.float32)
            np.testing.assert_array_equal(codes * steps_of(kind, stored, shape).astype(np.float32), dense)

    @pytest.mark.parametrize("block", [16, 32, 128])
    @pytest.mark.parametrize("shape", SIZES, ids=str)
    def test_matmulnbits_of_the_identity_reads_the_same(self, shape: tuple[int, int], block: int) -> None:
        kind, weight = Int4(block, nbits=True), matrix(*shape, seed=1)
        stored = kind.store(weight)
        node = onnx.helper.make_node(
            "MatMulNBits",
            ["x", "w", "s"],
            ["y"],
            domain="com.microsoft",
            K=shape[0],
            N=shape[1],
            bits=4,
            block_size=block,
        )
        model = onnx.helper.make_model(
            onnx.helper.make_graph(
                [node],
                "g",
                [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, (shape[0], shape[0]))],
                [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
                [onnx.numpy_helper.from_array(stored[""], "w"), onnx.numpy_helper.from_array(stored[SCALE], "s")],
            ),
            opset_imports=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)],
            ir_version=8,
        )
        (got,) = onnxruntime.InferenceSession(model.SerializeToString()).run(
            None, {"x": np.eye(shape[0], dtype=np.float32)}
        )
        np.testing.assert_allclose(got, kind.dense(stored, shape), rtol=1e-6)

    @pytest.mark.parametrize("shape", SIZES, ids=str)
    def test_both_layouts_have_the_same_numbers(self, shape: tuple[int, int]) -> None:
        weight = matrix(*shape, seed=2)
        first, second = Int4(16), Int4(16, nbits=True)
        np.testing.assert_array_equal(
            first.dense(first.store(weight), shape), second.dense(second.store(weight), shape), strict=True
        )


class TestAny:
    @every
    def test_heads_are_what_is_stored(self, kind: Format) -> None:
        dtypes = {"F16": "float16", "BF16": "uint16", "I8": "int8", "U8": "uint8", "F32": "float32"}
        stored = kind.store(matrix(37, 3))
        assert next(iter(kind.heads((37, 3)))) == ""
        for ending, (dtype, shape) in kind.heads((37, 3)).items():
            assert (stored[ending].dtype, stored[ending].shape) == (np.dtype(dtypes[dtype]), shape), ending

    @every
    @pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
    def test_what_is_no_number_is_refused(self, kind: Format, value: float) -> None:
        weight = matrix(20, 3)
        weight[13, 1] = value
        with pytest.raises(InputError, match="it has NaN or infinite values"):
            kind.store(weight)

    @every
    def test_normal_weights_are_within_the_error_that_is_allowed(self, kind: Format) -> None:
        weight = matrix(200, 30)
        off = np.linalg.norm(kind.dense(kind.store(weight), weight.shape) - weight) / np.linalg.norm(weight)
        assert off < kind.most_error / 2
        assert off > kind.most_error / 100, "a limit that much above what is right would let anything pass"

    @every
    def test_what_it_is_given_stays(self, kind: Format) -> None:
        weight = matrix(33, 3)
        weight.flags.writeable = False
        kind.store(weight)
