"""Bundles whose passes are bounded, as the runtime and its commands use them: `--max-length`, `--static-length`."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caracal_runtimes import limits
from caracal_runtimes.bench import BenchOptions, run_bench
from caracal_runtimes.bisect import Options, run_bisect
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_state import pass_size
from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.manifest import BOUNDED_VERSION, FORMAT_VERSION, Manifest
from caracal_runtimes.model import CausalLM
from caracal_runtimes.parity import run_parity
from caracal_runtimes.pass_lengths import ANY, PassLengths
from caracal_runtimes.sampling import SamplingOptions

LAGS = 8  # of the tiny bundles
N = 20
STATIC, BOUNDED = PassLengths(N, static=True), PassLengths(N)
GREEDY = SamplingOptions(temperature=0)


@pytest.fixture(scope="module")
def static(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny bundle with passes of exactly N tokens. Read only."""
    import onnx_ir as ir
    from caracal_export import export_checkpoint, exporter, tracing

    def trace(model: Any, name: str, *rest: Any, **named: Any) -> ir.Model:
        if name in tracing.BOUNDED:
            return tracing.trace(model, name, *rest, **named)
        return ir.load(exported.bundle / f"{name}.onnx")  # which no bound touches

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "trace", trace)
        target = tmp_path_factory.mktemp("static") / "bundle"
        export_checkpoint(
            exported.checkpoint, target, threads=1, lags=LAGS, max_length=N, static_length=True, verify=False
        )
    return Bundle.open(target)


@pytest.fixture(scope="module")
def bounded_model(static: Bundle) -> CausalLM:
    return static.model(threads=1)


# What lengths mean


def test_lengths_without_a_bound() -> None:
    assert (ANY.axis, ANY.inside(7), ANY.transformed(7), ANY.capped(7)) == ("length", 7, 7, 7)
    ANY.check(10**9)
    feeds = {"input_ids": np.ones((2, 3), np.int64)}
    assert ANY.padded(feeds) == feeds


def test_lengths_with_a_bound() -> None:
    assert (BOUNDED.axis, BOUNDED.inside(7), BOUNDED.transformed(7)) == ("length", 7, N)
    assert [BOUNDED.capped(n) for n in (N - 1, N, N + 1)] == [N - 1, N, N]
    BOUNDED.check(N)
    with pytest.raises(InputError, match=rf"--max-length {N}\), found 1,021;"):
        BOUNDED.check(1021)


def test_static_lengths() -> None:
    assert (STATIC.axis, STATIC.inside(7), STATIC.transformed(7)) == (N, N, N)


def test_what_is_padded_is_what_has_a_length() -> None:
    feeds = {
        "input_ids": np.ones((2, 3), np.int64),
        "lengths": np.asarray([3, 1]),
        "logit_positions": np.ones((2, 3), np.int64),
        "starts": np.asarray([8, 8]),
        "past.0.pending": np.ones((2, 3, 5), np.float32),
        "past.0.lag_v": np.ones((2, 3, 5), np.float32),
        "past.0.lag_g": np.ones((2, 3, 5), np.float32),
        "past.0.conv": np.ones((2, 2, 5), np.float32),
        "past.2.keys": np.ones((2, 8, 5), np.float32),
    }
    padded = STATIC.padded(feeds)
    for name, value in feeds.items():
        along = name in ("input_ids", "past.0.pending", "past.0.lag_v", "past.0.lag_g")
        assert padded[name].shape == ((2, N, *value.shape[2:]) if along else value.shape), name
        assert padded[name].dtype == value.dtype
        assert padded[name].sum() == value.sum()


# The manifest


def _json(static: Bundle) -> dict[str, Any]:
    return dict(json.loads((static.path / "manifest.json").read_text(encoding="utf-8")))


def test_the_manifest_says_it(static: Bundle, exported: Any) -> None:
    data = _json(static)
    assert (data["format_version"], data["max_length"], data["static_length"]) == (BOUNDED_VERSION, N, True)
    assert static.manifest.lengths == STATIC
    # A bundle without a bound is as it always was, so that older readers take it.
    plain = json.loads((exported.bundle / "manifest.json").read_text(encoding="utf-8"))
    assert plain["format_version"] == FORMAT_VERSION
    assert not {"max_length", "static_length"} & set(plain)
    assert Bundle.open(exported.bundle).manifest.lengths == ANY


