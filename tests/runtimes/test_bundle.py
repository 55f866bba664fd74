"""Opening a bundle: altered, missing and foreign files are named, and nothing outside the folder is ever read."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from caracal_runtimes.bundle import Bundle, sha256_of
from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.model import CausalLM
from caracal_runtimes.providers.ort import OrtSession

posix = pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
WEIGHTY = ("extend.onnx", "forward.onnx", "step.onnx", "step_resident.onnx")  # the graphs that have weights
GRAPHS = ("convolve.onnx", "convolve_long.onnx", *WEIGHTY)
FILES = tuple(sorted(("README.md", *GRAPHS, "golden.safetensors", "tokenizer.json", "weights.safetensors")))


def refused(path: str | Path, *words: str, **options: bool) -> str:
    with pytest.raises(BundleError) as caught:
        Bundle.open(path, **options)
    message = str(caught.value)
    for word in words:
        assert word in message
    return message


def test_the_files_named_here_are_all(copy: Any) -> None:
    assert tuple(sorted(copy.manifest()["files"])) == FILES
    assert sorted(path.name for path in copy.path.iterdir()) == sorted([*FILES, "manifest.json"])


class TestAltered:
    @pytest.mark.parametrize("name", FILES)
    def test_a_flipped_bit_is_found_by_name(self, copy: Any, name: str) -> None:
        content = (copy.path / name).read_bytes()
        for place in (0, len(content) // 2, len(content) - 1):
            changed = bytearray(content)
            changed[place] ^= 1
            (copy.path / name).write_bytes(changed)
            refused(copy.path, f"{name} was altered", "export it again")
            assert Bundle.open(copy.path, check_hashes=False).id()  # only hashing can tell
        (copy.path / name).write_bytes(content)
        copy.open()

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("check_hashes", [True, False])
    def test_another_size(self, copy: Any, name: str, check_hashes: bool) -> None:
        content = (copy.path / name).read_bytes()
        for changed in (content + b"\n", content[:-1], b""):
            (copy.path / name).write_bytes(changed)
            refused(
                copy.path, name, f"{len(changed):,} bytes", f"manifest says {len(content):,}", check_hashes=check_hashes
            )

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("check_hashes", [True, False])
    def test_a_missing_file(self, copy: Any, name: str, check_hashes: bool) -> None:
        (copy.path / name).unlink()
        refused(copy.path, f"{name} is missing", check_hashes=check_hashes)

    def test_a_folder_in_place_of_a_file(self, copy: Any) -> None:
        (copy.path / "forward.onnx").unlink()
        (copy.path / "forward.onnx").mkdir()
        refused(copy.path, "forward.onnx is missing")

    @posix
    @pytest.mark.parametrize("check_hashes", [True, False])
    def test_a_pipe_in_place_of_a_file(self, copy: Any, check_hashes: bool) -> None:
        """Opening it would wait for ever."""
        (copy.path / "forward.onnx").unlink()
        os.mkfifo(copy.path / "forward.onnx")
        refused(copy.path, "forward.onnx is missing", check_hashes=check_hashes)

    def test_a_name_that_means_something_else_on_another_system(self, copy: Any) -> None:
        for name in ("NUL.txt", "readme.MD", "sub./x", "a:b", "a\u202eb"):
            content = copy.manifest()["files"]["README.md"]
            copy.edit_manifest(lambda data, name=name, content=content: data["files"].update({name: content}))
            refused(copy.path, f"manifest.files: {name!r}")
            copy.edit_manifest(lambda data, name=name: data["files"].pop(name))
        copy.open()

    def test_a_file_that_the_manifest_does_not_list_is_no_error(self, copy: Any) -> None:
        (copy.path / "notes.txt").write_text("mine")
        copy.open()

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe{", b'{"format": "caracal-bundle"}'])
    def test_a_manifest_that_is_none(self, copy: Any, content: bytes) -> None:
        (copy.path / "manifest.json").write_bytes(content)
        refused(copy.path, "manifest")


@posix
class TestLinks:
    """A link can lead out of the bundle, and to other contents after the check."""

    @pytest.mark.parametrize("name", [*FILES, "manifest.json"])
    @pytest.mark.parametrize("inside", [False, True], ids=["leads out", "stays inside"])
    def test_a_linked_file(self, copy: Any, tmp_path: Path, name: str, inside: bool) -> None:
        target = (copy.path if inside else tmp_path) / "target"
        (copy.path / name).rename(target)
        (copy.path / name).symlink_to(target)
        refused(copy.path, name, "link")
        refused(copy.path, name, "link", check_hashes=False)

    def test_a_link_to_nothing(self, copy: Any) -> None:
        (copy.path / "README.md").unlink()
        (copy.path / "README.md").symlink_to("nowhere")
        refused(copy.path, "README.md is a link")

    @pytest.mark.parametrize("depth", [1, 2])
    def test_a_linked_folder_on_the_way(self, copy: Any, tmp_path: Path, depth: int) -> None:
        name = "/".join([*("ab"[:depth]), "README.md"])
        (copy.path / name).parent.mkdir(parents=True)
        (copy.path / "README.md").rename(copy.path / name)
        copy.edit_manifest(lambda data: data["files"].update({name: data["files"].pop("README.md")}))
        copy.open()
        (copy.path / "a").rename(tmp_path / "outside")
        (copy.path / "a").symlink_to(tmp_path / "outside")
        refused(copy.path, f"{name} is a link")

    def test_the_bundle_itself_may_be_reached_by_a_link(self, copy: Any, tmp_path: Path) -> None:
        (tmp_path / "latest").symlink_to(copy.path)
        assert Bundle.open(tmp_path / "latest").model(threads=1).forward([[1]]).shape == (1, 1, 320)


def point_weights_to(copy: Any, location: str, file: str = "forward.onnx") -> None:
    """Rewrites where a graph says that its weights lie."""
    graph = onnx.load(copy.path / file, load_external_data=False)
    count = 0
    for tensor in graph.graph.initializer:
        for item in tensor.external_data:
            if item.key == "location":
                item.value, count = location, count + 1
    assert count > 10
    (copy.path / file).write_bytes(graph.SerializeToString())
    copy.rehash()


@posix
class TestExternalData:
    def test_the_rewriting_alone_breaks_nothing(self, copy: Any, model: CausalLM) -> None:
        point_weights_to(copy, "weights.safetensors")
        np.testing.assert_array_equal(copy.model().forward([[1, 2]]), model.forward([[1, 2]]))

    @pytest.mark.parametrize("exists", [True, False], ids=["exists", "does not exist"])
    @pytest.mark.parametrize(
        "location",
        ["../outside.bin", "{folder}/outside.bin", "../bundle/../outside.bin", "sub/../../outside.bin", "./../outside.bin",
         "link.bin", "sub/outside.bin"],
    )  # fmt: skip
    def test_weights_outside_the_bundle_are_never_read(
        self, copy: Any, tmp_path: Path, location: str, exists: bool
    ) -> None:
        """The right weights lie outside: whoever reads them runs without an error."""
        if exists:
            shutil.copyfile(copy.path / "weights.safetensors", tmp_path / "outside.bin")
        (copy.path / "link.bin").symlink_to("../outside.bin")
        if location.startswith("sub/outside"):
            (copy.path / "sub").symlink_to("..")
        elif location.startswith("sub"):
            (copy.path / "sub").mkdir()
        point_weights_to(copy, location.format(folder=tmp_path))
        with pytest.raises(BundleError, match=r"forward\.onnx reads .*, which the manifest does not list"):
            copy.model()
        # Without our own check ONNX Runtime still refuses to leave the folder.
        with pytest.raises(BundleError, match=r"forward\.onnx could not be loaded"):
            OrtSession.on_cpu(copy.path / "forward.onnx")

    @pytest.mark.parametrize(
        "location",
        ["Weights.safetensors", "weights.safetensors ", "weights.safetensors.", "weights.safetensors::$DATA", "NUL"],
    )
    def test_what_other_systems_take_for_a_listed_file_or_a_device(self, copy: Any, location: str) -> None:
        point_weights_to(copy, location)
        with pytest.raises(BundleError, match=r"forward\.onnx reads .*, which the manifest does not list"):
            copy.model()

    @pytest.mark.parametrize("graph", WEIGHTY)
    def test_a_file_that_no_hash_covers_is_never_read(self, copy: Any, graph: str) -> None:
        """It could change without changing the bundle's id."""
        shutil.copyfile(copy.path / "weights.safetensors", copy.path / "other.bin")
        point_weights_to(copy, "other.bin", graph)
        with pytest.raises(BundleError, match=rf"{graph} reads 'other\.bin', which the manifest does not list"):
            copy.model()

    def place_of_weights(self, copy: Any, graph: str, key: str, value: str) -> None:
        """Rewrites one entry of where a graph's first weight lies."""
        altered = onnx.load(copy.path / graph, load_external_data=False)
        (item,) = (item for item in altered.graph.initializer[0].external_data if item.key == key)
        item.value = value
        (copy.path / graph).write_bytes(altered.SerializeToString())
        copy.rehash()
        with pytest.raises(BundleError, match=rf"{re.escape(graph)} could not be loaded"):
            OrtSession.on_cpu(copy.path / graph)

    @pytest.mark.parametrize("graph", WEIGHTY)
    @pytest.mark.parametrize(("key", "value"), [("offset", "99999999"), ("offset", "-8"), ("length", "4")])
    def test_weights_elsewhere_in_the_file(self, copy: Any, model: CausalLM, graph: str, key: str, value: str) -> None:
        """A session that reads the weights itself refuses; those that share them look them up by name."""
        self.place_of_weights(copy, graph, key, value)
        found = running(copy, graph)
        assert continued(found) == continued(model)
        np.testing.assert_array_equal(found.forward([[0, 5, 7]]), model.forward([[0, 5, 7]]))

    @pytest.mark.parametrize("graph", WEIGHTY)
    def test_weights_nowhere(self, copy: Any, graph: str) -> None:
        self.place_of_weights(copy, graph, "location", "")
        with pytest.raises(BundleError, match=rf"{re.escape(graph)} could not be loaded"):
            continued(running(copy, graph))


