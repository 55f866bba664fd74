"""`caracal quantize`: a bundle in fewer bits that is proven, and nothing by halves where the proof fails."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors
from caracal_export.errors import VerificationError
from caracal_export.graph_files import refer_to_weights
from caracal_export.precision import formats, quantizing, rewriting
from caracal_export.precision.plan import INT4_OPERATORS, Planned, Precision, roles_of
from caracal_export.precision.quantizing import Quantized, StoredWeights, quantize_bundle
from caracal_export.weight_files import WeightFile, plan_files, write_files
from caracal_runtimes import replay
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import WEIGHTLESS, Manifest
from caracal_runtimes.safetensors_file import SafetensorsFile, TensorHead, width_of
from caracal_runtimes.tolerances import tolerance_for
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from running import Ran, refused
from tokenizers import Tokenizer, pre_tokenizers

Array = NDArray[Any]
PRECISIONS = {
    **{name: Precision(name) for name in ("float16", "bfloat16", "int8", "int4")},
    "nbits": Precision("int4", block=16, operator=INT4_OPERATORS[1]),
}
every = pytest.mark.parametrize("name", PRECISIONS)
DTYPES = {"float16": "F16", "bfloat16": "BF16", "int8": "I8", "int4": "U8"}


@pytest.fixture(scope="session")
def quantized(bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Quantized]:
    """`quantized(name)`: the `matmul` bundle in one of `PRECISIONS`, verified. Read only."""
    made: dict[str, Quantized] = {}

    def quantize(name: str) -> Quantized:
        if name not in made:
            target = tmp_path_factory.mktemp("quantized") / name
            made[name] = quantize_bundle(Bundle.open(bundle("matmul")), target, PRECISIONS[name], threads=1)
        return made[name]

    return quantize


@pytest.fixture(scope="session")
def readable(
    bundle: Callable[[str], Path], rehash: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The `matmul` bundle with a tokenizer that reads words between blanks, `w0` to `w96`. Read only."""
    path = Path(shutil.copytree(bundle("matmul"), tmp_path_factory.mktemp("readable") / "b"))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    rehash(path)
    return path


