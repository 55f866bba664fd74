"""`staged_folder`: whole or not at all, whatever stands in the target's place, ends the process or comes at the same time.

No model is exported here: a folder with a manifest and three files that state each other's content stands for a bundle.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from caracal_export import staging
from caracal_export.staging import BUNDLE, CHECKPOINT, Kind, check_target, staged_folder
from caracal_runtimes.errors import InputError

PARTS = ("a.onnx", "b.onnx", "weights.safetensors")


def write(folder: Path, mark: str, kind: str = "bundle", size: int = 100) -> None:
    """Fills a folder; every file says which writer it is of, and the manifest has all their hashes."""
    files = {}
    for name in PARTS:
        content = f"{mark} {name} ".encode() * size
        (folder / name).write_bytes(content)
        files[name] = {"sha256": hashlib.sha256(content).hexdigest()}
    (folder / "manifest.json").write_text(
        json.dumps({"format": f"caracal-{kind}", "mark": mark, "files": files}), encoding="utf-8"
    )


def mark_of(folder: Path) -> str:
    """Which writer a folder is of. It must be whole: nothing missing, nothing of another writer, nothing else."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert names(folder) == {"manifest.json", *PARTS}
    for name, entry in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == entry["sha256"], name
    return str(manifest["mark"])


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def put(target: Path, mark: str, *, overwrite: bool = False) -> None:
    with staged_folder(BUNDLE, target, overwrite=overwrite) as stage:
        write(stage, mark)


def refused(message: str, target: Path, *, kind: Kind = BUNDLE, overwrite: bool = True) -> str:
    """Both functions refuse the target, with the same single line."""
    lines = set()
    for attempt in (lambda: check_target(kind, target, overwrite=overwrite), lambda: _enter(kind, target, overwrite)):
        with pytest.raises(InputError, match=message) as raised:
            attempt()
        assert raised.value.exit_code == 2
        lines.add(str(raised.value))
    (line,) = lines
    assert line.isprintable(), "one line that any terminal can show"
    assert line.startswith(f"{kind.command}: ")
    return line