def running(copy: Any, graph: str) -> CausalLM:
    """The copy as a model whose tokens run this graph."""
    loaded: CausalLM = copy.open().model(threads=1, resident=graph == "step_resident.onnx")
    return loaded


def continued(model: CausalLM) -> list[int]:
    """Ids from all three graphs that have weights: a prompt, a few steps, and a chunk."""
    session = model.start([[0, 5, 7]])
    session.generate(max_new_tokens=12, stop_ids=())
    session.append([8, 9, 10, 11])
    session.generate(max_new_tokens=3, stop_ids=())
    return session.ids[0]


class TestWhereItLies:
    @pytest.fixture
    def logits(self, model: CausalLM) -> Any:
        return model.forward([[0, 5, 7]])

    @pytest.mark.parametrize("name", ["moved", "with blanks  in it", "ünïcode 日本 😀", "a'b", "%s{x}$HOME", "-x", "~"])
    def test_moved_and_renamed(self, copy: Any, tmp_path: Path, logits: Any, name: str) -> None:
        (tmp_path / "elsewhere").mkdir()
        copy.path.rename(tmp_path / "elsewhere" / name)
        bundle = Bundle.open(tmp_path / "elsewhere" / name)
        np.testing.assert_array_equal(bundle.model(threads=1).forward([[0, 5, 7]]), logits)
        assert bundle.tokenizer().get_vocab_size() == 320
        assert bundle.golden().tensor("one/input_ids").shape == (1, 1)

    @pytest.mark.parametrize("path", ["bundle", "./bundle", "bundle/", "../here/bundle", "bundle/../bundle"])
    def test_a_relative_path_from_another_folder(
        self, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logits: Any, path: str
    ) -> None:
        (tmp_path / "here").mkdir()
        shutil.copytree(exported.bundle, tmp_path / "here" / "bundle")
        monkeypatch.chdir(tmp_path / "here")
        np.testing.assert_array_equal(Bundle.open(path).model(threads=1).forward([[0, 5, 7]]), logits)

    def test_the_current_folder(self, copy: Any, monkeypatch: pytest.MonkeyPatch, logits: Any) -> None:
        monkeypatch.chdir(copy.path)
        np.testing.assert_array_equal(Bundle.open(".").model(threads=1).forward([[0, 5, 7]]), logits)


