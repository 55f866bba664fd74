"""Where what can be made again is kept, and that nobody else's file is taken for ours."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from caracal_runtimes import cache_folder as module
from caracal_runtimes.cache_folder import cache_folder, read_owned, write_atomically

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


class TestFolder:
    def test_the_variable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("CARACAL_CACHE", str(tmp_path / "mine"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
        assert cache_folder() == tmp_path / "mine"

    @pytest.mark.parametrize("value", ["", " ", "off", "OFF"])
    def test_off(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("CARACAL_CACHE", value)
        assert cache_folder() is None

    def test_a_relative_one_stays_where_it_was(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("CARACAL_CACHE", "kept")
        assert cache_folder() == tmp_path / "kept"

    def test_the_standard_place(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("CARACAL_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "caracal-onnx"

    @pytest.mark.skipif(sys.platform != "linux", reason="each system has its own")
    @pytest.mark.parametrize("base", ["", "relative/cache"])
    def test_the_home_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, base: str) -> None:
        monkeypatch.delenv("CARACAL_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert cache_folder() == tmp_path / ".cache" / "caracal-onnx"


class TestFiles:
    def test_there_and_back(self, tmp_path: Path) -> None:
        file = tmp_path / "a" / "b" / "file"
        assert write_atomically(file, b"one")
        assert write_atomically(file, b"two")
        assert read_owned(file) == b"two"
        assert [path.name for path in file.parent.iterdir()] == ["file"]

    @posix
    def test_for_this_user_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "new" / "file"
        assert write_atomically(file, b"one")
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert not write_atomically(tmp_path / "file" / "x", b"one")
        (tmp_path / "folder").mkdir()
        assert not write_atomically(tmp_path / "folder", b"one")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]

    def test_several_at_once(self, tmp_path: Path) -> None:
        file, contents = tmp_path / "file", [bytes([65 + number]) * 100_000 for number in range(8)]
        threads = [threading.Thread(target=write_atomically, args=(file, content)) for content in contents]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert read_owned(file) in contents
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    @posix
    def test_a_link_in_the_place_of_the_temporary_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        victim = tmp_path / "victim"
        victim.write_bytes(b"theirs")
        monkeypatch.setattr(module, "_count", iter([7]))
        (tmp_path / f".file.{os.getpid()}.7.tmp").symlink_to(victim)
        assert not write_atomically(tmp_path / "file", b"ours")
        assert victim.read_bytes() == b"theirs"

    def test_none(self, tmp_path: Path) -> None:
        assert read_owned(tmp_path / "none") is None
        assert read_owned(tmp_path) is None
        assert read_owned(tmp_path / "a\0b") is None

    @posix
    def test_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"one")
        (tmp_path / "link").symlink_to(tmp_path / "file")
        assert read_owned(tmp_path / "link") is None

    @posix
    @pytest.mark.parametrize("mode", [0o620, 0o602])
    def test_one_that_others_may_write_to(self, tmp_path: Path, mode: int) -> None:
        file = tmp_path / "file"
        assert write_atomically(file, b"one")
        file.chmod(mode)
        assert read_owned(file) is None

    @posix
    def test_another_user(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "file"
        assert write_atomically(file, b"one")
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        assert read_owned(file) is None

    @posix
    def test_a_pipe_does_not_hold_up(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        assert read_owned(tmp_path / "pipe") is None