def _enter(kind: Kind, target: Path, overwrite: bool) -> None:
    with staged_folder(kind, target, overwrite=overwrite):
        raise AssertionError("it was not refused")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The target `out`, where an old bundle stands."""
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "old")
    return tmp_path / "out"


# What stands in the target's place


def test_a_new_folder_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    with staged_folder(BUNDLE, tmp_path / "out", overwrite=False) as stage:
        write(stage, "new")
        assert not (tmp_path / "out").exists()
        assert stage.parent == tmp_path
    assert mark_of(tmp_path / "out") == "new"
    assert names(tmp_path) == {"out"}


def test_a_bundle_is_not_touched_without_overwrite(old: Path, tmp_path: Path) -> None:
    refused("exists; pass --overwrite to replace it", old, overwrite=False)
    assert mark_of(old) == "old"
    assert names(tmp_path) == {"out"}


def test_overwrite_replaces_a_bundle_at_the_end(old: Path, tmp_path: Path) -> None:
    with staged_folder(BUNDLE, old, overwrite=True) as stage:
        write(stage, "new")
        assert mark_of(old) == "old"
    assert mark_of(old) == "new"
    assert names(tmp_path) == {"out"}


def test_a_signed_bundle_may_be_replaced(old: Path) -> None:
    (old / "manifest.sig").write_bytes(b"signed")
    put(old, "new", overwrite=True)
    assert mark_of(old) == "new"


def test_overwrite_takes_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused("exists; pass --overwrite", tmp_path / "out", overwrite=False)
    put(tmp_path / "out", "new", overwrite=True)
    assert mark_of(tmp_path / "out") == "new"


def test_overwrite_replaces_nothing_but_a_bundle(old: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "manifest.json").write_text('{"name": "an app"}')
    (tmp_path / "file").write_text("also work")
    (tmp_path / "link").symlink_to(old)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    before = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name, reason in {
        "thesis": "is no bundle; it is not replaced",
        "app": "is no bundle; it is not replaced",
        "file": "is a file",
        "link": "is a link",
        "link/": "is a link",
        "dangling": "is a link",
        "missing/out": "does not exist",
        "file/out": "does not exist",
    }.items():
        refused(reason, tmp_path / name)
    assert names(tmp_path) == {"out", "thesis", "app", "file", "link", "dangling"}
    assert {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("added", "named"),
    [("notes.txt", "notes.txt"), ("a.d/notes.txt", "a.d"), ("a.onnx.d/b.onnx", "a.onnx.d"), (".git/config", ".git")],
)
def test_overwrite_spares_what_was_added_to_a_bundle(old: Path, added: str, named: str) -> None:
    (old / added).parent.mkdir(exist_ok=True)
    (old / added).write_text("mine", encoding="utf-8")
    refused(rf"holds '{named}', which is not part of the bundle; move it away", old)
    assert (old / added).read_text(encoding="utf-8") == "mine"


def test_overwrite_spares_a_folder_that_has_the_name_of_a_bundles_file(old: Path) -> None:
    (old / "a.onnx").unlink()
    (old / "a.onnx").mkdir()
    (old / "a.onnx" / "thesis.txt").write_text("years of work", encoding="utf-8")
    refused("holds 'a.onnx', which is not part of the bundle", old)
    assert (old / "a.onnx" / "thesis.txt").exists()


def test_a_bundle_with_files_in_folders_may_be_replaced(old: Path) -> None:
    (old / "more").mkdir()
    (old / "more" / "c.onnx").write_text("c")
    manifest = json.loads((old / "manifest.json").read_text())
    manifest["files"]["more/c.onnx"] = {}
    (old / "manifest.json").write_text(json.dumps(manifest))
    put(old, "new", overwrite=True)
    assert mark_of(old) == "new"
    (old / "more").mkdir()
    (old / "more" / "notes.txt").write_text("mine")
    (old / "manifest.json").write_text(json.dumps(manifest))
    refused("holds 'more/notes.txt'", old)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"format": "caracal-bundle"}', '{"format": ["caracal-bundle"], "files": {}}', "[" * 10**6, "\udcff"]
)  # fmt: skip
def test_a_folder_with_a_manifest_that_says_nothing_is_no_bundle(old: Path, text: str) -> None:
    (old / "manifest.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    refused("is no bundle; it is not replaced", old)
    assert len(names(old)) == 4


@pytest.mark.parametrize("output", ["", " ", "/", ".", "..", "x/.."])
def test_an_output_without_a_name_is_refused(output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    refused("-o must name the bundle's folder, found", Path(output))
    assert names(tmp_path) == {"x"}


def test_an_output_that_is_no_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    for name in ("null\0byte", "x" * 256, "round/out", "y" * 300 + "/out"):
        refused("cannot be used as a folder|does not exist", tmp_path / name)
    assert names(tmp_path) == {"round"}


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="exists and is no bundle"),
        staged_folder(BUNDLE, tmp_path / "out", overwrite=True) as stage,
    ):
        write(stage, "new")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("x")
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"theirs"}


# Checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """All that a checkpoint's folder may hold."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "caracal"}', encoding="utf-8")
    for name in (
        "tokenizer.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ):
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def test_overwrite_replaces_a_checkpoint(checkpoint: Path) -> None:
    with staged_folder(CHECKPOINT, checkpoint, overwrite=True) as stage:
        (stage / "config.json").write_text("new", encoding="utf-8")
    assert names(checkpoint) == {"config.json"}


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("train.py", "train.py"),
        ("optimizer.safetensors", "optimizer.safetensors"),
        ("model.bin", "model.bin"),
        ("config.json.bak", "config.json.bak"),
        # What a conversion does not write again would be lost.
        ("model_ema.safetensors", "model_ema.safetensors"),
        ("generation_config.json", "generation_config.json"),
        ("tokenizer_config.json", "tokenizer_config.json"),
        ("MODEL.SAFETENSORS", "MODEL.SAFETENSORS"),
        ("model/layer.safetensors", "model"),
        ("tokenizer/notes.json", "tokenizer"),
    ],
)
def test_overwrite_spares_what_is_no_part_of_a_checkpoint(checkpoint: Path, name: str, shown: str) -> None:
    (checkpoint / name).parent.mkdir(exist_ok=True)
    (checkpoint / name).write_text("mine", encoding="utf-8")
    line = refused(f"holds '{shown}', which is not part of the checkpoint", checkpoint, kind=CHECKPOINT)
    assert line.startswith("convert: ")
    assert (checkpoint / name).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("config", [None, "{}", "[]", '{"model_type": "llama"}', '{"model_type": ["caracal"]}', "{"])
