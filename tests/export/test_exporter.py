"""`export_checkpoint`: a whole, described, proven bundle; or an error that says why, and nothing left behind."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors.torch
import torch
from caracal_export import export_checkpoint, exporter, lowerings, weights
from caracal_export.errors import VerificationError
from caracal_export.opsets import retarget
from caracal_export.tracing import GRAPHS
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError, RuntimeToolError
from caracal_runtimes.parity import run_parity
from numpy.typing import NDArray
from onnxscript.onnx_opset import opset18 as op

from caracal import CaracalModel, CheckpointError

GRAPH_FILES = {f"{name}.onnx" for name in GRAPHS}
FILES = {"README.md", "golden.safetensors", "tokenizer.json", "weights.safetensors"} | GRAPH_FILES


@pytest.fixture
def traced_before(monkeypatch: pytest.MonkeyPatch, bundle: Callable[[str], Path]) -> None:
    """`matmul` exports of `checkpoint` take the graphs from its bundle: all but the tracing, in a tenth of the time."""
    folder = bundle("matmul")  # exported before the patch

    def trace(model: CaracalModel, name: str, mixing: str, opset: int, **options: Any) -> ir.Model:
        assert mixing == "matmul"
        return retarget(ir.load(folder / f"{name}.onnx"), opset)

    monkeypatch.setattr(exporter, "trace", trace)


@pytest.fixture
def altered_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of `checkpoint`, to be altered."""
    return Path(shutil.copytree(checkpoint, tmp_path_factory.mktemp("altered") / "tiny"))


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _edit_weight(checkpoint: Path, name: str, edit: Callable[[torch.Tensor], object]) -> None:
    state = safetensors.torch.load_file(checkpoint / "model.safetensors")
    edit(state[name])
    safetensors.torch.save_file(state, checkpoint / "model.safetensors")


# A bundle that is right


@pytest.fixture(scope="module", params=["matmul", "dft"])
def exported(request: pytest.FixtureRequest, bundle: Callable[[str], Path]) -> tuple[str, Path]:
    return request.param, bundle(request.param)


def test_manifest_has_size_and_hash_of_every_file(exported: tuple[str, Path]) -> None:
    _, folder = exported
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert _names(folder) == FILES | {"manifest.json"}
    assert manifest["files"] == {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in _contents(folder).items()
        if name != "manifest.json"
    }


def test_manifest_describes_the_checkpoint(exported: tuple[str, Path], checkpoint: Path) -> None:
    _, folder = exported
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["format"], manifest["format_version"]) == ("caracal-bundle", 4)
    assert manifest["precision"] == "float32"
    assert manifest["weights"] == ["weights.safetensors"]
    assert manifest["tokenizer"] == "tokenizer.json"
    assert manifest["config"] == json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert manifest["source"]["name"] == "tiny"
    assert manifest["source"]["files"] == {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }
    for package in ("torch", "onnx", "onnxruntime", "safetensors"):
        assert manifest["producer"][package] == importlib.metadata.version(package)


