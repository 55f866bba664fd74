"""Decoding with the state in the memory of a device: the same properties as in main memory, through the other graph.

The CPU's own memory stands for a device's here, so that every line but the runtime's copies runs without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from caracal_runtimes import growing_rows, resident_batch
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decoding import Stateful
from caracal_runtimes.errors import NotRunError
from caracal_runtimes.model import CausalLM
from caracal_runtimes.parity import run_parity
from caracal_runtimes.providers import Settings, provider
from caracal_runtimes.providers.cpu import Cpu
from caracal_runtimes.providers.ort import OrtBinding, OrtDeviceArray
from caracal_runtimes.resident_batch import ResidentBatch
from caracal_runtimes.sampling import SamplingOptions

from . import test_decoding
from .conftest import BundleCopy
from .test_decoding import VOCABULARY, M, Reader, W, random_text, relative_l2, wrapped
from .test_parity_decode import edit_graph, scaled_scores, verdicts

fine_pieces = test_decoding.fine_pieces
attentive = test_decoding.model


@pytest.fixture(scope="module", autouse=True)
def cpu_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cpu, "state_memory", lambda self, settings: "cpu:0")
        yield


@pytest.fixture(scope="module")
def model(attentive: CausalLM, cpu_memory: None) -> CausalLM:
    assert attentive.graphs.resident
    return attentive


class TestSteps(test_decoding.TestSteps):
    """As in main memory."""


class TestBatches(test_decoding.TestBatches):
    """As in main memory."""


class TestExtend(test_decoding.TestExtend):
    """As in main memory."""


class TestCopy(test_decoding.TestCopy):
    """As in main memory."""


variant = test_decoding.variant
test_any_mixture = test_decoding.test_any_mixture


@pytest.mark.slow
class TestVariants(test_decoding.TestVariants):
    """As in main memory: also a window and a ring that hold nothing, and layers of one kind alone."""


class TestMemory:
    def test_main_memory_gives_the_same_logits(self, exported: Any, model: CausalLM) -> None:
        bundle = Bundle.open(exported.bundle)
        plain, resident = bundle.model(threads=1, resident=False), bundle.model(threads=1)
        assert [m.graphs.resident for m in (plain, resident)] == [False, True]
        decoders = [Stateful(m.graphs) for m in (plain, resident)]
        prompts = [list(random_text(row, count, VOCABULARY)) for row, count in enumerate((1, 5, 30))]
        for decoder in decoders:
            decoder.prefill(prompts)
        for token in range(60):
            want, got = (decoder.step([0, 1, 2], [token, token + 9, 3 * token]) for decoder in decoders)
            assert relative_l2(got, want) <= test_decoding.LIMIT
        assert [type(decoder._batch).__name__ for decoder in decoders] == ["StepBatch", "ResidentBatch"]

    def test_nothing_of_the_state_crosses_once_the_first_lags_are_known(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = Reader(model).prefill(1, 30).step(0, 1)
        crossed: list[str] = []
        for name in ("read", "write"):
            wrapped(
                OrtDeviceArray, name, lambda original, self, *a, name=name: crossed.append(name) or original(self, *a)
            )(monkeypatch)
        known = []
        for _ in range(2 * M):
            crossed.clear()
            reader.step(0, 1)
            known.append((reader.known[0] - 1, list(crossed)))
        layers = 2
        assert [position for position, moved in known if moved] == list(range(2, M + 1))
        assert all(moved in ([], ["write"] * 2 * layers) for _, moved in known)
        crossed.clear()
        reader.decoder.rows()
        assert crossed == ["read"] * (layers + 2), "convolution inputs of two layers, keys and values of one"
        monkeypatch.undo()
        reader.check()

    def test_outputs_are_bound_to_other_arrays_than_inputs(self, model: CausalLM) -> None:
        batch = Reader(model).prefill(9).step(0).decoder._batch
        assert isinstance(batch, ResidentBatch)
        assert len(batch._state) == 2 * 3 + 2
        for binding in batch._bindings:
            assert isinstance(binding, OrtBinding)
            places = {name: array.value.data_ptr() for name, array in binding._arrays.items() if "." in name
                      and isinstance(array, OrtDeviceArray)}  # fmt: skip
            assert len(set(places.values())) == len(places) == 2 * len(batch._state) + 2 * 4

    def test_bytes_count_what_is_on_the_device(self, model: CausalLM) -> None:
        reader = Reader(model).prefill(20)
        before = reader.decoder.state_bytes
        reader.step(0)
        layer = 4 * (2 * 48 + 2 * (M - 1) * 48 + 2 * (2 * (M - 1) * 48 + 2 * 48))
        assert reader.decoder.state_bytes - before >= 2 * layer + 4 * 4 * W * 48
        assert 0 < reader.decoder.step_state_bytes < reader.decoder.state_bytes

    def test_no_room_is_said(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = Reader(model).prefill(3)
        with monkeypatch.context() as patch:
            patch.setattr("caracal_runtimes.providers.ort.DeviceMemory.empty", lambda *a: [][0])
            with pytest.raises(NotRunError, match=r"provider cpu: no array of shape \[1, 48\] in its memory"):
                reader.step(0)
        with pytest.raises(NotRunError, match="in the middle of a token"):
            reader.step(0)

    @pytest.mark.parametrize("where", [(ResidentBatch, "_grow"), (ResidentBatch, "leave")], ids=str)
    def test_an_interrupt_is_refused_until_a_new_start(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
    ) -> None:
        def interrupt(*arguments: Any) -> None:
            raise KeyboardInterrupt

        reader = Reader(model).prefill(5, 9).step(0, 1, times=20).step(1)
        with monkeypatch.context() as patch:
            patch.setattr(*where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                reader.step(0, 1)
        with pytest.raises(NotRunError, match="in the middle of a token"):
            reader.decoder.rows()
        reader.prefill(3, 3).step(0, 1, times=9).check()


class TestWhichMemory:
    def test_of_known_providers(self) -> None:
        memories = {name: provider(name).state_memory(Settings()) for name in ("cuda", "tensorrt", "directml")}
        assert memories == {"cuda": "cuda:0", "tensorrt": "cuda:0", "directml": "dml:0"}
        assert provider("cuda").state_memory(Settings("1")) == "cuda:1"
        assert provider("cuda").state_memory(Settings(options={"device_id": "2"})) == "cuda:2"

    @pytest.mark.parametrize("name", ["openvino", "qnn", "coreml", "ggml", "reference", "migraphx"])
    def test_others_stay_in_main_memory(self, name: str) -> None:
        assert provider(name).state_memory(Settings()) is None

    def test_a_device_that_is_no_number_is_left_to_open(self) -> None:
        assert provider("cuda").state_memory(Settings("nope")) is None

    def test_webgpu_without_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        webgpu = provider("webgpu")
        monkeypatch.setattr(type(webgpu), "_is_plugin", lambda self: False)
        assert webgpu.state_memory(Settings()) is None
        monkeypatch.setattr(type(webgpu), "_is_plugin", lambda self: True)
        monkeypatch.setattr(type(webgpu), "_plugin_devices", lambda self, ort: [])
        assert webgpu.state_memory(Settings()) is None

        def fails(self: Any, ort: Any) -> None:
            raise NotRunError("the plugin does not load")

        monkeypatch.setattr(type(webgpu), "_plugin_devices", fails)
        assert webgpu.state_memory(Settings()) is None

    def test_a_runtime_that_does_not_tell_of_memories(self, monkeypatch: pytest.MonkeyPatch) -> None:
        webgpu = provider("webgpu")
        monkeypatch.setattr(type(webgpu), "_is_plugin", lambda self: True)
        monkeypatch.setattr(type(webgpu), "_plugin_devices", lambda self, ort: [("gpu", object())])
        assert webgpu.state_memory(Settings()) is None


# What a decoder that keeps its state on a device can do wrong


def altered_state(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes the device's arrays of this name after a batch has been entered."""

    def around(original: Any, self: ResidentBatch, *rest: Any) -> None:
        original(self, *rest)
        arrays = {**self._fixed, **{name: pair[0] for name, pair in self._state.items()}}
        for name, array in arrays.items():
            if name.partition(".")[2].startswith(part):
                array.write(change(array.read()))

    return wrapped(ResidentBatch, "__init__", around)