class TestNoBundle:
    @pytest.mark.parametrize("path", ["", " ", "\t"])
    def test_an_empty_path(self, path: str) -> None:
        refused(path, "the path is empty", "caracal export")

    @pytest.mark.parametrize("path", ["nowhere", "nowhere/at/all", "a\0b"])
    def test_nothing_there(self, path: str) -> None:
        refused(path, "nothing at", "caracal export")

    def test_a_checkpoint(self, exported: Any) -> None:
        refused(exported.checkpoint, "looks like a checkpoint", f"caracal export {exported.checkpoint} -o")

    def test_another_folder_or_file(self, copy: Any, tmp_path: Path) -> None:
        assert "checkpoint" not in refused(tmp_path, "is no bundle", "no manifest.json")
        refused(copy.path / "manifest.json", "is no bundle")

    def test_a_path_longer_than_the_system_allows(self) -> None:
        refused("a" * 5000, "bundle")

    def test_a_file_name_longer_than_the_system_allows(self, copy: Any) -> None:
        long = "b" * 300
        copy.edit_manifest(lambda data: data["files"].update({long: data["files"]["README.md"]}))
        refused(copy.path, long)

    def test_a_name_that_no_file_system_can_hold(self, copy: Any) -> None:
        copy.edit_manifest(lambda data: data["files"].update({"\ud800": data["files"]["README.md"]}))
        refused(copy.path, "U+D800")


