"""A bundle whose weights lie in several files is the same bundle: on every provider, in every graph, to the last bit.

The files are split here by the `safetensors` and `onnx` packages, not by the exporter.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
from caracal_runtimes import Bundle, run_parity
from caracal_runtimes.bisect import Options, layer_errors, run_bisect
from caracal_runtimes.bundle import sha256_of
from caracal_runtimes.errors import BundleError
from caracal_runtimes.model import CausalLM
from caracal_runtimes.providers import Settings
from caracal_runtimes.providers.cpu import PROVIDER as CPU
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.sampling import SamplingOptions
from numpy.typing import NDArray

WEIGHTY = ("forward", "extend", "step", "step_resident")
# A reader takes the names from the manifest: these follow no pattern, and stand in no order.
SHARDS = ("part b.safetensors", "part a.safetensors", "last.safetensors")
NATIVE = {"openvino_native": "openvino", "reference": "onnx", "tract": "tract", "iree": "iree.compiler", "mnn": "MNN"}
GREEDY = SamplingOptions(temperature=0)
IDS = [[0, 5, 9, 200, 319, 7, 7, 31, 12, 11], [0, 7]]


def write_shards(folder: Path, parts: dict[str, dict[str, NDArray[Any]]]) -> None:
    """Writes weight files, makes the graphs refer to them, and the manifest list them with the right hashes."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    for name in manifest["weights"]:
        (folder / name).unlink(missing_ok=True)
        del manifest["files"][name]
    places: dict[str, dict[str, str]] = {}
    for name, tensors in parts.items():
        safetensors.numpy.save_file(tensors, folder / name, metadata={"format": "caracal-bundle"})
        with (folder / name).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        for tensor in tensors:
            begin, end = header[tensor]["data_offsets"]
            places[tensor] = {"location": name, "offset": str(8 + size + begin), "length": str(end - begin)}
    for graph in WEIGHTY:
        model = onnx.load(folder / f"{graph}.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            del tensor.external_data[:]
            for key, value in places[tensor.name].items():
                tensor.external_data.add(key=key, value=value)
        (folder / f"{graph}.onnx").write_bytes(model.SerializeToString())
    manifest["weights"] = list(parts)
    for name in {*manifest["files"], *parts}:
        manifest["files"][name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def split(tensors: dict[str, NDArray[Any]]) -> dict[str, dict[str, NDArray[Any]]]:
    """Deals tensors out like cards, so that every layer reads from every file."""
    return {file: {name: tensors[name] for name in sorted(tensors)[place::3]} for place, file in enumerate(SHARDS)}


@pytest.fixture(scope="module")
def whole(exported: Any) -> Bundle:
    return Bundle.open(exported.bundle)


@pytest.fixture(scope="module")
def sharded(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny bundle in three weight files. Read only."""
    folder = Path(shutil.copytree(exported.bundle, tmp_path_factory.mktemp("sharded") / "bundle"))
    write_shards(folder, split(safetensors.numpy.load_file(folder / "weights.safetensors")))
    return Bundle.open(folder)


@pytest.fixture
def altered(sharded: Bundle, tmp_path: Path) -> Path:
    """A copy of `sharded`, to be altered."""
    return Path(shutil.copytree(sharded.path, tmp_path / "altered"))


@pytest.fixture(scope="module")
def pair(whole: Bundle, sharded: Bundle) -> tuple[CausalLM, CausalLM]:
    """Both as models on the CPU, one thread."""
    return whole.model(threads=1), sharded.model(threads=1)


def test_the_bundle_lists_its_files(whole: Bundle, sharded: Bundle) -> None:
    assert sharded.manifest.weights == SHARDS
    assert sharded.parameters() == whole.parameters() > 0
    assert sharded.id() != whole.id()


def test_logits_are_the_same_bits(pair: tuple[CausalLM, CausalLM]) -> None:
    expected, got = (model.forward(IDS) for model in pair)
    np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize("resident", [False, True], ids=["step", "step_resident"])
def test_every_graph_continues_alike(whole: Bundle, sharded: Bundle, resident: bool) -> None:
    """A prompt, steps, a chunk, and several rows, for which the step has packed weights of its own."""
    found = []
    for bundle in (whole, sharded):
        session = bundle.model(threads=1, resident=resident).start(IDS)
        session.generate(max_new_tokens=12, stop_ids=(), options=GREEDY)
        session.append([8, 9, 10, 11])
        session.generate(max_new_tokens=4, stop_ids=(), options=GREEDY)
        found.append(session.ids)
    assert found[0] == found[1]
    assert [len(row) for row in found[1]] == [10 + 12 + 4 + 4, 2 + 12 + 4 + 4]


def test_parity_passes(sharded: Bundle) -> None:
    assert run_parity(sharded, threads=1).verdict == "PASSED"


def test_sessions_share_one_copy_of_all_files(sharded: Bundle) -> None:
    paths = tuple(map(sharded.file, SHARDS))
    sessions = []
    for name in WEIGHTY:
        spec = sharded.manifest.graphs[name]
        session = CPU.open(sharded.file(spec.file), spec, Settings(threads=1, weights=paths))
        assert isinstance(session, OrtSession)
        sessions.append(session)
    first = sessions[0]._weights
    assert all(session._weights is first for session in sessions)
    stored = {name for path in paths for name in safetensors.numpy.load_file(path)}
    assert first.values.keys() == stored


def test_bisect_finds_nothing_and_reads_every_block(sharded: Bundle) -> None:
    report = run_bisect(sharded, Options("reference", threads=1, case="odd"))
    assert report.verdict == "PASSED"
    layers = layer_errors(sharded, "reference", Settings(threads=1), case="odd")
    assert len(layers) == 3
    assert all(layer.own_relative_l2 is not None and layer.own_relative_l2 < 1e-5 for layer in layers)


# The runtimes that read the files themselves, where they are installed


@pytest.mark.parametrize("module", NATIVE)
def test_native_providers_compute_the_same_bits(whole: Bundle, sharded: Bundle, module: str) -> None:
    pytest.importorskip(NATIVE[module], reason=f"{NATIVE[module]} is not installed")
    provider = importlib.import_module(f"caracal_runtimes.providers.{module}").PROVIDER
    if provider.detect().state == "missing":  # IREE is two packages
        pytest.skip(provider.detect().reason)
    golden = whole.golden()
    feeds = {key: np.asarray(golden.tensor(f"odd/{key}")) for key in ("input_ids", "lengths", "logit_positions")}
    logits = []
    for bundle in (whole, sharded):
        spec = bundle.manifest.graphs["forward"]
        logits += provider.open(bundle.file(spec.file), spec, Settings(threads=1)).run(feeds, ["logits"])
    np.testing.assert_array_equal(logits[1], logits[0], strict=True)
    assert np.linalg.norm(logits[1] - golden.tensor("odd/logits")) < 1e-5 * np.linalg.norm(logits[1])


# What is wrong with a file is said of that file


@pytest.mark.parametrize("name", SHARDS)
def test_a_missing_file_is_named(altered: Path, name: str) -> None:
    (altered / name).unlink()
    with pytest.raises(BundleError, match=f"{name} is missing"):
        Bundle.open(altered, check_hashes=False)


@pytest.mark.parametrize("name", SHARDS)
def test_an_altered_file_is_named(altered: Path, name: str) -> None:
    content = bytearray((altered / name).read_bytes())
    content[-1] ^= 1
    (altered / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"{name} was altered"):
        Bundle.open(altered)


def test_two_files_that_changed_places_are_named(altered: Path) -> None:
    (altered / SHARDS[0]).rename(altered / "kept")
    (altered / SHARDS[1]).rename(altered / SHARDS[0])
    (altered / "kept").rename(altered / SHARDS[1])
    with pytest.raises(BundleError, match=r"part [ab]\.safetensors has .* bytes, the manifest says"):
        Bundle.open(altered, check_hashes=False)


def doubled(parts: dict[str, dict[str, NDArray[Any]]]) -> None:
    parts[SHARDS[2]]["norm.bias"] = parts[SHARDS[0]]["norm.bias"] = next(
        tensors["norm.bias"] for tensors in parts.values() if "norm.bias" in tensors
    )


@pytest.mark.parametrize(
    "use",
    [
        Bundle.parameters,
        lambda bundle: bundle.model(threads=1),
        lambda bundle: bundle.model("reference", threads=1),  # which reads by place and would not notice
    ],
    ids=["parameters", "cpu", "reference"],
)
def test_a_tensor_in_two_files_is_refused(sharded: Bundle, altered: Path, use: Callable[[Bundle], object]) -> None:
    """Which of the two is meant differs between readers, so that they would run different models."""
    parts = {name: safetensors.numpy.load_file(altered / name) for name in SHARDS}
    doubled(parts)
    write_shards(altered, parts)
    with pytest.raises(BundleError, match=r"'norm\.bias' is in part b\.safetensors and again in .*\.safetensors"):
        use(Bundle.open(altered))


def test_a_weight_that_is_in_no_file_is_not_run(altered: Path) -> None:
    manifest = json.loads((altered / "manifest.json").read_text(encoding="utf-8"))
    (altered / SHARDS[1]).unlink()
    manifest["weights"].remove(SHARDS[1])
    del manifest["files"][SHARDS[1]]
    (altered / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(BundleError, match=rf"\.onnx reads '{SHARDS[1]}', which the manifest does not list"):
        Bundle.open(altered).model(threads=1)
