"""The command line: results on standard output, one clear line per error, and the exit codes that scripts rely on."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cli import main
from caracal_runtimes.generation import Generated
from caracal_runtimes.model import CausalLM
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.sampling import SamplingOptions
from caracal_runtimes.scoring import Score

Caracal = Callable[..., Any]
# Left alone an untrained model repeats itself; with this penalty no token comes twice.
GREEDY = ("--threads", "1", "--temperature", "0", "--repetition-penalty", "1000", "--ignore-eos")
TEXT = "And God said, Let there be naïve light: 「日本語」"


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    return give


@pytest.fixture
def greedy(model: CausalLM) -> Generated:
    options = SamplingOptions(temperature=0, repetition_penalty=1000)
    (result,) = model.generate(TEXT, max_new_tokens=12, options=options, stop_ids=())
    assert len(set(result.ids)) == 12
    return result


class TestGenerate:
    def test_text(self, caracal: Caracal, exported: Any, greedy: Generated) -> None:
        ran = caracal("generate", exported.bundle, "-p", TEXT, "-n", 12, *GREEDY)
        assert ran == (0, f"{greedy.text}\n", "")

    @pytest.mark.parametrize("form", ["{}", "{} ", "\t{}\n"])
    @pytest.mark.parametrize("separator", [",", " ", ", ", "\n"])
    def test_ids(self, caracal: Caracal, exported: Any, greedy: Generated, separator: str, form: str) -> None:
        ids = form.format(separator.join(map(str, greedy.prompt_ids)))
        ran = caracal("generate", exported.bundle, "--ids", ids, "-n", 12, *GREEDY)
        assert (ran.code, ran.err) == (0, "")
        assert list(map(int, ran.out.split())) == greedy.ids

    def test_prompt_from_a_file_or_standard_input(
        self, caracal: Caracal, exported: Any, greedy: Generated, tmp_path: Path, stdin: Callable[[bytes], None]
    ) -> None:
        (tmp_path / "prompt ü.txt").write_text(TEXT, encoding="utf-8")
        stdin(TEXT.encode())
        for source in (tmp_path / "prompt ü.txt", "-"):
            ran = caracal("generate", exported.bundle, "--prompt-file", source, "-n", 12, *GREEDY)
            assert ran == (0, f"{greedy.text}\n", "")

    @pytest.mark.parametrize("source", ["-p", "--ids"])
    def test_json(self, caracal: Caracal, exported: Any, greedy: Generated, source: str) -> None:
        given = TEXT if source == "-p" else ",".join(map(str, greedy.prompt_ids))
        ran = caracal("generate", exported.bundle, source, given, "-n", 12, "--format", "json", *GREEDY)
        data = json.loads(ran.out, parse_constant=pytest.fail)
        assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
        (result,) = data["results"]
        assert (result["prompt_ids"], result["ids"], result["text"]) == (greedy.prompt_ids, greedy.ids, greedy.text)
        assert result["logprobs"] == pytest.approx(greedy.logprobs)
        assert (result["stopped_by"], data["ep"], data["threads"]) == ("length", "cpu", 1)

    @pytest.mark.parametrize(
        ("argv", "options"),
        [
            ([], {}),
            (["--seed", "5"], {"seed": 5}),
            (["--seed", str(2**64 - 1)], {"seed": 2**64 - 1}),
            (["--temperature", "2.5"], {"temperature": 2.5}),
            (["--top-k", "7"], {"top_k": 7}),
            (["--top-p", "0.3"], {"top_p": 0.3}),
            (["--min-p", "0.2"], {"min_p": 0.2}),
            (["--repetition-penalty", "1.7", "--temperature", "0"], {"repetition_penalty": 1.7, "temperature": 0}),
        ],
    )
    def test_sampling_options(
        self, caracal: Caracal, exported: Any, model: CausalLM, argv: list[str], options: Any
    ) -> None:
        (expected,) = model.generate([0, 5], max_new_tokens=20, options=SamplingOptions(**options), stop_ids=())
        ran = caracal("generate", exported.bundle, "--ids", "0,5", "-n", 20, "--ignore-eos", "--threads", 1, *argv)
        assert list(map(int, ran.out.split())) == expected.ids

    def test_stop(self, caracal: Caracal, exported: Any, greedy: Generated) -> None:
        text = greedy.text
        assert text
        ran = caracal("generate", exported.bundle, "-p", TEXT, "-n", 12, *GREEDY, "--stop", "zz", "--stop", text[4:6])
        assert ran.out == text[: text.find(text[4:6])] + "\n"

    def test_stop_ids_and_the_end_of_text(self, caracal: Caracal, copy: Any, greedy: Generated) -> None:
        """The model's own end is made one of the tokens that come."""
        copy.edit_manifest(lambda data: data["config"].update(eos_token_id=greedy.ids[6]))
        argv = ["generate", copy.path, "--ids", ",".join(map(str, greedy.prompt_ids)), "-n", 12, *GREEDY[:-1]]

        def count(*more: object) -> int:
            return len(caracal(*argv, *more).out.split())

        end, other = greedy.ids.index(greedy.ids[6]) + 1, greedy.ids.index(greedy.ids[3]) + 1
        assert end != other
        assert (count(), count("--ignore-eos")) == (end, 12)
        assert count("--stop-id", greedy.ids[3]) == other
        assert count("--stop-id", greedy.ids[3], "--stop-id", greedy.ids[6]) == min(end, other)
        refused(caracal(*argv, "--stop-id", greedy.ids[3], "--ignore-eos"), 2, "--ignore-eos and --stop-id contradict")

    def test_without_a_tokenizer(self, caracal: Caracal, copy: Any, greedy: Generated) -> None:
        copy.drop_tokenizer()
        ids = ",".join(map(str, greedy.prompt_ids))
        assert caracal("generate", copy.path, "--ids", ids, "-n", 12, *GREEDY).out.split() == [*map(str, greedy.ids)]
        data = json.loads(caracal("generate", copy.path, "--ids", ids, "-n", 1, "--format", "json", *GREEDY).out)
        assert data["results"][0]["text"] is None
        ran = caracal("generate", copy.path, "-p", "God")
        assert (ran.code, ran.out) == (2, "")
        assert "no tokenizer.json" in ran.err
        assert "--ids" in ran.err

    def test_logits_that_are_no_numbers_are_a_finding(self, caracal: Caracal, copy: Any) -> None:
        copy.weight("norm.weight")[0] = np.nan
        copy.rehash()
        ran = caracal("generate", copy.path, "--ids", "1", *GREEDY)
        assert ran.code == 1
        assert "NaN" in ran.err