def test_it_is_written_as_it_was_read(static: Bundle) -> None:
    for manifest in (static.manifest, dataclasses.replace(static.manifest, max_length=None, static_length=False)):
        assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"max_length": None},
            "manifest.max_length must be there if and only if format_version is 5, found None with 5",
        ),
        (
            {"format_version": 4},
            "manifest.max_length must be there if and only if format_version is 5, found 20 with 4",
        ),
        ({"max_length": 1}, "manifest.max_length must be an integer from 2"),
        ({"max_length": "20"}, "manifest.max_length must be of type int"),
        ({"max_length": True}, "manifest.max_length must be of type int"),
        ({"static_length": 1}, "manifest.static_length must be of type bool"),
        ({"format_version": 4, "max_length": None}, "static_length is true without a max_length"),
        ({"format_version": 6}, r"format_version 6 is not one this version reads \(4, 5\); update caracal-onnx"),
    ],
)
def test_a_manifest_that_contradicts_itself(static: Bundle, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(json.dumps({**_json(static), **change}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": N + 1}, r"forward: input_ids has the shape \['batch', 20\], expected \['batch', 21\]"),
        ({"static_length": False}, r"forward: input_ids has the shape \['batch', 20\], expected \['batch', 'length'\]"),
        ({"max_length": LAGS - 1}, "max_length: expected at least 8, which the graph step mixes by itself, found 7"),
    ],
)
def test_a_manifest_that_is_not_that_of_its_graphs(static: Bundle, change: dict[str, Any], message: str) -> None:
    manifest = Manifest.from_json(json.dumps({**_json(static), **change}))
    with pytest.raises(BundleError, match=message):
        dataclasses.replace(static, manifest=manifest).model(threads=1)


# Passes, generation, sessions


def test_a_chunk_is_a_power_of_two_that_fits(bounded_model: CausalLM) -> None:
    graphs = bounded_model.graphs
    assert [pass_size(graphs, chunk) for chunk in (1, 8, 15, 16, 20, 64, 2048)] == [8, 8, 8, 16, 16, 16, 16]
    unbounded = copy.copy(graphs)
    unbounded.lengths = ANY
    assert pass_size(unbounded, 2048) == 2048


@pytest.mark.parametrize("chunk", [1, 16, 2048])
def test_generation_is_that_of_the_unbounded_bundle(bounded_model: CausalLM, model: CausalLM, chunk: int) -> None:
    rng = np.random.default_rng(chunk)
    prompts = [rng.integers(1, 320, n).tolist() for n in (1, 5, N, N + 1, 7 * N + 3)]
    got, want = (
        each.generate(prompts, max_new_tokens=40, options=GREEDY, stop_ids=[], prefill_chunk=chunk)
        for each in (bounded_model, model)
    )
    assert [each.ids for each in got] == [each.ids for each in want]


def test_sessions_append_fork_save_and_load(bounded_model: CausalLM, model: CausalLM, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    first, more = rng.integers(1, 320, 3 * N).tolist(), rng.integers(1, 320, 2 * N + 5).tolist()
    found = []
    for each, name in ((bounded_model, "bounded"), (model, "any")):
        session = each.start([first])
        session.append(more)
        session.fork().save(tmp_path / name)
        found.append(
            [
                run.generate(max_new_tokens=30, options=GREEDY, stop_ids=[])[0].ids
                for run in (session, each.load_session(tmp_path / name))
            ]
        )
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]


def test_what_one_pass_cannot_read_is_refused(bounded_model: CausalLM) -> None:
    with pytest.raises(InputError, match=f"one pass of this bundle reads at most {N} tokens"):
        bounded_model.forward([[1] * (N + 1)])
    with pytest.raises(InputError, match=r"lengths: expected 1 integers from 1 to 3"):
        bounded_model.forward(np.ones((1, 3), np.int64), lengths=[4])  # the graph's own length is nobody's business


def test_memory_is_that_of_the_graph(bounded_model: CausalLM) -> None:
    spec = bounded_model.spec
    whole = limits.forward_bytes(spec, 2, 1024, 3)
    assert limits.forward_bytes(spec, 2, 7, 3, "matmul", PassLengths(1024, static=True)) == whole
    partly = limits.forward_bytes(spec, 2, 7, 3, "matmul", PassLengths(1024))
    assert limits.forward_bytes(spec, 2, 7, 3) < partly < whole
    # Rows that are padded to one length are not read together where that would be more than a chunk.
    assert limits.prompt_pass([5] * 9, 64) == (9, 5)
    assert limits.prompt_pass([5] * 9, 64, STATIC) == (3, 5)
    assert limits.prompt_pass([5000] * 9, 64, STATIC) == (3, N)


# Commands


def test_score_takes_windows_of_one_pass(bounded_model: CausalLM, model: CausalLM) -> None:
    ids = np.random.default_rng(0).integers(1, 320, 3 * N).tolist()
    got, want = bounded_model.score(ids), model.score(ids, context=N)
    assert (got.context, got.tokens, got.windows) == (N, want.tokens, want.windows)
    assert got.nats == pytest.approx(want.nats, rel=1e-6)


def test_parity_passes_and_reads_chunks(static: Bundle) -> None:
    report = run_parity(static, threads=1)
    (row,) = report.providers
    assert report.verdict == "PASSED"
    assert any(case.name.endswith("_by_chunks") and case.verdict == "PASSED" for case in row.cases)
    assert all(case.length <= N for case in row.cases if not case.name.startswith("convolve_block"))
    assert row.text is not None
    assert row.text.tokens <= N


def test_bench_measures_contexts_beyond_a_pass(static: Bundle, bounded_model: CausalLM) -> None:
    options = BenchOptions(contexts=(4, 3 * N), new_tokens=3, repeats=1, warmup=0)
    report = run_bench(static, options, model=bounded_model)
    assert [result.context for result in report.results] == [4, 3 * N]


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["forward", "extend", "step"])
def test_bisect_finds_nothing_wrong(static: Bundle, graph: str) -> None:
    report = run_bisect(static, Options(ep="cpu", against="reference", graph=graph))
    assert report.verdict == "PASSED", report


def test_commands_say_it_in_one_line(caracal: Callable[..., Any], static: Bundle) -> None:
    ran = caracal(
        "generate", static.path, "--ids", ",".join(["7"] * (3 * N)), "--max-new-tokens", 4, "--temperature", 0
    )
    assert ran.code == 0, ran.err
    ran = caracal("info", static.path, "--ep", "cpu")
    assert f"passes: exactly {N} tokens, shorter ones padded (--max-length {N} --static-length)" in ran.out