def test_overwrite_spares_the_checkpoint_of_another_model(checkpoint: Path, config: str | None) -> None:
    if config is None:
        (checkpoint / "config.json").unlink()
    else:
        (checkpoint / "config.json").write_text(config, encoding="utf-8")
    refused("is no checkpoint; it is not replaced", checkpoint, kind=CHECKPOINT)
    assert (checkpoint / "model.safetensors").exists()


def test_no_kind_replaces_the_other(checkpoint: Path, old: Path) -> None:
    refused("export: .* is no bundle", checkpoint)
    refused("convert: .* is no checkpoint", old, kind=CHECKPOINT)


# Names and places

NAMES = {
    "longest": "a" * 255,
    "longest of wide letters": "模" * 85,
    "emoji": "🦁" * 63,
    "composed": unicodedata.normalize("NFC", "é ü ß " * 9),
    "decomposed": unicodedata.normalize("NFD", "é ü ß " * 9),
    "no UTF-8": os.fsdecode(b"\xff\xfe" * 70),
    "blanks": " with  blanks ",
    "dash": "-o",
    "pattern": "o[u]t *?{a,b}",
    "newline": "two\nlines\x1b[31m",
    "hidden": ".out",
    "dots": "...",
    "like a leftover": ".x.partial-00000000-0000000000000000",
    "quotes": "a'b\"c",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_any_name_will_do(tmp_path: Path, name: str) -> None:
    target = tmp_path / name
    die(target, "copying")
    (left,) = names(tmp_path)
    assert left != name
    put(target, "first")
    assert names(tmp_path) == {name}
    refused("exists; pass --overwrite", target, overwrite=False)
    die(target, "between the renames", "second")
    assert not target.exists()
    put(target, "third", overwrite=True)
    assert mark_of(target) == "third"
    assert names(tmp_path) == {name}


def test_long_names_that_differ_at_the_end_have_leftovers_of_their_own(tmp_path: Path) -> None:
    one, other = tmp_path / ("a" * 250 + "1"), tmp_path / ("a" * 250 + "2")
    die(one, "copying")
    before = names(tmp_path)
    check_target(BUNDLE, other, overwrite=False)
    assert names(tmp_path) == before
    check_target(BUNDLE, one, overwrite=False)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("given", ["out", "out/", "./out", "./x/../out", "x/../out/.", "link/../out", "../{here}/out"])
def test_a_relative_target_counts_from_where_the_process_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    here, far = tmp_path / "here", tmp_path / "far"
    (here / "x").mkdir(parents=True)
    (far / "away").mkdir(parents=True)
    (here / "link").symlink_to(far / "away")
    monkeypatch.chdir(here)
    with staged_folder(BUNDLE, Path(given.format(here="here")), overwrite=False) as stage:
        monkeypatch.chdir("/")
        write(stage, "new")
    # As everywhere in the system: what `..` means behind a link is where the link leads.
    assert mark_of((far if given.startswith("link") else here) / "out") == "new"
    assert names(here) | names(far) == {"x", "link", "away", "out"}


def test_a_target_under_a_linked_folder_stays_there_when_the_link_changes(tmp_path: Path) -> None:
    (tmp_path / "disk1").mkdir()
    (tmp_path / "disk2").mkdir()
    (tmp_path / "current").symlink_to("disk1")
    with staged_folder(BUNDLE, tmp_path / "current" / "out", overwrite=False) as stage:
        write(stage, "new")
        (tmp_path / "current").unlink()
        (tmp_path / "current").symlink_to("disk2")
    assert mark_of(tmp_path / "disk1" / "out") == "new"
    assert names(tmp_path / "disk2") == set()


def test_files_and_folders_get_the_usual_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with staged_folder(BUNDLE, tmp_path / "out", overwrite=False) as stage:
            write(stage, "new")
            (stage / PARTS[0]).chmod(0o600)
            (stage / "inner").mkdir()
            (stage / "inner" / "file").touch(0o600)
    finally:
        os.umask(before)
    found = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").rglob("*")}
    assert found.pop("inner") == oct(0o750)
    assert found == dict.fromkeys({"manifest.json", "file", *PARTS}, oct(0o640))
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_all_that_was_written_is_forced_to_the_disk_before_it_appears(
    tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that survives a power cut where the contents do not would leave a target with empty files."""
    steps: list[object] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        steps.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def moved(self: Path, target: Path) -> Path:
        steps.append(Path(target).name)
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", moved)
    put(old, "new", overwrite=True)
    written = {path.stat().st_ino for path in [old, *old.iterdir()]}
    assert set(steps[:5]) == written
    assert steps[6:8] == ["out", tmp_path.stat().st_ino]
    assert len(steps) == 9, "the old one goes only after the new one's name is on the disk"


# Processes that end


_CHILD = """
import os, shutil, signal, sys
from pathlib import Path
from caracal_export import staging

target, when, mark = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.path.insert(0, os.path.dirname(sys.argv[4]))
from test_staging import write

def die(*args, **named):
    os.kill(os.getpid(), signal.SIGKILL)

count = 0
def counted(self, to, rename=Path.rename):
    global count
    count += 1
    if count == {"before the rename": 1, "between the renames": 2, "after the renames": 3}.get(when):
        die()
    return rename(self, to)
Path.rename = counted

def half(path, ignore_errors=False):
    if path.exists():
        sorted(path.iterdir())[0].unlink()
        die()
if when == "clearing the old":
    shutil.rmtree = half
if when == "syncing":
    os.fsync = die

with staging.staged_folder(staging.BUNDLE, target, overwrite=True) as stage:
    (stage / "a.onnx").write_text("half")
    if when == "copying":
        die()
    write(stage, mark)
print("not killed")
"""


def die(target: Path, when: str, mark: str = "killed") -> None:
    """Writes to `target` in a process that kills itself then."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(target), when, mark, __file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, (done.stdout, done.stderr)


@pytest.mark.parametrize("when", ["copying", "syncing", "before the rename"])
def test_a_killed_run_leaves_no_target_and_the_next_one_cleans_up(tmp_path: Path, when: str) -> None:
    die(tmp_path / "out", when)
    (left,) = names(tmp_path)
    assert left.startswith(".out.partial-")
    put(tmp_path / "out", "new")
    assert mark_of(tmp_path / "out") == "new"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize(
    ("when", "stands", "recovered"),
    [
        ("copying", "old", "old"),
        ("syncing", "old", "old"),
        ("before the rename", "old", "old"),
        ("between the renames", None, "old"),
        ("after the renames", "killed", "killed"),
        ("clearing the old", "killed", "killed"),
    ],
)
def test_a_killed_replacement_leaves_a_whole_bundle(
    old: Path, tmp_path: Path, when: str, stands: str | None, recovered: str
) -> None:
    die(old, when)
    assert (mark_of(old) if old.exists() else None) == stands
    assert len(names(tmp_path)) == 2
    with pytest.raises(InputError, match="exists; pass --overwrite"):
        check_target(BUNDLE, old, overwrite=False)
    assert mark_of(old) == recovered
    assert names(tmp_path) == {"out"}
    put(old, "new", overwrite=True)
    assert mark_of(old) == "new"


def test_half_of_a_former_bundle_never_comes_back(old: Path, tmp_path: Path) -> None:
    """Killed while it clears the old one; then the new one is moved away, and the target's place is free."""
    die(old, "clearing the old")
    old.rename(tmp_path / "elsewhere")
    put(old, "new")
    assert mark_of(old) == "new"
    assert names(tmp_path) == {"out", "elsewhere"}


def test_kills_at_any_moment(tmp_path: Path) -> None:
    """Without knowing the steps: a run that replaces without pause is killed at many moments."""
    target = tmp_path / "out"
    put(target, "0")
    loop = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, os.path.dirname(sys.argv[2]))\n"
        "from test_staging import put\n"
        "print('ready', flush=True)\n"
        "while True: put(Path(sys.argv[1]), 'loop', overwrite=True)\n"
    )
    for turn in range(12):
        with subprocess.Popen(
            [sys.executable, "-c", loop, str(target), __file__], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.004 * turn)
            process.kill()
        if target.exists():
            mark_of(target)
        check_target(BUNDLE, target, overwrite=True)
        mark_of(target)
        assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError, SystemExit, GeneratorExit])
