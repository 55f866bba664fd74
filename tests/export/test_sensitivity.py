"""What rounding a weight costs is measured, and a bound on the whole holds when somebody else measures it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir
import pytest
from caracal_export.precision import mixing_precisions
from caracal_export.precision.calibration import calibration_ids
from caracal_export.precision.mixing_precisions import Mixed, choose_higher
from caracal_export.precision.plan import INT4_OPERATORS, Planned, Precision, plan, roles_of
from caracal_export.precision.quantizing import quantize_bundle
from caracal_export.precision.sensitivity import Sensitivity, divergence, enough, measure
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError
from numpy.typing import NDArray

IDS = np.random.default_rng(9).integers(0, 97, 60).tolist()
INT4 = Precision("int4", block=16, operator=INT4_OPERATORS[1])


@pytest.fixture(scope="module")
def source(bundle: Callable[[str], Path]) -> Bundle:
    return Bundle.open(bundle("matmul"))


def planned(source: Bundle, precision: Precision) -> list[Planned]:
    models = [ir.load(source.file(graph.file)) for graph in source.manifest.graphs.values()]
    return plan(
        precision, roles_of(models), {name: file.entries[name].shape for name, file in source.weights().holders.items()}
    )


def mean_kl(source: Bundle, other: Bundle, ids: list[int]) -> float:
    """KL in nats at all positions but the first, through the model's own interface."""

    def probabilities(bundle: Bundle) -> NDArray[np.float64]:
        logits = bundle.model(threads=1).forward([ids], [list(range(1, len(ids)))])[0].astype(np.float64)
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))

    p, q = probabilities(source), probabilities(other)
    return float((p * np.log(p / q)).sum(axis=-1).mean())


class TestMeasure:
    def test_a_weight_that_rounding_hurts_comes_first(
        self,
        bundle: Callable[[str], Path],
        stored_tensor: Callable[[Path, str], NDArray[Any]],
        rehash: Callable[[Path], None],
        tmp_path: Path,
    ) -> None:
        """One input is a thousand times smaller, and its weights as much larger: beside them all others become zero."""
        path = Path(shutil.copytree(bundle("matmul"), tmp_path / "b"))
        file, weight = path / "weights.safetensors", "blocks.1.ffn.up_proj.weight"
        for name, factor in (
            ("norm.weight", 1e-3),
            ("norm.bias", 1e-3),
            ("up_proj.weight", 1e3),
            ("gate_proj.weight", 1e3),
        ):
            stored_tensor(file, f"blocks.1.ffn.{name}")[5] *= np.float32(factor)
        rehash(path)
        altered = Bundle.open(path)
        found = measure(altered, planned(altered, Precision("int8")), IDS, threads=1)
        assert {each.weight for each in found[:2]} == {weight, "blocks.1.ffn.gate_proj.weight"}
        plain = Bundle.open(bundle("matmul"))
        before = {each.weight: each.kl for each in measure(plain, planned(plain, Precision("int8")), IDS, threads=1)}
        assert found[1].kl > 10 * before[found[1].weight]
        assert [each.kl for each in found] == sorted((each.kl for each in found), reverse=True)

    def test_it_is_the_divergence_of_a_bundle_with_that_weight_alone(self, source: Bundle, tmp_path: Path) -> None:
        """In bfloat16, whose activations stay what they are."""
        precision = Precision("bfloat16")
        found = {each.weight: each.kl for each in measure(source, planned(source, precision), IDS, threads=1)}
        assert "embed_tokens.weight" in found
        name = "blocks.1.ffn.down_proj.weight"
        quantize_bundle(
            source, tmp_path / "b", precision, higher=[other for other in found if other != name], verify=False
        )
        assert mean_kl(source, Bundle.open(tmp_path / "b"), IDS) == pytest.approx(found[name], rel=0.02)

    def test_every_weight_is_measured_once(self, source: Bundle) -> None:
        plans = planned(source, INT4)
        seen: list[tuple[str, int, int]] = []
        found = measure(source, plans, IDS[:5], threads=1, progress=lambda *state: seen.append(state))
        assert sorted(each.weight for each in found) == sorted({each.weight for each in plans})
        assert all(each.kl >= 0 for each in found)
        assert [done for _, done, _ in seen] == list(range(len(found)))
        assert {total for _, _, total in seen} == {len(found)}

    def test_two_tokens_are_the_least(self, source: Bundle) -> None:
        assert len(measure(source, planned(source, INT4)[:1], [1, 2], threads=1)) == 1
        with pytest.raises(InputError, match="expected a text of at least 2 tokens, found 1"):
            measure(source, planned(source, INT4), [1], threads=1)

    def test_a_bundle_is_no_distance_from_itself(self, source: Bundle) -> None:
        assert divergence(source, source, IDS, threads=1) == 0