def with_keep_g(value: float) -> Callable[[pytest.MonkeyPatch], None]:
    def around(original: Any, self: OrtBinding) -> None:
        for name, array in self._arrays.items():
            if name == "keep_g":
                assert isinstance(array, np.ndarray)
                array.fill(value)
        original(self)

    return wrapped(OrtBinding, "run", around)


def lags_after(change: Callable[[ResidentBatch], bool]) -> Callable[[pytest.MonkeyPatch], None]:
    return wrapped(ResidentBatch, "_write_lags", lambda original, self: original(self) if change(self) else None)


def lags_shifted(original: Any, self: ResidentBatch) -> None:
    original(self)
    for name, array in self._fixed.items():
        if ".lag_" in name:
            array.write(np.roll(array.read(), 1, 0))


SABOTAGE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "recent tokens shifted by one": altered_state("recent", lambda a: np.roll(a, 1, 0)),
    "no recent tokens on entering": altered_state("recent", np.zeros_like),
    "the lags shifted by one": wrapped(ResidentBatch, "_write_lags", lags_shifted),
    "the lags only of what was known on entering": lags_after(lambda batch: not batch._clock),
    "first_g dropped": altered_state("first_g", np.zeros_like),
    "first_v dropped": altered_state("first_v", np.zeros_like),
    "no convolution inputs on entering": altered_state("conv", np.zeros_like),
    "keys of the next slot": altered_state("keys", lambda a: np.roll(a, 1, 3)),
    "values of the next slot": altered_state("values", lambda a: np.roll(a, 1, 2)),
    "early pairs counted twice": with_keep_g(1),
    "late pairs counted once": with_keep_g(0),
    "early pairs counted twice after entering": test_decoding.SABOTAGE["early pairs counted twice after entering"],
    "the arrays not swapped": wrapped(
        ResidentBatch, "_bind", lambda original, self, parity: original(self, 0)
    ),
    "the oldest key still visible": lambda patch: patch.setattr(resident_batch, "HIDDEN", np.float32(0)),
    "nothing written back": lambda patch: patch.setattr(ResidentBatch, "leave", lambda self: None),
    "the state before the last token written back": wrapped(
        ResidentBatch, "_read", lambda original, self, name: self._state[name][1 - self._clock % 2].read()
    ),
    "tokens counted as they were read": wrapped(
        growing_rows.GrowingRows, "_uncounted", lambda original, self, row: original(self, row) * 0
    ),
}  # fmt: skip