class TestScore:
    @pytest.fixture
    def expected(self, model: CausalLM) -> Score:
        return model.score(TEXT, context=8)

    def argv(self, exported: Any, file: object, *more: object) -> list[object]:
        return ["score", exported.bundle, file, "--context", 8, "--threads", 1, *more]

    def test_json(self, caracal: Caracal, exported: Any, tmp_path: Path, expected: Score) -> None:
        (tmp_path / "text").write_text(TEXT, encoding="utf-8")
        ran = caracal(*self.argv(exported, tmp_path / "text", "--format", "json"))
        data = json.loads(ran.out, parse_constant=pytest.fail)
        assert ran.code == 0
        for name in ("bits_per_byte", "perplexity", "bits_per_token"):
            assert data[name] == pytest.approx(getattr(expected, name))
        assert (data["tokens"], data["windows"], data["context"]) == (expected.tokens, expected.windows, 8)
        assert (data["text_bytes"], data["ep"], data["threads"]) == (len(TEXT.encode()), "cpu", 1)

    def test_text(self, caracal: Caracal, exported: Any, expected: Score, stdin: Callable[[bytes], None]) -> None:
        stdin(TEXT.encode())
        ran = caracal(*self.argv(exported, "-"))
        lines = ran.out.splitlines()
        assert lines[0] == f"{expected.bits_per_byte:.4f} bits per byte  ({len(TEXT.encode())} bytes)"
        assert lines[1].startswith(f"{expected.perplexity:.3f} perplexity per token  ({expected.tokens} tokens, ")
        assert lines[2].startswith(f"context up to 8 tokens, {expected.windows} window(s)")

    def test_ids(self, caracal: Caracal, exported: Any, model: CausalLM, tmp_path: Path, expected: Score) -> None:
        (tmp_path / "ids").write_text(", ".join(map(str, model.tokenizer.encode(TEXT).ids)))
        ran = caracal(*self.argv(exported, tmp_path / "ids", "--ids", "--format", "json"))
        data = json.loads(ran.out)
        assert data["bits_per_token"] == pytest.approx(expected.bits_per_token)
        assert (data["bits_per_byte"], data["text_bytes"]) == (None, None)
        assert "per byte" not in caracal(*self.argv(exported, tmp_path / "ids", "--ids")).out

    def test_logits_that_are_no_numbers_are_a_finding(
        self, caracal: Caracal, copy: Any, stdin: Callable[[bytes], None]
    ) -> None:
        copy.weight("norm.weight")[0] = np.nan
        copy.rehash()
        stdin(TEXT.encode())
        with np.errstate(invalid="ignore"):
            ran = caracal("score", copy.path, "-")
        assert (ran.code, ran.out) == (1, "")

    @pytest.mark.parametrize("output", ["text", "json"])
    def test_a_text_that_the_model_holds_for_impossible(
        self, caracal: Caracal, copy: Any, stdin: Callable[[bytes], None], output: str
    ) -> None:
        """A perplexity beyond a double is shown, and is JSON that every reader takes."""
        copy.weight("norm.weight")[...] *= 1e5
        copy.rehash()
        stdin(TEXT.encode())
        ran = caracal("score", copy.path, "-", "--format", output, "--threads", 1)
        assert ran.code == 0
        if output == "json":
            data = json.loads(ran.out, parse_constant=pytest.fail)
            assert data["bits_per_token"] > 1100


