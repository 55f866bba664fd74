"""`caracal bench`: the figures hang together, and bad requests are refused. No timing is judged here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes.bench import BenchOptions, run_bench
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError

from .conftest import LAGS, BundleCopy, Exported, Ran

OPTIONS = BenchOptions(contexts=(3, 40), new_tokens=20, repeats=2, warmup=2, batch=2)


def test_figures_hang_together(exported: Exported) -> None:
    bundle = Bundle.open(exported.bundle)
    seen: list[tuple[int, int]] = []
    report = run_bench(bundle, OPTIONS, threads=1, progress=lambda what, done, total: seen.append((done, total)))
    assert [result.context for result in report.results] == [3, 40]
    assert seen == [(index, 6) for index in range(6)], "two contexts, a round that warms up and two that count"
    for result in report.results:
        times = [result.ms_per_token[key] for key in ("p50", "p95", "p99", "max")]
        assert 0 < times[0] <= times[1] <= times[2] <= times[3]
        assert min(times) / 10 < result.ms_per_token["mean"] <= times[3]
        assert result.decode_tokens_per_s == pytest.approx(2e3 / result.ms_per_token["mean"])
        assert result.prefill_tokens_per_s == pytest.approx(2 * result.context / result.prefill_s)
        assert result.first_token_s >= result.prefill_s > 0
        assert result.peak_bytes is None or result.peak_bytes > result.state_bytes
    short, long = report.results
    assert long.state_bytes >= short.state_bytes
    assert report.bundle_id == bundle.id()
    assert (report.threads, report.ep, report.options) == (1, "cpu", OPTIONS)
    assert {"processor", "onnxruntime", "numpy", "python", "caracal-onnx"} <= report.environment.keys()


def test_what_a_step_reads_does_not_grow(exported: Exported) -> None:
    """Two MHF layers of width 48 with rings of M and their lags, an attention layer with rings of 8, two rows."""
    report = run_bench(Bundle.open(exported.bundle), OPTIONS, threads=1)
    rows, width, window = 2, 48, 8
    mhf = 4 * LAGS + 3 + 2  # recent and lag of both streams; pending, first v and g; two inputs of the convolution
    expected = 4 * rows * (2 * mhf * width + 2 * window * width + window)
    assert {result.step_state_bytes for result in report.results} == {expected}


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"contexts": ()}, "--contexts"),
        ({"contexts": (0,)}, "--contexts"),
        ({"contexts": (128, -1)}, "--contexts"),
        ({"contexts": (1.5,)}, "--contexts"),
        ({"new_tokens": 0}, "--new-tokens"),
        ({"repeats": 0}, "--repeats"),
        ({"warmup": -1}, "--warmup"),
        ({"batch": 0}, "--batch"),
        ({"batch": True}, "--batch"),
        ({"batch": 10**20}, "--batch"),
        ({"chunk": 0}, "--prefill-chunk"),
    ],
)
def test_bad_options(arguments: dict[str, Any], flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        BenchOptions(**arguments)


def test_a_context_beyond_memory_is_refused_before_anything_runs(exported: Exported) -> None:
    with pytest.raises(InputError, match="context too long"):
        run_bench(Bundle.open(exported.bundle), BenchOptions(contexts=(8, 10**8)), threads=1)


def test_the_command_prints_a_table_and_writes_json(
    exported: Exported, caracal: Callable[..., Ran], tmp_path: Path
) -> None:
    file = tmp_path / "bench.json"
    common = ("--contexts", "2,30", "-n", "6", "--repeats", "1", "--warmup", "0", "--threads", "1")
    ran = caracal("bench", exported.bundle, *common, "--json", file)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert [line.split()[0] for line in lines if line[:1].isdigit()][1:] == ["2", "30"]
    assert lines[-1].startswith("a token at 30 takes ")
    data = json.loads(file.read_text(encoding="utf-8"))
    assert [result["context"] for result in data["results"]] == [2, 30]
    assert all(math.isfinite(value) for result in data["results"] for value in result["ms_per_token"].values())
    printed = caracal("bench", exported.bundle, *common, "--format", "json")
    assert json.loads(printed.out).keys() == data.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--contexts", ""), "--contexts"),
        (("--contexts", "a"), "--contexts"),
        (("--contexts", "0"), "--contexts"),
        (("-n", "0"), "--new-tokens"),
        (("--batch", "-2"), "--batch"),
        (("--json", "/nowhere/at/all.json"), "--json"),
        (("--ep", "cdua"), "--ep"),
        (("--ep-option", "a=b"), "--ep-option"),
        (("--threads", "-1"), "--threads"),
    ],
)
def test_bad_usage(exported: Exported, caracal: Callable[..., Ran], arguments: tuple[str, ...], message: str) -> None:
    ran = caracal("bench", exported.bundle, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_model_that_is_not_finite_is_not_timed(copy: BundleCopy, caracal: Callable[..., Ran]) -> None:
    copy.weight("blocks.1.ffn.down_proj.weight")[0, 0] = math.nan
    copy.rehash()
    ran = caracal("bench", copy.path, "--contexts", "3", "-n", "2", "--repeats", "1", "--threads", "1")
    assert (ran.code, ran.out) == (1, "")
    assert "NaN or infinite" in ran.err
