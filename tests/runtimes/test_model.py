"""The forward pass as a Python call: what it returns, what it refuses, and what it costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
from caracal_runtimes import limits
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError, InputError, LimitError, NotRunError
from caracal_runtimes.forward import pad_right
from caracal_runtimes.manifest import ModelSpec
from caracal_runtimes.model import CausalLM
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.session import default_threads
from numpy.typing import NDArray

VOCABULARY = 320
LARGE = ModelSpec(50257, 1536, 24, 16, 4096, 256, None, None, 3, ("mhf", "mhf", "sliding_attention") * 8)


def ids(*shape: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, shape)


def assert_close(got: NDArray[Any], ref: NDArray[Any]) -> None:
    """Equal up to the rounding of float32 sums in another order."""
    assert got.shape == ref.shape
    assert np.linalg.norm(np.float64(got) - ref) <= 1e-5 * np.linalg.norm(np.float64(ref))


class TestForward:
    def test_equals_what_pytorch_recorded(self, exported: Any, model: CausalLM) -> None:
        recorded = safetensors.numpy.load_file(exported.bundle / "golden.safetensors")
        for name in ("one", "window_plus_1", "ragged"):
            got = model.forward(recorded[f"{name}/input_ids"], recorded[f"{name}/logit_positions"])
            assert_close(got, recorded[f"{name}/logits"])

    @pytest.mark.parametrize(("batch", "length"), [(1, 1), (1, 2), (3, 1), (2, 7), (5, 8), (1, 9), (2, 100)])
    def test_shape_and_dtype(self, model: CausalLM, batch: int, length: int) -> None:
        logits = model.forward(ids(batch, length))
        assert (logits.shape, logits.dtype) == ((batch, length, VOCABULARY), np.float32)
        assert np.isfinite(logits).all()

    def test_rows_of_different_lengths_are_single_rows(self, model: CausalLM) -> None:
        rows = [ids(n, seed=n).tolist() for n in (1, 3, 8, 9, 30)]
        logits = model.forward(rows)
        assert logits.shape == (5, 30, VOCABULARY)
        for row, got in zip(rows, logits, strict=True):
            assert_close(got[: len(row)], model.forward([row])[0])

    def test_a_later_token_changes_no_earlier_logit(self, model: CausalLM) -> None:
        changed = ids(1, 40)
        before = model.forward(changed)
        changed[0, 21] = (changed[0, 21] + 1) % VOCABULARY
        after = model.forward(changed)
        assert_close(after[:, :21], before[:, :21])
        assert (np.abs(after[0, 21:] - before[0, 21:]).max(axis=-1) > 1e-3).all()

    @pytest.mark.parametrize(
        "positions",
        [[[0], [19]], [[19, 19], [19, 0]], [[3, 2, 1], [7, 8, 9]], [list(range(20))] * 2],
        ids=["one", "repeated", "any order", "all"],
    )
    def test_positions_pick_rows_of_the_whole(self, model: CausalLM, positions: list[list[int]]) -> None:
        whole = model.forward(ids(2, 20))
        expected = np.stack([row[list(chosen)] for row, chosen in zip(whole, positions, strict=True)])
        for given in (positions, np.asarray(positions, np.int32), tuple(map(tuple, positions))):
            assert_close(model.forward(ids(2, 20), given), expected)

    @pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint64", ">i4"])
    def test_any_integer_type(self, model: CausalLM, dtype: str) -> None:
        numbers = ids(2, 5) % 120
        np.testing.assert_array_equal(model.forward(numbers.astype(dtype)), model.forward(numbers))

    def test_any_layout_and_any_sequence(self, model: CausalLM) -> None:
        numbers = ids(4, 6)
        expected = model.forward(numbers)
        np.testing.assert_array_equal(model.forward(np.asfortranarray(numbers)), expected)
        np.testing.assert_array_equal(model.forward(np.repeat(numbers, 2, axis=1)[:, ::2]), expected)
        np.testing.assert_array_equal(model.forward(tuple(map(tuple, numbers.tolist()))), expected)
        np.testing.assert_array_equal(model.forward(list(numbers)), expected)

    def test_the_input_is_not_changed(self, model: CausalLM) -> None:
        numbers = ids(2, 5)
        before = numbers.copy()
        model.forward(numbers)
        np.testing.assert_array_equal(numbers, before)


class TestBadInput:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ([[-1]], "ids must be from 0 to 319, found -1"),
            ([[5, 320]], "ids must be from 0 to 319, found 320"),
            ([[2**40]], "found 1099511627776"),
            ([[2**63]], "input_ids"),
            ([[2**64]], "input_ids"),
            ([[-(2**63)]], "found -9223372036854775808"),
            (np.array([[2**63 + 1]], np.uint64), "input_ids"),
            ([[1.0]], "expected integers, found float64"),
            ([[1, 2], [1.5]], "expected integers, found float64"),
            (np.zeros((1, 2), np.float32), "expected integers, found float32"),
            ([[True, False]], "expected integers, found bool"),
            (np.ones((1, 2), bool), "expected integers, found bool"),
            ([["1"]], "expected integers"),
            ([["a", 1]], "expected integers"),
            ([[None]], "expected integers, found object"),
            ([None], "expected integers, found object"),
            ("abc", "input_ids"),
            (b"abc", "input_ids"),
            (["abc"], "expected integers"),
            (None, "input_ids"),
            (5, "input_ids"),
            (iter([[1]]), "input_ids"),
            ({1: 2}, "input_ids"),
            ([], "at least one row"),
            ([[]], "at least one token"),
            ([[1], []], "at least one token"),
            (np.zeros((0, 3), np.int64), "at least one token"),
            (np.zeros((3, 0), np.int64), "at least one token"),
            (np.zeros((0, 0)), "at least one token"),
            ([1, 2, 3], "rows of at least one token"),
            (np.arange(3), r"expected shape \[B, L\], found \[3\]"),
            (np.array(3), r"expected shape \[B, L\], found \[\]"),
            (np.zeros((1, 1, 1), np.int64), r"found \[1, 1, 1\]"),
            ([[[1, 2], [3, 4]]], "rows of at least one token"),
            ([[[1], [2, 3]]], "rows that do not form an array"),
            (np.array([[1], [2, 3]], dtype=object), "expected integers, found object"),
        ],
    )
    def test_ids(self, model: CausalLM, given: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            model.forward(given)

    @pytest.mark.parametrize(
        ("positions", "message"),
        [
            ([[0], [5]], "must be from 0 to 4, found 0 to 5"),
            ([[0], [-1]], "must be from 0 to 4, found -1 to 0"),
            ([[2**63], [0]], "logit_positions"),
            ([[0]], r"expected shape \[2, P\], found \[1, 1\]"),
            ([[0], [0], [0]], r"expected shape \[2, P\], found \[3, 1\]"),
            ([0, 1], r"expected shape \[2, P\], found \[2\]"),
            (0, r"expected shape \[2, P\], found \[\]"),
            ([[], []], r"expected shape \[2, P\], found \[2, 0\]"),
            ([], r"expected shape \[2, P\], found \[0\]"),
            ([[[0]], [[0]]], r"found \[2, 1, 1\]"),
            ([[0, 1], [0]], "rows that do not form an array"),
            ([[0.0], [1.0]], "expected integers, found float64"),
            ([[True], [False]], "expected integers, found bool"),
            ([["0"], ["1"]], "expected integers"),
            ([[None], [0]], "expected integers, found object"),
        ],
    )
    def test_positions(self, model: CausalLM, positions: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            model.forward(ids(2, 5), positions)


class TestPadRight:
    def test_pads_on_the_right_only(self) -> None:
        np.testing.assert_array_equal(pad_right([[1, 2, 3], [4]], pad=9), [[1, 2, 3], [4, 9, 9]])
        assert pad_right([[1], [2, 3]]).dtype == np.int64


class TestLimits:
    """Beyond 2^31 elements in a tensor, values go wrong without an error."""

    @pytest.mark.parametrize(
        ("sizes", "shape", "what", "elements"),
        [
            ({}, (1, 42731, 42731), "logits [B, P, V]", 42731 * 50257),
            ({}, (42731, 1, 1), "logits [B, P, V]", 42731 * 50257),
            ({}, (1, 350_000, 1), "attention scores [B, H, L, 1.5 W]", 350_080 * 16 * 384),
            ({"num_attention_heads": 1}, (2, 2**18 + 1, 1), "feed-forward [B, L, F]", 2 * (2**18 + 1) * 4096),
            ({"num_attention_heads": 1, "intermediate_size": 1}, (1, 400_000, 1), "spectra [B, 4L, D]", None),
            ({"num_attention_heads": 1, "intermediate_size": 1, "hidden_size": 1}, (1, 3 * 10**6, 1), "tables", None),
        ],
    )
    def test_too_many_elements_are_refused_with_the_numbers(
        self,
        monkeypatch: pytest.MonkeyPatch,
        sizes: dict[str, int],
        shape: tuple[int, int, int],
        what: str,
        elements: int | None,
    ) -> None:
        monkeypatch.setattr(limits, "available_bytes", lambda: None)
        with pytest.raises(InputError) as caught:
            limits.check_forward(replace(LARGE, **sizes), *shape)
        batch, length, _ = shape
        for part in (f"{batch} row(s) of {length:,} tokens", what, "at most 2,147,483,647 are computed correctly"):
            assert part in str(caught.value)
        found = re.search(r"with ([\d,]+) elements", str(caught.value))
        assert found is not None
        counted = int(found[1].replace(",", ""))
        assert counted == elements or (elements is None and 2**31 <= counted < 2**32)

    def test_the_border_is_2_to_the_31(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "available_bytes", lambda: None)
        small = ModelSpec(2**20, 1, 1, 1, 1, 1, None, None, 1, ("mhf",))
        limits.check_forward(small, 2047, 1, 1)  # 2^31 - 2^20 logits
        with pytest.raises(InputError, match="2,147,483,648 elements"):
            limits.check_forward(small, 2048, 1, 1)

    def test_a_forward_pass_is_refused_before_it_runs(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(OrtSession, "run", lambda *args: pytest.fail("it ran"))
        monkeypatch.setattr(model, "_granted", 0)
        row = np.zeros((1, 2**20), np.int64)
        with pytest.raises(InputError, match="elements"):
            model.forward(np.broadcast_to(row, (7, 2**20)))
        monkeypatch.setattr(limits, "available_bytes", lambda: 10**6)
        with pytest.raises(InputError, match=r"1 row\(s\) of 5,000 tokens need about .* GB, 0\.0 GB are available"):
            model.forward(ids(1, 5000), [[0]])
        with pytest.raises(InputError, match=r"context too long for memory: 1 row\(s\) of up to 5,001 tokens"):
            model.generate([1], max_new_tokens=5000)

    def test_memory_is_compared_with_the_estimate(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        needed = limits.forward_bytes(model.spec, 2, 50, 50)
        monkeypatch.setattr(model, "_granted", 0)
        monkeypatch.setattr(limits, "available_bytes", lambda: needed - 1)
        with pytest.raises(InputError, match="too large for memory"):
            model.forward(ids(2, 50))
        assert model.forward(ids(2, 50), [[0], [0]]).shape == (2, 1, VOCABULARY)  # fewer logits fit
        monkeypatch.setattr(model, "_granted", 0)
        monkeypatch.setattr(limits, "available_bytes", lambda: needed)
        assert model.forward(ids(2, 50)).shape == (2, 50, VOCABULARY)

    def test_a_second_pass_uses_the_memory_of_the_first(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """The session's arena keeps what it was granted, so the system shows less although nothing more is needed."""
        needed = limits.forward_bytes(model.spec, 2, 50, 50)
        monkeypatch.setattr(model, "_granted", 0)
        monkeypatch.setattr(limits, "available_bytes", lambda: needed)
        model.forward(ids(2, 50))
        monkeypatch.setattr(limits, "available_bytes", lambda: 0)
        assert model.forward(ids(2, 50)).shape == (2, 50, VOCABULARY)
        with pytest.raises(InputError, match="too large for memory"):
            model.forward(ids(2, 51))

    def test_dft_is_measured_by_its_own_tensors(self) -> None:
        """N is a power of two of at least 2L, and complex: beyond 2^31 elements where the matmul form is not."""
        spec = ModelSpec(100, 768, 3, 12, 2048, 128, None, None, 3, ("mhf", "mhf", "sliding_attention"))
        limits.check_forward(spec, 1, 524_289, 1, granted=10**15)
        with pytest.raises(LimitError, match="3,221,225,472 elements"):
            limits.check_forward(spec, 1, 524_289, 1, mixing="dft", granted=10**15)

    @pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux tells the free memory")
    def test_available_bytes_is_less_than_the_machine_has(self) -> None:
        available = limits.available_bytes()
        assert available is not None
        assert 0 < available <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Prints what the process's peak memory grows by in one forward pass, and what was predicted. The first pass, of one token,
