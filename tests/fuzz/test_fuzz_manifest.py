"""`manifest.json` and the folder around it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import caracal_runtimes
import pytest
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError
from caracal_runtimes.manifest import Manifest
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, Raw, attempt, damaged, dump, encoded, mutants

PROBE = Path(caracal_runtimes.__file__).parent / "probe_bundle"
TEXT = (PROBE / "manifest.json").read_text(encoding="utf-8")


def small(data: dict[str, Any]) -> dict[str, Any]:
    """The same manifest with two of each graph's tensors, which are all alike."""
    for graph in data["graphs"].values():
        for key in ("inputs", "outputs"):
            graph[key] = graph[key][:2]
        graph["operators"] = dict(list(graph["operators"].items())[:2])
    data["golden"]["cases"] = data["golden"]["cases"][:2]
    data["golden"]["text"] = {"name": "text", "tokens": 2, "bytes": 1}
    return data


DOCUMENT = small(json.loads(TEXT))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(PROBE, tmp_path_factory.mktemp("fuzz") / "bundle"))


def no_json(constant: str) -> None:
    raise AssertionError(f"no other reader takes {constant} for JSON")


def check_usable(manifest: Manifest) -> None:
    """It is what it says: written and read again it is the same, and another JSON reader can read it."""
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    json.loads(text, parse_constant=no_json)
    assert manifest.model.layer_types
    for name in manifest.files:
        path = Path("/bundle", name)
        assert Path("/bundle") in path.parents
        assert ".." not in path.parts
    names = {*manifest.weights, manifest.golden.file, *(graph.file for graph in manifest.graphs.values())}
    assert names <= manifest.files.keys()


def test_the_document_itself_is_read() -> None:
    check_usable(Manifest.from_json(json.dumps(DOCUMENT)))


@pytest.mark.parametrize("key", ["config", "source", "verification"])
@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-1e400", "[" * 32 + "]" * 32, "[" * 300 + "]" * 300, '{"a":' * 40 + "1" + "}" * 40]
)
def test_what_is_kept_as_it_stands_can_be_written_again(key: str, value: str) -> None:
    text = dump({**DOCUMENT, key: {**DOCUMENT["config"], "x": Raw(value)}})
    with pytest.raises(BundleError, match=rf"manifest\.{key} has the number|manifest\.json has values in more than 32"):
        Manifest.from_json(text)
    check_usable(Manifest.from_json(text.replace(value, "[" * 30 + "1e300" + "]" * 30)))


@pytest.mark.parametrize("name", ["\n", "\x1b[31m", "\u202e", "x" * 5000])
def test_a_name_in_the_file_stays_in_the_line_of_the_message(name: str) -> None:
    for place in ("files", "graphs", "producer"):
        assert attempt(BundleError, Manifest.from_json, dump({**DOCUMENT, place: {name: 1}})) is None


@FUZZ
@given(mutants(DOCUMENT))
def test_manifests_with_changed_values(text: str) -> None:
    manifest = attempt(BundleError, Manifest.from_json, text)
    if manifest is not None:
        check_usable(manifest)


@FUZZ
@given(st.text(st.characters()) | damaged(json.dumps(DOCUMENT).encode()).map(lambda data: data.decode("latin-1")))
def test_texts_that_are_no_manifest(text: str) -> None:
    manifest = attempt(BundleError, Manifest.from_json, text)
    if manifest is not None:
        check_usable(manifest)


def opened(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    bundle = attempt(BundleError, Bundle.open, folder)
    if bundle is not None:
        check_usable(bundle.manifest)
        assert len(bundle.id()) == 64
        assert bundle.parameters() > 0
        for name, entry in bundle.manifest.files.items():
            assert (folder / name).stat().st_size == entry.bytes


@FUZZ
@given(text=mutants(json.loads(TEXT)))
def test_bundles_with_changed_manifests(folder: Path, text: str) -> None:
    opened(folder, encoded(text))


@FUZZ
@given(content=st.binary() | damaged(TEXT.encode()))
def test_bundles_with_damaged_manifests(folder: Path, content: bytes) -> None:
    opened(folder, content)
