"""The header of a safetensors file, and the tensors behind it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from caracal_runtimes.errors import BundleError
from caracal_runtimes.safetensors_file import SafetensorsFile
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, Twice, attempt, damaged, dump, encoded, mutants

DATA = bytes(range(64))
HEADER: dict[str, Any] = {
    "__metadata__": {"format": "np", "note": "ü"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
    "empty": {"dtype": "F64", "shape": [0, 5], "data_offsets": [32, 32]},
    "c": {"dtype": "BF16", "shape": [2, 2, 2], "data_offsets": [32, 48]},
    "d": {"dtype": "BOOL", "shape": [16], "data_offsets": [48, 64]},
}


def file_of(header: bytes, data: bytes = DATA) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


WHOLE = file_of(json.dumps(HEADER).encode())


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.safetensors"


def everything(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    file = SafetensorsFile.open(path)
    size = path.stat().st_size
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in file.metadata.items())
    assert sum(entry.bytes for entry in file.entries.values()) <= size
    tensors = {name: file.tensor(name) for name in file.entries}
    for name, entry in file.entries.items():
        assert tensors[name].shape == entry.shape
        assert entry.offset + entry.bytes <= size
    assert file.numbers == sum(math.prod(tensor.shape) for tensor in tensors.values())
    return {name: np.array(tensor) for name, tensor in tensors.items()}


def check(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    found = attempt(BundleError, everything, path)
    if found is None:
        return
    try:
        with safetensors.safe_open(path, "numpy") as file:
            expected = {name: file.get_tensor(name) for name in file.keys() if found[name].dtype != np.float32}  # noqa: SIM118
    except Exception:
        return  # the library is stricter here and there
    for name, tensor in expected.items():
        assert tensor.shape == found[name].shape
        assert tensor.tobytes() == found[name].tobytes()


def test_the_file_itself_is_read(path: Path) -> None:
    path.write_bytes(WHOLE)
    assert everything(path).keys() == HEADER.keys() - {"__metadata__"}


@pytest.mark.parametrize("name", ["a", "__metadata__"])
def test_of_two_entries_with_one_name_none_is_taken(path: Path, name: str) -> None:
    """Another reader might take the other one."""
    path.write_bytes(file_of(dump({**HEADER, name: Twice(HEADER[name], HEADER[name])}).encode()))
    with pytest.raises(BundleError, match="its header is not JSON, or has a key twice"):
        SafetensorsFile.open(path)


@pytest.mark.parametrize("metadata", [1, [], "x", {"a": 1}, {"a": None}, {"a": {"b": "c"}}])
def test_metadata_are_texts_or_nothing(path: Path, metadata: object) -> None:
    path.write_bytes(file_of(json.dumps({**HEADER, "__metadata__": metadata}).encode()))
    with pytest.raises(BundleError, match="its metadata must be texts by name"):
        SafetensorsFile.open(path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "numpy")


@FUZZ
@given(text=mutants(HEADER))
def test_files_with_changed_headers(path: Path, text: str) -> None:
    check(path, file_of(encoded(text)))


@FUZZ
@given(content=st.binary() | damaged(WHOLE))
def test_damaged_files(path: Path, content: bytes) -> None:
    check(path, content)


@FUZZ
@given(header=st.binary(), data=st.binary(max_size=20), length=st.integers(0, 2**64 - 1))
def test_files_that_are_none(path: Path, header: bytes, data: bytes, length: int) -> None:
    check(path, length.to_bytes(8, "little") + header + data)


@FUZZ
@given(
    shape=st.lists(st.sampled_from((0, 1, 2, 3, 2**16, 2**31, 2**32, 2**60, 2**63, 2**64, 10**400)), max_size=70),
    dtype=st.sampled_from(("F64", "F32", "BF16", "I8", "BOOL")),
    end=st.sampled_from((0, 8, 64, 2**63, 2**64)),
)
def test_shapes_of_any_size(path: Path, shape: list[int], dtype: str, end: int) -> None:
    header = {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}
    check(path, file_of(json.dumps(header).encode(), DATA[: min(end, 64)]))