class TestSabotage:
    """Breaks one thing on purpose: each must show in the comparison, or the comparison proves nothing."""

    def test_the_scenario_is_right_when_nothing_is_broken(self, model: CausalLM) -> None:
        for reader in test_decoding.everything(model):
            reader.check()

    @pytest.mark.parametrize("name", SABOTAGE)
    def test_shows(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        SABOTAGE[name](monkeypatch)
        readers = test_decoding.everything(model)
        monkeypatch.undo()
        worst = max(reader.errors()[0] for reader in readers)
        assert not worst <= 5 * test_decoding.LIMIT, f"{name}: {worst}"


# Parity


def backwards(graph: onnx.GraphProto, output: str) -> None:
    """A new row is put in front of the others instead of behind them."""
    (node,) = (node for node in graph.node if output in node.output)
    assert node.op_type == "Concat"
    node.input[:] = node.input[::-1]


@pytest.mark.parametrize(
    "change",
    [
        scaled_scores,
        *(
            lambda graph, name=name: backwards(graph, f"present.{name}")
            for name in ("0.recent_g", "2.keys", "2.values")
        ),
    ],
    ids=["scores", "recent_g", "keys", "values"],
)
def test_a_wrong_graph_fails_on_a_provider_that_runs_it(
    copy: BundleCopy, monkeypatch: pytest.MonkeyPatch, change: Callable[[onnx.GraphProto], object]
) -> None:
    edit_graph(copy, "step_resident", change)
    report = run_parity(copy.open(), threads=1)
    assert report.exit_code == 1
    found = verdicts(report)
    assert "FAILED" in found["steps"] and found["whole"] == found["products"] == {"PASSED"}
    monkeypatch.setattr(Cpu, "state_memory", lambda self, settings: None)
    assert run_parity(copy.open(), threads=1).verdict == "PASSED"


def test_parity_passes_and_places_the_graph_that_runs(copy: BundleCopy) -> None:
    report = run_parity(copy.open(), threads=1)
    assert report.verdict == "PASSED"
    placement = report.providers[0].placement
    assert placement is not None
    assert "step_resident" in placement and "step" not in placement


def test_webgpu_keeps_the_state_on_its_device(exported: Any, model: CausalLM) -> None:
    pytest.importorskip("onnxruntime_ep_webgpu")
    found = provider("webgpu").detect()
    if found.state != "ready":
        pytest.skip(found.reason)
    bundle = Bundle.open(exported.bundle)
    webgpu = bundle.model("webgpu", threads=1)
    assert webgpu.graphs.resident
    greedy = {"max_new_tokens": 24, "options": SamplingOptions(temperature=0), "stop_ids": ()}
    prompts = [[1, 2, 3], list(range(30))]
    cpu = bundle.model(threads=1, resident=False)
    want, got = ([row.ids for row in m.generate(prompts, **greedy)] for m in (cpu, webgpu))
    assert got == want
    decoder = Stateful(webgpu.graphs)
    decoder.prefill([prompts[1]])
    decoder.step([0], [5])
    batch = decoder._batch
    assert isinstance(batch, ResidentBatch)
    assert {array.device for pair in batch._state.values() for array in pair} == {"webgpu"}
    binding = batch._bindings[0]
    assert isinstance(binding, OrtBinding)
    places = [value.device_name() for value in binding._binding.get_outputs()]
    assert places == ["cpu"] * 2 + ["webgpu"] * len(batch._state)  # logits and streams, and the rest
