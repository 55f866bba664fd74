"""`caracal generate`: batches, states on disk, JSON, options that contradict each other, and an interrupt."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caracal_runtimes import state_file
from caracal_runtimes.decoding import Stateful
from caracal_runtimes.model import CausalLM
from caracal_runtimes.sampling import SamplingOptions
from numpy.typing import NDArray

from .conftest import BundleCopy, Exported, Ran

# With the penalty no token repeats at once: a decoder that lost its place would show.
GREEDY = ("--temperature", "0", "--repetition-penalty", "1e3", "--ignore-eos", "--threads", "1")
OPTIONS = SamplingOptions(temperature=0, repetition_penalty=1e3)


def generated(model: CausalLM, prompt: Any, count: int) -> tuple[list[int], str | None]:
    """What the API writes, greedily."""
    (result,) = model.generate(prompt, max_new_tokens=count, options=OPTIONS, stop_ids=())
    return result.ids, result.text


class TestBatch:
    def test_several_prompts(self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran]) -> None:
        prompts = ("In the beginning", "God", "And the earth was without form")
        flags = [part for prompt in prompts for part in ("-p", prompt)]
        ran = caracal("generate", exported.bundle, *flags, "-n", 9, *GREEDY, "--json")
        assert ran.code == 0
        results = json.loads(ran.out)["results"]
        assert [result["ids"] for result in results] == [generated(model, prompt, 9)[0] for prompt in prompts]

    def test_text_of_several_prompts_is_told_apart(
        self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran]
    ) -> None:
        ran = caracal("generate", exported.bundle, "-p", "God", "-p", "earth", "-n", 4, *GREEDY)
        text = [generated(model, prompt, 4)[1] for prompt in ("God", "earth")]
        heads = [f"== {row} of 2, 4 tokens, ended by length\n" for row in (1, 2)]
        assert ran.out == f"{heads[0]}{text[0]}\n{heads[1]}{text[1]}\n".replace("\ud800", "?")

    def test_ids(self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran]) -> None:
        ran = caracal("generate", exported.bundle, "--ids", "1,2,3", "--ids", "9", "-n", 5, *GREEDY)
        lines = ran.out.splitlines()
        assert [list(map(int, lines[row].split())) for row in (1, 3)] == [
            generated(model, [1, 2, 3], 5)[0],
            generated(model, [9], 5)[0],
        ]

    def test_files(self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran], tmp_path: Path) -> None:
        (tmp_path / "a").write_text("God said", encoding="utf-8")
        (tmp_path / "b").write_text("light", encoding="utf-8")
        files = ("--prompt-file", tmp_path / "a", "--prompt-file", tmp_path / "b")
        results = json.loads(caracal("generate", exported.bundle, *files, "-n", 3, *GREEDY, "--json").out)["results"]
        assert [r["ids"] for r in results] == [generated(model, text, 3)[0] for text in ("God said", "light")]

    def test_standard_input(
        self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"God said")))
        ran = caracal("generate", exported.bundle, "--prompt-file", "-", "-n", 3, *GREEDY, "--json")
        assert json.loads(ran.out)["results"][0]["ids"] == generated(model, "God said", 3)[0]


class TestJson:
    def test_everything_is_there(self, exported: Exported, caracal: Callable[..., Ran]) -> None:
        ran = caracal("generate", exported.bundle, "-p", "God", "-n", 6, *GREEDY, "--json")
        data = json.loads(ran.out)
        assert data.keys() == {"results", "timings", "state_bytes", "ep", "threads", "unchecked"}
        assert data["unchecked"] is False
        (result,) = data["results"]
        assert result.keys() == {"prompt_ids", "ids", "logprobs", "text", "stopped_by"}
        assert len(result["ids"]) == len(result["logprobs"]) == 6
        assert all(logprob < 0 for logprob in result["logprobs"])
        timings = data["timings"]
        assert 0 < timings["prefill_s"] < timings["first_token_s"]
        assert timings["decode_tokens_per_s"] == pytest.approx(5 / timings["decode_s"])
        assert data["state_bytes"] > 0

    def test_one_token_has_no_rate(self, exported: Exported, caracal: Callable[..., Ran]) -> None:
        data = json.loads(caracal("generate", exported.bundle, "-p", "God", "-n", 1, *GREEDY, "--json").out)
        assert data["timings"]["decode_tokens_per_s"] is None


class TestOptions:
    def test_logit_bias(self, exported: Exported, caracal: Callable[..., Ran]) -> None:
        flags = ("--logit-bias", "77=1e6", "--logit-bias", "78=-5")
        data = json.loads(caracal("generate", exported.bundle, "-p", "God", "-n", 4, *GREEDY, *flags, "--json").out)
        assert data["results"][0]["ids"] == [77] * 4

    @pytest.mark.parametrize("chunk", [1, 8, 20, 10**6])
    def test_the_chunk_changes_nothing(
        self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran], chunk: int
    ) -> None:
        ids = list(range(1, 120))
        prompt = ("--ids", ",".join(map(str, ids)))
        data = json.loads(
            caracal("generate", exported.bundle, *prompt, "-n", 5, *GREEDY, "--prefill-chunk", chunk, "--json").out
        )
        assert data["results"][0]["ids"] == generated(model, ids, 5)[0]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((), "expected a prompt, found none"),
            (("-p", ""), "empty prompt"),
            (("-p", "God", "-p", ""), "empty prompt"),
            (("--ids", ""), "expected at least one integer"),
            (("--ids", "1", "--ids", " "), "expected at least one integer"),
            (("-p", "a", "--ids", "1"), "--prompt and --ids"),
            (("-p", "a", "--prompt-file", "x"), "--prompt and --prompt-file"),
            (("--prompt-file", "-", "--prompt-file", "-"), "twice"),
            (("-p", "a", "-n", "0"), "--max-new-tokens"),
            (("-p", "a", "-n", "-7"), "--max-new-tokens"),
            (("-p", "a", "--temperature", "0", "--top-k", "5"), "--top-k"),
            (("-p", "a", "--temperature", "0", "--top-p", "0.9"), "--top-p"),
            (("-p", "a", "--temperature", "0", "--min-p", "0.1"), "--min-p"),
            (("-p", "a", "--ignore-eos", "--stop-id", "3"), "--stop-id"),
            (("-p", "a", "--temperature", "nan"), "--temperature"),
            (("-p", "a", "--top-p", "0"), "--top-p"),
            (("-p", "a", "--top-k", "-1"), "--top-k"),
            (("-p", "a", "--seed", "-1"), "--seed"),
            (("-p", "a", "--stop", ""), "--stop"),
            (("-p", "a", "--stop-id", "320"), "stop_ids"),
            (("-p", "a", "--logit-bias", "5"), "--logit-bias"),
            (("-p", "a", "--logit-bias", "x=1"), "--logit-bias"),
            (("-p", "a", "--logit-bias", "1=x"), "--logit-bias"),
            (("-p", "a", "--logit-bias", "1=nan"), "logit_bias"),
            (("-p", "a", "--logit-bias", "320=1"), "logit_bias"),
            (("-p", "a", "--logit-bias", "1=1", "--logit-bias", "1=2"), "twice"),
            (("-p", "a", "--prefill-chunk", "0"), "--prefill-chunk"),
            (("-p", "a", "--save-state", "/nowhere/at/all"), "--save-state"),
            (("--load-state", "/nowhere/at/all"), "no file at"),
            (("-p", "a", "-n", "100000000"), "context too long"),
        ],
    )
    def test_bad_usage(
        self, exported: Exported, caracal: Callable[..., Ran], arguments: tuple[str, ...], message: str
    ) -> None:
        ran = caracal("generate", exported.bundle, *arguments)
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err
        assert len(ran.err.splitlines()) == 1


class TestStates:
    def test_a_run_in_two_parts_is_one_run(
        self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran], tmp_path: Path
    ) -> None:
        state, options = tmp_path / "state", ("--seed", 5, "--threads", 1, "--ignore-eos", "--json")
        whole = json.loads(caracal("generate", exported.bundle, "-p", "God", "-n", 40, *options).out)["results"][0]
        first = caracal("generate", exported.bundle, "-p", "God", "-n", 17, *options, "--save-state", state)
        second = caracal("generate", exported.bundle, "--load-state", state, "-n", 23, *options)
        ids = [json.loads(ran.out)["results"][0]["ids"] for ran in (first, second)]
        assert ids[0] + ids[1] == whole["ids"]

    def test_a_prompt_is_appended(
        self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran], tmp_path: Path
    ) -> None:
        state = tmp_path / "state"
        caracal("generate", exported.bundle, "--ids", "5,6,7", "-n", 20, *GREEDY, "--save-state", state)
        written = generated(model, [5, 6, 7], 20)[0]
        ran = caracal("generate", exported.bundle, "--load-state", state, "--ids", "8,9", "-n", 6, *GREEDY, "--json")
        expected = generated(model, [5, 6, 7, *written, 8, 9], 6)[0]
        assert json.loads(ran.out)["results"][0]["ids"] == expected

    @pytest.mark.parametrize("prompts", [("-p", "a", "-p", "b"), ("--ids", "1", "--ids", "2")])
    def test_at_most_one_prompt_goes_with_a_state(
        self, exported: Exported, caracal: Callable[..., Ran], tmp_path: Path, prompts: tuple[str, ...]
    ) -> None:
        ran = caracal("generate", exported.bundle, "--load-state", tmp_path / "state", *prompts)
        assert ran.code == 2
        assert "at most one prompt" in ran.err

    def test_of_another_bundle(
        self, exported: Exported, caracal: Callable[..., Ran], copy: BundleCopy, tmp_path: Path
    ) -> None:
        state = tmp_path / "state"
        caracal("generate", exported.bundle, "-p", "God", "-n", 3, *GREEDY, "--save-state", state)
        copy.weight("norm.weight")[0] *= 2
        copy.rehash()
        ran = caracal("generate", copy.path, "--load-state", state, "-n", 3, *GREEDY)
        assert (ran.code, ran.out) == (2, "")
        assert "belongs to the bundle" in ran.err
        assert len(ran.err.splitlines()) == 1

    def test_the_output_stands_when_the_state_cannot_be_written(
        self, exported: Exported, model: CausalLM, caracal: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(state_file, "write_safetensors", full)
        flags = ("--save-state", "state", "--json")
        ran = caracal("generate", exported.bundle, "--ids", "1,2", "-n", 4, *GREEDY, *flags)
        assert ran.code == 2
        assert json.loads(ran.out)["results"][0]["ids"] == generated(model, [1, 2], 4)[0]
        assert "No space left" in ran.err

    @pytest.mark.parametrize("command", ["generate", "bench", "parity"])
    def test_no_output_goes_into_the_bundle(self, copy: BundleCopy, caracal: Callable[..., Ran], command: str) -> None:
        before = {path.name: path.read_bytes() for path in copy.path.iterdir()}
        flags = ("-p", "God", "--save-state") if command == "generate" else ("--json",)
        for name in ("weights.safetensors", "manifest.json", "new"):
            ran = caracal(command, copy.path, *flags, copy.path / name)
            assert (ran.code, ran.out) == (2, "")
            assert "lies in the bundle" in ran.err
        assert {path.name: path.read_bytes() for path in copy.path.iterdir()} == before

    @pytest.mark.skipif(os.name == "nt", reason="links and pipes of POSIX")
    def test_a_link_stays_a_link(self, exported: Exported, caracal: Callable[..., Ran], tmp_path: Path) -> None:
        (tmp_path / "state").write_bytes(b"older")
        (tmp_path / "link").symlink_to("state")
        ran = caracal("generate", exported.bundle, "--ids", "1", "-n", 2, *GREEDY, "--save-state", tmp_path / "link")
        assert ran.code == 0
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "state").stat().st_size > 1000
        assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "state"]

    @pytest.mark.skipif(os.name == "nt", reason="links and pipes of POSIX")
    def test_a_pipe_is_written_as_it_is(self, exported: Exported, caracal: Callable[..., Ran], tmp_path: Path) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
            ran = caracal("generate", exported.bundle, "--ids", "1", "-n", 2, *GREEDY, "--save-state", pipe)
            received = reader.communicate(timeout=60)[0]
        assert ran.code == 0
        assert pipe.is_fifo()
        (tmp_path / "state").write_bytes(received)
        assert caracal("generate", exported.bundle, "--load-state", tmp_path / "state", "-n", 2, *GREEDY).code == 0


class TestManifestAndGraphs:
    """A configuration that does not fit the graphs, with hashes made right: refused before anything runs."""

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("conv_kernel", 1),
            ("conv_kernel", 2),
            ("conv_kernel", 10**12),
            ("sliding_window", 7),
            ("sliding_window", 2**40),
            ("hidden_size", 24),
            ("hidden_size", 96),
            ("vocab_size", 321),
            ("num_attention_heads", 3),
            ("layer_types", ["mhf", "sliding_attention", "mhf"]),
            ("layer_types", ["mhf", "mhf", "mhf"]),
        ],
    )
    def test_configuration(self, copy: BundleCopy, caracal: Callable[..., Ran], key: str, value: Any) -> None:
        copy.edit_manifest(lambda data: data["config"].update({key: value}))
        ran = caracal("generate", copy.path, "--ids", "1,2,3", "-n", 4)
        assert (ran.code, ran.out) == (2, "")
        assert "manifest.graphs." in ran.err
        assert "export the checkpoint again" in ran.err
        assert len(ran.err.splitlines()) == 1

    @pytest.mark.parametrize(("graph", "other"), [("step", "forward"), ("extend", "step"), ("convolve", "forward")])
    def test_a_graph_in_the_place_of_another(
        self, copy: BundleCopy, caracal: Callable[..., Ran], graph: str, other: str
    ) -> None:
        (copy.path / f"{graph}.onnx").write_bytes((copy.path / f"{other}.onnx").read_bytes())
        copy.rehash()
        ids = ",".join(map(str, range(1, 60)))
        ran = caracal("generate", copy.path, "--ids", ids, "-n", 40, "--prefill-chunk", 16)
        assert ran.code == 2
        assert f"{graph}.onnx" in ran.err
        assert "export the checkpoint again" in ran.err


def test_logits_that_turn_nan_end_the_text(
    exported: Exported, model: CausalLM, caracal: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written before stands; nothing comes after."""
    step, calls = Stateful.step, iter(range(100))

    def failing(self: Stateful, rows: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
        logits = step(self, rows, tokens)
        if next(calls) == 3:
            logits[0, 5] = np.nan
        return logits

    monkeypatch.setattr(Stateful, "step", failing)
    ran = caracal("generate", exported.bundle, "--ids", "1,2,3", "-n", 12, *GREEDY)
    monkeypatch.undo()
    assert ran.code == 1
    assert list(map(int, ran.out.split())) == generated(model, [1, 2, 3], 4)[0]
    assert "finite" in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.skipif(os.name == "nt", reason="sends a POSIX signal")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_the_process_clean(exported: Exported, number: int) -> None:
    command = [sys.executable, "-m", "caracal_runtimes", "generate", str(exported.shipped), "-p", "And", "-n", "100000"]
    process = subprocess.Popen(
        [*command, "--ignore-eos", "--threads", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    first = process.stdout.read(20)  # it streams
    process.send_signal(number)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().strip() == "caracal: interrupted"
    assert len(first) == 20
    rest.decode()  # no half of a character
