"""The cache of optimised graphs: it changes nothing but the time, and nothing that lies in it can do harm."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from caracal_runtimes import graph_cache
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.graph_cache import Entry, entry, prune
from caracal_runtimes.parity import run_provider
from caracal_runtimes.providers import Settings, ort_loading

IDS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]]
POSIX = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are those of POSIX")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder in which graphs are kept, which is not there yet."""
    monkeypatch.setenv("CARACAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / graph_cache.FOLDER


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every graph that is loaded through the cache, whether it came from there."""
    found: list[bool] = []
    from_cache = ort_loading._from_cache

    def noted(*arguments: Any) -> Any:
        session = from_cache(*arguments)
        found.append(session is not None)
        return session

    monkeypatch.setattr(ort_loading, "_from_cache", noted)
    return found


def logits(bundle: Path, **options: Any) -> np.ndarray:
    return Bundle.open(bundle).model(threads=1, **{"graph_cache": True, **options}).forward(IDS)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# What it is for


def test_graphs_come_from_the_cache_and_compute_the_same(exported: Any, folder: Path, came: list[bool]) -> None:
    plain = Bundle.open(exported.bundle).model(threads=1)
    first, second = (Bundle.open(exported.bundle).model(threads=1, graph_cache=True) for _ in range(2))
    for model in (first, second):
        for graph in model.graphs.used:
            model.graphs.session(graph)
    graphs = len(plain.graphs.used)
    assert came == [False] + [True] + [False] * (graphs - 1) + [True] * (graphs - 1)
    assert len(files(folder)) == graphs
    ids = plain.generate(IDS, max_new_tokens=40)[0].ids
    for model in (first, second):
        assert np.array_equal(model.forward(IDS), plain.forward(IDS))
        assert model.generate(IDS, max_new_tokens=40)[0].ids == ids
        assert {graph: set(found.nodes) for graph, found in model.placements().items()} == {
            graph: {"CPUExecutionProvider"} for graph in plain.graphs.used
        }
    assert {name: second.graphs.session(name).inputs() for name in plain.graphs.used} == {
        name: plain.graphs.session(name).inputs() for name in plain.graphs.used
    }


def test_the_command_fills_it_and_says_the_same(
    exported: Any, folder: Path, caracal: Callable[..., Any], came: list[bool]
) -> None:
    words = ("generate", exported.bundle, "--ids", "3 14 15", "--max-new-tokens", "4", "--threads", "1")
    first, second = caracal(*words), caracal(*words)
    assert first.code == second.code == 0, first.err
    assert first.out == second.out
    assert any(came)
    assert files(folder)


@pytest.mark.parametrize("value", ["", "off", " OFF "])
def test_it_can_be_switched_off(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, came: list[bool], value: str
) -> None:
    monkeypatch.setenv("CARACAL_CACHE", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    logits(exported.bundle)
    assert came == []
    assert list(tmp_path.iterdir()) == []


def test_what_judges_a_provider_does_not_use_it(exported: Any, folder: Path, came: list[bool]) -> None:
    row = run_provider(Bundle.open(exported.bundle), "cpu", Settings(threads=1), quick=True)
    assert row.cases
    assert came == []
    assert not folder.exists()


def test_weights_stay_in_the_bundle(exported: Any, folder: Path) -> None:
    model = Bundle.open(exported.bundle).model(threads=1, graph_cache=True)
    for graph in model.graphs.used:
        model.graphs.session(graph)
    kept = files(folder)
    weights = safetensors.numpy.load_file(exported.bundle / "weights.safetensors")
    wanted = {"embed_tokens.weight": weights["embed_tokens.weight"].tobytes()}
    wanted |= {name: array.tobytes() for name, array in weights.items() if array.nbytes >= 4096}
    assert len(wanted) > 5
    assert [name for name, content in wanted.items() if any(content[:4096] in each for each in kept.values())] == []
    # A session with a copy of its own would have them written.
    for graph in ("forward", "step"):
        model.graphs.session(graph, packed=True)
    assert files(folder) == kept


# What an entry depends on


def test_other_weights_under_the_same_graph_are_another_entry(
    exported: Any, copy: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimiser folds what it can work out from the weights alone into the graph."""
    before = logits(exported.bundle)
    path = copy.path / "weights.safetensors"
    raw = bytearray(path.read_bytes())
    size = int.from_bytes(raw[:8], "little")
    weights = np.frombuffer(raw, np.float32, offset=8 + size) if size % 4 == 0 else None
    assert weights is not None
    weights *= np.float32(1.25)
    path.write_bytes(raw)
    copy.rehash()
    right = logits(copy.path, graph_cache=False)
    assert not np.allclose(right, before)
    assert np.array_equal(logits(copy.path), right)
    assert np.array_equal(logits(copy.path), right)
    monkeypatch.setattr(Bundle, "_weights_digest", lambda *_: "the same")
    shutil.rmtree(folder)
    logits(exported.bundle)
    assert not np.array_equal(logits(copy.path), right)  # else this test would find nothing


def test_weights_that_were_touched_without_their_hash_are_another_entry(copy: Any, folder: Path) -> None:
    digest = copy.open()._weights_digest("forward")
    status = (copy.path / "weights.safetensors").stat()
    os.utime(copy.path / "weights.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    assert copy.open()._weights_digest("forward") != digest
    assert copy.open()._weights_digest("convolve") == "none"


def test_everything_that_changes_the_graph_is_in_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(parts: dict[str, object]) -> str:
        found = entry(parts)
        assert found is not None
        return found.key

    assert key({"a": 1}) == key({"a": 1})
    keys = [key({"a": 1}), key({"a": 2}), key({"b": 1}), key({"a": 1, "b": 1})]
    monkeypatch.setattr(graph_cache, "machine", lambda: ("Linux", "x86_64", "another processor", "avx512f"))
    keys.append(key({"a": 1}))
    monkeypatch.setattr(graph_cache, "FORMAT", graph_cache.FORMAT + 1)
    keys.append(key({"a": 1}))
    assert len(set(keys)) == len(keys)


def test_the_machine_is_told_by_more_than_its_architecture() -> None:
    system, architecture, processor, flags = graph_cache.machine()
    assert system
    assert architecture
    assert processor
    if sys.platform == "linux" and architecture == "x86_64":
        assert "sse2" in flags.split()


def test_runtime_options_and_graph_are_in_the_key(exported: Any, folder: Path) -> None:
    import onnxruntime

    class Other:
        """ONNX Runtime of another version."""

        __version__ = "0.0"
        get_build_info = staticmethod(onnxruntime.get_build_info)

    class Rebuilt:
        """The same version, built from other sources."""

        __version__ = onnxruntime.__version__
        get_build_info = staticmethod(lambda: "another build")

    def key(ort: Any, depends: list[object], *settings: tuple[str, str]) -> str:
        options = onnxruntime.SessionOptions()
        for name, value in settings:
            options.add_session_config_entry(name, value)
        found = ort_loading._entry(ort, options, depends)
        assert found is not None
        return found.key

    keys = [
        key(onnxruntime, ["a"]),
        key(onnxruntime, ["b"]),
        key(Other, ["a"]),
        key(Rebuilt, ["a"]),
        key(onnxruntime, ["a"], ("session.disable_prepacking", "1")),
        key(onnxruntime, ["a"], ("session.qdq_matmulnbits_accuracy_level", "1")),
    ]
    assert len(set(keys)) == len(keys)
    assert key(onnxruntime, ["a"]) == keys[0]


# What may lie there


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def _exchange(path: Path) -> None:
    """Another entry, whole, under this name."""
    whole = path.read_bytes()
    other = "0" * 64
    path.write_bytes(whole.replace(path.stem.encode(), other.encode(), 1))


def _unloadable(path: Path) -> None:
    """Whole by its checksum, and no graph."""
    path.write_bytes(Entry(path, path.stem)._head(b"no graph") + b"no graph")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit": _flip,
    "its end": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "everything": lambda path: path.write_bytes(b""),
    "all but the head": lambda path: path.write_bytes(path.read_bytes()[:150]),
    "another kind of file": lambda path: path.write_bytes(b"\0" * 5000),
    "of another key": _exchange,
    "no graph": _unloadable,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_what_is_damaged_is_made_again(exported: Any, folder: Path, came: list[bool], damage: str) -> None:
    right = logits(exported.bundle)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    DAMAGES[damage](path)
    assert np.array_equal(logits(exported.bundle), right)
    assert np.array_equal(logits(exported.bundle), right)
    assert came == [False, False, True]
    again = path.read_bytes()
    assert len(again) == len(whole)
    assert Entry(path, path.stem).read() is not None


@POSIX
def test_what_others_may_have_written_is_left_alone(
    exported: Any, folder: Path, came: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits(exported.bundle)
    (path,) = folder.iterdir()
    found = Entry(path, path.stem)
    assert found.read() is not None
    path.chmod(0o622)
    assert found.read() is None
    path.chmod(0o600)
    assert found.read() is not None
    aside = tmp_path / "aside"
    path.rename(aside)
    path.symlink_to(aside)
    assert found.read() is None
    logits(exported.bundle)  # puts a file in the link's place, and does not follow it
    assert not path.is_symlink()
    assert came == [False, False]
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert found.read() is None


@POSIX
@pytest.mark.parametrize("trap", ["a link", "writable by all", "of another user"])
def test_nothing_is_written_to_a_folder_of_others(
    exported: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: str
) -> None:
    real = tmp_path / "real"
    real.mkdir()
    folder.parent.mkdir()
    if trap == "a link":
        folder.symlink_to(real)
    else:
        folder.mkdir()
        folder.chmod(0o777 if trap == "writable by all" else 0o700)
    if trap == "of another user":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    logits(exported.bundle)
    assert list(folder.iterdir()) == list(real.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_no_error(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caracal: Callable[..., Any]
) -> None:
    (tmp_path / "file").write_text("in the way")
    for value in (tmp_path / "file", tmp_path / "file" / "below", "x" * 300):
        monkeypatch.setenv("CARACAL_CACHE", str(value))
        ran = caracal("generate", exported.bundle, "--ids", "3 14", "--max-new-tokens", "2", "--threads", "1")
        assert ran.code == 0
        assert "cache" not in ran.err.lower()
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_cache_that_is_only_read_serves_what_it_has(
    exported: Any, folder: Path, came: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = logits(exported.bundle)
    kept = files(folder)

    def refused(*arguments: Any, **named: Any) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(tempfile, "mkdtemp", refused)
    model = Bundle.open(exported.bundle).model(threads=1, graph_cache=True)
    assert np.array_equal(model.forward(IDS), right)
    model.graphs.session("step")
    assert came == [False, True, False]
    assert files(folder) == kept


def test_a_disk_that_is_full_is_no_error(exported: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = logits(exported.bundle, graph_cache=False)
    session = ort_loading._session

    def full(ort: Any, graph: Any, options: Any, providers: Any) -> Any:
        if options.optimized_model_filepath:
            Path(options.optimized_model_filepath).write_bytes(b"half of")
            raise OSError(28, "No space left on device")
        return session(ort, graph, options, providers)

    monkeypatch.setattr(ort_loading, "_session", full)
    assert np.array_equal(logits(exported.bundle), right)
    assert list(folder.iterdir()) == []


def test_a_bad_graph_is_the_bundles_fault_and_never_kept(copy: Any, folder: Path, caracal: Callable[..., Any]) -> None:
    path = copy.path / "step.onnx"
    content = path.read_bytes()
    at = content.index(b"MatMul")
    path.write_bytes(content[:at] + b"MatMux" + content[at + 6 :])
    copy.rehash()
    ran = caracal("generate", copy.path, "--ids", "3 14", "--max-new-tokens", "3", "--threads", "1")
    assert ran.code == 2
    assert "step.onnx" in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert len(files(folder)) == 1  # of `forward`, which is right


def test_a_graph_that_changed_while_it_was_loaded_is_not_kept(
    exported: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter(["a" * 64, "b" * 64])
    monkeypatch.setattr(ort_loading, "_digest", lambda path: next(found))
    logits(exported.bundle)
    assert list(folder.iterdir()) == []


# How much of it


def _fill(folder: Path, count: int, size: int) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / f"{index:064x}{graph_cache.SUFFIX}" for index in range(count)]
    for age, path in enumerate(paths):
        path.write_bytes(b"x" * size)
        os.utime(path, (1e9 - age, 1e9 - age))
    return paths


def test_what_was_used_longest_ago_makes_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = _fill(folder, 6, 1000)
    prune(folder)
    assert all(path.exists() for path in paths)
    monkeypatch.setattr(graph_cache, "MOST_ENTRIES", 4)
    prune(folder)
    assert [path.exists() for path in paths] == [True] * 4 + [False] * 2
    monkeypatch.setattr(graph_cache, "MOST_BYTES", 2500)
    prune(folder)
    assert [path.exists() for path in paths] == [True] * 2 + [False] * 4
    monkeypatch.setattr(graph_cache, "MOST_BYTES", 1)
    prune(folder)
    assert [path.exists() for path in paths] == [True] + [False] * 5


def test_a_use_counts_and_a_new_graph_makes_room(exported: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST_ENTRIES", 2)
    model = Bundle.open(exported.bundle).model(threads=1, graph_cache=True)
    (forward,) = folder.iterdir()
    model.graphs.session("step")
    (step,) = set(folder.iterdir()) - {forward}
    for path in (forward, step):
        os.utime(path, (1e9, 1e9))
    logits(exported.bundle)  # uses `forward`
    model.graphs.session("convolve")
    assert forward.exists()
    assert not step.exists()
    assert len(files(folder)) == 2


def test_what_a_process_that_died_left_goes_after_a_while(folder: Path) -> None:
    folder.mkdir(parents=True)
    names = ("new-old", "new-young", "old.tmp", "young.tmp", "old.txt")
    for name in names:
        path = folder / name
        path.mkdir() if name.startswith("new-") else path.write_bytes(b"")
        if "old" in name:
            os.utime(path, (time.time() - 7200,) * 2)
    prune(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["new-young", "old.txt", "young.tmp"]


def test_a_graph_with_weights_inside_is_not_kept(exported: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_cache, "MOST_ENTRY_BYTES", 1000)
    logits(exported.bundle)
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_processes_that_start_at_once_do_not_disturb_each_other(exported: Any, folder: Path) -> None:
    program = (
        "import sys, hashlib\n"
        "from caracal_runtimes.bundle import Bundle\n"
        "model = Bundle.open(sys.argv[1]).model(threads=1, graph_cache=True)\n"
        "for graph in model.graphs.used: model.graphs.session(graph)\n"
        f"print(hashlib.sha256(model.forward({IDS}).tobytes()).hexdigest())\n"
    )
    words = [sys.executable, "-c", program, str(exported.bundle)]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    found = {process.communicate(timeout=200)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert found == {hashlib.sha256(logits(exported.bundle, graph_cache=False).tobytes()).hexdigest()}
    assert len(list(folder.iterdir())) == len(Bundle.open(exported.bundle).model(threads=1).graphs.used)
    for path in folder.iterdir():
        assert Entry(path, path.stem).read() is not None
