"""How a weight is stored in fewer bits, and the numbers that its stored form stands for.

A format is told from the float32 values alone, with numpy, so that a bundle can be quantized where PyTorch is not. Matrices
lie as a bundle has them: [in, out] for a product, [rows, width] for a table of which rows are taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from caracal_runtimes.errors import InputError
from caracal_runtimes.safetensors_file import TensorHead, widen_bfloat16
from numpy.typing import NDArray

Floats = NDArray[np.float32]
#: What is stored of a weight, by the ending that its name gets.
Stored = Mapping[str, NDArray[Any]]

SCALE = "_scale"
_HALF_MOST = 65504.0  # the largest finite float16
# Of products of bytes with signed bytes, x86 processors without VNNI add pairs in 16 bits, and silently keep the largest number
# where that is too little: 2 * 255 * 63 fits, 2 * 255 * 127 does not.
_INT8_MOST = 63
_INT4_LEAST, _INT4_MOST = -8, 7
# Parts of a block's largest value that the largest code is tried to stand for. Fewer clipped values against finer steps: the
# one with the least squared error is kept.
_SHRINK = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


class Format(ABC):
    """One way to store a weight."""

    name: ClassVar[str]
    #: Relative L2 of a weight beyond which the format does not fit it: a few values are far larger than all others, or all
    #: are too small.
    most_error: ClassVar[float]

    @abstractmethod
    def heads(self, shape: tuple[int, ...]) -> dict[str, TensorHead]:
        """Dtype and shape of what is stored of a weight of this shape, by ending; the first is the weight's own."""

    def seen_as(self, shape: tuple[int, ...]) -> TensorHead:
        """Dtype and shape of the weight's own tensor for a graph; int4, which files do not have, is `I4`."""
        return self.heads(shape)[""]

    @abstractmethod
    def scales(self, weight: Floats) -> Floats | None:
        """The factors, None where there are none. Raises InputError for values that the format does not have."""

    @abstractmethod
    def codes(self, weight: Floats, scales: Floats | None) -> NDArray[Any]:
        """The numbers that are stored for a weight, given its factors."""

    @abstractmethod
    def dense(self, stored: Stored, shape: tuple[int, ...]) -> Floats:
        """The float32 weight of this shape that stored tensors stand for."""

    def store(self, weight: Floats) -> dict[str, NDArray[Any]]:
        """All that is stored of a weight, by ending."""
        scales = self.scales(weight)
        return {"": self.codes(weight, scales), **({} if scales is None else {SCALE: scales})}


class Float16(Format):
    """IEEE half precision, rounded to nearest."""

    name = "float16"
    most_error = 1e-3

    def heads(self, shape: tuple[int, ...]) -> dict[str, TensorHead]:  # noqa: D102
        return {"": ("F16", shape)}

    def scales(self, weight: Floats) -> None:  # noqa: D102
        _check_finite(weight)
        most = float(np.abs(weight).max(initial=0.0))
        if most > _HALF_MOST:
            raise InputError(f"float16 ends at {_HALF_MOST:g}, found {most:.3g}; use bfloat16")

    def codes(self, weight: Floats, scales: Floats | None) -> NDArray[Any]:  # noqa: D102
        half: NDArray[Any] = weight.astype(np.float16)
        return half

    def dense(self, stored: Stored, shape: tuple[int, ...]) -> Floats:  # noqa: D102
        dense: Floats = stored[""].astype(np.float32)
        return dense


class BFloat16(Format):
    """The upper half of a float32, rounded to nearest, ties to even; its codes are those bits as uint16."""

    name = "bfloat16"
    most_error = 4e-3

    def heads(self, shape: tuple[int, ...]) -> dict[str, TensorHead]:  # noqa: D102
        return {"": ("BF16", shape)}

    def scales(self, weight: Floats) -> None:  # noqa: D102
        _check_finite(weight)
        if not np.isfinite(widen_bfloat16(self.codes(weight, None))).all():
            raise InputError("bfloat16 ends at 3.39e38, found more; scale the weights down")

    def codes(self, weight: Floats, scales: Floats | None) -> NDArray[Any]:  # noqa: D102
        bits = np.ascontiguousarray(weight).view(np.uint32)
        rounded: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return rounded

    def dense(self, stored: Stored, shape: tuple[int, ...]) -> Floats:  # noqa: D102
        dense: Floats = widen_bfloat16(stored[""])
        return dense


@dataclass(frozen=True)
class Int8(Format):
    """Whole numbers from -63 to 63 with one factor for each column, or for each row of a table.

    Seven bits and not eight: see `_INT8_MOST`. The eighth would be lost on some processors, without a word.
    """

    by_row: bool = False
    name: ClassVar[str] = "int8"
    most_error: ClassVar[float] = 1e-1

    def heads(self, shape: tuple[int, ...]) -> dict[str, TensorHead]:  # noqa: D102
        rows, columns = shape
        return {"": ("I8", shape), SCALE: ("F32", (rows, 1) if self.by_row else (columns,))}

    def scales(self, weight: Floats) -> Floats:  # noqa: D102
        _check_finite(weight)
        most = np.abs(weight).max(axis=1 if self.by_row else 0, keepdims=self.by_row) / np.float32(_INT8_MOST)
        return _nonzero(most)

    def codes(self, weight: Floats, scales: Floats | None) -> NDArray[Any]:  # noqa: D102
        assert scales is not None
        codes: NDArray[Any] = np.clip(np.rint(weight / scales), -_INT8_MOST, _INT8_MOST).astype(np.int8)
        return codes

    def dense(self, stored: Stored, shape: tuple[int, ...]) -> Floats:  # noqa: D102
        product: Floats = stored[""].astype(np.float32) * stored[SCALE]
        return product