class TestParity:
    def test_passed(self, caracal: Caracal, exported: Any) -> None:
        ran = caracal("parity", exported.bundle, "--threads", 1)
        lines = ran.out.splitlines()
        assert ran.code == 0
        assert lines[0] == lines[-1]
        assert lines[0].startswith("PASSED  parity matmul float32 on cpu  worst relative L2 ")

    def test_json_to_a_file_and_to_standard_output(self, caracal: Caracal, exported: Any, tmp_path: Path) -> None:
        ran = caracal("parity", exported.bundle, "--threads", 1, "--json", tmp_path / "r.json", "--format", "json")
        shown = json.loads(ran.out, parse_constant=pytest.fail)
        assert (ran.code, shown["verdict"]) == (0, "PASSED")
        assert json.loads((tmp_path / "r.json").read_text(encoding="utf-8")) == shown
        text = caracal("parity", exported.bundle, "--threads", 1, "--json", tmp_path / "s.json").out
        assert text.startswith("PASSED  ")
        assert json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["providers"][0]["level"] == "strict"

    def test_failed(self, caracal: Caracal, copy: Any, tmp_path: Path) -> None:
        copy.weight("norm.bias")[0] += 1
        copy.rehash()
        ran = caracal("parity", copy.path, "--threads", 1, "--json", tmp_path / "r.json")
        assert ran.code == 1
        assert ran.out.splitlines()[-1].startswith("FAILED  ")
        report = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
        assert report["verdict"] == "FAILED"

    @pytest.mark.parametrize("output", ["text", "json"])
    def test_not_run(self, caracal: Caracal, copy: Any, output: str) -> None:
        copy.edit_manifest(lambda data: data["golden"].update(cases=[]))
        ran = caracal("parity", copy.path, "--threads", 1, "--format", output)
        assert ran.code == 3
        verdict = json.loads(ran.out)["verdict"] if output == "json" else ran.out.splitlines()[-1][:7]
        assert verdict == "NOT RUN"

    def test_level(self, caracal: Caracal, exported: Any) -> None:
        assert "level close" in caracal("parity", exported.bundle, "--threads", 1, "--level", "close").out


class TestInfo:
    def test_a_bundle(self, caracal: Caracal, exported: Any) -> None:
        ran = caracal("info", exported.bundle, "--format", "json")
        data = json.loads(ran.out)
        weights = safetensors.numpy.load_file(exported.bundle / "weights.safetensors")
        manifest = json.loads((exported.bundle / "manifest.json").read_text(encoding="utf-8"))
        assert (ran.code, ran.err) == (0, "")
        assert data["id"] == Bundle.open(exported.bundle).id()
        assert data["parameters"] == sum(array.size for array in weights.values())
        assert data["config"] == manifest["config"]
        assert data["files"].keys() == manifest["files"].keys()
        assert data["graphs"]["forward"]["opset"] == 18
        assert all(entry["sha256"] in data["files"][name] for name, entry in manifest["files"].items())

    def test_a_checkpoint(self, caracal: Caracal, exported: Any) -> None:
        data = json.loads(caracal("info", exported.checkpoint, "--format", "json").out)
        stored = safetensors.numpy.load_file(exported.checkpoint / "model.safetensors")
        assert data["kind"] == "checkpoint, safetensors folder"
        assert data["loads"].startswith("yes")
        assert data["parameters"] == sum(array.size for array in stored.values())
        assert data["stored"] == f"{data['parameters']:,} numbers in float32"
        assert data["tensors"] == {name: f"float32 {list(array.shape)}" for name, array in stored.items()}
        assert data["config"] == json.loads((exported.checkpoint / "config.json").read_text())

    @pytest.mark.parametrize("kind", ["bundle", "checkpoint"])
    def test_as_text(self, caracal: Caracal, exported: Any, kind: str) -> None:
        folder = getattr(exported, kind)
        ran = caracal("info", folder)
        assert ran.code == 0
        for line in (f"kind: {kind}", f"path: {folder}", "parameters: 97,296", "  hidden_size: 48"):
            assert line in ran.out
        assert "{" not in ran.out

    def test_operators_and_who_has_kernels_for_them(self, caracal: Caracal, exported: Any) -> None:
        data = json.loads(caracal("info", exported.bundle, "--format", "json").out)
        manifest = json.loads((exported.bundle / "manifest.json").read_text(encoding="utf-8"))
        for name, graph in manifest["graphs"].items():
            listed = sum(row["nodes"].get(name, 0) for row in data["operators"])
            constants = graph["operators"].get("Constant", 0)
            assert listed + data["nodes that work out sizes"].get(name, 0) + constants == sum(
                graph["operators"].values()
            )
        product = next(row for row in data["operators"] if row["operator"] == "MatMul")
        assert (product["opset"], product["version"], product["dtype"]) == (18, 13, "float32")
        for ep in ("cpu", "cuda", "directml"):
            assert data["providers"][ep]["findings"] == []
        assert data["providers"]["iree"]["findings"][0]["verdict"] == "unknown"
        text = caracal("info", exported.bundle).out
        assert len(re.findall(r"^  MatMul +18 +13 +float32 +\d", text, re.MULTILINE)) == 1
        assert "  cuda: all operators have kernels  [onnxruntime-gpu " in text
        assert "  iree: nothing is known of these operators  [" in text

    def test_operators_that_a_provider_lacks(self, caracal: Caracal, copy: Any) -> None:
        """A provider that lacks an operator is told apart from one of which that is not known, before any hardware is."""
        graph = onnx.load(copy.path / "convolve.onnx")
        for node in graph.graph.node:
            if node.op_type == "MatMul":
                node.op_type = "DFT"
                del node.input[1:]
        (copy.path / "convolve.onnx").write_bytes(graph.SerializeToString())
        copy.rehash()
        text = caracal("info", copy.path).out
        assert re.search(r"  cuda: 1 missing  .*\n    missing: DFT float32 \(\d+ nodes in convolve\): no kernel", text)
        only = caracal("info", copy.path, "--ep", "CUDA").out
        assert "    source: " in only
        assert "directml" not in only
        data = json.loads(caracal("info", copy.path, "--ep", "dml", "--format", "json").out)
        assert list(data["providers"]) == ["directml"]

    def test_a_provider_nobody_knows(self, caracal: Caracal, exported: Any) -> None:
        refused(caracal("info", exported.bundle, "--ep", "abacus"), 2, "--ep must be one of", "cuda", "found 'abacus'")
        refused(caracal("info", exported.checkpoint, "--ep", "cuda"), 2, "export the checkpoint first")

    def test_a_graph_that_is_none(self, caracal: Caracal, copy: Any) -> None:
        (copy.path / "step.onnx").write_bytes(b"\xff" * 100)
        copy.rehash()
        refused(caracal("info", copy.path), 2, "step.onnx is no whole ONNX model")

    def test_check_hashes_every_file(self, caracal: Caracal, copy: Any) -> None:
        assert "checked by hash" in caracal("info", copy.path, "--check").out
        content = bytearray((copy.path / "README.md").read_bytes())
        content[0] ^= 1
        (copy.path / "README.md").write_bytes(content)
        unchecked = caracal("info", copy.path)
        assert (unchecked.code, "not checked" in unchecked.out) == (0, True)
        checked = caracal("info", copy.path, "--check")
        assert (checked.code, checked.out) == (2, "")
        assert "README.md was altered" in checked.err


