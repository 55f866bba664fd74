"""What the goldens cover, and that they are what the reference computes row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from caracal_export import goldens
from caracal_export.drafting import draft_greedy
from caracal_runtimes.manifest import GoldenCase, Manifest
from numpy.typing import NDArray

from caracal import CaracalModel

Tensors = dict[str, NDArray[Any]]
WINDOW = 8
LAGS = 8  # of the bundle's step graph
LONGEST = 6 * LAGS + 5  # blocks of several sizes, and some tokens on top


@pytest.fixture(scope="module")
def manifest(bundle: Callable[[str], Path]) -> Manifest:
    return Manifest.from_json((bundle("matmul") / "manifest.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tensors(bundle: Callable[[str], Path], manifest: Manifest) -> Tensors:
    return safetensors.numpy.load_file(bundle("matmul") / manifest.golden.file)


@pytest.fixture(scope="module")
def exact(model: CaracalModel) -> CaracalModel:
    """The reference in float64."""
    double = CaracalModel(model.config).double()
    double.load_state_dict(model.state_dict())
    return double.requires_grad_(False)


def _ids_read(cases: list[GoldenCase], tensors: Tensors) -> set[int]:
    """Ids at real positions; what stands in a row's padding is read by the graph but decides nothing."""
    read: set[int] = set()
    for case in cases:
        for row, length in zip(tensors[f"{case.name}/input_ids"], tensors[f"{case.name}/lengths"], strict=True):
            read.update(row[:length].tolist())
    return read


def test_lengths_are_where_implementations_break(manifest: Manifest, tensors: Tensors) -> None:
    lengths = {
        case.name: sorted(set(tensors[f"{case.name}/lengths"].tolist()))
        for case in manifest.golden.cases
        if not case.columns
    }
    assert lengths == {
        "one": [1],
        "two": [2],
        "three": [3],
        "window_minus_1": [WINDOW - 1],
        "window": [WINDOW],
        "window_plus_1": [WINDOW + 1],
        "odd": [37],
        "beyond_window": [LONGEST],
        "ragged": [1, WINDOW + 1, 2 * WINDOW + 3],
    }


@pytest.mark.parametrize(
    ("window", "lags", "longest"), [(8, 8, 53), (8, 64, 389), (100, 8, 305), (1, 2, 17), (5000, 64, 15005)]
)
def test_the_longest_row_goes_beyond_window_and_lags(
    random_model: Callable[..., CaracalModel], window: int, lags: int, longest: int
) -> None:
    """One that fits into either would leave what comes after it unseen."""
    model = random_model(hidden_size=4, num_attention_heads=2, num_hidden_layers=1, sliding_window=window)
    plans = goldens._length_plans(model.config, lags, np.random.default_rng(0))
    assert {len(row) for plan in plans if plan.name == "beyond_window" for row in plan.rows} == {longest}


def test_every_row_of_the_embedding_is_read(manifest: Manifest, tensors: Tensors, model: CaracalModel) -> None:
    assert _ids_read(list(manifest.golden.cases), tensors) == set(range(model.config.vocab_size))


def test_manifest_describes_the_tensors(manifest: Manifest, tensors: Tensors) -> None:
    wanted = set()
    for case in manifest.golden.cases:
        keys = ["input_ids", "lengths", "logit_positions", "logits", *(["columns"] if case.columns else [])]
        wanted |= {f"{case.name}/{key}" for key in keys}
        ids, positions, logits = (tensors[f"{case.name}/{key}"] for key in ("input_ids", "logit_positions", "logits"))
        assert ids.shape == (case.batch, case.length)
        assert logits.shape[:2] == positions.shape
        assert (positions < tensors[f"{case.name}/lengths"][:, None]).all()
        assert (ids.dtype, positions.dtype, logits.dtype) == (np.int64, np.int64, np.float32)
    for greedy in manifest.golden.greedy:
        wanted |= {f"{greedy.name}/{key}" for key in ("prompt", "continuation", "margins")}
        assert len(tensors[f"{greedy.name}/prompt"]) == greedy.prompt_length
        assert len(tensors[f"{greedy.name}/continuation"]) == greedy.new_tokens == 32
    assert set(tensors) == wanted
    assert "PyTorch" in manifest.golden.reference


