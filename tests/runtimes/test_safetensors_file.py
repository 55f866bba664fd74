"""The numpy-only safetensors reader against the `safetensors` library, and against files that lie."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from caracal_runtimes.errors import BundleError
from caracal_runtimes.safetensors_file import (
    STORED_AS,
    SafetensorsFile,
    SafetensorsFiles,
    header_bytes,
    widen_bfloat16,
    width_of,
    write_safetensors,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
# A file is written anew for every example.
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(folder: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """A safetensors file with any header (bytes as they are, else JSON) and any stated header length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read_all(path: Path) -> dict[str, NDArray[Any]]:
    file = SafetensorsFile.open(path)
    return {name: file.tensor(name) for name in file.entries}


def refused(path: Path, message: str = "x.safetensors") -> None:
    with pytest.raises(BundleError, match=message):
        read_all(path)


class TestReading:
    @in_one_folder
    @given(
        st.dictionaries(
            st.text(min_size=1).filter(lambda name: name != "__metadata__"),
            hnp.arrays(st.sampled_from(sorted(NAMES)).map(np.dtype), hnp.array_shapes(min_dims=0, min_side=0)),
            max_size=4,
        )
    )
    @example({"scalar": np.array(7, np.int64), "empty": np.zeros((3, 0), np.float32), "odd": np.array([1], np.uint8)})
    def test_as_the_library_wrote_it(self, tmp_path: Path, arrays: dict[str, NDArray[Any]]) -> None:
        path = tmp_path / "x.safetensors"
        safetensors.numpy.save_file(arrays, path)
        file = SafetensorsFile.open(path)
        assert file.entries.keys() == arrays.keys()
        for name, expected in arrays.items():
            got = file.tensor(name)
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
            assert got.tobytes() == expected.tobytes()
            assert (file.entries[name].dtype, file.entries[name].bytes) == (NAMES[got.dtype.name], expected.nbytes)

    def test_all_dtypes_as_the_library_reads_them(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        rng = np.random.default_rng(1)
        safetensors.numpy.save_file({name: (rng.normal(size=(3, 5)) * 9).astype(name) for name in NAMES}, path)
        expected = safetensors.numpy.load_file(path)
        assert len(expected) == len(NAMES)
        for name, array in read_all(path).items():
            np.testing.assert_array_equal(array, expected[name], strict=True)

    def test_bfloat16_is_widened_exactly(self, tmp_path: Path) -> None:
        """BF16 is the upper half of a float32: 8 bits of exponent, 7 of fraction."""
        values = {
            0x0000: 0.0, 0x8000: -0.0, 0x3F80: 1.0, 0xC000: -2.0, 0x3F81: 1 + 2**-7, 0x0001: 2.0**-133,
            0x7F7F: (2 - 2**-7) * 2.0**127, 0x7F80: math.inf, 0xFF80: -math.inf, 0x7FC0: math.nan,
        }  # fmt: skip
        header = {
            "a": entry("BF16", [2, 5], [0, 20]),
            "b": entry("BF16", [], [20, 22]),
            "c": entry("BF16", [0], [22, 22]),
        }
        data = b"".join(bits.to_bytes(2, "little") for bits in [*values, 0x4049])
        got = read_all(write(tmp_path, header, data))
        np.testing.assert_array_equal(got["a"], np.float32(list(values.values())).reshape(2, 5), strict=True)
        np.testing.assert_array_equal(np.signbit(got["a"].ravel()[:2]), [False, True])
        assert isinstance(got["b"], np.ndarray)
        np.testing.assert_array_equal(got["b"], np.float32(3.140625), strict=True)
        np.testing.assert_array_equal(got["c"], np.zeros(0, np.float32), strict=True)

    def test_bfloat16_as_it_is_stored(self, tmp_path: Path) -> None:
        bits = np.array([[0x3F80, 0x8000, 0x7FC1], [0x0001, 0xFF80, 0x4049]], np.uint16)
        header = {"a": entry("BF16", [2, 3], [0, 12]), "b": entry("F16", [2], [12, 16])}
        path = write(tmp_path, header, bits.tobytes() + np.float16([1.5, -2]).tobytes())
        for file in (SafetensorsFile.open(path), SafetensorsFiles.open([path])):
            np.testing.assert_array_equal(file.stored("a"), bits, strict=True)
            np.testing.assert_array_equal(file.stored("b"), np.float16([1.5, -2]), strict=True)
            np.testing.assert_array_equal(file.tensor("b"), file.stored("b"), strict=True)
            np.testing.assert_array_equal(file.tensor("a"), widen_bfloat16(bits), strict=True)
            with pytest.raises(BundleError, match="no tensor 'c'"):
                file.stored("c")

    def test_every_bfloat16_is_widened_to_its_own_bits(self) -> None:
        bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
        wide = widen_bfloat16(bits.T)  # not in the order of memory
        assert (wide.dtype, wide.shape) == (np.float32, (256, 256))
        np.testing.assert_array_equal(wide.view(np.uint32), bits.T.astype(np.uint32) << 16)

    @pytest.mark.parametrize("dtype", sorted(STORED_AS))
    def test_widths(self, dtype: str) -> None:
        assert width_of(dtype) == np.dtype(STORED_AS[dtype]).itemsize

    def test_positions_count_from_the_start_of_the_file(self, tmp_path: Path) -> None:
        """ONNX external data needs them so."""
        safetensors.numpy.save_file({"a": np.arange(3.0), "b": np.arange(5)}, tmp_path / "x.safetensors")
        file = SafetensorsFile.open(tmp_path / "x.safetensors")
        content = (tmp_path / "x.safetensors").read_bytes()
        for name, expected in (("a", np.arange(3.0)), ("b", np.arange(5))):
            place = file.entries[name]
            assert content[place.offset : place.offset + place.bytes] == expected.tobytes()

    def test_metadata(self, tmp_path: Path) -> None:
        safetensors.numpy.save_file({"a": np.zeros(1)}, tmp_path / "x.safetensors", metadata={"format": "np"})
        assert SafetensorsFile.open(tmp_path / "x.safetensors").metadata == {"format": "np"}
        assert SafetensorsFile.open(write(tmp_path, {"a": entry()}, bytes(8))).metadata == {}

    def test_tensors_are_read_only(self, tmp_path: Path) -> None:
        array = read_all(write(tmp_path, {"a": entry()}, bytes(8)))["a"]
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1

    def test_a_name_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(BundleError, match=r"x\.safetensors has no tensor 'b'"):
            SafetensorsFile.open(write(tmp_path, {"a": entry()}, bytes(8))).tensor("b")


WRITTEN = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "a": np.arange(3, dtype=np.int64),
    "none": np.zeros((0, 4), np.float32),
    "scalar": np.float32(7).reshape(()),
}