def test_any_exception_clears_the_stage(old: Path, tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), staged_folder(BUNDLE, old, overwrite=True) as stage:
        write(stage, "half")
        raise error
    assert mark_of(old) == "old"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), OSError(errno.EDQUOT, "Disk quota exceeded"), KeyboardInterrupt()])  # fmt: skip
@pytest.mark.parametrize("where", ["the first rename", "the second rename", "syncing"])
def test_a_move_that_fails_brings_the_old_bundle_back(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if (".partial-" in self.name and where == "the second rename") or (self == old and where == "the first rename"):
            raise error
        return rename(self, target)

    def sync(descriptor: int) -> None:
        raise error

    monkeypatch.setattr(Path, "rename", fail)
    if where == "syncing":
        monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises((InputError, KeyboardInterrupt)) as raised:
        put(old, "new", overwrite=True)
    if isinstance(raised.value, InputError):
        assert isinstance(error, OSError)
        expected = (
            f"export: cannot write {old} ({error.strerror}); nothing was changed, make room or choose another place"
        )
        assert str(raised.value) == expected
    assert mark_of(old) == "old"
    assert names(tmp_path) == {"out"}


def test_what_others_left_stays(tmp_path: Path) -> None:
    """Of another target, and whatever merely looks alike; and of another machine, until a day has passed."""
    kernel, token = staging._kernel(), "0123456789abcdef"
    other = "00000000" if kernel != "00000000" else "11111111"
    kept = {
        f".out2.partial-{kernel}-{token}",
        f".out.partial-{kernel}-{token}.bak",
        f".out.partial-{token}",
        f".out.notes-{kernel}-{token}",
        f"out.partial-{kernel}-{token}",
        f".out.partial-{other}-{token}",
    }
    for name in [*kept, f".out.partial-{kernel}-{token}"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    check_target(BUNDLE, tmp_path / "out", overwrite=False)
    assert names(tmp_path) == kept
    two_days_ago = time.time() - 2 * 86_400
    foreign = tmp_path / f".out.partial-{other}-{token}"
    os.utime(foreign, (two_days_ago, two_days_ago))
    check_target(BUNDLE, tmp_path / "out", overwrite=False)
    assert foreign.exists(), "a file in it is new"
    os.utime(foreign / "file", (two_days_ago, two_days_ago))
    check_target(BUNDLE, tmp_path / "out", overwrite=False)
    assert names(tmp_path) == kept - {foreign.name}


def test_a_bundle_that_another_machine_was_replacing_comes_back(tmp_path: Path) -> None:
    put(tmp_path / "out", "old")
    (tmp_path / "out").rename(tmp_path / ".out.replaced-00000000-0123456789abcdef")
    refused("exists; pass --overwrite", tmp_path / "out", overwrite=False)
    assert mark_of(tmp_path / "out") == "old"


# Disks


_ON_A_DISK = """
set -e
mount -t tmpfs -o size=300k,mode=755 tmpfs "$1"
mkdir "$1/out"
exec "$2" -c "$3" "$1" "$4"
"""

_FULL = """
import json, os, resource, subprocess, sys
from pathlib import Path
sys.path.insert(0, os.path.dirname(sys.argv[2]))
from test_staging import mark_of, names, write
from caracal_export.staging import BUNDLE, staged_folder
from caracal_runtimes.errors import InputError

disk = Path(sys.argv[1])
write(disk / "out", "old")
{before}
for target in (disk / "out", disk / "new"):
    try:
        with staged_folder(BUNDLE, target, overwrite=True) as stage:
            write(stage, "new", size={size})
    except InputError as error:
        print(error)
    assert mark_of(disk / "out") == "old"
    assert names(disk) == {{"out"}}, names(disk)
"""


@pytest.fixture
def on_a_disk(tmp_path: Path) -> Callable[[str], list[str]]:
    """`on_a_disk(script)`: what it prints, run with a small disk of its own, which nobody else sees."""
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("mounting a disk needs Linux and the rights of root")

    def run(script: str) -> list[str]:
        command = ["unshare", "--mount", "sh", "-c", _ON_A_DISK, "sh", str(tmp_path), sys.executable, script, __file__]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def _cannot_write(disk: Path, reason: str) -> list[str]:
    return [
        f"export: cannot write {disk / name} ({reason}); nothing was changed, make room or choose another place"
        for name in ("out", "new")
    ]


def test_a_full_disk_costs_nothing(on_a_disk: Callable[[str], list[str]], tmp_path: Path) -> None:
    assert on_a_disk(_FULL.format(before="", size=10_000)) == _cannot_write(tmp_path, "No space left on device")


def test_a_disk_without_room_for_names_costs_nothing(on_a_disk: Callable[[str], list[str]], tmp_path: Path) -> None:
    before = "subprocess.run(['mount', '-o', 'remount,nr_inodes=8', sys.argv[1]], check=True)"
    assert on_a_disk(_FULL.format(before=before, size=1)) == _cannot_write(tmp_path, "No space left on device")


def test_a_disk_that_must_not_be_written_is_refused(on_a_disk: Callable[[str], list[str]], tmp_path: Path) -> None:
    before = "subprocess.run(['mount', '-o', 'remount,ro', sys.argv[1]], check=True)"
    assert on_a_disk(_FULL.format(before=before, size=1)) == _cannot_write(tmp_path, "Read-only file system")


def test_files_that_must_not_grow_cost_nothing(tmp_path: Path) -> None:
    """A limit on the size of files fails as a full disk does, and needs no rights."""
    (tmp_path / "out").mkdir()
    script = _FULL.format(before="resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000))", size=1_000)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), __file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == _cannot_write(tmp_path, "File too large")


# Several at once


_CONTENDER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, os.path.dirname(sys.argv[1]))
from test_staging import put
from caracal_export import staging
from caracal_runtimes.errors import InputError