def test_each_row_is_what_float64_computes_for_it_alone(
    manifest: Manifest, tensors: Tensors, exact: CaracalModel, relative_l2: Callable[..., float]
) -> None:
    for case in manifest.golden.cases:
        for index, length in enumerate(tensors[f"{case.name}/lengths"]):
            row = torch.from_numpy(tensors[f"{case.name}/input_ids"][index : index + 1, :length])
            want = exact(row)[0].numpy()[tensors[f"{case.name}/logit_positions"][index]]
            if case.columns:
                want = want[:, tensors[f"{case.name}/columns"]]
            assert relative_l2(tensors[f"{case.name}/logits"][index], want) <= 1e-5, (case.name, index)


def test_ragged_rows_are_recorded_at_their_own_positions(tensors: Tensors) -> None:
    for row, length in zip(tensors["ragged/logit_positions"], tensors["ragged/lengths"], strict=True):
        np.testing.assert_array_equal(row[:length], np.arange(length))
        assert (row[length:] == length - 1).all()


def test_greedy_continuations_are_what_float64_continues(
    manifest: Manifest, tensors: Tensors, exact: CaracalModel
) -> None:
    assert {greedy.prompt_length > WINDOW for greedy in manifest.golden.greedy} == {True, False}
    for greedy in manifest.golden.greedy:
        ids = tensors[f"{greedy.name}/prompt"].tolist()
        continuation, margins = tensors[f"{greedy.name}/continuation"], tensors[f"{greedy.name}/margins"]
        assert margins.min() > 1e-3, "a near tie would prove nothing; choose other weights"
        for token, margin in zip(continuation, margins, strict=True):
            best = exact(torch.tensor([ids]))[0, -1].topk(2)
            assert int(best.indices[0]) == token
            assert float(best.values[0] - best.values[1]) == pytest.approx(margin, rel=1e-2)
            ids.append(int(token))


@pytest.mark.parametrize("overrides", [{"vocab_size": 600, "tie_word_embeddings": False}, {"vocab_size": 513}])
def test_a_vocabulary_beyond_one_row_is_covered_too(
    random_model: Callable[..., CaracalModel], overrides: dict[str, Any]
) -> None:
    model = random_model(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, **overrides)
    recorded = goldens.record(model, LAGS)
    assert _ids_read(recorded.cases, recorded.tensors) == set(range(overrides["vocab_size"]))


def test_a_large_tied_vocabulary_shows_every_row_as_a_column(random_model: Callable[..., CaracalModel]) -> None:
    model = random_model(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=17000)
    recorded = goldens.record(model, LAGS)
    assert not any(case.name.startswith("vocabulary") for case in recorded.cases)
    whole = [case for case in recorded.cases if not case.columns]
    assert whole
    for case in whole:
        assert recorded.tensors[f"{case.name}/logits"].shape[-1] == 17000


def test_where_few_positions_fit_every_position_is_compared_on_some_columns(
    random_model: Callable[..., CaracalModel],
) -> None:
    model = random_model(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=50257)
    window = model.config.sliding_window
    recorded = goldens.record(model, LAGS)
    few = set(recorded.tensors["beyond_window/logit_positions"][0].tolist())
    assert few >= {0, LONGEST - 1, window - 1, window}, "the ends and the window's edge come first"
    everywhere = recorded.tensors["beyond_window_everywhere/logit_positions"][0]
    assert everywhere.tolist() == list(range(LONGEST))
    assert recorded.tensors["beyond_window_everywhere/logits"].shape == (1, LONGEST, 64)


def test_a_large_untied_vocabulary_is_still_read_whole(random_model: Callable[..., CaracalModel]) -> None:
    model = random_model(
        hidden_size=4,
        num_attention_heads=2,
        num_hidden_layers=1,
        intermediate_size=4,
        vocab_size=17000,
        tie_word_embeddings=False,
    )
    recorded = goldens.record(model, LAGS)
    assert _ids_read(recorded.cases, recorded.tensors) == set(range(17000))


def test_the_same_model_gives_the_same_goldens(
    bundle: Callable[[str], Path], model: CaracalModel, tensors: Tensors
) -> None:
    again = goldens.record(model, LAGS).tensors
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(again[name], tensor, err_msg=name)
    assert (bundle("dft") / "golden.safetensors").read_bytes() == (bundle("matmul") / "golden.safetensors").read_bytes()


@pytest.mark.parametrize(
    "module", ["blocks.0.mhf.pre_conv", "blocks.1.mhf.value_proj", "blocks.2.ffn.down_proj", "norm"]
)
def test_the_first_module_that_is_not_finite_is_named(random_model: Callable[..., CaracalModel], module: str) -> None:
    model = random_model()
    with torch.no_grad():
        model.get_submodule(module).weight.fill_(3e38)
    expected = {"blocks.0.mhf.pre_conv": "blocks.0.mhf.norm"}.get(module, module)  # run as a function, not as a module
    ids = torch.arange(97)[None]
    assert goldens.first_not_finite(model, ids) == expected