class TestWriting:
    @pytest.mark.parametrize("metadata", [{}, {"format": "ü"}, {"odd": "x" * 5, "more": ""}])
    def test_the_library_reads_what_is_written(self, tmp_path: Path, metadata: dict[str, str]) -> None:
        path = tmp_path / "x.safetensors"
        write_safetensors(path, WRITTEN, metadata)
        with safetensors.safe_open(path, framework="np") as file:
            assert (file.metadata() or {}) == metadata
        found = safetensors.numpy.load_file(path)
        assert found.keys() == WRITTEN.keys()
        for name, array in WRITTEN.items():
            np.testing.assert_array_equal(found[name], array, strict=True)

    @given(st.lists(st.text(min_size=1, max_size=9), unique=True, max_size=5))
    def test_data_begins_at_a_multiple_of_eight(self, names: list[str]) -> None:
        header = header_bytes({name: ("F32", (1,)) for name in names if name != "__metadata__"}, {"format": "x"})
        assert len(header) % 8 == 0
        assert int.from_bytes(header[:8], "little") == len(header) - 8

    @pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole in it takes its whole size there")
    def test_a_tensor_behind_2_gib(self, tmp_path: Path) -> None:
        """The file is a hole but for its two ends."""
        path = tmp_path / "x.safetensors"
        header = header_bytes({"large": ("F32", (2**29 + 7,)), "small": ("F32", (5,))}, {})
        small = np.float32([1, -2, 3, -4, 5])
        with path.open("wb") as file:
            file.write(header)
            file.seek(len(header) + 4 * (2**29 + 7))
            file.write(small.tobytes())
        mine = SafetensorsFile.open(path)
        assert mine.entries["small"].offset == len(header) + 2**31 + 28
        with safetensors.safe_open(path, framework="np") as theirs:
            np.testing.assert_array_equal(theirs.get_tensor("small"), small, strict=True)
        np.testing.assert_array_equal(mine.tensor("small"), small, strict=True)
        assert mine.tensor("large").shape == (2**29 + 7,)


