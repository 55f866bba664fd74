"""`caracal providers` remembers what was in order, exactly as long as nothing has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes import fingerprint as facts
from caracal_runtimes import providers
from caracal_runtimes.cli import main
from caracal_runtimes.cli import providers as command
from caracal_runtimes.detecting import detect_each
from caracal_runtimes.fingerprint import MOST_SECONDS, fingerprint
from caracal_runtimes.providers import NAMES, Detection, provider

GONE = "directml" if sys.platform != "win32" else "coreml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARACAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the providers that were really looked at."""
    names: list[str] = []

    def looking(chosen: Any, *arguments: Any) -> Any:
        names.extend(each.name for each in chosen)
        return detect_each(chosen, *arguments)

    monkeypatch.setattr("caracal_runtimes.detecting.detect_each", looking)
    return names


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str]]]:
    def say(*options: str) -> tuple[int, list[str]]:
        code = main(["providers", *options])
        return code, capsys.readouterr().out.splitlines()

    return say


def file_of(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_the_second_time_nothing_runs(folder: Path, asked: list[str], say: Any) -> None:
    first = say("--ep", f"cpu,{GONE}")
    assert asked == ["cpu", GONE]
    second = say("--ep", f"cpu,{GONE}")
    assert asked == ["cpu", GONE]
    new = [line for line in second[1] if line not in first[1]]
    assert (second[0], len(new)) == (first[0], 1)
    assert new[0].startswith("remembered from 20")
    assert "(all), since nothing here has changed; --fresh looks and runs anew" in new[0]
    assert [line for line in second[1] if line not in new and line] == [line for line in first[1] if line]


def test_what_is_not_known_is_looked_at(asked: list[str], folder: Path, say: Any) -> None:
    say("--ep", "cpu", "--no-probe")
    _, lines = say("--ep", f"{GONE},CPU", "--no-probe")
    assert asked == ["cpu", GONE]
    assert any(line.startswith("remembered from 20") and "(cpu)" in line for line in lines)
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "] == ["cpu", GONE]


def test_looking_is_no_proof(asked: list[str], folder: Path, say: Any) -> None:
    say("--ep", "cpu", "--no-probe")
    _, lines = say("--ep", "cpu")
    assert asked == ["cpu", "cpu"]
    assert lines[-1] == "PASSED  providers  1 of 1 ready  1 of 1 probes right"


def test_fresh(asked: list[str], folder: Path, say: Any) -> None:
    say("--ep", "cpu", "--no-probe")
    before = file_of(folder).read_bytes()
    _, lines = say("--ep", "cpu", "--no-probe", "--fresh")
    assert asked == ["cpu", "cpu"]
    assert not any("remembered" in line for line in lines)
    assert (
        json.loads(file_of(folder).read_bytes())["answers"]["cpu"]["seconds"]
        > json.loads(before)["answers"]["cpu"]["seconds"]
    )


def test_off(asked: list[str], say: Any) -> None:
    for _ in range(2):
        say("--ep", "cpu", "--no-probe")
    assert asked == ["cpu", "cpu"]


def test_a_change_is_seen(asked: list[str], folder: Path, say: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    say("--ep", "cpu", "--no-probe")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    say("--ep", "cpu", "--no-probe")
    assert asked == ["cpu", "cpu"]


@pytest.mark.parametrize(("state", "verdict"), [("broken", None), ("ready", "FAILED"), ("ready", "NOT RUN")])
def test_what_is_wrong_is_measured_each_time(
    folder: Path, say: Any, monkeypatch: pytest.MonkeyPatch, state: Any, verdict: str | None
) -> None:
    looked = []

    def detection(chosen: Any) -> list[Detection]:
        looked.append(len(chosen))
        return [Detection(state, reason="" if state == "ready" else "a library does not load")]

    def answer(*arguments: Any) -> Any:
        made = whole(*arguments)
        probe = {"ep": "cpu", "verdict": verdict}
        made["entry"]["probes"] = [probe] if verdict else []
        return made

    whole = command._answer
    monkeypatch.setattr("caracal_runtimes.detecting.detect_each", detection)
    monkeypatch.setattr(command, "_probe", lambda *arguments: [])
    monkeypatch.setattr(command, "_answer", answer)
    for times in (1, 2):
        code, lines = say("--ep", "cpu")
        assert (code, looked) == (1, [1] * times)
        assert lines[-1].startswith("FAILED  providers")


@pytest.mark.parametrize("age", [MOST_SECONDS + 60, -3600.0])
def test_too_old_or_from_the_future(asked: list[str], folder: Path, say: Any, age: float) -> None:
    say("--ep", "cpu", "--no-probe")
    data = json.loads(file_of(folder).read_text())
    data["answers"]["cpu"]["seconds"] = time.time() - age
    file_of(folder).write_text(json.dumps(data))
    say("--ep", "cpu", "--no-probe")
    assert asked == ["cpu", "cpu"]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"{",
        lambda data: b"[]",
        lambda data: b"\xff",
        lambda data: b"[" * 100_000,
        lambda data: json.dumps(data | {"format": 0}).encode(),
        lambda data: json.dumps(data | {"answers": [1]}).encode(),
        lambda data: json.dumps(data | {"answers": {"cpu": {}}}).encode(),
        lambda data: json.dumps(data | {"answers": {"cpu": data["answers"]["cpu"] | {"lines": []}}}).encode(),
        lambda data: json.dumps(data | {"answers": {"cpu": data["answers"]["cpu"] | {"entry": {}}}}).encode(),
    ],
)
def test_a_damaged_memory_is_no_answer(asked: list[str], folder: Path, say: Any, change: Any) -> None:
    say("--ep", "cpu", "--no-probe")
    file = file_of(folder)
    file.write_bytes(change(json.loads(file.read_bytes())))
    code, lines = say("--ep", "cpu", "--no-probe")
    assert (code, asked) == (0, ["cpu", "cpu"])
    assert not any("remembered" in line for line in lines)
    assert list(json.loads(file_of(folder).read_bytes())["answers"]) == ["cpu"]