@dataclass(frozen=True)
class Int4(Format):
    """Whole numbers from -8 to 7, two in a byte, with one factor for each `block` inputs of each output.

    Two layouts of the same numbers. The standard's, for `DequantizeLinear` of opset 21: codes of [in, out] one after the
    other, the first of two in the lower half of the byte, factors [in / block, out]. ONNX Runtime's `MatMulNBits`: codes plus
    8 as [out, blocks, block / 2] and factors as [out, blocks].

    Args:
        block: inputs that share a factor; a power of two from 16 on.
        nbits: the second layout.
    """

    block: int = 32
    nbits: bool = False
    name: ClassVar[str] = "int4"
    most_error: ClassVar[float] = 3e-1

    def heads(self, shape: tuple[int, ...]) -> dict[str, TensorHead]:  # noqa: D102
        rows, columns = shape
        blocks = -(-rows // self.block)
        if self.nbits:
            return {"": ("U8", (columns, blocks, self.block // 2)), SCALE: ("F32", (columns, blocks))}
        return {"": ("U8", (-(-rows * columns // 2),)), SCALE: ("F32", (blocks, columns))}

    def seen_as(self, shape: tuple[int, ...]) -> TensorHead:  # noqa: D102
        return super().seen_as(shape) if self.nbits else ("I4", shape)

    def scales(self, weight: Floats) -> Floats:  # noqa: D102
        _check_finite(weight)
        values = self._blocks(weight)  # (blocks, block, out)
        most = np.abs(values).max(axis=1)
        units = values / _nonzero(most)[:, None]  # whose squares are neither too large nor too small for a float32
        best = np.full(most.shape, np.inf, np.float32)
        found = np.zeros(most.shape, np.float32)
        for part in _SHRINK:
            step = np.float32(part / _INT4_MOST)
            error = np.square(np.clip(np.rint(units / step), _INT4_LEAST, _INT4_MOST) * step - units).sum(axis=1)
            better = error < best
            best, found = np.where(better, error, best), np.where(better, step, found)
        scales = _nonzero(most * found)
        return np.ascontiguousarray(scales.T) if self.nbits else scales

    def codes(self, weight: Floats, scales: Floats | None) -> NDArray[Any]:  # noqa: D102
        assert scales is not None
        by_block = (scales.T if self.nbits else scales)[:, None]
        codes = np.clip(np.rint(self._blocks(weight) / by_block), _INT4_LEAST, _INT4_MOST).astype(np.int8)
        if self.nbits:
            return _pack((codes - _INT4_LEAST).astype(np.uint8).transpose(2, 0, 1))
        flat = codes.reshape(-1, weight.shape[1])[: weight.shape[0]].reshape(-1)
        return _pack(np.append(flat, np.zeros(len(flat) % 2, np.int8)).view(np.uint8) & np.uint8(15))

    def dense(self, stored: Stored, shape: tuple[int, ...]) -> Floats:  # noqa: D102
        rows, columns = shape
        packed = np.asarray(stored[""])
        halves = np.stack((packed & 15, packed >> 4), axis=-1).reshape(*packed.shape[:-1], -1).astype(np.int8)
        if self.nbits:
            codes = (halves + _INT4_LEAST).transpose(1, 2, 0).reshape(-1, columns)[:rows]
            scales = np.asarray(stored[SCALE]).T
        else:
            codes = np.where(halves > _INT4_MOST, halves - 16, halves)[: rows * columns].reshape(shape)
            scales = np.asarray(stored[SCALE])
        dense: Floats = codes.astype(np.float32) * scales.repeat(self.block, axis=0)[:rows]
        return dense

    def _blocks(self, weight: Floats) -> Floats:
        """[in, out] -> [blocks, block, out], with zeros behind the last input."""
        rows, columns = weight.shape
        padded = np.pad(weight, ((0, -rows % self.block), (0, 0)))
        return padded.reshape(-1, self.block, columns)


def _check_finite(weight: Floats) -> None:
    if not np.isfinite(weight).all():
        raise InputError("it has NaN or infinite values; export it from a checkpoint that has none")


def _nonzero(scales: Floats) -> Floats:
    """Factors of what is zero throughout, or too small to divide by, are one: its codes are zero."""
    return np.where(scales < np.finfo(np.float32).tiny, np.float32(1), scales).astype(np.float32)


def _pack(codes: NDArray[Any]) -> NDArray[Any]:
    """Pairs of uint8 along the last axis in one byte, the first in its lower half."""
    packed: NDArray[Any] = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return packed