def tensors_of(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every stored tensor, as the library of the format reads them."""
    found = {}
    for path in folder.glob("weights*.safetensors"):
        with safetensors.safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = (part.get_dtype(), part.get_shape())
    return found


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestBundles:
    @every
    def test_it_passed_at_its_level(
        self, quantized: Callable[[str], Quantized], bundle: Callable[[str], Path], name: str
    ) -> None:
        done, precision = quantized(name), PRECISIONS[name].name
        assert done.report is not None
        (row,) = done.report.providers
        assert (done.report.verdict, done.report.precision, row.level) == ("PASSED", precision, "strict")
        assert row.tolerance == tolerance_for("strict", precision)
        assert len(row.cases) > 10
        assert all(result.verdict == "PASSED" for result in row.results)
        # Fewer bits cost something: a report of float32 figures would be that of another bundle.
        worst = max(case.metrics.relative_l2 for case in row.cases if case.metrics is not None)
        assert worst > 1e-4
        before, after = ((path / "weights.safetensors").stat().st_size for path in (bundle("matmul"), done.path))
        assert after < before
        assert done.bytes == sum(path.stat().st_size for path in done.path.iterdir())

    @every
    def test_the_manifest_says_what_is_where(
        self, quantized: Callable[[str], Quantized], bundle: Callable[[str], Path], name: str
    ) -> None:
        source, opened, precision = Bundle.open(bundle("matmul")), Bundle.open(quantized(name).path), PRECISIONS[name]
        text = (opened.path / "manifest.json").read_text(encoding="utf-8")
        manifest = opened.manifest
        assert manifest.to_json() == text
        assert Manifest.from_json(text) == manifest
        found = manifest.quantization
        assert found is not None
        assert (manifest.precision, found.source, found.parameters) == (
            precision.name,
            source.id(),
            source.parameters(),
        )
        assert opened.parameters() == source.parameters()
        assert found.block_size == (precision.block if precision.name == "int4" else None)
        assert opened.id() != source.id()
        assert (manifest.config, manifest.golden, manifest.source) == (
            source.manifest.config,
            source.manifest.golden,
            source.manifest.source,
        )
        assert manifest.verification is not None
        assert manifest.verification["verdict"] == "PASSED"
        assert manifest.files.keys() == {each.name for each in opened.path.iterdir()} - {"manifest.json"}

        before, after = tensors_of(source.path), tensors_of(opened.path)
        for weight, kind in found.weights.items():
            assert after[weight][0] == DTYPES[kind], weight
        scales = {f"{weight}_scale" for weight, kind in found.weights.items() if kind.startswith("int")}
        assert scales <= after.keys()
        for weight in after.keys() - found.weights.keys() - scales:
            assert after[weight] == before[weight] == ("F32", before[weight][1])
            assert len(before[weight][1]) != 2 or "conv" in weight, "a matrix that was forgotten"
        assert set(found.weights.values()) == {precision.name} | ({"int8"} if precision.name == "int4" else set())

    @every
    def test_graphs_read_what_is_stored_and_nothing_else(
        self, quantized: Callable[[str], Quantized], bundle: Callable[[str], Path], name: str
    ) -> None:
        before, after = bundle("matmul"), quantized(name).path
        manifest = Bundle.open(after).manifest
        told = manifest.quantization
        assert told is not None
        read: set[str] = set()
        for graph, spec in manifest.graphs.items():
            if graph in WEIGHTLESS:
                assert (after / spec.file).read_bytes() == (before / spec.file).read_bytes()
                continue
            model = onnx.load(after / spec.file, load_external_data=False)
            plain = Bundle.open(before).manifest.graphs[graph]
            assert (spec.inputs, spec.outputs, spec.mixing) == (plain.inputs, plain.outputs, plain.mixing)
            assert spec.opset == (21 if name == "int4" else 18)
            names = [node.name for node in model.graph.node]
            assert len(names) == len(set(names)) == sum(spec.operators.values())
            for tensor in model.graph.initializer:
                assert tensor.data_location == onnx.TensorProto.EXTERNAL
                assert (tensor.data_type == onnx.TensorProto.FLOAT) == (tensor.name not in told.weights), tensor.name
                read.add(tensor.name)
        assert read == tensors_of(after).keys()
        for same in ("golden.safetensors", "tokenizer.json"):
            assert (after / same).read_bytes() == (before / same).read_bytes()

    @every
    def test_the_card(self, quantized: Callable[[str], Quantized], name: str) -> None:
        done, precision = quantized(name), PRECISIONS[name].name
        card = (done.path / "README.md").read_text(encoding="utf-8")
        assert f", {precision}. Source weights" in card
        assert "Every stored weight was compared with the nearest that its format has to the float32 one" in card
        assert "Against float32: KL" in card
        assert "--no-verify" not in card

    @every
    def test_every_command_runs_it(
        self, quantized: Callable[[str], Quantized], caracal: Callable[..., Ran], name: str, tmp_path: Path
    ) -> None:
        path = quantized(name).path
        before = {each.name: each.read_bytes() for each in path.iterdir()}
        (tmp_path / "text").write_text("1 2 3 4 5 6", encoding="utf-8")
        for arguments, word in (
            (["info", path], PRECISIONS[name].name),
            (["parity", path, "--threads", 1], f"PASSED  parity matmul {PRECISIONS[name].name} on cpu"),
            (["generate", path, "--ids", "1,2,3", "-n", 12, "--threads", 1], ""),
            (["score", path, tmp_path / "text", "--ids", "--threads", 1], ""),
            (["bench", path, "--threads", 1, "--contexts", 16, "-n", 9, "--repeats", 1], ""),
        ):
            ran = caracal(*arguments)
            assert ran.code == 0, ran.err
            assert word in ran.out
        assert before == {each.name: each.read_bytes() for each in path.iterdir()}

    @every
    def test_steps_agree_with_whole_passes(self, quantized: Callable[[str], Quantized], name: str) -> None:
        model = Bundle.open(quantized(name).path).model(threads=1)
        ids = np.random.default_rng(3).integers(0, 97, 40)
        whole = model.forward(ids[None], np.arange(40)[None])[0]
        stepped = replay.by_steps(model.graphs, [ids.tolist()], None)
        assert len(stepped) == 21
        got, whole = np.stack([*stepped.values()]), whole[[place for _, place in stepped]]
        # The same weights: what a byte of activations is rounded to may turn on the order of float32 sums, no more.
        limit = {"int8": 2e-2, "float16": 2e-3}.get(name, 1e-5)
        assert np.linalg.norm(got - whole) / np.linalg.norm(whole) < limit

    def test_int4_leaves_activations_as_they_are(self, quantized: Callable[[str], Quantized]) -> None:
        """By itself ONNX Runtime rounds them to 8 bits where it finds weights of 4, which nobody asked for."""
        opened = Bundle.open(quantized("int4").path)
        feeds = {
            "input_ids": np.arange(20)[None] * 3 % 97,
            "lengths": np.array([20]),
            "logit_positions": np.arange(20)[None],
        }
        found = {}
        for level in "14":
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", level)
            session = onnxruntime.InferenceSession(str(opened.path / "forward.onnx"), options)
            found[level] = session.run(["logits"], feeds)[0]

        def off(logits: Array, level: str) -> float:
            return float(np.linalg.norm(logits - found[level]) / np.linalg.norm(found[level]))

        exact, fast = (
            opened.model(threads=1, fast=fast).forward(feeds["input_ids"], feeds["logit_positions"])
            for fast in (False, True)
        )
        assert off(exact, "1") < 1e-6
        assert off(fast, "4") < 1e-6
        assert off(exact, "4") > 1e-3

    def test_a_row_of_int8_does_not_depend_on_the_others(self, quantized: Callable[[str], Quantized]) -> None:
        model = Bundle.open(quantized("int8").path).model(threads=1)
        rng = np.random.default_rng(4)
        ids, positions = rng.integers(0, 97, (3, 20)), np.tile(np.arange(20), (3, 1))
        want = model.forward(ids, positions)
        others = ids.copy()
        others[1:] = rng.integers(0, 97, (2, 20))
        np.testing.assert_array_equal(model.forward(others, positions)[0], want[0])
        later = ids.copy()
        later[:, 12:] = rng.integers(0, 97, (3, 8))
        got = model.forward(later, positions)
        assert not np.allclose(got[:, 12:], want[:, 12:])
        # The FFT rounds with all tokens in it, and so may a byte; a factor of all tokens would show as much more.
        assert np.linalg.norm(got[:, :12] - want[:, :12]) / np.linalg.norm(want[:, :12]) < 1e-2

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["bfloat16", "int8", "nbits"])
    def test_a_head_of_its_own_and_no_tokenizer(self, untied_bundle: Path, tmp_path: Path, name: str) -> None:
        done = quantize_bundle(Bundle.open(untied_bundle), tmp_path / "b", PRECISIONS[name], threads=1)
        assert done.report is not None
        assert done.report.verdict == "PASSED"
        manifest = Bundle.open(tmp_path / "b").manifest
        assert manifest.quantization is not None
        assert {"embed_tokens.weight", "lm_head.weight"} <= manifest.quantization.weights.keys()
        assert manifest.tokenizer is None

    def test_shards(self, bundle: Callable[[str], Path], quantized: Callable[[str], Quantized], tmp_path: Path) -> None:
        source = Bundle.open(bundle("matmul"))
        quantize_bundle(source, tmp_path / "b", PRECISIONS["int8"], threads=1, max_shard_size=12_000)
        split, whole = Bundle.open(tmp_path / "b"), Bundle.open(quantized("int8").path)
        assert len(split.manifest.weights) > 2
        assert all((split.path / name).stat().st_size <= 12_000 for name in split.manifest.weights)
        a, b = split.weights(), whole.weights()
        assert a.holders.keys() == b.holders.keys()
        assert all(np.array_equal(a.stored(name), b.stored(name)) for name in a.holders)

    def test_the_same_twice(
        self, bundle: Callable[[str], Path], quantized: Callable[[str], Quantized], tmp_path: Path
    ) -> None:
        quantize_bundle(Bundle.open(bundle("matmul")), tmp_path / "b", PRECISIONS["nbits"], verify=False)
        first, second = Bundle.open(quantized("nbits").path).manifest, Bundle.open(tmp_path / "b").manifest
        assert first.quantization == second.quantization
        for name in first.files.keys() - {"README.md"}:
            assert first.files[name] == second.files[name], name

    def test_an_unverified_one_says_so(
        self, bundle: Callable[[str], Path], caracal: Callable[..., Ran], tmp_path: Path
    ) -> None:
        target = tmp_path / "b"
        ran = caracal("quantize", bundle("matmul"), "-o", target, "--precision", "bf16", "--no-verify")
        assert ran.code == 0, ran.err
        assert f"NOT RUN  verification  skipped by --no-verify; run: caracal parity {target}" in ran.out
        assert Bundle.open(target).manifest.verification is None
        assert "Nothing: it was exported with `--no-verify`." in (target / "README.md").read_text(encoding="utf-8")

    def test_the_command_says_what_was_found(
        self, bundle: Callable[[str], Path], caracal: Callable[..., Ran], tmp_path: Path
    ) -> None:
        target = tmp_path / "b"
        ran = caracal("quantize", bundle("matmul"), "-o", target, "--precision", "FP16", "--threads", 1)
        assert ran.code == 0, ran.err
        assert ran.out.startswith(f"{target}: float16, ")
        assert "PASSED  parity matmul float16 on cpu  worst relative L2" in ran.out
        assert listed(tmp_path) == ["b"]

    def test_it_may_replace_its_source(
        self, bundle: Callable[[str], Path], copy_bundle: Callable[[Path], Path], caracal: Callable[..., Ran]
    ) -> None:
        path = copy_bundle(bundle("matmul"))
        command = ("quantize", path, "-o", path, "--precision", "bf16", "--threads", 1)
        refused(caracal(*command), f"caracal: quantize: {path} exists; pass --overwrite")
        assert Bundle.open(path).manifest.precision == "float32"
        assert caracal(*command, "--overwrite").code == 0
        assert Bundle.open(path).manifest.precision == "bfloat16"
        assert listed(path.parent) == [path.name]


class TestRefused:
    """One line, exit code 2, and nothing written."""

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--precision", "int3"], ["--precision must be one of", "'int3'"]),
            (["--precision", ""], ["--precision must be one of"]),
            (["--precision", "float32"], ["the bundle is float32 already"]),
            (["--precision", "fp32", "--keep", "x"], ["--keep is about weights in fewer bits"]),
            (["--precision", "int8", "--block-size", "32"], ["--block-size is about int4, found --precision int8"]),
            (["--precision", "bf16", "--int4-operator", "MatMulNBits"], ["--int4-operator is about int4", "bfloat16"]),
            (["--precision", "int4", "--block-size", "20"], ["--block-size must be 16, 32, 64, 128 or 256, found 20"]),
            (["--precision", "int4", "--block-size", "0"], ["--block-size must be", "found 0"]),
            (["--precision", "int4", "--int4-operator", "MatMul"], ["--int4-operator must be one of", "'MatMul'"]),
            (["--precision", "int8", "--max-kl", "nan"], ["--max-kl: expected a number of nats above 0", "nan"]),
            (["--precision", "int8", "--max-kl", "0"], ["--max-kl: expected a number of nats above 0", "0.0"]),
            (["--precision", "int8", "--max-kl", "-1"], ["--max-kl: expected a number of nats above 0", "-1.0"]),
            (["--precision", "int8", "--max-kl", "inf"], ["--max-kl: expected a number of nats above 0", "inf"]),
            (["--precision", "int8", "--calibration", "-"], ["--calibration is the text for --max-kl"]),
            (["--precision", "int8", "--max-kl", "1", "--calibration", "/no/such"], ["no text file at '/no/such'"]),
            (["--precision", "int8", "--keep", "blocks.7.*"], ["--keep: 'blocks.7.*' fits no weight that int8"]),
            (["--precision", "int8", "--keep", "blocks.0.*", "--keep", "no"], ["--keep: 'no' fits no weight"]),
            (["--precision", "int8", "--keep", "*"], ["--keep leaves no weight to store as int8"]),
            (["--precision", "int8", "--threads", "-1"], ["threads"]),
            (["--precision", "int8", "--max-shard-size", "10"], ["--max-shard-size: expected at least"]),
            (["--precision", "int8", "--max-kl", "1", "--threads", "-1"], ["threads"]),
            (
                ["--precision", "int8", "--max-kl", "1", "--max-shard-size", "10"],
                ["--max-shard-size: expected at least"],
            ),
        ],
        ids=lambda value: " ".join(value) if value and value[0].startswith("--p") else "",
    )
    def test_arguments(
        self,
        bundle: Callable[[str], Path],
        caracal: Callable[..., Ran],
        tmp_path: Path,
        arguments: list[str],
        words: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("caracal_export.precision.mixing_precisions.measure", pytest.fail)  # takes minutes for some
        refused(caracal("quantize", bundle("matmul"), "-o", tmp_path / "b", *arguments), *words)
        assert listed(tmp_path) == []

    @pytest.mark.parametrize("text", ["", "\n", "w1"])
    def test_a_text_of_too_few_tokens(
        self, bundle: Callable[[str], Path], caracal: Callable[..., Ran], tmp_path: Path, text: str
    ) -> None:
        (tmp_path / "text").write_text(text, encoding="utf-8")
        command = ["quantize", bundle("matmul"), "-o", tmp_path / "b", "--precision", "int8", "--max-kl", "1"]
        ran = caracal(*command, "--calibration", tmp_path / "text")
        refused(ran, "calibration: expected a text of at least 2 tokens, found")
        assert listed(tmp_path) == ["text"]

    def test_no_tokenizer_and_no_passage(
        self, untied_bundle: Path, caracal: Callable[..., Ran], tmp_path: Path
    ) -> None:
        command = ["quantize", untied_bundle, "-o", tmp_path / "b", "--precision", "int8", "--max-kl", "1"]
        refused(
            caracal(*command), "calibration: the bundle has no recorded passage, since it has no tokenizer", "--keep"
        )
        (tmp_path / "text").write_text("w1 w2 w3", encoding="utf-8")
        refused(caracal(*command, "--calibration", tmp_path / "text"), "no tokenizer.json")
        assert listed(tmp_path) == ["text"]

    def test_a_quantized_bundle(
        self, quantized: Callable[[str], Quantized], caracal: Callable[..., Ran], tmp_path: Path
    ) -> None:
        """What was rounded must not be rounded again, nor be taken for a checkpoint."""
        path = quantized("int8").path
        for name in ("int8", "int4", "fp32"):
            ran = caracal("quantize", path, "-o", tmp_path / "b", "--precision", name)
            refused(ran, "quantize: expected a float32 bundle, found int8")
        refused(caracal("convert", path, "-o", tmp_path / "b"), "int8")
        assert listed(tmp_path) == []

    def test_targets_that_are_there(
        self,
        bundle: Callable[[str], Path],
        quantized: Callable[[str], Quantized],
        caracal: Callable[..., Ran],
        tmp_path: Path,
    ) -> None:
        target = quantized("int8").path
        before = (target / "manifest.json").read_bytes()
        refused(caracal("quantize", bundle("matmul"), "-o", target, "--precision", "bf16"), "exists; pass --overwrite")
        assert (target / "manifest.json").read_bytes() == before
        (tmp_path / "notes").mkdir()
        (tmp_path / "notes" / "mine.txt").write_text("x", encoding="utf-8")
        ran = caracal("quantize", bundle("matmul"), "-o", tmp_path / "notes", "--precision", "bf16", "--overwrite")
        assert (ran.code, ran.out) == (2, "")
        assert listed(tmp_path / "notes") == ["mine.txt"]

    def test_what_is_no_bundle(self, checkpoint: Path, caracal: Callable[..., Ran], tmp_path: Path) -> None:
        for path, word in ((checkpoint, "looks like a checkpoint"), (tmp_path / "no", "nothing at")):
            refused(caracal("quantize", path, "-o", tmp_path / "b", "--precision", "int8"), word)
        assert listed(tmp_path) == []

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("float16", 7e4, "float16 ends at 65504"),
            ("int8", math.nan, "NaN or infinite"),
            ("bf16", math.inf, "NaN or inf"),
        ],
    )
    def test_numbers_that_a_format_does_not_have(
        self,
        bundle: Callable[[str], Path],
        copy_bundle: Callable[[Path], Path],
        stored_tensor: Callable[[Path, str], Array],
        rehash: Callable[[Path], None],
        caracal: Callable[..., Ran],
        tmp_path: Path,
        name: str,
        value: float,
        words: str,
    ) -> None:
        path = copy_bundle(bundle("matmul"))
        weight = "blocks.0.ffn.up_proj.weight"
        stored_tensor(path / "weights.safetensors", weight)[3, 4] = value
        rehash(path)
        ran = caracal("quantize", path, "-o", tmp_path / "b", "--precision", name, "--no-verify")
        refused(ran, f"quantize: {weight}: ", words)
        assert not (tmp_path / "b").exists()


# Broken on purpose

Q, K = "blocks.2.swa.q_proj.weight", "blocks.2.swa.k_proj.weight"


def reading(change: Callable[[str, Array], Array]) -> Callable[[StoredWeights, str], Array]:
    plain = StoredWeights.read
    return lambda self, name: change(name, np.array(plain(self, name), order="C"))


def other_code(name: str, tensor: Array) -> Array:
    if name == Q:
        tensor.reshape(-1).view(np.uint8)[5] ^= 1
    return tensor


def other_scale(name: str, tensor: Array) -> Array:
    if name == f"{Q}_scale":
        tensor.reshape(-1)[2] *= np.float32(1 + 3e-7)
    return tensor


def other_bias(name: str, tensor: Array) -> Array:
    if name == "norm.bias":
        tensor[7] += np.float32(1e-6)
    return tensor


def swapped(self: StoredWeights, name: str) -> Array:
    return PLAIN(self, name.replace(Q, "?").replace(K, Q).replace("?", K))


PLAIN = StoredWeights.read


class TestBroken:
    """Each fault is found by the verification, and leaves nothing behind."""

    def attempt(self, path: Path, tmp_path: Path, name: str, words: str) -> VerificationError:
        with pytest.raises(VerificationError, match=words) as caught:
            quantize_bundle(Bundle.open(path), tmp_path / "b", PRECISIONS[name], threads=1)
        assert listed(tmp_path) == []
        return caught.value

    @every
    @pytest.mark.parametrize("fault", [other_code, other_bias])
    def test_an_altered_tensor(
        self,
        bundle: Callable[[str], Path],
        tmp_path: Path,
        name: str,
        fault: Callable[[str, Array], Array],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(StoredWeights, "read", reading(fault))
        words = f"{Q} is not what" if fault is other_code else "norm.bias differs from the float32 bundle's"
        self.attempt(bundle("matmul"), tmp_path, name, words)

    @pytest.mark.parametrize("name", ["int8", "int4", "nbits"])
    def test_an_altered_factor(
        self, bundle: Callable[[str], Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By so little that all codes stay."""
        monkeypatch.setattr(StoredWeights, "read", reading(other_scale))
        self.attempt(bundle("matmul"), tmp_path, name, f"{Q}_scale is not what")

    @every
    def test_swapped_tensors(
        self, bundle: Callable[[str], Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(StoredWeights, "read", swapped)
        self.attempt(bundle("matmul"), tmp_path, name, "k_proj.weight is not what")

    @pytest.mark.parametrize("place", ["_zero_point", "_step", "_stored", "_half", "Mul"])
    def test_a_wrong_graph(
        self, bundle: Callable[[str], Path], tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A zero point that is off by one, a step of another size, another weight, a factor that is left out."""
        graph = rewriting._Graph
        add, quantize, stored = graph._add, graph._quantized, graph._stored

        def constant(value: Any) -> Callable[[Any], ir.Value]:
            return lambda self: self._constant(f"other{value.dtype}", np.array(value))

        def quantized_rightly(self: Any, node: ir.Node, x: ir.Value) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(graph, place, plain)
                return quantize(self, node, x)

        def another(self: Any, planned: Planned) -> list[ir.Value]:
            values = stored(self, planned)
            return [*values[:-1], stored(self, OTHERS[Q])[-1]] if planned.stored_as == K else values

        def without(
            self: Any, node: ir.Node, op_type: str, inputs: list[ir.Value], *rest: Any, **more: Any
        ) -> ir.Value:
            if op_type == "Mul" and str(inputs[-1].name).endswith("_scale"):
                op_type, inputs = "Identity", inputs[:1]
            return add(self, node, op_type, inputs, *rest, **more)

        name = "int8"
        if place in ("_zero_point", "_step"):
            plain = getattr(graph, place)
            monkeypatch.setattr(
                graph, place, constant(np.uint8(129) if place == "_zero_point" else np.float32(1 / 126))
            )
            monkeypatch.setattr(graph, "_quantized", quantized_rightly)
        elif place == "_stored":
            source = Bundle.open(bundle("matmul"))
            OTHERS[Q] = Planned(Q, Q, formats.Int8(), "product", source.weights().holders[Q].entries[Q].shape)
            monkeypatch.setattr(graph, place, another)
        elif place == "_half":
            name = "float16"
            monkeypatch.setattr(
                graph, place, lambda self, node, x: (self._cast(node, add(self, node, "Neg", [x]), 10),)
            )
        else:
            monkeypatch.setattr(graph, "_add", without)
        words = "which reads .* is .* from what the stored weight gives"
        self.attempt(bundle("matmul"), tmp_path, name, words)

    @pytest.mark.parametrize("name", ["float16", "int8", "int4"])
    def test_a_graph_that_reads_the_wrong_place(
        self, bundle: Callable[[str], Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def turned(model: ir.Model, files: Sequence[WeightFile], folder: Path) -> None:
            first = files[0].tensors
            refer_to_weights(model, [WeightFile("weights.safetensors", 0, {**first, Q: first[K], K: first[Q]})], folder)

        monkeypatch.setattr(quantizing, "refer_to_weights", turned)
        self.attempt(bundle("matmul"), tmp_path, name, "which reads .* from what the stored weight gives")

    def test_a_fault_beside_the_products(
        self, bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two biases that change places are seen by the goldens alone."""

        def turned(model: ir.Model, files: Sequence[WeightFile], folder: Path) -> None:
            first = files[0].tensors
            a, b = "blocks.2.swa.v_proj.bias", "blocks.2.swa.out_proj.bias"
            refer_to_weights(model, [WeightFile("weights.safetensors", 0, {**first, a: first[b], b: first[a]})], folder)

        monkeypatch.setattr(quantizing, "refer_to_weights", turned)
        error = self.attempt(
            bundle("matmul"), tmp_path, "float16", "quantize: float16 costs this model more than its level"
        )
        assert error.report is not None
        assert error.report.verdict == "FAILED"

    def test_a_weight_that_a_format_does_not_fit(
        self, bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(formats.Int8, "most_error", 1e-3)
        self.attempt(bundle("matmul"), tmp_path, "int8", "from itself .relative L2, at most 1e-03.: .* --keep ")


OTHERS: dict[str, Planned] = {}


READ_FIRST = "*.[vgukq]*_proj.weight"  # value and gate, up and gate, q, k and v


@pytest.fixture
def with_outlier(
    bundle: Callable[[str], Path],
    copy_bundle: Callable[[Path], Path],
    stored_tensor: Callable[[Path, str], Array],
    rehash: Callable[[Path], None],
) -> Path:
    """The same function, with one channel a thousand times larger in weights and as much smaller in front of them."""
    path = copy_bundle(bundle("matmul"))
    weights = path / "weights.safetensors"
    for block, part in ((0, "mhf"), (0, "ffn"), (1, "mhf"), (1, "ffn"), (2, "swa"), (2, "ffn")):
        for name in SafetensorsFile.open(weights).entries:
            if name.startswith(f"blocks.{block}.{part}.norm."):
                stored_tensor(weights, name)[5] *= np.float32(1e-3)
            elif name.startswith(f"blocks.{block}.{part}.") and fnmatchcase(name, READ_FIRST):
                stored_tensor(weights, name)[5] *= np.float32(1e3)
    rehash(path)
    return path


@pytest.mark.slow
def test_a_missed_level_writes_nothing(with_outlier: Path, caracal: Callable[..., Ran], tmp_path: Path) -> None:
    command = ["quantize", with_outlier, "-o", tmp_path / "b", "--precision", "int8", "--threads", 1]
    ran = caracal(*command)
    assert ran.code == 1
    assert "FAILED  parity matmul int8 on cpu" in ran.out
    (message,) = [line for line in ran.err.splitlines() if not line.endswith(" ...")]
    assert "quantize: int8 costs this model more than its level allows, nothing was written" in message
    assert not (tmp_path / "b").exists()
    kept = caracal(*command, "--keep", READ_FIRST)
    assert kept.code == 0, kept.err
    told = Bundle.open(tmp_path / "b").manifest.quantization
    assert told is not None
    assert not [name for name in told.weights if fnmatchcase(name, READ_FIRST)]
    assert "blocks.0.ffn.down_proj.weight" in told.weights


# Files of several dtypes

HEADS = st.dictionaries(
    st.text("abcxyz.", min_size=1, max_size=6),
    st.tuples(
        st.sampled_from(["F32", "F16", "BF16", "I8", "U8", "I64"]), st.lists(st.integers(0, 9), max_size=3).map(tuple)
    ),
    min_size=1,
    max_size=12,
)


@given(HEADS, st.one_of(st.none(), st.integers(1000, 3000)))
def test_every_number_lies_at_a_multiple_of_its_size(heads: dict[str, TensorHead], limit: int | None) -> None:
    """Without gaps: where an odd number of bytes came first, no float behind it could be read in its place."""
    files = plan_files(heads, limit)
    placed = [name for file in files for name in file.tensors]
    assert placed == sorted(heads, key=lambda name: (-width_of(heads[name][0]), name))
    for file in files:
        for name, entry in file.tensors.items():
            assert (entry.dtype, entry.shape) == heads[name]
            assert entry.offset % width_of(entry.dtype) == 0
    assert plan_files(dict(reversed(heads.items())), limit) == files


@pytest.mark.parametrize(
    "wrong",
    [np.zeros(4, np.float32), np.zeros(4, np.float16), np.zeros(5, np.uint16), np.zeros((2, 2), np.uint16)],
    ids=str,
)
def test_a_tensor_of_another_dtype_or_shape_is_not_written(wrong: Array, tmp_path: Path) -> None:
    files = plan_files({"a": ("BF16", (4,))}, None)
    with pytest.raises(InputError, match=r"weights: expected a as uint16 \[4\], found"):
        write_files(files, lambda name: wrong, tmp_path, lambda done, total: None)


# What it needs

NO_TORCH = "raise ImportError('quantize must not need torch')\n"


def run_python(arguments: Sequence[str], path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *sys.path]), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def shadowed(folder: Path, names: Mapping[str, str]) -> Path:
    for name, text in names.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_it_needs_neither_torch_nor_safetensors(readable: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("w1 w2 w3 w4 w5 w6", encoding="utf-8")
    path = shadowed(tmp_path / "path", dict.fromkeys(("torch", "safetensors", "onnxscript", "transformers"), NO_TORCH))
    assert run_python(["-c", "import torch"], path).returncode == 1
    command = ["-m", "caracal_runtimes", "quantize", str(readable), "-o", str(tmp_path / "b")]
    options = ["--precision", "int4", "--max-kl", "5", "--calibration", str(tmp_path / "text"), "--threads", "1"]
    ran = run_python([*command, *options], path)
    assert ran.returncode == 0, ran.stderr
    assert "PASSED  parity matmul int4" in ran.stdout
    assert Bundle.open(tmp_path / "b").manifest.precision == "int4"


@pytest.mark.parametrize("package", ["onnx", "onnx_ir", "onnxruntime"])
def test_what_is_missing_is_said(package: str, tmp_path: Path) -> None:
    code = (
        "import importlib.util, sys\nfrom caracal_runtimes.cli import main\n"
        f"class Blocked:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}: raise ImportError(name)\n"
        f"find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *rest: None if name == {package!r} else find(name, *rest)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "sys.exit(main(['quantize', 'nowhere', '-o', 'b', '--precision', 'int8']))"
    )
    ran = run_python(["-c", code], tmp_path)
    assert (ran.returncode, ran.stdout) == (3, ""), ran.stderr
    (message,) = ran.stderr.splitlines()
    assert f"missing: {package}; pip install 'caracal-onnx[quantize,cpu]'" in message


# From a checkpoint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--precision", "int3"], "--precision must be one of"),
        (["--keep", "*"], "--keep is about weights in fewer bits; choose them with --precision"),
        (["--max-kl", "0.1"], "--max-kl is about weights in fewer bits"),
        (["--block-size", "32"], "--block-size is about int4, found --precision float32"),
        (["--precision", "int8", "--max-kl", "nan"], "--max-kl: expected a number of nats above 0"),
        (["--precision", "int8", "--calibration", "x"], "--calibration is the text for --max-kl"),
        (["--precision", "int8", "--max-kl", "1", "--calibration", "/no/such"], "no text file at"),
    ],
)
def test_export_refuses_before_it_exports(
    checkpoint: Path, caracal: Callable[..., Ran], tmp_path: Path, arguments: list[str], words: str
) -> None:
    refused(caracal("export", checkpoint, "-o", tmp_path / "b", *arguments), words)
    assert listed(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-kl", "1"], "--max-kl: the checkpoint has no tokenizer.json"),
        (["--max-kl", "1", "--calibration", "TEXT"], "--max-kl: the checkpoint has no tokenizer.json"),
        (["--keep", "blocks.7.*"], "--keep: 'blocks.7.*' fits no weight that int8 would change"),
        (["--keep", "blocks.0.*", "--keep", "no"], "--keep: 'no' fits no weight"),
        (["--keep", "*"], "--keep leaves no weight to store as int8"),
    ],
)
def test_export_refuses_what_the_checkpoint_has_not_before_it_writes(
    untied_checkpoint: Path,
    caracal: Callable[..., Ran],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.setattr("caracal_export.exporter._write_weights", pytest.fail)
    (tmp_path / "TEXT").write_text("w1 w2 w3", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    refused(caracal("export", untied_checkpoint, "-o", "b", "--precision", "int8", *arguments), words)
    assert listed(tmp_path) == ["TEXT"]


def test_export_refuses_a_text_of_too_few_tokens_before_it_writes(
    checkpoint: Path, caracal: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("caracal_export.exporter._write_weights", pytest.fail)
    (tmp_path / "text").write_text("w1", encoding="utf-8")
    command = ["export", checkpoint, "-o", tmp_path / "b", "--precision", "int8", "--max-kl", "1"]
    refused(caracal(*command, "--calibration", tmp_path / "text"), "calibration: expected a text of at least 2 tokens")
    assert listed(tmp_path) == ["text"]


@pytest.mark.parametrize("mixing", ["matmul", "dft"])
def test_a_step_tells_what_every_graph_does_with_a_weight(bundle: Callable[[str], Path], mixing: str) -> None:
    """Which patterns of `--keep` fit is told from that graph alone before an export."""
    path = bundle(mixing)
    graphs = {name: ir.load(path / graph.file) for name, graph in Bundle.open(path).manifest.graphs.items()}
    assert roles_of([graphs["step"]]) == roles_of(graphs.values())


@pytest.mark.slow
def test_export_in_fewer_bits_is_export_and_quantize(
    checkpoint: Path, readable: Path, caracal: Callable[..., Ran], tmp_path: Path
) -> None:
    """With weights of two precisions, chosen by the same measurements."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "tiny"))
    (folder / "tokenizer.json").unlink()
    shutil.copyfile(readable / "tokenizer.json", folder / "tokenizer.json")
    (tmp_path / "text").write_text("w1 w2 w3 w4 w5 w6 w7 w8 w9", encoding="utf-8")
    options = ["--precision", "int4", "--max-kl", "0.02", "--int4-operator", "MatMulNBits", "--no-verify"]
    options += ["--block-size", "16", "--calibration", str(tmp_path / "text")]
    ran = caracal("export", folder, "-o", tmp_path / "a", *options)
    assert ran.code == 0, ran.err
    assert "int4" in ran.out
    assert "weights keep a higher precision: KL " in ran.out
    assert "NOT RUN  verification  skipped by --no-verify" in ran.out
    assert caracal("quantize", readable, "-o", tmp_path / "b", *options).code == 0
    a, b = (Bundle.open(tmp_path / name) for name in "ab")
    assert listed(a.path) == listed(b.path)
    assert a.manifest.quantization is not None
    assert b.manifest.quantization is not None
    assert a.manifest.quantization.weights == b.manifest.quantization.weights
    assert set(a.manifest.quantization.weights.values()) == {"int4", "int8"}
    assert (a.path / "weights.safetensors").read_bytes() == (b.path / "weights.safetensors").read_bytes()
    assert a.manifest.verification is None


def test_a_step_that_is_interrupted_leaves_nothing(
    bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(quantizing, "check_uses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_bundle(Bundle.open(bundle("matmul")), tmp_path / "b", PRECISIONS["int8"], threads=1)
    assert listed(tmp_path) == []
    with pytest.raises(InputError, match="threads"):
        quantize_bundle(Bundle.open(bundle("matmul")), tmp_path / "b", PRECISIONS["int8"], threads=-1)