def test_a_place_that_cannot_be_written(asked: list[str], folder: Path, say: Any) -> None:
    folder.touch()
    for _ in range(2):
        assert say("--ep", "cpu", "--no-probe")[0] == 0
    assert asked == ["cpu", "cpu"]


def test_those_of_other_packages_are_never_remembered(
    asked: list[str], folder: Path, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign(type(provider("cpu"))):  # type: ignore[misc]
        name = "foreign"

        def detect(self) -> Detection:
            return Detection("ready", {}, ())

    foreign = Foreign()
    monkeypatch.setattr(providers, "_foreign", lambda: (foreign,))
    monkeypatch.setattr(
        "caracal_runtimes.detecting.detect_each",
        lambda chosen: asked.extend(each.name for each in chosen) or [each.detect() for each in chosen],
    )
    for _ in range(2):
        say("--ep", "foreign", "--no-probe")
    assert asked == ["foreign", "foreign"]


@pytest.mark.slow
def test_all_without_numpy(tmp_path: Path) -> None:
    """What is known is said without loading a provider."""
    environment = os.environ | {"CARACAL_CACHE": str(tmp_path)}
    code = (
        "import sys; from caracal_runtimes.cli import main; code = main(['providers', '--no-probe', '--format', 'json'])\n"
        "print('numpy' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    first, second = (
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True) for _ in range(2)
    )
    assert (first.returncode, second.returncode) == (0, 0)
    assert second.stdout == first.stdout
    assert [entry["name"] for entry in json.loads(second.stdout)][: len(NAMES)] == list(NAMES)
    assert (first.stderr.split()[-1], second.stderr.split()[-1]) == ("True", "False")


def test_the_group_of_foreign_providers_is_the_one() -> None:
    assert command.FOREIGN == providers.GROUP


class TestFingerprint:
    def test_it_holds(self) -> None:
        assert fingerprint() == fingerprint()

    @pytest.mark.parametrize("name", ["ORT_LIB", "LD_LIBRARY_PATH", "VK_ICD_FILENAMES", "OMP_NUM_THREADS"])
    def test_variables(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        before = fingerprint()
        monkeypatch.setenv(name, "something else")
        assert fingerprint() != before

    def test_a_variable_that_says_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = fingerprint()
        monkeypatch.setenv("COLUMNS", "71")
        assert fingerprint() == before

    def test_packages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "onnxruntime" / "capi").mkdir(parents=True)
        library = tmp_path / "onnxruntime" / "capi" / "libonnxruntime.so"
        library.write_bytes(b"1")
        monkeypatch.syspath_prepend(str(tmp_path))
        found = [fingerprint()]
        (tmp_path / "onnxruntime_gpu-1.0.dist-info").mkdir()
        found.append(fingerprint())
        (tmp_path / "onnxruntime_gpu-1.0.dist-info").rename(tmp_path / "onnxruntime_gpu-1.1.dist-info")
        found.append(fingerprint())
        library.write_bytes(b"12")
        found.append(fingerprint())
        assert len(set(found)) == len(found)

    def test_devices_and_drivers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(facts, "_PLACES", ((str(tmp_path), ("nvidia*", "lib")),))
        (tmp_path / "lib").mkdir()
        found = [fingerprint()]
        (tmp_path / "nvidia0").touch()
        found.append(fingerprint())
        (tmp_path / "lib" / "libcuda.so.1").touch()
        found.append(fingerprint())
        assert len(set(found)) == len(found)


class TestDetecting:
    def test_each_in_its_order(self) -> None:
        names = [GONE, "cpu", "qnn"]
        found = detect_each([provider(name) for name in names])
        assert [each.state for each in found][:2] == ["impossible", "ready"]

    def test_one_that_ends_its_process_ends_no_other(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second of three that share a process crashes it."""
        (tmp_path / "sitecustomize.py").write_text(
            "import os, sys\n"
            "class Crash:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            "        if name == 'caracal_runtimes.providers.coreml':\n"
            "            os.kill(os.getpid(), 6)\n"
            "if 'caracal_runtimes.isolation' in ' '.join(sys.orig_argv):\n"
            "    sys.meta_path.insert(0, Crash())\n"
        )
        chosen = [provider(name) for name in ("directml", "coreml", "cpu")]
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        found = detect_each(chosen)
        assert [each.died for each in found] == [False, True, False]
        assert found[2].state == "ready"
        assert "SIGABRT" in found[1].reason