def kept(costs: dict[str, float], bound: float, numbers: dict[str, int] | None = None) -> list[str]:
    return enough([Sensitivity(name, kl) for name, kl in costs.items()], bound, numbers or dict.fromkeys(costs, 10))


class TestEnough:
    COSTS: ClassVar = {"a": 0.5, "b": 0.3, "c": 0.15, "d": 0.05}

    @pytest.mark.parametrize(
        ("bound", "expected"),
        [
            (2.0, []),
            (1.0, []),
            (0.99, ["a"]),
            (0.5, ["a"]),
            (0.49, ["a", "b"]),
            (0.1, ["a", "b", "c"]),
            (0.01, [*"abcd"]),
        ],
    )
    def test_the_most_sensitive_first(self, bound: float, expected: list[str]) -> None:
        assert kept({name: cost + (name == "a") * 1e-12 for name, cost in self.COSTS.items()}, bound + 1e-9) == expected

    def test_small_weights_are_cheap_to_keep(self) -> None:
        numbers = {"a": 1000, "b": 10, "c": 10, "d": 10}
        assert kept(self.COSTS, 0.6, numbers) == ["b", "c"]

    def test_ties_go_by_name(self) -> None:
        assert kept({"z": 0.1, "a": 0.1, "m": 0.1}, 0.15) == ["a", "m"]

    def test_what_cannot_be_kept_counts_all_the_same(self) -> None:
        assert kept(self.COSTS, 0.6, {"c": 10, "d": 10, "b": 10}) == ["b", "c"]
        assert kept(self.COSTS, 0.4, {"c": 10, "d": 10, "b": 10}) == ["b", "c", "d"]

    def test_infinite_costs(self) -> None:
        """A weight whose rounding gives no number at all."""
        assert kept({"a": float("inf"), "b": 0.1}, 0.2)[0] == "a"

    def test_nothing_to_keep(self) -> None:
        assert enough([], 0.1, {}) == []