target, mark, overwrite, locks, rounds = Path(sys.argv[2]), sys.argv[3], sys.argv[4] == "True", sys.argv[5] == "True", int(sys.argv[6])
if not locks:
    staging._lock = lambda folder: None
print("ready", flush=True)
sys.stdin.readline()
for turn in range(rounds):
    try:
        put(target, mark, overwrite=overwrite)
        print("wrote", flush=True)
    except InputError as error:
        print(repr(str(error)), flush=True)
"""


@pytest.fixture
def contend(tmp_path: Path) -> Iterator[Callable[..., list[list[str]]]]:
    """`contend(count, overwrite=, locks=, rounds=)`: what each of so many processes said, all begun at once."""
    with contextlib.ExitStack() as stack:

        def run(count: int, *, overwrite: bool, locks: bool, rounds: int) -> list[list[str]]:
            rest = [str(overwrite), str(locks), str(rounds)]
            started = [
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-c", _CONTENDER, __file__, str(tmp_path / "out"), f"run {index}", *rest],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for index in range(count)
            ]
            for process in started:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for process in started:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            said = [process.communicate()[0].splitlines() for process in started]
            assert [process.returncode for process in started] == [0] * count
            return said

        yield run


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
@pytest.mark.parametrize("count", [2, 4])
def test_of_many_new_bundles_one_stands(
    tmp_path: Path, contend: Callable[..., list[list[str]]], count: int, locks: bool
) -> None:
    said = contend(count, overwrite=False, locks=locks, rounds=1)
    assert said.count(["wrote"]) == 1
    for (line,) in said:
        assert line == "wrote" or "exists; pass --overwrite" in line or "another run wrote" in line
    assert mark_of(tmp_path / "out") == f"run {said.index(['wrote'])}"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
@pytest.mark.parametrize("count", [2, 4])
def test_of_many_replacements_each_is_whole_or_refused(
    old: Path, tmp_path: Path, contend: Callable[..., list[list[str]]], count: int, locks: bool
) -> None:
    said = contend(count, overwrite=True, locks=locks, rounds=15)
    for lines in said:
        assert len(lines) == 15
        for line in lines:
            # With locks nobody is in the way of anyone; without, any refusal in one line will do.
            assert line == "wrote" or (not locks and line.startswith("'export: ") and "\\n" not in line), line
    assert any("wrote" in lines for lines in said)
    assert mark_of(old).startswith("run ")
    assert names(tmp_path) == {"out"}


def test_threads_of_one_process_do_not_disturb_each_other(old: Path, tmp_path: Path) -> None:
    failed: list[BaseException] = []
    begin = threading.Barrier(6)

    def work(index: int) -> None:
        begin.wait()
        try:
            for _ in range(10):
                put(old, f"thread {index}", overwrite=True)
        except BaseException as error:
            failed.append(error)

    umask = os.umask(0o022)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.umask(umask) == 0o022, "what all threads share is as it was"
    assert not failed
    assert mark_of(old).startswith("thread ")
    assert names(tmp_path) == {"out"}


def test_a_run_in_another_process_keeps_its_stage(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; sys.path.insert(0, os.path.dirname(sys.argv[2]))\n"
        "from caracal_export.staging import BUNDLE, staged_folder\n"
        "from test_staging import write\n"
        "with staged_folder(BUNDLE, Path(sys.argv[1]), overwrite=True) as stage:\n"
        "    write(stage, 'slow')\n"
        "    print(stage.name, flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    target = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(target), __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        stage = process.stdout.readline().strip()
        put(target, "fast")
        put(target, "faster", overwrite=True)
        assert names(tmp_path) == {"out", stage}
        mark_of(tmp_path / stage)
        process.communicate("\n")
    assert process.returncode == 0
    assert mark_of(target) == "slow"
    assert names(tmp_path) == {"out"}


def test_a_run_in_the_same_process_keeps_its_stage(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with staged_folder(BUNDLE, target, overwrite=True) as stage:
        write(stage, "slow")
        put(target, "fast")
        mark_of(stage)
    assert mark_of(target) == "slow"
    assert names(tmp_path) == {"out"}


def test_a_folder_that_another_program_keeps_locked_is_written_all_the_same(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`flock FOLDER caracal export …` is a habit."""
    fcntl = pytest.importorskip("fcntl", reason="only POSIX locks folders")
    monkeypatch.setattr(staging, "_LOCK_SECONDS", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        put(old, "new", overwrite=True)
    finally:
        os.close(descriptor)
    assert mark_of(old) == "new"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_a_target_that_another_run_puts_back_between_the_renames_stands(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    if not locks:
        monkeypatch.setattr(staging, "_lock", lambda folder: None)
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        done = rename(self, target)
        if ".replaced-" in Path(target).name:
            old.mkdir()
            write(old, "theirs")
        return done

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(InputError, match=r"another run wrote .* meanwhile; nothing was changed"):
        put(old, "mine", overwrite=True)
    assert mark_of(old) == "theirs"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("what", ["a bundle", "file", "link"])
def test_what_appears_after_the_last_look_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, overwrite: bool
) -> None:
    """By another program, or on a file system that has no locks."""
    target, check, looks = tmp_path / "out", staging._check, []

    def looked(*args: Any, **named: Any) -> bool:
        found = check(*args, **named)
        looks.append(found)
        if len(looks) == 2:
            if what == "a bundle":
                target.mkdir()
                write(target, "theirs")
            elif what == "file":
                target.write_text("theirs")
            else:
                target.symlink_to(tmp_path)
        return found

    monkeypatch.setattr(staging, "_check", looked)
    with pytest.raises(InputError, match=r"another run wrote|Not a directory"):
        put(target, "mine", overwrite=overwrite)
    assert looks == [False, False]
    assert names(tmp_path) == {"out"}
    assert (target.is_symlink(), target.is_file()) == (what == "link", what == "file")
    assert what != "a bundle" or mark_of(target) == "theirs"


def test_without_locks_a_replacement_that_is_under_way_is_waited_for(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes between the two renames sees a bundle that looks left behind."""
    monkeypatch.setattr(staging, "_lock", lambda folder: None)
    rename, seen = Path.rename, []

    def look() -> None:
        with pytest.raises(InputError, match="exists; pass --overwrite"):
            check_target(BUNDLE, old, overwrite=False)
        seen.append(mark_of(old))

    other = threading.Thread(target=look)

    def slow(self: Path, target: Path) -> Path:
        done = rename(self, target)
        if ".replaced-" in Path(target).name:
            other.start()
            time.sleep(0.15)
        return done

    monkeypatch.setattr(Path, "rename", slow)
    put(old, "new", overwrite=True)
    other.join()
    assert seen == ["new"]