def _record_one(model: CaracalModel, prompt: list[int]) -> tuple[goldens.Recorded, int]:
    """One continuation, and how many passes of the reference it took."""
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    recorded = goldens.Recorded()
    handle = model.register_forward_hook(count)
    ids = np.asarray(prompt, dtype=np.int64)
    (drafted,) = goldens.draft_greedy(model, [torch.from_numpy(ids)], goldens.GREEDY_TOKENS)
    goldens._record_greedy(model, "one", ids, drafted, recorded)
    handle.remove()
    return recorded, passes


@pytest.mark.parametrize(
    "overrides", [{}, {"norm_before_conv": True, "use_bias": False, "hidden_act": "gelu", "conv_kernel": 1}]
)
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, 3 * WINDOW + 2])
def test_guesses_spare_the_reference_all_but_one_pass(
    random_model: Callable[..., CaracalModel], overrides: dict[str, Any], length: int
) -> None:
    _, passes = _record_one(random_model(**overrides), [5 * n % 97 for n in range(length)])
    assert passes == 1


@pytest.mark.parametrize("wrong", [[0], [31], [3, 4, 20], list(range(32))], ids=str)
def test_wrong_guesses_cost_time_and_change_nothing(
    random_model: Callable[..., CaracalModel], monkeypatch: pytest.MonkeyPatch, wrong: list[int]
) -> None:
    model = random_model()
    right, _ = _record_one(model, [1, 2, 3])
    drafted = goldens.draft_greedy

    def guess(model: CaracalModel, rows: list[torch.Tensor], count: int) -> list[list[int]]:
        done = 32 - count
        return [
            [(t + 1) % 97 if done + n in wrong else t for n, t in enumerate(row)] for row in drafted(model, rows, count)
        ]

    monkeypatch.setattr(goldens, "draft_greedy", guess)
    got, passes = _record_one(model, [1, 2, 3])
    assert passes == 1 + len([n for n in wrong if n < 31])
    np.testing.assert_array_equal(got.tensors["one/continuation"], right.tensors["one/continuation"])
    # Passes over fewer tokens round differently.
    np.testing.assert_allclose(got.tensors["one/margins"], right.tensors["one/margins"], rtol=1e-3, atol=1e-4)


def test_the_references_rounding_is_what_float64_says(
    manifest: Manifest,
    tensors: Tensors,
    model: CaracalModel,
    exact: CaracalModel,
    relative_l2: Callable[..., float],
) -> None:
    longest = max((case for case in manifest.golden.cases if case.batch == 1), key=lambda case: case.length)
    row = torch.from_numpy(tensors[f"{longest.name}/input_ids"])
    want = relative_l2(model(row).numpy(), exact(row).numpy())
    assert manifest.golden.rounding == pytest.approx(want, rel=0.1)  # the number of threads shows in the last digits
    assert 1e-8 < manifest.golden.rounding < 3e-6


def test_a_model_that_rounds_more_is_seen_to(random_model: Callable[..., CaracalModel]) -> None:
    model = random_model()
    row, at = np.arange(60) % 97, np.arange(60)
    calm = goldens.own_rounding(model, row, at)
    for block in model.blocks[:2]:
        block.mhf.value_proj.weight.mul_(30.0)  # products of large streams, of which little is left
        block.mhf.gate_proj.bias.sub_(20.0)
    assert goldens.own_rounding(model, row, at) > 3 * calm


@torch.no_grad()
def test_drafts_are_what_greedy_decoding_writes(random_model: Callable[..., CaracalModel]) -> None:
    """Behind rows of several lengths at once. A wrong draft would alter no golden: each would be drafted anew, token by token."""
    model = random_model(num_hidden_layers=4)
    rng = np.random.default_rng(3)
    rows = [torch.from_numpy(rng.integers(0, model.config.vocab_size, n)) for n in (1, 2, WINDOW, 3 * WINDOW + 1)]
    drafts = draft_greedy(model, rows, 2 * WINDOW)
    for row, drafted in zip(rows, drafts, strict=True):
        written: list[int] = []
        while len(written) < 2 * WINDOW:
            known = torch.cat((row, torch.tensor(written, dtype=torch.int64)))
            written.append(int(model(known[None])[0, -1].argmax()))
        assert drafted == written
