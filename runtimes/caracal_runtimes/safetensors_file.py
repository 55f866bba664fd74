"""Reading and writing safetensors with numpy alone, so that a bundle needs no further package.

Format: https://github.com/huggingface/safetensors - 8 bytes header length (little endian), a JSON header
`{name: {dtype, shape, data_offsets: [begin, end]}}`, then the data. Tensors are mapped, not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caracal_runtimes.errors import BundleError

if TYPE_CHECKING:  # describing a file needs no numpy, which takes a tenth of a second to load
    from numpy.typing import NDArray

#: How numpy sees the bytes of each dtype of the format; it has no bfloat16, of which these are the bits.
STORED_AS = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
    "BF16": "<u2",
}
_BFLOAT16 = "BF16"
_MAX_HEADER = 100 << 20
#: A tensor's dtype, as the format names it, and its shape.
TensorHead = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: `offset` counts from the start of the file, `bytes` is its length there."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """A parsed header; `tensor` maps the data of one name."""

    path: Path
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]

    @classmethod
    def open(cls, path: str | Path) -> SafetensorsFile:
        """Parses and checks the header. Raises BundleError when the file is not a whole safetensors file."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                prefix = file.read(8)
                size = int.from_bytes(prefix, "little")
                if len(prefix) < 8 or size > _MAX_HEADER:
                    raise BundleError(f"{path.name} is not a safetensors file: no header of a sensible length")
                raw = file.read(size)
                if len(raw) != size:
                    raise BundleError(f"{path.name} is not a safetensors file: its header is cut short")
                header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
                file.seek(0, 2)
                data_bytes = file.tell() - 8 - size
        except OSError as error:
            raise BundleError(f"{path} cannot be read ({error})") from None
        except (ValueError, RecursionError):
            raise BundleError(
                f"{path.name} is not a safetensors file: its header is not JSON, or has a key twice"
            ) from None
        if not isinstance(header, dict):
            raise BundleError(f"{path.name} is not a safetensors file: its header is no JSON object")
        metadata = {} if header.get("__metadata__") is None else header["__metadata__"]
        header.pop("__metadata__", None)
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise BundleError(f"{path.name} is not a safetensors file: its metadata must be texts by name")
        entries = {name: _entry(path.name, name, value, 8 + size, data_bytes) for name, value in header.items()}
        _check_gapless(path.name, entries, 8 + size, data_bytes)
        return cls(path, entries, metadata)

    @property
    def numbers(self) -> int:
        """How many numbers the tensors hold together."""
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor, read-only; BF16 comes widened to float32. Raises BundleError when there is no such name."""
        array = self.stored(name)
        return widen_bfloat16(array) if self.entries[name].dtype == _BFLOAT16 else array

    def stored(self, name: str) -> NDArray[Any]:
        """As `tensor`, but BF16 comes as its bits, uint16."""
        import numpy as np

        entry = self.entries.get(name)
        if entry is None:
            raise BundleError(f"{self.path.name} has no tensor {name!r}")
        try:
            if entry.bytes == 0:
                return np.empty(entry.shape, dtype=STORED_AS[entry.dtype])
            array: NDArray[Any] = np.memmap(
                self.path, dtype=STORED_AS[entry.dtype], mode="r", offset=entry.offset, shape=entry.shape
            )
        except (OSError, ValueError) as error:
            raise BundleError(f"{self.path} cannot be read ({error})") from None
        return array


@dataclass(frozen=True)
class SafetensorsFiles:
    """Several files that together hold one set of tensors, such as a bundle's weights: a name lies in one of them only."""

    files: tuple[SafetensorsFile, ...]
    #: Which of the files has a tensor.
    holders: dict[str, SafetensorsFile]

    @classmethod
    def open(cls, paths: Iterable[Path]) -> SafetensorsFiles:
        """Parses and checks all headers. Raises BundleError for a bad file, and for a name that two of them have."""
        files = tuple(map(SafetensorsFile.open, paths))
        holders: dict[str, SafetensorsFile] = {}
        for file in files:
            for name in file.entries:
                if name in holders:
                    raise BundleError(
                        f"the tensor {name!r:.80} is in {holders[name].path.name} and again in {file.path.name}, expected "
                        f"it once; export the bundle again"
                    )
                holders[name] = file
        return cls(files, holders)

    @property
    def numbers(self) -> int:
        """How many numbers the tensors hold together."""
        return sum(file.numbers for file in self.files)

    def tensor(self, name: str) -> NDArray[Any]:
        """One tensor, as `SafetensorsFile.tensor` gives it. Raises BundleError when no file has the name."""
        return self._holder(name).tensor(name)

    def stored(self, name: str) -> NDArray[Any]:
        """One tensor, as `SafetensorsFile.stored` gives it. Raises BundleError when no file has the name."""
        return self._holder(name).stored(name)

    def _holder(self, name: str) -> SafetensorsFile:
        if name not in self.holders:
            raise BundleError(f"{', '.join(file.path.name for file in self.files)}: no tensor {name!r:.80}")
        return self.holders[name]


def widen_bfloat16(bits: NDArray[Any]) -> NDArray[Any]:
    """Float32 of the bits of bfloat16, which are its upper half."""
    import numpy as np

    wide: NDArray[Any] = (np.asarray(bits, "<u4").reshape(-1) << 16).view("<f4").reshape(bits.shape)
    return wide


def header_bytes(tensors: Mapping[str, TensorHead], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with: length and text of its header. The tensors follow in their order, without gaps.

    Args:
        tensors: dtype and shape by name.
        metadata: texts to go with them.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    place = 0
    for name, (dtype, shape) in tensors.items():
        end = place + math.prod(shape) * width_of(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # data that is aligned can be mapped
    return len(raw).to_bytes(8, "little") + raw


def write_safetensors(path: Path, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Writes float32 and int64 tensors as a safetensors file. Raises OSError."""
    import numpy as np

    names = {np.dtype("<f4"): "F32", np.dtype("<i8"): "I64"}
    with path.open("wb") as file:
        file.write(
            header_bytes({name: (names[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}, metadata)
        )
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).data if tensor.size else b"")


def _entry(file: str, name: str, value: object, start: int, data_bytes: int) -> TensorEntry:
    wrong = f"{file} is not a whole safetensors file: the entry of {name!r:.80}"
    if not isinstance(value, dict):
        raise BundleError(f"{wrong} is no JSON object")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in STORED_AS:
        raise BundleError(f"{wrong} has a dtype that is not supported: {dtype!r:.40}")
    if not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2:
        raise BundleError(f"{wrong} has no valid shape and data_offsets")
    begin, end = offsets
    if not begin <= end <= data_bytes or end - begin != math.prod(shape) * width_of(dtype):
        raise BundleError(f"{wrong} points outside the file or does not match its shape; the file may be cut short")
    return TensorEntry(dtype, tuple(shape), start + begin, end - begin)


def width_of(dtype: str) -> int:
    """Bytes of one number of a dtype of the format."""
    return int(STORED_AS[dtype].lstrip("<?iuf") or 1)


def _check_gapless(file: str, entries: dict[str, TensorEntry], start: int, data_bytes: int) -> None:
    """The format wants the data covered exactly once: no overlap, no hole, nothing after the last tensor."""
    place = start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.bytes)):
        if entry.offset != place:
            raise BundleError(f"{file} is not a whole safetensors file: tensors overlap or leave a hole")
        place += entry.bytes
    if place != start + data_bytes:
        raise BundleError(f"{file} is not a whole safetensors file: there is data after the last tensor")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys: of two entries for a tensor, readers may take either. Raises ValueError."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands there twice")
    return data


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
