"""The registry, what providers say of this machine, and how a broken installation is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from caracal_runtimes import providers
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cli import main
from caracal_runtimes.detecting import detect
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.probe import PROBE
from caracal_runtimes.providers import NAMES, Provider, Settings, all_providers, parse, provider
from caracal_runtimes.providers import ort_provider as base
from caracal_runtimes.tolerances import TOLERANCES

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_a_provider_of_its_name(name: str) -> None:
    found = provider(name)
    assert isinstance(found, Provider)
    assert found.name == name == name.lower()
    assert found.title
    assert (found.level, "float32") in TOLERANCES
    assert provider(f" {name.upper()} ") is found


@pytest.mark.parametrize("each", all_providers(), ids=lambda each: each.name)
def test_every_extra_exists(each: Provider) -> None:
    text = PYPROJECT.read_text()
    if each.extra is not None:
        assert f"\n{each.extra} = [" in text
        assert f"caracal-onnx[{each.extra}]" in each.install()
    assert each.install()


def test_names_and_aliases_are_all_different() -> None:
    names = [name for each in all_providers() for name in (each.name, *each.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("ep", "found"), [("dml", ("directml", None)), ("IREE:Vulkan", ("iree", "Vulkan")), ("cuda:1", ("cuda", "1"))]
)
def test_names_with_devices(ep: str, found: tuple[str, str | None]) -> None:
    each, device = parse(ep)
    assert (each.name, device) == found


@pytest.mark.parametrize("each", all_providers(), ids=lambda each: each.name)
def test_detection_explains_itself(each: Provider) -> None:
    found = detect(each)
    assert found.state in ("ready", "missing", "broken", "impossible")
    if found.state == "ready":
        assert found.versions
        assert not found.reason
    else:
        assert found.reason
        assert "\n" not in found.reason
    if found.state == "missing":
        assert "pip install" in found.remedy


@pytest.mark.parametrize(
    ("name", "exact", "fast"),
    [
        ("cuda", {"use_tf32": "0"}, {"device_id": "0"}),
        ("tensorrt", {"trt_fp16_enable": "0"}, {"device_id": "0"}),
        ("coreml", {"MLComputeUnits": "CPUAndGPU"}, {"MLComputeUnits": "ALL"}),
        ("migraphx", {"migraphx_fp16_enable": "0"}, {"device_id": "0"}),
    ],
)
def test_exact_is_not_fast(name: str, exact: dict[str, str], fast: dict[str, str]) -> None:
    each = provider(name)
    assert exact.items() <= each.applied(Settings()).items()
    assert not exact.items() <= each.applied(Settings(fast=True)).items()
    assert fast.items() <= each.applied(Settings(fast=True)).items()
    assert each.applied(Settings(options={"x": "y"}))["x"] == "y"


def test_options_of_the_user_go_first() -> None:
    assert provider("cuda").applied(Settings(options={"use_tf32": "1"}))["use_tf32"] == "1"


class TestBroken:
    """Installations as users have them, made here by what the libraries would say."""

    @pytest.fixture
    def ort(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        fake = SimpleNamespace(
            __version__="1.31.1",
            __file__=__file__,
            get_available_providers=lambda: [
                "TensorrtExecutionProvider",
                "CUDAExecutionProvider",
                "CPUExecutionProvider",
            ],
            get_ep_devices=list,
            register_execution_provider_library=lambda name, path: None,
        )
        monkeypatch.setattr(base, "import_onnxruntime", lambda: fake)
        monkeypatch.setattr(base, "_REGISTERED", {})
        return fake

    def plugin(self, monkeypatch: pytest.MonkeyPatch, name: str, path: str = "lib.so") -> None:
        module = ModuleType(name)
        module.get_library_path = lambda: path  # type: ignore[attr-defined]
        module.get_ep_name = lambda: "X"  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(base, "importable", lambda module: module == name)

    def test_cuda_without_its_libraries(self, ort: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "capi").mkdir()
        (tmp_path / "capi" / "libonnxruntime_providers_cuda.so").write_bytes(b"no library")
        ort.__file__ = str(tmp_path / "__init__.py")
        found = provider("cuda").detect()
        assert found.state == "broken"
        assert "libonnxruntime_providers_cuda.so does not load" in found.reason
        assert "onnxruntime-gpu[cuda,cudnn]" in found.remedy

    def test_a_plugin_newer_than_the_core(self, ort: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plugin(monkeypatch, "onnxruntime_ep_webgpu")

        def refuse(name: str, path: str) -> None:
            raise RuntimeError(
                "The requested API version [99] is not available, only API versions [1, 31] are supported"
            )

        ort.register_execution_provider_library = refuse
        found = provider("webgpu").detect()
        assert found.state == "broken"
        assert "the plugin is newer than onnxruntime 1.31.1" in found.reason
        assert found.remedy == "pip install -U onnxruntime"

    def test_a_plugin_whose_library_misses_another(self, ort: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plugin(monkeypatch, "onnxruntime_ep_nv_tensorrt_rtx")

        def refuse(name: str, path: str) -> None:
            raise RuntimeError("libcuda.so.1: cannot open shared object file: No such file or directory")

        ort.register_execution_provider_library = refuse
        found = provider("nvtensorrtrtx").detect()
        assert (found.state, "libcuda.so.1" in found.reason) == ("broken", True)
        assert "NVIDIA's driver" in found.remedy

    def test_a_plugin_without_a_device(self, ort: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plugin(monkeypatch, "onnxruntime_ep_webgpu")
        found = provider("webgpu").detect()
        assert found.state == "impossible"
        assert "finds no adapter" in found.reason
        assert "docs/recipes.md" in found.remedy

    def test_two_builds_at_once(self, ort: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        both = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
        monkeypatch.setattr(base, "installed", lambda *names: {name: both[name] for name in names if name in both})
        found = provider("cuda").detect()
        assert found.state == "broken"
        assert "onnxruntime and onnxruntime-gpu are installed together" in found.reason
        assert "pip uninstall -y onnxruntime onnxruntime-gpu" in found.remedy

    def test_no_onnxruntime(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse() -> None:
            raise NotRunError("running a bundle needs ONNX Runtime")

        monkeypatch.setattr(base, "import_onnxruntime", refuse)
        monkeypatch.setattr(base, "importable", lambda module: False)
        found = provider("cpu").detect()
        assert (found.state, found.remedy) == ("missing", "pip install 'caracal-onnx[cpu]'")


class TestForeign:
    def test_one_that_does_not_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Entry:
            name = "other"

            def load(self) -> Any:
                raise ZeroDivisionError("at import")

        monkeypatch.setattr(providers, "entry_points", lambda group: [Entry()])
        providers._foreign.cache_clear()
        with pytest.raises(InputError, match="the provider other of another package does not load: at import"):
            all_providers()
        providers._foreign.cache_clear()

    def test_one_that_takes_a_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        entry = SimpleNamespace(name="cpu2", load=lambda: provider("cpu"))
        monkeypatch.setattr(providers, "entry_points", lambda group: [entry])
        providers._foreign.cache_clear()
        with pytest.raises(InputError, match="must be a Provider with a name of its own"):
            all_providers()
        providers._foreign.cache_clear()


class TestCommand:
    def test_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["providers", "--ep", "cpu,coreml"]) == 0
        out = capsys.readouterr().out
        assert "probe on cpu: PASSED, relative L2 " in out
        assert "nodes: " in out
        assert out.splitlines()[-1] == "PASSED  providers  1 of 2 ready  1 of 1 probes right"

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["providers", "--no-probe", "--format", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [entry["name"] for entry in found[: len(NAMES)]] == list(NAMES)
        assert all(entry["reason"] or entry["state"] == "ready" for entry in found)

    def test_none_ready(self, capsys: pytest.CaptureFixture[str]) -> None:
        gone = "directml" if sys.platform != "win32" else "coreml"
        assert main(["providers", "--ep", gone]) == 3
        assert capsys.readouterr().out.splitlines()[-1].startswith("NOT RUN  providers  0 of 1 ready")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--ep", "x"], "found 'x'"),
            (["--time-limit", "0"], "--time-limit"),
            (["--ep", "cpu:gpu"], "found the device 'gpu'"),
            (["--ep", "cpu,CPU"], "cpu is asked for twice"),
        ],
    )
    def test_bad_input(self, capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
        assert main(["providers", *options]) == 2
        assert words in capsys.readouterr().err


def test_the_probe_is_whole() -> None:
    bundle = Bundle.open(PROBE)
    assert bundle.parameters() < 100_000
    assert bundle.manifest.verification is not None
    assert bundle.manifest.verification["verdict"] == "PASSED"
