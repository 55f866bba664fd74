"""Parity must notice every kind of breakage, and must never call PASSED what was not compared."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.manifest import GRAPHS
from caracal_runtimes.metrics import compare_logits
from caracal_runtimes.model import CausalLM
from caracal_runtimes.parity import _run_greedy, run_parity
from caracal_runtimes.parity_report import CaseResult, GreedyResult, ParityReport, ProviderReport
from caracal_runtimes.providers.ort import OrtSession
from caracal_runtimes.report import parity_table, verdict_line
from caracal_runtimes.sampling import SamplingOptions
from caracal_runtimes.session import Misplaced, Placement
from caracal_runtimes.tolerances import TOLERANCES

STRICT = TOLERANCES["strict", "float32"]
FROM_START = "greedy_from_start"


def strict_json(report: ParityReport) -> Any:
    """The report through JSON, by a reader that refuses NaN and Infinity."""
    return json.loads(json.dumps(report.to_dict(), allow_nan=False), parse_constant=pytest.fail)


def check(bundle: Bundle, verdict: str, exit_code: int) -> ParityReport:
    """Runs parity and holds every form of the report to one verdict."""
    report = run_parity(bundle, threads=1)
    (provider,) = report.providers
    assert (report.verdict, report.exit_code, provider.verdict) == (verdict, exit_code, verdict)
    line = verdict_line(report, provider)
    assert line.startswith(f"{verdict}  parity matmul float32 on cpu  ")
    assert "\n" not in line
    assert parity_table(report).splitlines()[0] == line
    data = strict_json(report)
    assert (data["verdict"], data["providers"][0]["verdict"]) == (verdict, verdict)
    return report


def reasons(report: ParityReport) -> dict[str, str]:
    (provider,) = report.providers
    return {result.name: result.reason for result in provider.results if result.verdict == "FAILED"}


class TestGood:
    def test_passes(self, exported: Any) -> None:
        report = check(Bundle.open(exported.bundle), "PASSED", 0)
        (provider,) = report.providers
        assert len(provider.cases) >= 10
        assert len(provider.greedy) == 2
        assert all(case.metrics is not None and case.metrics.elements > 0 for case in provider.cases)
        assert all(greedy.agreeing == greedy.new_tokens for greedy in provider.greedy)
        assert (provider.ep, provider.threads, provider.level, provider.reason) == ("cpu", 1, "strict", "")
        assert provider.placement is not None
        assert set(provider.placement) == {*GRAPHS} - {"step_resident"}
        assert set(provider.whole_placement.nodes) == {"CPUExecutionProvider"}

    def test_says_what_was_compared_and_where(self, exported: Any) -> None:
        bundle = Bundle.open(exported.bundle)
        report = run_parity(bundle, " CPU ", threads=1, level="close")
        assert (report.bundle, report.bundle_id) == (bundle.path.name, bundle.id())
        assert report.reference.startswith("PyTorch ")
        assert report.providers[0].level == "close"
        assert report.machines[0].keys() >= {"os", "machine", "processor", "python", "numpy", "onnxruntime"}

    def test_the_worst_case_is_named(self, exported: Any) -> None:
        report = run_parity(Bundle.open(exported.bundle), threads=1)
        (provider,) = report.providers
        errors = {case.name: case.metrics.relative_l2 for case in provider.cases if case.metrics is not None}
        worst = max(errors, key=lambda name: errors[name])
        assert f"worst relative L2 {errors[worst]:.1e} ({worst})  limit 1e-05" in verdict_line(report, provider)

    def test_progress(self, exported: Any) -> None:
        seen: list[tuple[str, int, int]] = []
        run_parity(Bundle.open(exported.bundle), threads=1, progress=lambda *state: seen.append(state))
        loading, *compared, timing, last = seen
        assert (loading[0], timing[0], last[0]) == ("loading the graphs", "timing", "done")
        assert [done for _, done, _ in compared] == list(range(len(compared)))
        assert {total for _, _, total in [*compared, timing, last]} == {len(compared)}

    @pytest.mark.parametrize(
        "arguments", [{"ep": "cdua"}, {"ep": ""}, {"level": "exact"}, {"level": ""}, {"threads": -1}]
    )
    def test_bad_usage(self, exported: Any, arguments: Any) -> None:
        """Not the machine's fault, so that it is an error and no report."""
        with pytest.raises(InputError, match="level" if "level" in arguments else "--"):
            run_parity(Bundle.open(exported.bundle), **{"threads": 1, **arguments})