class TestContents:
    def test_id_is_the_documented_digest(self, copy: Any) -> None:
        lines = "".join(f"{hashlib.sha256((copy.path / name).read_bytes()).hexdigest()} {name}\n" for name in FILES)
        assert copy.open().id() == hashlib.sha256(lines.encode()).hexdigest()

    def test_id_does_not_depend_on_the_place_or_the_order(self, copy: Any, tmp_path: Path) -> None:
        before = copy.open().id()
        copy.edit_manifest(lambda data: data.update(files=dict(reversed(data["files"].items()))))
        copy.path.rename(tmp_path / "renamed")
        assert Bundle.open(tmp_path / "renamed").id() == before

    @pytest.mark.parametrize("name", FILES)
    def test_id_depends_on_every_file(self, copy: Any, name: str) -> None:
        before = copy.open().id()
        content = bytearray((copy.path / name).read_bytes())
        content[-1] ^= 1
        (copy.path / name).write_bytes(content)
        copy.rehash()
        assert copy.open().id() != before

    def test_sha256(self, tmp_path: Path) -> None:
        content = bytes(range(256)) * 8192 + b"a tail"  # more than is read at once
        (tmp_path / "x").write_bytes(content)
        assert sha256_of(tmp_path / "x") == hashlib.sha256(content).hexdigest()
        with pytest.raises(BundleError, match="cannot be read"):
            sha256_of(tmp_path / "y")

    def test_without_a_tokenizer(self, copy: Any) -> None:
        copy.drop_tokenizer()
        with pytest.raises(BundleError, match=r"no tokenizer\.json.*--ids"):
            copy.open().tokenizer()

    @pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0"}', "[1]"])
    def test_a_tokenizer_that_is_none(self, copy: Any, content: str) -> None:
        (copy.path / "tokenizer.json").write_text(content)
        copy.rehash()
        with pytest.raises(BundleError, match=r"tokenizer\.json is no tokenizer"):
            copy.open().tokenizer()

    def test_every_error_here_is_an_input_error_with_exit_code_2(self) -> None:
        assert issubclass(BundleError, InputError)
        assert BundleError("").exit_code == 2

    def test_the_tokenizer_is_the_bundles(self, exported: Any) -> None:
        vocabulary = json.loads((exported.bundle / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        assert Bundle.open(exported.bundle).tokenizer().get_vocab() == vocabulary