def _described(values: Iterable[onnx.ValueInfoProto]) -> list[dict[str, Any]]:
    types = {onnx.TensorProto.FLOAT: "float32", onnx.TensorProto.INT64: "int64"}
    return [
        {
            "name": value.name,
            "dtype": types[value.type.tensor_type.elem_type],
            "shape": [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        }
        for value in values
    ]


def test_manifest_describes_every_graph(exported: tuple[str, Path]) -> None:
    mixing, folder = exported
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    weightless = {"convolve", "convolve_long"}
    assert manifest["graphs"].keys() == set(GRAPHS) == {"forward", "extend", "step", "step_resident"} | weightless
    for name, entry in manifest["graphs"].items():
        graph = onnx.load(folder / f"{name}.onnx", load_external_data=False).graph
        assert entry == {
            "file": f"{name}.onnx",
            "opset": 18,
            "mixing": mixing,
            "inputs": _described(graph.input),
            "outputs": _described(graph.output),
            "operators": dict(Counter(node.op_type for node in graph.node)),
        }
    forward = manifest["graphs"]["forward"]
    assert forward["inputs"] == [
        {"name": "input_ids", "dtype": "int64", "shape": ["batch", "length"]},
        {"name": "lengths", "dtype": "int64", "shape": ["batch"]},
        {"name": "logit_positions", "dtype": "int64", "shape": ["batch", "positions"]},
    ]
    assert forward["outputs"][0] == {"name": "logits", "dtype": "float32", "shape": ["batch", "positions", 97]}


def test_manifest_and_card_say_what_was_verified(exported: tuple[str, Path]) -> None:
    _, folder = exported
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    found, golden = manifest["verification"], manifest["golden"]
    assert found["verdict"] == "PASSED"
    assert found["limit_relative_l2"] == 1e-5
    assert 0 < found["worst_relative_l2"] <= 1e-5
    # Read again token by token: the longest row and the two batches; and the longest row in chunks.
    products = 3
    assert found["comparisons"] == len(golden["cases"]) + 4 + products + len(golden["greedy"])
    assert found["environment"]["onnxruntime"] == importlib.metadata.version("onnxruntime")
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"worst relative L2 {found['worst_relative_l2']:.1e}" in card
    assert "--no-verify" not in card


def test_tokenizer_travels_unaltered(exported: tuple[str, Path], checkpoint: Path, untied_bundle: Path) -> None:
    assert (exported[1] / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert not (untied_bundle / "tokenizer.json").exists()
    assert Bundle.open(untied_bundle).manifest.tokenizer is None


@pytest.mark.parametrize("where", ["-with blanks and ß ü 模型", "[a]*?{b}"])
@pytest.mark.usefixtures("traced_before")
def test_any_folder_name_will_do(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Given relative to the working directory, and run after a move to another place."""
    (tmp_path / where).mkdir()
    shutil.copytree(checkpoint, tmp_path / where / "checkpoint of ü")
    monkeypatch.chdir(tmp_path / where)
    result = export_checkpoint(Path("checkpoint of ü"), where, threads=1)
    assert _names(tmp_path / where) == {"checkpoint of ü", where}
    assert result.report is not None
    assert result.report.verdict == "PASSED"
    monkeypatch.chdir("/")
    moved = tmp_path / "moved ß"
    (tmp_path / where / where).rename(moved)
    assert result.bytes == sum(path.stat().st_size for path in moved.iterdir())
    assert run_parity(Bundle.open(moved), threads=1).verdict == "PASSED"


@pytest.mark.usefixtures("traced_before")
def test_files_get_the_usual_permissions(checkpoint: Path, tmp_path: Path) -> None:
    """Some writers make files that only their owner may read."""
    before = os.umask(0o022)
    try:
        export_checkpoint(checkpoint, tmp_path / "out", threads=1)
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "out").iterdir()} == dict.fromkeys(
        FILES | {"manifest.json"}, oct(0o644)
    )
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("traced_before")
def test_no_verify_writes_a_bundle_that_says_so(checkpoint: Path, tmp_path: Path) -> None:
    result = export_checkpoint(checkpoint, tmp_path / "out", verify=False)
    assert result.report is None
    assert Bundle.open(tmp_path / "out").manifest.verification is None
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Nothing: it was exported with `--no-verify`" in card
    assert "PASSED" not in card


@pytest.mark.usefixtures("traced_before")
def test_progress_reaches_the_end(checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    export_checkpoint(checkpoint, tmp_path / "out", threads=1, progress=lambda *step: seen.append(step))
    stages = list(dict.fromkeys(what.partition(":")[0] for what, _, _ in seen))
    assert stages[0] == "reading the checkpoint"
    assert stages[-1] == "verifying"
    assert seen[-1][1] == seen[-1][2]


# Verification


@pytest.mark.slow
def test_a_slightly_wrong_lowering_is_not_written(
    checkpoint: Path, tmp_path: Path, bundle: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {case.name for case in Bundle.open(bundle("matmul")).manifest.golden.cases}

    right = lowerings.MIXINGS["matmul"]

    def off_by_a_thousandth(pairs: Any, count: Any, *, folded: bool, longest: int | None = None) -> Any:
        whole = right(pairs, count, folded=folded, longest=longest)
        return whole if len(pairs) > 1 else op.Mul(whole, op.Constant(value_float=1.001))  # whole sequences alone

    monkeypatch.setitem(lowerings.MIXINGS, "matmul", off_by_a_thousandth)  # type: ignore[arg-type]
    with pytest.raises(VerificationError) as raised:
        export_checkpoint(checkpoint, tmp_path / "out", threads=1)
    assert raised.value.exit_code == 1
    verdict = str(raised.value)
    assert "FAILED  parity matmul" in verdict
    assert "\n" not in verdict, "one clear line"
    found = re.search(r"worst relative L2 (\S+) \((\w+)\)  limit 1e-05", verdict)
    assert found, verdict
    assert 1e-5 < float(found[1]) < 1e-2
    assert found[2] in names
    assert _names(tmp_path) == set()


@pytest.mark.usefixtures("traced_before")
def test_weights_in_each_others_place_are_not_written(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stored_tensor: Callable[[Path, str], NDArray[Any]],
) -> None:
    write = exporter.write_files

    def swapped(*given: Any, **named: Any) -> None:
        write(*given, **named)
        (folder,) = tmp_path.iterdir()
        a, b = (
            stored_tensor(folder / "weights.safetensors", f"blocks.0.mhf.{name}.weight")
            for name in ("value_proj", "gate_proj")
        )
        a[:], b[:] = b.copy(), a.copy()

    monkeypatch.setattr(exporter, "write_files", swapped)
    with pytest.raises(VerificationError, match=r"blocks\.0\.mhf\.(value|gate)_proj\.weight differs"):
        export_checkpoint(checkpoint, tmp_path / "out", threads=1)
    assert _names(tmp_path) == set()


@pytest.mark.usefixtures("traced_before")
def test_a_wrong_step_that_the_cpu_does_not_run_is_not_written(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = exporter.trace

    def backwards(model: CaracalModel, name: str, *rest: Any, **named: Any) -> ir.Model:
        graph = trace(model, name, *rest, **named)
        if name == "step_resident":
            (node,) = (node for node in graph.graph if node.outputs[0].name == "present.0.recent_v")
            rest_of_them, new = node.inputs
            node.replace_input_with(0, new)
            node.replace_input_with(1, rest_of_them)
        return graph

    monkeypatch.setattr(exporter, "trace", backwards)
    with pytest.raises(VerificationError, match="step_resident does not compute what the checkpoint does"):
        export_checkpoint(checkpoint, tmp_path / "out", threads=1)
    assert _names(tmp_path) == set()


@pytest.mark.usefixtures("traced_before")
def test_an_invalid_graph_is_not_written(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = ir.save

    def misspelt(model: ir.Model, path: Path) -> None:
        next(iter(model.graph)).op_type = "Conztant"
        save(model, path)

    monkeypatch.setattr(ir, "save", misspelt)
    with pytest.raises(VerificationError, match=r"not valid ONNX.*Conztant"):
        export_checkpoint(checkpoint, tmp_path / "out", verify=False)
    assert _names(tmp_path) == set()


@pytest.mark.usefixtures("traced_before")
def test_a_verification_that_could_not_run_is_no_mismatch(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """'Not reached' lies between right and wrong: another exit code, and no claim about the numbers."""
    import onnxruntime

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the library is broken")

    monkeypatch.setattr(onnxruntime, "InferenceSession", broken)
    with pytest.raises(RuntimeToolError, match="the library is broken") as raised:
        export_checkpoint(checkpoint, tmp_path / "out", threads=1)
    assert _names(tmp_path) == set()
    assert raised.value.exit_code == 3
    assert "does not compute" not in str(raised.value)


# Input that is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixing": "fft"}, "--mixing must be .*'fft'"),
        ({"opset": 16}, "--opset must be from 17 to 23, found 16"),
        ({"opset": 24}, "--opset must be from 17 to 23, found 24"),
        ({"threads": -1}, "--threads must be .*-1"),
        ({"threads": 5000}, "--threads must be .*5000"),
        ({"lags": 0}, "lags must be a power of two of at least 2, found 0"),
        ({"lags": 1}, "lags must be .* found 1"),
        ({"lags": 12}, "lags must be .* found 12"),
        ({"lags": -8}, "lags must be .* found -8"),
    ],
)
@pytest.mark.usefixtures("traced_before")
def test_bad_arguments_are_bad_input(checkpoint: Path, tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as raised:
        export_checkpoint(checkpoint, tmp_path / "out", **arguments)
    assert raised.value.exit_code == 2
    assert _names(tmp_path) == set()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(altered_checkpoint: Path, tmp_path: Path, value: float) -> None:
    name = "blocks.1.mhf.out_proj.weight"
    _edit_weight(altered_checkpoint, name, lambda weight: weight[3, 5:7].fill_(value))
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} .*2 of 1024 values"):
        export_checkpoint(altered_checkpoint, tmp_path / "out")
    assert _names(tmp_path) == set()


@pytest.mark.slow
@pytest.mark.parametrize("module", ["blocks.1.mhf.value_proj", "blocks.2.ffn.down_proj"])
def test_a_forward_pass_that_overflows_names_the_first_module(
    altered_checkpoint: Path, tmp_path: Path, module: str
) -> None:
    _edit_weight(altered_checkpoint, f"{module}.weight", lambda weight: weight.fill_(3e38))
    # Inputs large enough that the products overflow in this module and not in the one after it.
    _edit_weight(altered_checkpoint, f"{module.rpartition('.')[0]}.norm.weight", lambda weight: weight.mul_(10))
    with pytest.raises(
        InputError, match=rf"NaN or infinite.*first seen in the output of {re.escape(module)} "
    ) as raised:
        export_checkpoint(altered_checkpoint, tmp_path / "out")
    assert raised.value.exit_code == 2
    assert _names(tmp_path) == set()


def test_a_tokenizer_of_a_larger_vocabulary_is_refused(
    altered_checkpoint: Path, tmp_path: Path, tokenizer_json: Callable[[int], str]
) -> None:
    (altered_checkpoint / "tokenizer.json").write_text(tokenizer_json(98), encoding="utf-8")
    with pytest.raises(InputError, match="token ids up to 97, the model's vocab_size is 97"):
        export_checkpoint(altered_checkpoint, tmp_path / "out")
    assert _names(tmp_path) == set()


@pytest.mark.parametrize("text", ["", "{}", '{"version": "1.0", "model": {"type": "WordLevel"', "\x00\xff"])
def test_a_broken_tokenizer_is_refused(altered_checkpoint: Path, tmp_path: Path, text: str) -> None:
    (altered_checkpoint / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"tokenizer\.json is no tokenizer"):
        export_checkpoint(altered_checkpoint, tmp_path / "out")
    assert _names(tmp_path) == set()


def test_a_disk_without_room_is_refused_beforehand(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"needs about \d+ MB, the disk has 1 MB free"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert _names(tmp_path) == set()


# The target


@pytest.mark.usefixtures("traced_before")
def test_overwrite_replaces_a_bundle(checkpoint: Path, tmp_path: Path, untied_bundle: Path) -> None:
    shutil.copytree(untied_bundle, tmp_path / "out")
    export_checkpoint(checkpoint, tmp_path / "out", overwrite=True, threads=1)
    assert _names(tmp_path) == {"out"}
    assert _names(tmp_path / "out") == FILES | {"manifest.json"}
    assert Bundle.open(tmp_path / "out").manifest.config["tie_word_embeddings"] is True


def test_the_checkpoint_is_never_the_output(altered_checkpoint: Path) -> None:
    before = _contents(altered_checkpoint)
    with pytest.raises(InputError, match="is no bundle"):
        export_checkpoint(altered_checkpoint, altered_checkpoint, overwrite=True)
    assert _contents(altered_checkpoint) == before


@pytest.mark.usefixtures("traced_before")
def test_a_failed_overwrite_leaves_the_old_bundle(
    checkpoint: Path, tmp_path: Path, untied_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(untied_bundle, tmp_path / "out")
    before = _contents(tmp_path / "out")

    def fail(*args: object) -> int:
        raise VerificationError("wrong")

    monkeypatch.setattr(weights, "compare_weights", fail)
    with pytest.raises(VerificationError):
        export_checkpoint(checkpoint, tmp_path / "out", overwrite=True)
    assert _contents(tmp_path / "out") == before
    assert _names(tmp_path) == {"out"}


# Interrupted


@pytest.fixture
def file_size_limit() -> Iterator[Callable[[int], None]]:
    """`file_size_limit(bytes)`: from then on no file grows beyond, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "stage",
    [
        "recording goldens: one",
        "tracing the graphs: forward",
        "tracing the graphs: convolve",
        "verifying: done",
    ],
)
@pytest.mark.usefixtures("traced_before")
def test_a_full_disk_leaves_nothing(
    checkpoint: Path, tmp_path: Path, file_size_limit: Callable[[int], None], stage: str
) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(what: str, done: int, total: int) -> None:
        if what == stage:
            file_size_limit(1000)

    try:
        with pytest.raises(InputError, match=r"cannot write .*nothing was changed") as raised:
            export_checkpoint(checkpoint, tmp_path / "out", threads=1, progress=fill)
    finally:
        file_size_limit(soft)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)
    assert _names(tmp_path) == set()


# The whole way at once


def test_the_numbers_of_a_bundle_are_the_checkpoints(exported: tuple[str, Path], model: CaracalModel) -> None:
    """The whole way at once: a bundle opened by the runtime gives the logits of the model that was saved."""
    ids = np.random.default_rng(0).integers(0, 97, (2, 33))
    with torch.no_grad():
        want = model(torch.from_numpy(ids)).numpy()
    got = Bundle.open(exported[1]).model(threads=1).forward(ids)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) <= 1e-5