# takes what every pass takes. VmHWM and not getrusage: that one's figure starts at the size of the parent process.
GROWTH = """
import sys
import numpy as np
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.limits import forward_bytes
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
batch, length, positions = map(int, sys.argv[2:])
model = Bundle.open(sys.argv[1], check_hashes=False).model(threads=1)
ids = np.arange(batch * length).reshape(batch, length) % model.spec.vocab_size
chosen = np.broadcast_to(np.arange(length - positions, length), (batch, positions))
model.forward([[1]])
before = peak()
model.forward(ids, chosen)
print(peak() - before, forward_bytes(model.spec, batch, length, positions))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a process's own peak")
@pytest.mark.parametrize(("batch", "length", "positions"), [(1, 4096, 1), (1, 4096, 4096), (4, 1024, 1), (1, 700, 700)])
def test_the_memory_estimate_bounds_the_measured_peak(exported: Any, batch: int, length: int, positions: int) -> None:
    """Too low an estimate lets a process be killed, too high a one refuses what would have run."""
    command = [sys.executable, "-c", GROWTH, str(exported.shipped), str(batch), str(length), str(positions)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    grown, estimated = map(int, output.split())
    assert grown > 20e6, "too small a pass to measure"
    assert grown <= estimated <= 6 * grown


class TestSession:
    @pytest.mark.parametrize("threads", [1, 2, 3])
    def test_threads_are_recorded(self, exported: Any, threads: int) -> None:
        assert Bundle.open(exported.bundle).model(threads=threads).threads == threads

    def test_default_threads(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        assert Bundle.open(exported.bundle).model().threads == default_threads()
        if hasattr(os, "sched_getaffinity"):
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7})
            assert default_threads() == 3

    def test_threads_reach_onnxruntime(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        original = onnxruntime.InferenceSession

        def record(path: str, options: Any, **kwargs: Any) -> Any:
            seen.append((options.intra_op_num_threads, options.inter_op_num_threads, kwargs["enable_fallback"]))
            return original(path, options, **kwargs)

        monkeypatch.setattr(onnxruntime, "InferenceSession", record)
        Bundle.open(exported.bundle).model(threads=3)
        assert seen == [(3, 1, 0)]

    @pytest.mark.parametrize("threads", [-1, 4097, 2**31, 1.0, "1", None, True])
    def test_bad_threads(self, exported: Any, threads: Any) -> None:
        with pytest.raises(InputError, match="--threads must be an integer from 0 to 4096"):
            Bundle.open(exported.bundle).model(threads=threads)

    @pytest.mark.parametrize("ep", ["cpu", "CPU", " Cpu "])
    def test_provider_names_ignore_case(self, exported: Any, ep: str) -> None:
        assert Bundle.open(exported.bundle).model(ep, threads=1).ep == "cpu"

    @pytest.mark.parametrize("ep", ["", "cdua", "CPUExecutionProvider", "cpu,cuda", "all"])
    def test_an_unknown_provider(self, exported: Any, ep: str) -> None:
        with pytest.raises(InputError, match=f"--ep must be one of cpu, cuda, .*, mnn, found '{ep}'"):
            Bundle.open(exported.bundle).model(ep)

    def test_options_that_the_provider_does_not_take(self, exported: Any) -> None:
        with pytest.raises(InputError, match="--ep-option: the provider cpu takes pack, spin_us, found device_id"):
            Bundle.open(exported.bundle).model(ep_options={"device_id": "0"})

    def test_a_provider_that_the_build_lacks(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["OtherExecutionProvider"])
        with pytest.raises(
            NotRunError, match=r"provider cpu does not work here: onnxruntime .* has OtherExecutionProvider"
        ):
            Bundle.open(exported.bundle).model()

    def test_two_builds_over_each_other(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(onnxruntime, "InferenceSession")
        with pytest.raises(NotRunError, match="uninstall every onnxruntime package"):
            Bundle.open(exported.bundle).model()

    def test_placement_counts_every_node_on_the_cpu(self, model: CausalLM) -> None:
        placement = model.placement()
        assert placement.nodes.keys() == placement.operators.keys() == {"CPUExecutionProvider"}
        operators = placement.operators["CPUExecutionProvider"]
        assert placement.nodes["CPUExecutionProvider"] == sum(operators.values()) > 50
        assert operators["MatMul"] + operators.get("FusedMatMul", 0) + operators.get("Gemm", 0) > 10

    @pytest.mark.parametrize("content", [b"", b"no graph", b"\x08\x09"])
    def test_a_graph_that_does_not_load(self, copy: Any, content: bytes) -> None:
        (copy.path / "forward.onnx").write_bytes(content)
        copy.rehash()
        with pytest.raises(BundleError, match=r"^forward\.onnx is no whole ONNX model: [^\n]+$"):
            copy.model()

    def test_a_run_that_fails(self, model: CausalLM) -> None:
        """An input is missing."""
        with pytest.raises(NotRunError, match=r"^provider cpu: running forward\.onnx failed: [^\n]+$"):
            model._session.run({"input_ids": np.zeros((1, 1), np.int64)})

    def test_memory_that_runs_out_is_not_renamed(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object) -> Sequence[object]:
            raise MemoryError

        class Full:
            run = fail

        monkeypatch.setattr(model._session, "_session", Full())
        with pytest.raises(MemoryError):
            model.forward([[1]])