class TestChoose:
    @pytest.mark.slow
    @pytest.mark.parametrize("precision", [Precision("bfloat16"), Precision("int8"), INT4], ids=lambda each: each.name)
    def test_the_bound_holds(self, source: Bundle, tmp_path: Path, precision: Precision) -> None:
        quantize_bundle(source, tmp_path / "all", precision, verify=False)
        whole = mean_kl(source, Bundle.open(tmp_path / "all"), IDS)
        bound = whole / 2
        mixed = choose_higher(source, precision, bound, IDS, threads=1)
        assert (mixed.bound, mixed.tokens) == (bound, 60)
        assert mixed.higher
        assert len(mixed.higher) < len(mixed.sensitivities)
        quantize_bundle(source, tmp_path / "b", precision, higher=mixed.higher, verify=False)
        found = Bundle.open(tmp_path / "b")
        assert mean_kl(source, found, IDS) == pytest.approx(mixed.kl, rel=0.02)
        assert mixed.kl <= bound
        told = found.manifest.quantization
        assert told is not None
        for name in mixed.higher:
            stored = told.weights.get("lm_head.weight" if name == "embed_tokens.weight" else name)
            assert stored == ("int8" if precision.name == "int4" else None)

    def test_a_bound_that_all_meet_keeps_nothing(self, source: Bundle) -> None:
        assert choose_higher(source, Precision("bfloat16"), 1.0, IDS, threads=1).higher == ()

    def test_a_bound_that_only_float32_meets_is_refused(self, source: Bundle) -> None:
        with pytest.raises(InputError, match="--max-kl 1e-12: all 20 weights would have to stay float32; allow more"):
            choose_higher(source, Precision("int8"), 1e-12, IDS, threads=1)

    def test_a_bound_that_int8_everywhere_misses_is_refused(self, source: Bundle) -> None:
        with pytest.raises(
            InputError, match=r"--max-kl 1e-12: int4 is .* nats from float32 on this text with 20 of 20 weights"
        ):
            choose_higher(source, INT4, 1e-12, IDS, threads=1)

    def test_a_table_that_stays_int8_is_not_counted_as_kept(self, untied_bundle: Path) -> None:
        untied = Bundle.open(untied_bundle)
        with pytest.raises(InputError, match="with 20 of 21 weights"):
            choose_higher(untied, INT4, 1e-12, IDS, threads=1)

    def test_effects_that_add_up_to_more(self, source: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
        """Measured one by one next to nothing, together far too much: before it gives up it tries to keep all of them."""
        plain, counts = mixing_precisions.write_quantized, list[int]()

        def counted(*arguments: Any, **options: Any) -> Any:
            counts.append(len(options["higher"]))
            return plain(*arguments, **options)

        names = sorted({each.weight for each in planned(source, INT4)})
        tiny = [Sensitivity(name, 1e-3 / 2**index) for index, name in enumerate(names)]
        monkeypatch.setattr(mixing_precisions, "measure", lambda *arguments, **options: tiny)
        monkeypatch.setattr(mixing_precisions, "write_quantized", counted)
        quantized = {len(names): 1e-4}
        monkeypatch.setattr(
            mixing_precisions, "divergence", lambda *arguments, **options: quantized.get(counts[-1], 0.11)
        )
        mixed = choose_higher(source, INT4, 0.1, IDS, threads=1)
        assert counts == sorted(counts)
        assert (len(counts), set(mixed.higher)) == (6, set(names))

    @pytest.mark.parametrize(("bound", "threads", "words"), [(float("nan"), 1, "--max-kl"), (0.1, -1, "threads")])
    def test_bad_arguments_come_before_the_work(
        self, source: Bundle, bound: float, threads: int, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(mixing_precisions, "measure", pytest.fail)
        with pytest.raises(InputError, match=words):
            choose_higher(source, INT4, bound, IDS, threads=threads)

    def test_what_it_says(self, source: Bundle) -> None:
        from caracal_export.cli.precision_arguments import mixed_lines

        found = tuple(Sensitivity(name, kl) for name, kl in (("a", 0.3), ("b", 0.2), ("c", 0.1), ("d", 0.01)))
        assert mixed_lines(Mixed(("a", "c"), 0.02, 0.05, 60, found)) == [
            "2 of 4 weights keep a higher precision: KL 2.0e-02 nats on 60 tokens, at most 0.05 was asked for",
            "the most sensitive alone: a 3.0e-01, b 2.0e-01, c 1.0e-01",
            "  kept: a",
            "  kept: c",
        ]


class TestText:
    def test_the_callers_own(self, source: Bundle) -> None:
        with pytest.raises(InputError, match="expected a text of at least 2 tokens, found 0; give a longer one"):
            calibration_ids(source, "")

    def test_none_recorded(self, source: Bundle, untied_bundle: Path) -> None:
        """The tiny tokenizer makes one token of any text, so that there is no passage."""
        assert source.manifest.golden.text is None
        with pytest.raises(InputError, match="no recorded passage; give a text of your own with --calibration"):
            calibration_ids(source, None)
        with pytest.raises(InputError, match="no recorded passage, since it has no tokenizer"):
            calibration_ids(Bundle.open(untied_bundle), None)