WEIGHTS = [
    "embed_tokens.weight", "norm.weight", "norm.bias",
    "blocks.0.mhf.pre_conv.weight", "blocks.0.mhf.norm.weight", "blocks.0.mhf.norm.bias",
    "blocks.0.mhf.value_proj.weight", "blocks.0.mhf.value_proj.bias", "blocks.1.mhf.gate_proj.weight",
    "blocks.1.mhf.gate_conv.weight", "blocks.1.mhf.gate_conv.bias", "blocks.1.mhf.out_proj.weight",
    "blocks.2.swa.q_proj.weight", "blocks.2.swa.v_proj.bias", "blocks.2.swa.out_proj.weight",
    "blocks.0.ffn.gate_proj.weight", "blocks.1.ffn.up_proj.bias", "blocks.2.ffn.down_proj.weight",
]  # fmt: skip
# Pairs of one shape: names, counts and sizes stay right.
SWAPPED = [
    ("blocks.0.ffn.gate_proj.weight", "blocks.0.ffn.up_proj.weight"),
    ("blocks.0.mhf.value_proj.weight", "blocks.0.mhf.gate_proj.weight"),
    ("blocks.2.swa.q_proj.weight", "blocks.2.swa.k_proj.weight"),
    ("blocks.0.mhf.out_proj.weight", "blocks.1.mhf.out_proj.weight"),
    ("norm.weight", "norm.bias"),
]


class TestWeights:
    @pytest.mark.parametrize("name", WEIGHTS)
    def test_one_element_zeroed(self, copy: Any, name: str) -> None:
        weight = copy.weight(name)
        weight.flat[np.abs(weight).argmax()] = 0
        copy.rehash()
        report = check(copy.open(), "FAILED", 1)
        assert "relative L2" in verdict_line(report, report.providers[0])

    @pytest.mark.parametrize(("first", "second"), SWAPPED)
    def test_two_weights_swapped(self, copy: Any, first: str, second: str) -> None:
        a, b = copy.weight(first), copy.weight(second)
        a[...], b[...] = b.copy(), a.copy()
        copy.rehash()
        check(copy.open(), "FAILED", 1)

    @pytest.mark.parametrize("token", [0, 1, 111, 222, 319])
    def test_one_row_of_the_embedding(self, copy: Any, token: int) -> None:
        """Whatever inputs the goldens have, every row is read by one of them."""
        copy.weight("embed_tokens.weight")[token] *= 1.001
        copy.rehash()
        check(copy.open(), "FAILED", 1)

    def test_all_zeros(self, copy: Any) -> None:
        for name in ("norm.weight", "norm.bias"):
            copy.weight(name)[...] = 0
        copy.rehash()
        check(copy.open(), "FAILED", 1)

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_logits_that_are_no_numbers_never_agree(self, copy: Any, value: float) -> None:
        copy.weight("norm.weight")[5] = value
        copy.rehash()
        report = check(copy.open(), "FAILED", 1)
        assert all("NaN or infinite" in reason for name, reason in reasons(report).items() if "greedy" not in name)
        products = {case.name for case in report.providers[0].cases if case.name.startswith("convolve_")}
        assert products.isdisjoint(reasons(report)), "they read no weights"
        ran = len(report.providers[0].results)
        assert len(reasons(report)) == ran - len(products)
        assert strict_json(report)["providers"][0]["cases"][0]["metrics"]["max_abs"] == "inf"

    def test_nan_where_the_reference_has_it_too(self, copy: Any) -> None:
        copy.weight("norm.weight")[5] = np.nan
        copy.edit_golden(lambda tensors: [array.fill(np.nan) for name, array in tensors.items() if "logits" in name])
        report = check(copy.open(), "FAILED", 1)
        assert "reference itself has NaN" in reasons(report)["one"]