class TestSeveralFiles:
    def write(self, folder: Path, **files: dict[str, NDArray[Any]]) -> list[Path]:
        for name, tensors in files.items():
            safetensors.numpy.save_file(tensors, folder / f"{name}.safetensors")
        return [folder / f"{name}.safetensors" for name in files]

    def test_a_tensor_is_found_in_its_file(self, tmp_path: Path) -> None:
        first, second = {"a": np.arange(3.0), "c": np.arange(4)}, {"b": np.ones((2, 2), np.int8)}
        files = SafetensorsFiles.open(self.write(tmp_path, one=first, two=second))
        assert files.numbers == 3 + 4 + 4
        assert {name: file.path.stem for name, file in files.holders.items()} == {"a": "one", "c": "one", "b": "two"}
        for name, array in {**first, **second}.items():
            np.testing.assert_array_equal(files.tensor(name), array, strict=True)

    def test_a_name_in_two_files(self, tmp_path: Path) -> None:
        paths = self.write(tmp_path, one={"a": np.zeros(1), "b": np.zeros(1)}, two={"c": np.zeros(1), "b": np.zeros(1)})
        with pytest.raises(BundleError, match=r"the tensor 'b' is in one\.safetensors and again in two\.safetensors"):
            SafetensorsFiles.open(paths)

    def test_a_name_in_none(self, tmp_path: Path) -> None:
        files = SafetensorsFiles.open(self.write(tmp_path, one={"a": np.zeros(1)}, two={"b": np.zeros(1)}))
        with pytest.raises(BundleError, match=r"one\.safetensors, two\.safetensors: no tensor 'c'"):
            files.tensor("c")

    def test_a_missing_file(self, tmp_path: Path) -> None:
        paths = self.write(tmp_path, one={"a": np.zeros(1)}, two={"b": np.zeros(1)})
        paths[1].unlink()
        with pytest.raises(BundleError, match=r"two\.safetensors cannot be read"):
            SafetensorsFiles.open(paths)