def refused(ran: Any, code: int, *words: str) -> None:
    """One line that says what is wrong, nothing else."""
    assert ran.code == code
    assert ran.out == ""
    assert ran.err.startswith("caracal: ")
    assert ran.err.count("\n") == 1
    assert "unexpected" not in ran.err
    for word in words:
        assert word in ran.err


BUNDLE_COMMANDS = [("generate", "--ids", "1"), ("score", "FILE"), ("parity",)]


class TestErrors:
    @pytest.fixture
    def argv(self, tmp_path: Path) -> Callable[..., list[object]]:
        """Arguments of a bundle command, with the bundle put in."""
        (tmp_path / "text").write_text("some text")

        def make(command: tuple[str, ...], bundle: object) -> list[object]:
            name, *rest = command
            return [name, bundle, *(tmp_path / "text" if item == "FILE" else item for item in rest)]

        return make

    @pytest.mark.parametrize("command", BUNDLE_COMMANDS, ids=str)
    def test_no_bundle(self, caracal: Caracal, argv: Any, exported: Any, tmp_path: Path, command: Any) -> None:
        refused(caracal(*argv(command, tmp_path / "nowhere")), 2, f"nothing at {tmp_path / 'nowhere'}")
        refused(caracal(*argv(command, "")), 2, "the path is empty")
        refused(caracal(*argv(command, tmp_path)), 2, "is no bundle", "manifest.json")
        refused(caracal(*argv(command, exported.bundle / "manifest.json")), 2, "is no bundle")
        refused(caracal(*argv(command, exported.checkpoint)), 2, "is no bundle", "caracal export")

    @pytest.mark.parametrize("command", BUNDLE_COMMANDS, ids=str)
    def test_an_altered_file(self, caracal: Caracal, argv: Any, copy: Any, command: Any) -> None:
        (copy.path / "README.md").write_text("another model card")
        refused(caracal(*argv(command, copy.path)), 2, "README.md")

    @pytest.mark.parametrize("command", BUNDLE_COMMANDS, ids=str)
    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--ep", "cdua"], ["--ep must be one of cpu, cuda, ", "found 'cdua'"]),
            (["--ep", ""], ["--ep must be one of cpu"]),
            (["--ep-option", "device=0"], ["the provider cpu takes pack, spin_us", "device"]),
            (["--ep-option", "device"], ["must look like KEY=VALUE, found 'device'"]),
            (["--ep-option", "=1"], ["must look like KEY=VALUE"]),
            (["--threads", "-1"], ["--threads must be an integer from 0 to 4096, found -1"]),
            (["--threads", "100000"], ["--threads must be", "100000"]),
        ],
        ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
    )
    def test_bad_runtime_options(
        self, caracal: Caracal, argv: Any, exported: Any, command: Any, options: list[str], words: list[str]
    ) -> None:
        refused(caracal(*argv(command, exported.bundle), *options), 2, *words)

    @pytest.mark.parametrize("path", ["", " ", "nowhere"])
    def test_info_of_nothing(self, caracal: Caracal, path: str) -> None:
        refused(
            caracal("info", path), 2, "nothing at nowhere" if path == "nowhere" else "the path is empty", "expected"
        )

    def test_info_of_something_else(self, caracal: Caracal, exported: Any, copy: Any, tmp_path: Path) -> None:
        refused(caracal("info", tmp_path), 2, "has no config.json and no model.safetensors")
        refused(caracal("info", exported.checkpoint / "config.json"), 2, "is the configuration; name its folder")
        (copy.path / "weights.safetensors").unlink()
        refused(caracal("info", copy.path), 2, "weights.safetensors is missing")

    def test_info_of_a_checkpoint_with_a_bad_configuration(
        self, caracal: Caracal, exported: Any, tmp_path: Path
    ) -> None:
        shutil.copytree(exported.checkpoint, tmp_path / "copy")
        (tmp_path / "copy" / "config.json").write_text("{}")
        ran = caracal("info", tmp_path / "copy")
        assert ran.code == 1, "a finding, and what is there is described all the same"
        assert "loads: no: config: model_type must be" in ran.out

    @pytest.mark.parametrize(
        ("option", "words"),
        [
            ("--top-p=2", ["--top-p must be in (0, 1], found 2.0"]),
            ("--top-p=0", ["--top-p"]),
            ("--top-k=-1", ["--top-k must be"]),
            ("--min-p=1.5", ["--min-p must be"]),
            ("--temperature=-1", ["--temperature must be"]),
            ("--temperature=nan", ["--temperature must be", "nan"]),
            ("--temperature=inf", ["--temperature must be"]),
            ("--repetition-penalty=0", ["--repetition-penalty must be"]),
            ("--seed=-1", ["--seed must be"]),
            ("--max-new-tokens=0", ["--max-new-tokens must be an integer of at least 1, found 0"]),
            ("--max-new-tokens=1000000000", ["context too long", "1,000,000,000 new ones"]),
            ("--stop=", ["--stop"]),
            ("--stop-id=320", ["stop_ids", "320"]),
            ("--stop-id=-1", ["stop_ids", "-1"]),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_bad_options(self, caracal: Caracal, exported: Any, option: str, words: list[str]) -> None:
        refused(caracal("generate", exported.bundle, "-p", "God", option), 2, *words)

    @pytest.mark.parametrize(
        "ids",
        [
            "",
            " ",
            ",",
            "x",
            "1,x",
            "1.5",
            "0x1",
            "320",
            "-1",
            "1;2",
            "--5",
            "1 --5",
            "²",
            "1,²",
            "- 1",
            "9" * 30,
            "9" * 5000,
        ],
        ids=lambda value: value[:9],
    )
    def test_bad_ids(self, caracal: Caracal, exported: Any, tmp_path: Path, ids: str) -> None:
        ran = caracal("generate", exported.bundle, f"--ids={ids}")
        refused(ran, 2, "ids")
        assert len(ran.err) < 200
        (tmp_path / "ids").write_text(ids, encoding="utf-8")
        refused(caracal("score", exported.bundle, tmp_path / "ids", "--ids"), 2, "ids")

    def test_no_prompt_or_prompts_of_two_kinds(self, caracal: Caracal) -> None:
        refused(caracal("generate", "x"), 2, "expected a prompt, found none", "-p", "--prompt-file", "--ids")
        refused(caracal("generate", "x", "-p", "a", "--ids", "1"), 2, "prompts of one kind", "--prompt and --ids")

    def test_empty_prompts(
        self, caracal: Caracal, exported: Any, tmp_path: Path, stdin: Callable[[bytes], None]
    ) -> None:
        (tmp_path / "empty").write_bytes(b"")
        refused(caracal("generate", exported.bundle, "-p", ""), 2, "empty prompt")
        refused(caracal("generate", exported.bundle, "--prompt-file", tmp_path / "empty"), 2, "empty prompt")
        refused(caracal("score", exported.bundle, tmp_path / "empty"), 2, "found none")
        stdin(b"")
        refused(caracal("generate", exported.bundle, "--prompt-file", "-"), 2, "empty prompt")

    @pytest.mark.parametrize("command", [("generate", "--prompt-file"), ("score",), ("score", "--ids")], ids=str)
    def test_files_that_cannot_be_read(
        self, caracal: Caracal, exported: Any, tmp_path: Path, stdin: Callable[[bytes], None], command: Any
    ) -> None:
        name, *options = command
        (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
        for file, words in (
            (tmp_path / "nowhere", ["no text file at", "nowhere"]),
            ("", ["cannot be read"]),
            (tmp_path, ["cannot be read", str(tmp_path)]),
            (tmp_path / "latin", ["latin is not UTF-8 text (byte 2 is 0xef)", "iconv"]),
            ("a\0b", ["cannot be read"]),
        ):
            refused(caracal(name, exported.bundle, *options, file), 2, *words)
        stdin(b"\xff")
        refused(caracal(name, exported.bundle, *options, "-"), 2, "is not UTF-8 text (byte 0 is 0xff)")

    def test_a_prompt_that_is_no_unicode(self, caracal: Caracal, exported: Any) -> None:
        """Python hands over bytes of the command line that are no UTF-8 as lone surrogates."""
        refused(caracal("generate", exported.bundle, "-p", "God \udcff"), 2, "prompt")

    def test_a_bad_context(self, caracal: Caracal, exported: Any, stdin: Callable[[bytes], None]) -> None:
        stdin(b"some text")
        refused(caracal("score", exported.bundle, "-", "--context", 1), 2, "--context must be an integer of at least 2")

    def test_parity_where_the_report_cannot_be_written(self, caracal: Caracal, exported: Any, tmp_path: Path) -> None:
        """Before anything runs."""
        for target in (tmp_path / "nowhere" / "r.json", tmp_path, ""):
            refused(caracal("parity", exported.bundle, "--json", target), 2)

    def test_parity_of_an_unknown_level(self, caracal: Caracal, exported: Any) -> None:
        ran = caracal("parity", exported.bundle, "--level", "exact")
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.splitlines()[-1].startswith("caracal: tolerance: no level 'exact'")

    def test_debug_shows_the_traceback(self, caracal: Caracal, exported: Any, tmp_path: Path) -> None:
        for argv in (["info", tmp_path], ["generate", tmp_path, "-p", "God"], ["parity", tmp_path]):
            assert "Traceback" not in caracal(*argv).err
            ran = caracal(*argv, "--debug")
            assert ran.code == 2
            assert "Traceback (most recent call last)" in ran.err
            assert ran.err.splitlines()[-1].startswith("caracal: ")

    def test_an_error_nobody_expected(self, caracal: Caracal, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **options: object) -> None:
            raise RuntimeError("a\nb")

        monkeypatch.setattr(Bundle, "open", fail)
        ran = caracal("generate", exported.bundle, "-p", "God")
        assert ran.code == 3
        assert "unexpected RuntimeError" in ran.err
        assert "--debug" in ran.err
        assert "Traceback" not in ran.err

    def test_memory_that_runs_out(self, caracal: Caracal, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **options: object) -> None:
            raise MemoryError

        monkeypatch.setattr(OrtSession, "run", fail)
        refused(caracal("generate", exported.bundle, "-p", "God"), 2, "out of memory")

    @pytest.mark.parametrize("missing", ["torch", "onnx", "onnx_ir"])
    def test_export_without_its_packages(
        self, caracal: Caracal, exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        original = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else original(name))
        for argv in (["export", exported.checkpoint, "-o", tmp_path / "b"], ["demo", "-o", tmp_path / "d"]):
            refused(caracal(*argv), 3, f"missing: {missing};", "pip install 'caracal-onnx[export,cpu]'")
        assert list(tmp_path.iterdir()) == []


class TestNoCheck:
    """Hashes are skipped, and it is said wherever a number may be read."""

    @pytest.fixture
    def altered(self, copy: Any) -> Path:
        """Of the same size, in a file that no graph reads: everything runs, and only hashing can tell."""
        content = bytearray((copy.path / "README.md").read_bytes())
        content[0] ^= 1
        (copy.path / "README.md").write_bytes(content)
        return Path(copy.path)

    def argv(self, command: str, bundle: Path, tmp_path: Path) -> list[object]:
        (tmp_path / "text").write_text(TEXT, encoding="utf-8")
        more: dict[str, list[object]] = {
            "generate": ["--ids", "1", "-n", 1],
            "score": [tmp_path / "text"],
            "parity": ["--quick"],
            "bench": ["--contexts", 4, "-n", 2, "--warmup", 0, "--repeats", 1],
            "bisect": ["--ep", "reference", "--graph", "convolve"],
        }
        return [command, bundle, *more[command], "--threads", 1]

    @pytest.mark.parametrize("command", ["generate", "score", "parity", "bench", "bisect"])
    def test_every_command_skips_the_hashes_and_says_so(
        self, caracal: Caracal, altered: Path, tmp_path: Path, command: str
    ) -> None:
        argv = [*self.argv(command, altered, tmp_path), "--format", "json"]
        refused(caracal(*argv), 2, "README.md was altered")
        ran = caracal(*argv, "--no-check")
        assert ran.code == 0
        warning = (
            f"caracal: WARNING: --no-check: the files of {altered} were not compared with their hashes; numbers from an altered "
            f"file would not be noticed"
        )
        assert ran.err.splitlines().count(warning) == 1
        data = json.loads(ran.out)
        assert [row["unchecked"] for row in data["providers"]] == [True] if command == "parity" else data["unchecked"]

    @pytest.mark.parametrize("command", ["generate", "score", "bench"])
    def test_without_it_nothing_is_said(self, caracal: Caracal, exported: Any, tmp_path: Path, command: str) -> None:
        ran = caracal(*self.argv(command, exported.bundle, tmp_path), "--format", "json")
        assert (ran.code, json.loads(ran.out)["unchecked"], "WARNING" in ran.err) == (0, False, False)

    @pytest.mark.parametrize("command", ["generate", "score", "parity", "bench", "bisect"])
    def test_presence_size_and_links_are_looked_at_all_the_same(
        self, caracal: Caracal, altered: Path, tmp_path: Path, command: str
    ) -> None:
        argv = [*self.argv(command, altered, tmp_path), "--no-check"]
        (altered / "README.md").write_text("short")
        refused(caracal(*argv), 2, "README.md has 5 bytes")
        (altered / "README.md").unlink()
        refused(caracal(*argv), 2, "README.md is missing")
        if sys.platform != "win32":
            (altered / "README.md").symlink_to(tmp_path / "text")
            refused(caracal(*argv), 2, "README.md is a link")

    def test_parity_says_it_in_its_verdicts_and_pages(self, caracal: Caracal, altered: Path, tmp_path: Path) -> None:
        argv = ["parity", altered, "--quick", "--threads", 1, "--no-check", "--report", tmp_path / "report"]
        ran = caracal(*argv)
        assert ran.code == 0
        verdict = ran.out.splitlines()[-1]
        assert verdict.startswith("PASSED  parity matmul float32 on cpu (unchecked: hashes not compared)  worst ")
        assert "note: the bundle's files were not compared with their hashes (--no-check)" in ran.out
        pages = [path.read_text(encoding="utf-8") for path in (tmp_path / "report").iterdir() if path.is_file()]
        assert len(pages) >= 3
        assert all("not compared with their hashes" in page for page in pages)

    def test_bisect_says_it_in_its_notes(self, caracal: Caracal, altered: Path, tmp_path: Path) -> None:
        ran = caracal(*self.argv("bisect", altered, tmp_path), "--no-check")
        assert (ran.code, ran.out.count("note: the bundle's files were not compared with their hashes")) == (0, 1)

    def test_joined_reports_keep_it(self, caracal: Caracal, altered: Path, exported: Any, tmp_path: Path) -> None:
        files = [tmp_path / "a.json", tmp_path / "b.json"]
        for bundle, file, more in ((altered, files[0], ["--no-check"]), (exported.bundle, files[1], [])):
            argv = ["parity", bundle, "--quick", "--threads", 1, "--json", file, *more]
            assert caracal(*argv).code == 0
        lines = caracal("parity", "merge", *files).out.splitlines()
        assert lines[-1].endswith("unchecked, hashes not compared: cpu")
        assert sum("(unchecked: hashes not compared)" in line for line in lines[:3]) == 1

    def test_joining_runs_nothing_that_could_be_checked(self, caracal: Caracal) -> None:
        refused(caracal("parity", "merge", "a.json", "b.json", "--no-check"), 2, "--no-check cannot be meant")

    @pytest.mark.parametrize("command", ["generate", "score", "parity", "bench", "bisect"])
    def test_auto_is_refused_which_remembers(
        self, caracal: Caracal, altered: Path, tmp_path: Path, command: str
    ) -> None:
        argv = [item for item in self.argv(command, altered, tmp_path) if item not in ("--ep", "reference")]
        ran = caracal(*argv, "--no-check", "--ep", "auto")
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.splitlines()[-1].startswith("caracal: --no-check: --ep auto judges")

    def test_info_and_verify_have_no_such_thing(self, caracal: Caracal, altered: Path) -> None:
        for command in ("info", "verify", "sign"):
            assert caracal(command, altered, "--no-check").code == 2


class TestUsage:
    def test_no_command(self, caracal: Caracal) -> None:
        ran = caracal()
        assert ran.code == 2
        assert all(name in ran.out + ran.err for name in ("usage: caracal", "generate", "parity", "export"))

    @pytest.mark.parametrize(
        "argv",
        [["speak"], ["generate"], ["score", "x"],
         ["generate", "x", "-p", "a", "--top-k", "many"], ["generate", "x", "-p", "a", "--format", "xml"],
         ["generate", "x", "-p", "a", "--tempreature", "1"], ["parity"], ["info"], ["info", "x", "y"], ["--nonsense"]],
        ids=" ".join,
    )  # fmt: skip
    def test_bad_usage(self, caracal: Caracal, argv: list[str]) -> None:
        ran = caracal(*argv)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("usage: caracal")
        assert "error: " in ran.err.splitlines()[-1]

    @pytest.mark.parametrize(
        "command", ["generate", "score", "parity", "info", "export", "demo", "bench", "sign", "verify"]
    )
    def test_help_of_every_command(self, caracal: Caracal, command: str) -> None:
        ran = caracal(command, "--help")
        assert (ran.code, ran.err) == (0, "")
        assert ran.out.startswith(f"usage: caracal {command}")

    def test_commands_come_in_the_order_of_a_first_use(self, caracal: Caracal) -> None:
        lines = caracal("--help").out.splitlines()
        names = [line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "]
        assert [name for name in names if name != "COMMAND"][:14] == [
            "demo",
            "export",
            "info",
            "convert",
            "quantize",
            "providers",
            "generate",
            "score",
            "web",
            "parity",
            "bisect",
            "sign",
            "verify",
            "bench",
        ]

    def test_version(self, caracal: Caracal) -> None:
        ran = caracal("--version")
        assert ran.code == 0
        assert ran.out.startswith("caracal-onnx ")


# A shell without job control lets its children ignore SIGINT; a terminal does not.
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from caracal_runtimes.cli import main
sys.exit(main())
"""


def start(*argv: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", START, *map(str, argv)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


class TestProcess:
    @pytest.mark.parametrize("argv", [["--help"], ["info", "BUNDLE"], ["info", "CHECKPOINT"]], ids=" ".join)
    def test_what_needs_no_torch_does_not_load_it(self, exported: Any, argv: list[str]) -> None:
        """Nor anything else that is slow; --help does not even load numpy."""
        code = (
            "import sys\nfrom caracal_runtimes.cli import main\n"
            "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
            "print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)\n"
        )
        folders = {"BUNDLE": str(exported.bundle), "CHECKPOINT": str(exported.checkpoint)}
        command = [sys.executable, "-c", code, *(folders.get(item, item) for item in argv)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        slow = {"torch", "onnx", "onnxscript", "onnx_ir", "onnxruntime", "tokenizers"}
        slow |= set() if "CHECKPOINT" in argv else {"safetensors"}  # which reads its header, and is quick
        assert ran.stdout
        assert not (slow | ({"numpy"} if argv == ["--help"] else set())) & set(ran.stderr.split())

    @pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted(self, exported: Any, number: signal.Signals) -> None:
        process = start("generate", exported.bundle, "-p", "God", "-n", 5000, "--ignore-eos", "--threads", 1)
        assert process.stdout is not None
        first = process.stdout.read(1)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert (len(first), process.returncode) == (1, 130)
        assert error.decode().strip() == "caracal: interrupted"

    @pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
    @pytest.mark.parametrize("command", ["generate", "info", "parity"])
    def test_a_reader_that_went_away(self, exported: Any, command: str) -> None:
        more = {"generate": ["-p", "God", "-n", 300, "--ignore-eos", "--threads", 1], "parity": ["--threads", 1]}
        process = start(command, exported.bundle, *more.get(command, []))
        assert process.stdout is not None
        assert process.stderr is not None
        if command == "generate":
            process.stdout.read(5)
        process.stdout.close()
        error = process.stderr.read().decode()
        process.stderr.close()
        process.wait(timeout=60)
        assert [line for line in error.splitlines() if line != "cpu (1 of 1) ..."] == []

    @pytest.mark.skipif(sys.platform == "win32", reason="file descriptors of POSIX")
    def test_no_standard_output_at_all(self, exported: Any) -> None:
        """As under some service managers."""
        command = [sys.executable, "-c", START, "info", str(exported.bundle)]
        ran = subprocess.run(["/bin/sh", "-c", '"$@" >&-', "sh", *command], capture_output=True, text=True, timeout=60)
        assert (ran.returncode, ran.stderr) == (0, "")

    def test_a_terminal_that_shows_ascii_only(self, exported: Any, model: CausalLM) -> None:
        """Text loses what cannot be shown; JSON loses nothing."""
        options = SamplingOptions(seed=3)
        (expected,) = model.generate("naïve", max_new_tokens=30, options=options, stop_ids=())
        assert expected.text is not None
        assert not expected.text.isascii()
        argv = ["generate", exported.bundle, "-p", "naïve", "-n", 30, "--seed", 3, "--ignore-eos", "--threads", 1]
        # Arguments stay UTF-8, as only the streams are told otherwise.
        environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "1"}
        out, error = start(*argv, env=environment).communicate(timeout=60)
        assert (out.decode("ascii").rstrip("\r\n"), error) == (
            "".join(c if c.isascii() else "?" for c in expected.text).rstrip("\r\n"),
            b"",
        )
        out, error = start(*argv, "--format", "json", env=environment).communicate(timeout=60)
        assert (json.loads(out)["results"][0]["text"], error) == (expected.text, b"")

    def test_errors_come_after_what_was_written(self, exported: Any, tmp_path: Path) -> None:
        process = start("generate", exported.bundle, "--prompt-file", tmp_path / "nowhere")
        out, error = process.communicate(timeout=60)
        assert (process.returncode, out) == (2, b"")
        assert error.startswith(b"caracal: no text file at")


def test_main_returns_and_does_not_exit(exported: Any, capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert main(["info", str(exported.bundle)]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "kind: bundle" in capsys.readouterr().out


def test_only_the_command_that_is_named_is_loaded() -> None:
    script = (
        "import sys\nfrom caracal_runtimes.cli import build_parser\nbuild_parser(sys.argv[1] or None)\n"
        "print(' '.join(name for name in sys.modules if name.startswith('caracal_')))"
    )
    loaded = {
        word: subprocess.run(
            [sys.executable, "-c", script, word], capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        for word in ("verify", "", "nonsense")
    }
    assert "caracal_runtimes.cli.verify" in loaded["verify"]
    assert "caracal_runtimes.cli.generate" not in loaded["verify"]
    assert {"caracal_runtimes.cli.verify", "caracal_runtimes.cli.generate"} <= set(loaded[""])
    assert set(loaded["nonsense"]) == set(loaded[""])


def test_a_finding_stays_a_finding_when_the_reader_has_gone() -> None:
    """`caracal parity B | head` must not turn exit code 1 into 0."""
    script = (
        "import sys, types\nfrom caracal_runtimes import cli\n"
        "def run(args):\n    print('x' * 100_000)\n    return 1\n"
        "module = types.SimpleNamespace(HELP='', __doc__='', add_arguments=lambda parser: None, run=run)\n"
        "cli._commands = lambda command: {'check': module}\nsys.exit(cli.main(['check']))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert process.returncode not in (0, None)
    assert b"Traceback" not in error