class TestGoldens:
    """What cannot be compared has failed."""

    @pytest.mark.parametrize("key", ["input_ids", "logit_positions", "logits"])
    def test_a_missing_tensor(self, copy: Any, key: str) -> None:
        copy.edit_golden(lambda tensors: tensors.pop(f"ragged/{key}"))
        report = check(copy.open(), "FAILED", 1)
        found = reasons(report)
        assert list(found) == ["ragged", "ragged_by_steps"]  # the same tensors, read again in pieces
        for reason in found.values():
            assert f"could not be compared: golden.safetensors has no tensor 'ragged/{key}'" in reason

    def test_missing_columns(self, copy: Any) -> None:
        copy.edit_golden(lambda tensors: tensors.pop("vocabulary_0/columns"))
        assert "no tensor" in reasons(check(copy.open(), "FAILED", 1))["vocabulary_0"]

    @pytest.mark.parametrize("key", ["prompt", "continuation", "margins"])
    def test_a_missing_tensor_of_a_continuation(self, copy: Any, key: str) -> None:
        copy.edit_golden(lambda tensors: tensors.pop(f"{FROM_START}/{key}"))
        assert f"no tensor '{FROM_START}/{key}'" in reasons(check(copy.open(), "FAILED", 1))[FROM_START]

    @pytest.mark.parametrize(
        ("key", "change"),
        [
            ("logits", lambda a: a[:, :-1]),
            ("logits", lambda a: a[..., :-1]),
            ("logits", lambda a: a[0]),
            ("logits", lambda a: a[:, :1]),
            ("logits", lambda a: np.float32(1)),
            ("logits", lambda a: a[:, :0]),
            ("input_ids", lambda a: a[:, :-1]),
            ("input_ids", lambda a: a[0]),
            ("input_ids", lambda a: np.int64(1)),
            ("input_ids", lambda a: a.astype(np.float32)),
            ("input_ids", lambda a: a + 320),
            ("logit_positions", lambda a: a[:, :-1]),
            ("logit_positions", lambda a: a + 1),
            ("logit_positions", lambda a: a.astype(np.float32)),
            ("logit_positions", lambda a: a[:, :0]),
        ],
    )
    def test_a_tensor_of_another_shape_or_type(self, copy: Any, key: str, change: Callable[[Any], Any]) -> None:
        copy.edit_golden(lambda tensors: tensors.update({f"odd/{key}": np.asarray(change(tensors[f"odd/{key}"]))}))
        failed = list(reasons(check(copy.open(), "FAILED", 1)))
        assert failed[0] == "odd"
        assert failed[1:] in ([], ["odd_by_steps"])  # reading in pieces compares what both have

    @pytest.mark.parametrize(
        ("key", "change"),
        [
            ("continuation", lambda a: a[0]),
            ("continuation", lambda a: a[:0]),
            ("continuation", lambda a: a[:-1]),
            ("continuation", lambda a: a[:, None]),
            ("margins", lambda a: a[0]),
            ("margins", lambda a: a[:-1]),
            ("prompt", lambda a: a[0]),
            ("prompt", lambda a: a[:0]),
            ("prompt", lambda a: np.stack([a, a])),
            ("prompt", lambda a: a.astype(np.float32)),
            ("prompt", lambda a: a + 320),
        ],
    )
    def test_a_continuation_of_another_shape_or_type(self, copy: Any, key: str, change: Callable[[Any], Any]) -> None:
        name = f"{FROM_START}/{key}"
        copy.edit_golden(lambda tensors: tensors.update({name: np.asarray(change(tensors[name]))}))
        assert list(reasons(check(copy.open(), "FAILED", 1))) == [FROM_START]

    def test_a_continuation_shorter_than_the_manifest_says(self, copy: Any) -> None:
        """Otherwise one token would stand for all."""

        def cut(tensors: dict[str, Any]) -> None:
            for key in ("continuation", "margins"):
                tensors[f"{FROM_START}/{key}"] = tensors[f"{FROM_START}/{key}"][:1]

        copy.edit_golden(cut)
        assert list(reasons(check(copy.open(), "FAILED", 1))) == [FROM_START]

    @pytest.mark.parametrize(
        "error", [ValueError("v"), TypeError("t"), KeyError("k"), ZeroDivisionError(), MemoryError()]
    )
    def test_a_comparison_that_crashes(self, exported: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        def crash(*args: object, **options: object) -> None:
            raise error

        monkeypatch.setattr("caracal_runtimes.parity.compare_logits", crash)
        report = check(Bundle.open(exported.bundle), "FAILED", 1)
        assert len(reasons(report)) == len(report.providers[0].cases)
        assert all(reason.startswith("could not be compared: ") for reason in reasons(report).values())

    @pytest.mark.parametrize("error", [NotRunError("lost the device"), RuntimeError("r"), MemoryError()])
    def test_a_run_that_crashes(self, exported: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        def crash(*args: object) -> None:
            raise error

        monkeypatch.setattr(OrtSession, "run", crash)
        report = check(Bundle.open(exported.bundle), "FAILED", 1)
        assert len(reasons(report)) == len(report.providers[0].results)

    def test_an_interruption_is_no_finding(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(OrtSession, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_parity(Bundle.open(exported.bundle), threads=1)

    def test_no_cases(self, copy: Any) -> None:
        copy.edit_manifest(lambda data: data["golden"].update(cases=[], greedy=[]))
        report = check(copy.open(), "NOT RUN", 3)
        assert "no golden forward pass to compare with" in verdict_line(report, report.providers[0])

    def test_continuations_alone_are_no_comparison(self, copy: Any) -> None:
        copy.edit_manifest(lambda data: data["golden"].update(cases=[]))
        check(copy.open(), "NOT RUN", 3)

    def test_a_failed_continuation_counts_also_without_cases(self, copy: Any) -> None:
        copy.edit_manifest(lambda data: data["golden"].update(cases=[]))
        copy.edit_golden(lambda tensors: tensors.pop(f"{FROM_START}/prompt"))
        check(copy.open(), "FAILED", 1)

    def test_a_damaged_file(self, copy: Any) -> None:
        content = (copy.path / "golden.safetensors").read_bytes()
        (copy.path / "golden.safetensors").write_bytes(content[:-1])
        copy.rehash()
        check(copy.open(), "FAILED", 1)


class TestGreedy:
    def change(self, copy: Any, margin: float, at: int = 3) -> None:
        """Another token is recorded at `at`, with this margin between the reference's two best logits."""

        def change(tensors: dict[str, Any]) -> None:
            margins = tensors[f"{FROM_START}/margins"].astype(np.float64)
            assert margins[at] > 1e-2, "this place would be a near tie anyway"
            margins[at] = margin
            tensors[f"{FROM_START}/margins"] = margins
            tensors[f"{FROM_START}/continuation"][at] = (tensors[f"{FROM_START}/continuation"][at] + 1) % 320

        copy.edit_golden(change)

    def result(self, report: ParityReport) -> GreedyResult:
        return next(greedy for greedy in report.providers[0].greedy if greedy.name == FROM_START)

    @pytest.mark.parametrize("margin", [1.0, STRICT.near_tie, float("nan"), float("inf")])
    def test_another_token_fails(self, copy: Any, margin: float) -> None:
        self.change(copy, margin)
        result = self.result(check(copy.open(), "FAILED", 1))
        assert (result.agreeing, result.reason) == (3, "parts from the reference at token 3")

    def test_a_near_tie_is_excused_and_said(self, copy: Any) -> None:
        self.change(copy, STRICT.near_tie * 0.99)
        report = check(copy.open(), "PASSED", 0)
        assert (self.result(report).agreeing, self.result(report).new_tokens) == (3, 128)
        assert "parts at token 3 on a near tie (margin 9.9e-05)" in parity_table(report)

    def ties(self, copy: Any, count: int, margin: float = 0.0) -> GreedyResult:
        """The result where the first tokens were recorded as others, each on a near tie."""

        def change(tensors: dict[str, Any]) -> None:
            margins = tensors[f"{FROM_START}/margins"].astype(np.float64)
            margins[:count] = margin
            tensors[f"{FROM_START}/margins"] = margins
            for at in range(count):
                given = [
                    *tensors[f"{FROM_START}/prompt"].tolist(),
                    *tensors[f"{FROM_START}/continuation"][:at].tolist(),
                ]
                best = int(model.forward([given], [[len(given) - 1]])[0, 0].argmax())
                tensors[f"{FROM_START}/continuation"][at] = (best + 1) % 320
            # What follows is the reference's own, behind what it is given.
            prompt = [
                *tensors[f"{FROM_START}/prompt"].tolist(),
                *tensors[f"{FROM_START}/continuation"][:count].tolist(),
            ]
            (after,) = model.generate(
                prompt, max_new_tokens=128 - count, options=SamplingOptions(temperature=0), stop_ids=()
            )
            tensors[f"{FROM_START}/continuation"][count:] = after.ids

        model = copy.model()
        copy.edit_golden(change)
        return self.alone(copy)

    def alone(self, copy: Any) -> GreedyResult:
        bundle = copy.open()
        golden = next(each for each in bundle.manifest.golden.greedy if each.name == FROM_START)
        return _run_greedy(bundle, bundle.model(threads=1), golden, STRICT)

    @pytest.mark.parametrize("count", [1, 8])
    def test_behind_near_ties_at_the_start_there_is_something_to_compare(self, copy: Any, count: int) -> None:
        """The reference's own tokens are put behind the prompt, as few as that takes."""
        result = self.ties(copy, count)
        assert (result.verdict, result.agreeing) == ("PASSED", 128 - count)
        assert result.reason == f"after {count} of the reference's, where it parts on near ties, all agree"

    def test_not_more_than_a_few_are_given(self, copy: Any) -> None:
        result = self.ties(copy, 9)
        assert (result.verdict, result.agreeing) == ("NOT RUN", 0)
        assert result.reason == (
            "after 8 of the reference's, where it parts on near ties, parts at the first token on a near tie (margin "
            "0.0e+00): nothing to compare"
        )

    def test_a_wrong_token_behind_a_near_tie_fails(self, copy: Any) -> None:
        self.ties(copy, 1)
        copy.edit_golden(
            lambda tensors: (
                tensors[f"{FROM_START}/margins"].__setitem__(slice(1, None), 1.0),
                tensors[f"{FROM_START}/continuation"].__setitem__(
                    5, (tensors[f"{FROM_START}/continuation"][5] + 1) % 320
                ),
            )
        )
        result = self.alone(copy)
        assert (result.verdict, result.agreeing) == ("FAILED", 4)
        assert result.reason == (
            "after 1 of the reference's, where it parts on near ties, parts from the reference at token 5"
        )

    def test_a_near_tie_elsewhere_excuses_nothing(self, copy: Any) -> None:
        self.change(copy, 1.0)
        copy.edit_golden(lambda tensors: tensors[f"{FROM_START}/margins"].__setitem__(slice(4, None), 0))
        check(copy.open(), "FAILED", 1)


def _placed(nodes: dict[str, int]) -> Placement:
    count = nodes.get("OtherExecutionProvider", 0)
    elsewhere = (Misplaced("forward.onnx", "here", "Add", "OtherExecutionProvider", "no kernel"),) * count
    return Placement(nodes, {}, elsewhere)


class TestPlacement:
    @pytest.mark.parametrize(
        ("nodes", "words"),
        [
            ({"CPUExecutionProvider": 300, "OtherExecutionProvider": 2}, "2 Add on OtherExecutionProvider (no kernel)"),
            ({"OtherExecutionProvider": 302}, "302 Add on OtherExecutionProvider (no kernel)"),
            ({}, "no node was recorded"),
        ],
        ids=["some elsewhere", "all elsewhere", "none recorded"],
    )
    def test_nodes_that_ran_elsewhere_or_nowhere(
        self, exported: Any, monkeypatch: pytest.MonkeyPatch, nodes: dict[str, int], words: str
    ) -> None:
        monkeypatch.setattr(CausalLM, "placements", lambda self: {"forward": _placed(nodes)})
        report = run_parity(Bundle.open(exported.bundle), threads=1)
        line = verdict_line(report, report.providers[0])
        assert report.verdict != "PASSED"
        assert report.exit_code != 0
        assert "asked for cpu" in line
        assert words in line

    def test_wrong_numbers_weigh_more(self, copy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CausalLM, "placements", lambda self: {"forward": _placed({"OtherExecutionProvider": 1})})
        copy.weight("norm.weight")[...] = 0
        copy.rehash()
        check(copy.open(), "FAILED", 1)


class TestNotRun:
    def test_a_graph_that_does_not_load(self, copy: Any) -> None:
        (copy.path / "forward.onnx").write_bytes(b"no graph")
        copy.rehash()
        report = check(copy.open(), "NOT RUN", 3)
        assert "forward.onnx is no whole ONNX model" in verdict_line(report, report.providers[0])

    def test_a_provider_that_the_build_lacks(self, exported: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("onnxruntime.get_available_providers", list)
        report = check(Bundle.open(exported.bundle), "NOT RUN", 3)
        assert "provider cpu does not work here" in parity_table(report)

    def test_no_provider_at_all(self, exported: Any) -> None:
        report = replace(run_parity(Bundle.open(exported.bundle), threads=1), providers=())
        assert (report.verdict, report.exit_code) == ("NOT RUN", 3)

    def test_a_provider_without_a_single_case(self, exported: Any) -> None:
        (provider,) = run_parity(Bundle.open(exported.bundle), threads=1).providers
        assert provider.greedy[0].verdict == "PASSED"
        assert replace(provider, cases=()).verdict == "NOT RUN"
        assert replace(provider, cases=(), greedy=()).verdict == "NOT RUN"

    def test_one_of_two_providers(self, exported: Any) -> None:
        report = run_parity(Bundle.open(exported.bundle), threads=1)
        (good,) = report.providers
        absent = ProviderReport("other", 1, "strict", STRICT, None, reason="not installed")
        failed = replace(good, cases=(replace(good.cases[0], verdict="FAILED", reason="x"),))
        assert replace(report, providers=(good, good)).exit_code == 0
        assert replace(report, providers=(good, absent)).exit_code == 3
        assert replace(report, providers=(good, absent, failed)).exit_code == 1


class TestReport:
    def test_json_has_every_figure(self, exported: Any) -> None:
        data = strict_json(run_parity(Bundle.open(exported.bundle), threads=1))
        case = data["providers"][0]["cases"][0]
        assert case["metrics"].keys() >= {"max_abs", "relative_l2", "kl_max", "outlier_ratio", "needed_scale"}
        assert data["providers"][0]["placement"]["forward"]["nodes"]["CPUExecutionProvider"] > 0
        assert data["providers"][0]["tolerance"]["relative_l2"] == STRICT.relative_l2

    def test_infinities_become_strings(self, exported: Any) -> None:
        report = run_parity(Bundle.open(exported.bundle), threads=1)
        metrics = compare_logits(np.full((1, 1, 3), np.nan), np.ones((1, 1, 3)), STRICT, whole_vocabulary=True)
        case = CaseResult("bad", 1, 1, "FAILED", metrics, float("nan"))
        provider = replace(report.providers[0], cases=(case,), tolerance=replace(STRICT, kl=float("inf")))
        data = strict_json(replace(report, providers=(provider,)))["providers"][0]
        assert data["cases"][0]["metrics"]["relative_l2"] == "inf"
        assert (data["cases"][0]["seconds"], data["tolerance"]["kl"]) == ("nan", "inf")

    def test_columns_are_aligned(self, copy: Any) -> None:
        copy.edit_golden(lambda tensors: tensors.pop("two/logits"))
        lines = parity_table(run_parity(copy.open(), threads=1)).splitlines()
        head = next(index for index, line in enumerate(lines) if line.startswith("case "))
        starts = [
            match.start()
            for match in re.finditer(r"(?<!\S)(?:batch x length|relative L2|max abs|KL mean|KL max|\S+)", lines[head])
        ]
        rows = lines[head + 1 : head + 11]
        assert len(starts) == 9
        assert {line.split()[0] for line in rows} >= {"one", "two", "ragged", "vocabulary_0"}
        for line in rows:
            for start in starts[1:]:
                assert line[start - 2 : start] == "  ", line
                assert line[start] not in " ", line
            assert line[starts[-1] :] in ("PASSED", "FAILED")
        assert max(map(len, lines[head : head + 11])) < 120

    def test_failures_are_spelt_out_below_the_table(self, copy: Any) -> None:
        copy.weight("norm.bias")[0] += 1
        copy.rehash()
        table = parity_table(run_parity(copy.open(), threads=1))
        assert re.search(r"^one: relative L2 \S+ > 1e-05; \d+ of 320 values", table, re.M)
        assert re.search(r"^nodes: \d+ on CPUExecutionProvider; 1 thread\(s\); level strict$", table, re.M)

    def test_a_series_of_passed_cases_is_shown_by_its_worst(self, exported: Any) -> None:
        report = run_parity(Bundle.open(exported.bundle), threads=1)
        (provider,) = report.providers
        case = provider.cases[0]
        assert case.metrics is not None
        series = tuple(
            replace(case, name=f"series_{index}", metrics=replace(case.metrics, relative_l2=error))
            for index, error in enumerate((1e-7, 3e-7, 2e-7))
        )
        failed = replace(series[0], name="series_3", verdict="FAILED", reason="why")
        table = parity_table(replace(report, providers=(replace(provider, cases=(*series, failed)),)))
        shown = [line.split()[0] for line in table.splitlines() if line.startswith("series")]
        assert shown == ["series_1", "series_3", "series_3:"]