class TestDamaged:
    def test_cut_short_anywhere(self, tmp_path: Path) -> None:
        path = tmp_path / "x.safetensors"
        safetensors.numpy.save_file({"a": np.arange(4.0), "b": np.arange(3, dtype=np.int8)}, path)
        whole = path.read_bytes()
        assert len(read_all(path)) == 2
        for size in range(len(whole)):
            path.write_bytes(whole[:size])
            refused(path)

    def test_no_file(self, tmp_path: Path) -> None:
        refused(tmp_path / "x.safetensors", r"x\.safetensors cannot be read")
        refused(tmp_path, "cannot be read")

    def test_a_file_that_went_away(self, tmp_path: Path) -> None:
        file = SafetensorsFile.open(write(tmp_path, {"a": entry()}, bytes(8)))
        file.path.unlink()
        with pytest.raises(BundleError, match="cannot be read"):
            file.tensor("a")

    @pytest.mark.parametrize("header", [{"a": entry()}, {}, {"__metadata__": {"a": "b"}}], ids=["one", "none", "meta"])
    def test_a_header_length_that_lies(self, tmp_path: Path, header: dict[str, Any]) -> None:
        data, true = bytes(8 * ("a" in header)), len(json.dumps(header))
        read_all(write(tmp_path, header, data, length=true))
        for length in (0, 1, true - 1, true + 1, true + 8, true + 9, 2**20, 2**31, 2**40, 2**63, 2**64 - 1):
            refused(write(tmp_path, header, data, length=length))

    @pytest.mark.parametrize(
        "header",
        [b"", b"{", b"\xff\xfe", b'{"\xff": 1}', b"[]", b"null", b"7", b'"a"', b"{'a': 1}", b"{}{}", b"[" * 10**5],
    )
    def test_no_json_object(self, tmp_path: Path, header: bytes) -> None:
        refused(write(tmp_path, header), "is not a safetensors file")

    @pytest.mark.parametrize("depth", [900, 980, 990, 1000])
    def test_nested_too_deep(self, tmp_path: Path, depth: int) -> None:
        refused(write(tmp_path, b'{"a": {"dtype": ' + b"[" * depth + b"]" * depth + b"}}"))

    @pytest.mark.parametrize("value", [None, 1, "F32", [], True])
    def test_an_entry_that_is_no_object(self, tmp_path: Path, value: object) -> None:
        refused(write(tmp_path, {"a": value}, bytes(8)), "entry of 'a'")

    @pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
    def test_an_entry_that_lacks_a_key(self, tmp_path: Path, key: str) -> None:
        value = entry()
        del value[key]
        refused(write(tmp_path, {"a": value}, bytes(8)), "entry of 'a'")

    @pytest.mark.parametrize("dtype", ["", "f32", "F8_E4M3", "U16", "U32", "U64", "C64", None, 7, ["F32"], {"F32": 1}])
    def test_a_dtype_that_is_not_read(self, tmp_path: Path, dtype: object) -> None:
        refused(write(tmp_path, {"a": entry(dtype)}, bytes(8)), "entry of 'a' has a dtype that is not supported")

    @pytest.mark.parametrize(
        "shape",
        [[1], [3], [2, 2], [], [-2], [-1, -2], [2.0], [True, 2], ["2"], None, 2, "2", {}, [2**63], [2**64, 2**64]],
    )
    def test_a_shape_that_is_not_the_data(self, tmp_path: Path, shape: object) -> None:
        refused(write(tmp_path, {"a": entry(shape=shape)}, bytes(8)), "entry of 'a'")

    @pytest.mark.parametrize("shape", [[0, 2**62], [2**70, 0], [0] + [1] * 70])
    def test_an_empty_shape_that_numpy_cannot_have(self, tmp_path: Path, shape: list[int]) -> None:
        refused(write(tmp_path, {"a": entry(shape=shape, offsets=[0, 0])}))

    @pytest.mark.parametrize(
        "offsets", [[0, 9], [1, 9], [8, 16], [8, 0], [-8, 0], [-4, 4], [0], [0, 4, 8], [0.0, 8.0], [False, 8], None, 8,
                    "08", {}, [0, 4], [2**63, 2**63 + 8]]
    )  # fmt: skip
    def test_offsets_outside_the_file(self, tmp_path: Path, offsets: object) -> None:
        refused(write(tmp_path, {"a": entry(offsets=offsets)}, bytes(8)), "entry of 'a'")

    @pytest.mark.parametrize("second", [[0, 8], [4, 12], [2, 10]])
    def test_tensors_that_overlap(self, tmp_path: Path, second: list[int]) -> None:
        refused(write(tmp_path, {"a": entry(), "b": entry(offsets=second)}, bytes(second[1])))

    @pytest.mark.parametrize(
        ("offsets", "size"),
        [([[8, 16]], 16), ([[0, 8], [9, 17]], 17), ([[0, 8]], 9)],
        ids=["before", "between", "after"],
    )
    def test_data_that_no_tensor_claims(self, tmp_path: Path, offsets: list[list[int]], size: int) -> None:
        """The format allows no holes."""
        header = {str(index): entry(offsets=pair) for index, pair in enumerate(offsets)}
        refused(write(tmp_path, header, bytes(size)))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 10)
    | st.integers()
    | st.floats()
    | st.sampled_from(["F32", "BF16", "U8"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8"]) | json_values,
        "shape": st.lists(st.integers(0, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 16), min_size=2, max_size=2) | json_values,
    },
)


def taken_or_refused(path: Path) -> None:
    """Either arrays that lie inside the file, or BundleError; never anything else."""
    try:
        found = read_all(path)
    except BundleError:
        return
    assert sum(array.nbytes for array in found.values()) <= 2 * path.stat().st_size  # BF16 doubles


class TestFuzz:
    @in_one_folder
    @given(st.dictionaries(st.text(max_size=3) | st.just("__metadata__"), entries | json_values, max_size=3))
    def test_headers(self, tmp_path: Path, header: object) -> None:
        taken_or_refused(write(tmp_path, header, bytes(16)))

    @in_one_folder
    @given(st.binary(max_size=64), st.none() | st.integers(0, 2**64 - 1))
    def test_header_bytes(self, tmp_path: Path, header: bytes, length: int | None) -> None:
        taken_or_refused(write(tmp_path, header, bytes(16), length=length))

    @in_one_folder
    @given(st.binary(max_size=64))
    def test_files(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        taken_or_refused(path)

    @in_one_folder
    @given(st.data())
    def test_a_changed_byte(self, tmp_path: Path, data: st.DataObject) -> None:
        path = tmp_path / "x.safetensors"
        content = bytearray(safetensors.numpy.save({"a": np.arange(3.0), "b": np.ones((2, 2), np.int8)}))
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        taken_or_refused(path)
