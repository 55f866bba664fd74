"""Generation against loops over the forward pass that are written out here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from caracal_runtimes.decoding import Recompute
from caracal_runtimes.errors import BundleError, InputError, NumericError
from caracal_runtimes.generation import Generated
from caracal_runtimes.model import CausalLM
from caracal_runtimes.sampling import SamplingOptions
from numpy.typing import NDArray

VOCABULARY = 320
GREEDY = SamplingOptions(temperature=0)
PENALTY = 1e3
# Left alone an untrained model repeats itself, and a state that went wrong might not show: never the same token twice.
NEW_TOKENS = SamplingOptions(temperature=0, repetition_penalty=PENALTY)
PROMPT = "God said"
# Around the window of 8, and of different lengths.
PROMPTS = [[0], [5, 7], list(range(100, 107)), list(range(40, 48)), list(range(200, 225))]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    x = logits.astype(np.float64)
    return x - x.max() - math.log(math.fsum(np.exp(x - x.max())))


def argmax_loop(
    model: CausalLM, prompt: Sequence[int], count: int, penalty: float = 1.0
) -> tuple[list[int], list[float]]:
    """The likeliest token each time, those that have occurred made less likely; log-probabilities are before that."""
    ids, logprobs = list(prompt), []
    for _ in range(count):
        logits = model.forward([ids])[0, -1]
        scores = logits.copy()
        for token in set(ids):
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        ids.append(int(scores.argmax()))
        logprobs.append(float(log_softmax(logits)[ids[-1]]))
    return ids[len(prompt) :], logprobs


def seed_of_row(seed: int, row: int) -> int:
    """The seed with which a single run draws what row `row` of a batch draws: the documented rule."""
    mask = 2**64 - 1
    z = row * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return seed ^ z ^ z >> 31


def run(model: CausalLM, prompt: Any = (0, 5, 7), **arguments: Any) -> Generated:
    """One row, to its full length unless a stop id is given."""
    (result,) = model.generate(prompt, **{"max_new_tokens": 24, "stop_ids": (), "options": GREEDY, **arguments})
    return result


@pytest.fixture
def plain(model: CausalLM) -> SamplingOptions:
    """Sampling of tokens that are whole ASCII characters: an untrained model writes mostly broken bytes."""
    texts = {token: model.tokenizer.decode([token]) for token in range(VOCABULARY)}
    banned = [token for token, text in texts.items() if not text or not (text.isascii() and text.isprintable())]
    return SamplingOptions(seed=3, temperature=2, logit_bias=dict.fromkeys(banned, -1e6))


@pytest.fixture
def whole(model: CausalLM, plain: SamplingOptions) -> Generated:
    """What `plain` writes after PROMPT where nothing stops it."""
    result = run(model, PROMPT, options=plain)
    assert result.text == model.tokenizer.decode(result.ids)
    assert len(set(result.text or "")) > 8
    return result


class TestGreedy:
    @pytest.mark.parametrize("prompt", PROMPTS, ids=len)
    def test_takes_the_likeliest_token_each_time(self, model: CausalLM, prompt: list[int]) -> None:
        expected, logprobs = argmax_loop(model, prompt, 20)
        result = run(model, prompt, max_new_tokens=20)
        assert result.ids == expected
        assert (result.prompt_ids, result.stopped_by) == (prompt, "length")
        np.testing.assert_allclose(result.logprobs, logprobs, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("prompt", PROMPTS, ids=len)
    def test_takes_the_likeliest_new_token_each_time(self, model: CausalLM, prompt: list[int]) -> None:
        expected, logprobs = argmax_loop(model, prompt, 60, PENALTY)
        assert len(set(expected)) == 60
        result = run(model, prompt, max_new_tokens=60, options=NEW_TOKENS)
        assert result.ids == expected
        np.testing.assert_allclose(result.logprobs, logprobs, rtol=1e-5, atol=1e-6)

    def test_does_not_depend_on_the_seed(self, model: CausalLM) -> None:
        assert len({tuple(run(model, options=SamplingOptions(temperature=0, seed=s)).ids) for s in range(5)}) == 1

    @pytest.mark.parametrize("count", [1, 2])
    def test_few_tokens(self, model: CausalLM, count: int) -> None:
        result = run(model, max_new_tokens=count)
        assert (result.ids, result.stopped_by) == (argmax_loop(model, (0, 5, 7), count)[0], "length")
        assert len(result.logprobs) == count

    def test_text_is_encoded_by_the_tokenizer(self, model: CausalLM) -> None:
        """That puts the end-of-text token, id 0, in front."""
        result = run(model, "And God said naïve 日本")
        assert result.prompt_ids[0] == 0
        assert model.tokenizer.decode(result.prompt_ids[1:]) == "And God said naïve 日本"
        assert result.ids == argmax_loop(model, result.prompt_ids, 24)[0]


class TestSampled:
    def test_the_seed_decides(self, model: CausalLM) -> None:
        texts = [run(model, options=SamplingOptions(seed=seed)).ids for seed in range(6)]
        assert [run(model, options=SamplingOptions(seed=seed)).ids for seed in range(6)] == texts
        assert len(set(map(tuple, texts))) == 6

    def test_logprobs_are_the_models_own(self, model: CausalLM) -> None:
        """Before temperature, filters, bias and penalty."""
        options = SamplingOptions(temperature=3, top_k=50, repetition_penalty=1.4, logit_bias={9: 4.0}, seed=4)
        result = run(model, options=options)
        ids = [*result.prompt_ids, *result.ids]
        for index, got in enumerate(result.logprobs):
            logits = model.forward([ids[: 3 + index]])[0, -1]
            assert got == pytest.approx(log_softmax(logits)[result.ids[index]], rel=1e-5, abs=1e-6)

    def test_the_penalty_sees_prompt_and_continuation(self, model: CausalLM) -> None:
        """A penalty without end on scores made positive: what has occurred cannot come while anything else is left."""
        bias = dict.fromkeys(range(VOCABULARY), 1e3)
        options = SamplingOptions(temperature=0, repetition_penalty=1e9, logit_bias=bias)
        prompt = [token for token in range(VOCABULARY) if token not in (3, 17, 90, 318)]
        assert sorted(run(model, prompt, options=options, max_new_tokens=4).ids) == [3, 17, 90, 318]


class TestBatch:
    def test_greedy_rows_are_single_runs(self, model: CausalLM) -> None:
        results = model.generate(PROMPTS, max_new_tokens=12, options=NEW_TOKENS, stop_ids=())
        assert [result.ids for result in results] == [argmax_loop(model, prompt, 12, PENALTY)[0] for prompt in PROMPTS]
        assert [result.prompt_ids for result in results] == PROMPTS

    def test_sampled_rows_are_single_runs_with_the_rows_seeds(self, model: CausalLM) -> None:
        results = model.generate(PROMPTS, max_new_tokens=12, options=SamplingOptions(seed=11), stop_ids=())
        for row, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
            single = run(model, prompt, max_new_tokens=12, options=SamplingOptions(seed=seed_of_row(11, row)))
            assert (single.ids, single.text) == (result.ids, result.text)
        assert seed_of_row(11, 0) == 11

    def test_equal_rows_draw_differently(self, model: CausalLM) -> None:
        results = model.generate([[0]] * 4, max_new_tokens=12, options=SamplingOptions(seed=1), stop_ids=())
        assert len({tuple(result.ids) for result in results}) == 4

    def test_rows_that_end_early_leave_the_others_alone(self, model: CausalLM) -> None:
        whole = [argmax_loop(model, prompt, 12)[0] for prompt in PROMPTS]
        ends = {whole[0][2], whole[3][5]}
        expected = [
            ids[: next((index + 1 for index, token in enumerate(ids) if token in ends), len(ids))] for ids in whole
        ]
        assert len(set(map(len, expected))) > 1
        results = model.generate(PROMPTS, max_new_tokens=12, options=GREEDY, stop_ids=ends)
        assert [result.ids for result in results] == expected
        assert [result.stopped_by for result in results] == [
            "stop_id" if ids[-1] in ends else "length" for ids in expected
        ]

    def test_texts_and_ids_may_be_mixed(self, model: CausalLM) -> None:
        text, ids = model.generate(["God", [0, 5]], max_new_tokens=5, options=GREEDY, stop_ids=())
        assert text.ids == run(model, "God", max_new_tokens=5).ids
        assert ids.ids == run(model, [0, 5], max_new_tokens=5).ids

    @pytest.mark.parametrize("kind", [tuple, list, np.asarray])
    def test_ids_of_any_kind(self, model: CausalLM, kind: Any) -> None:
        expected = run(model, [0, 5, 7], max_new_tokens=3).ids
        assert run(model, [kind([0, 5, 7])], max_new_tokens=3).ids == expected

    def test_numpy_integers_in_a_list(self, model: CausalLM) -> None:
        assert run(model, list(np.array([0, 5, 7]))).ids == run(model, [0, 5, 7]).ids


class TestStopIds:
    def test_the_models_own_end_is_the_default(self, model: CausalLM) -> None:
        certain = SamplingOptions(temperature=0, logit_bias={0: 1e6})
        result = run(model, "God said", options=certain, stop_ids=None)
        assert (result.ids, result.text, result.stopped_by) == ([0], "", "stop_id")
        assert run(model, options=certain, stop_ids=()).ids == [0] * 24
        assert run(model, options=certain, stop_ids=[7]).ids == [0] * 24

    def test_other_ids_end_too_and_do_not_show(self, model: CausalLM, plain: SamplingOptions, whole: Generated) -> None:
        end = whole.ids[5]
        place = whole.ids.index(end)
        result = run(model, PROMPT, options=plain, stop_ids=[end])
        assert (result.ids, result.stopped_by) == (whole.ids[: place + 1], "stop_id")
        assert result.logprobs == whole.logprobs[: place + 1]
        assert result.text == model.tokenizer.decode(whole.ids[:place])

    def test_on_the_last_token(self, model: CausalLM, plain: SamplingOptions, whole: Generated) -> None:
        place = whole.ids.index(whole.ids[5])
        result = run(model, PROMPT, options=plain, stop_ids=[whole.ids[5]], max_new_tokens=place + 1)
        assert (len(result.ids), result.stopped_by) == (place + 1, "stop_id")

    def test_a_model_without_an_end(self, copy: Any) -> None:
        copy.edit_manifest(lambda data: data["config"].update(eos_token_id=None))
        options = SamplingOptions(temperature=0, logit_bias={0: 1e6})
        assert run(copy.model(), options=options, stop_ids=None).ids == [0] * 24


class TestStopStrings:
    @pytest.fixture
    def text(self, whole: Generated) -> str:
        assert whole.text is not None
        return whole.text

    def test_every_piece_of_the_text_can_stop_it(
        self, model: CausalLM, plain: SamplingOptions, whole: Generated, text: str
    ) -> None:
        """As soon as the tokens hold the stop string, and no token later."""
        decode = model.tokenizer.decode
        for begin in range(0, len(text) - 3, 5):
            stop = text[begin : begin + 3]
            result = run(model, PROMPT, options=plain, stop=[stop])
            assert (result.text, result.stopped_by) == (text[: text.find(stop)], "stop_string")
            assert result.ids == whole.ids[: len(result.ids)]
            assert stop in decode(result.ids)
            assert stop not in decode(result.ids[:-1])

    def test_the_earliest_of_several(self, model: CausalLM, plain: SamplingOptions, text: str) -> None:
        stops = [text[12:15], text[6:9], "nowhere in the text"]
        result = run(model, PROMPT, options=plain, stop=stops)
        assert result.text == text[: min(text.find(stop) for stop in stops[:2])]

    def test_one_that_stays_open_to_the_end(self, model: CausalLM, plain: SamplingOptions, text: str) -> None:
        """A longer stop string may still complete, so that the one inside it counts only when no token follows."""
        stops = [text[-4:] + "never", text[-3:]]
        assert text.find(stops[1]) == len(text) - 3
        result = run(model, PROMPT, options=plain, stop=stops)
        assert (result.text, result.stopped_by) == (text[:-3], "stop_string")

    def test_one_that_does_not_occur(
        self, model: CausalLM, plain: SamplingOptions, whole: Generated, text: str
    ) -> None:
        for stop in ("nowhere", text[-2:] + "\n", "said"):  # the prompt does not count
            assert stop not in text
            assert run(model, PROMPT, options=plain, stop=[stop]) == whole

    def test_what_is_cut_off_is_never_shown(self, model: CausalLM, plain: SamplingOptions, text: str) -> None:
        pieces: list[str] = []
        stop = text[9:14]
        result = run(model, PROMPT, options=plain, stop=[stop], on_text=lambda row, piece: pieces.append(piece))
        assert "".join(pieces) == result.text == text[: text.find(stop)]


class TestStreaming:
    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("temperature", [0.7, 4.0])
    def test_pieces_join_to_the_text_and_tokens_to_the_ids(
        self, model: CausalLM, seed: int, temperature: float
    ) -> None:
        """At a high temperature most of it is bytes that form no character."""
        pieces: list[list[str]] = [[], [], []]
        tokens: list[list[tuple[int, float]]] = [[], [], []]
        results = model.generate(
            ["God", [0, 5, 7], "日本"],
            max_new_tokens=60,
            options=SamplingOptions(seed=seed, temperature=temperature),
            on_text=lambda row, text: pieces[row].append(text),
            on_token=lambda row, token, logprob: tokens[row].append((token, logprob)),
        )
        for row, result in enumerate(results):
            assert "".join(pieces[row]) == result.text == model.tokenizer.decode(result.ids)
            assert "" not in pieces[row]
            assert tokens[row] == list(zip(result.ids, result.logprobs, strict=True))

    def test_text_comes_as_it_is_made(self, model: CausalLM, plain: SamplingOptions, whole: Generated) -> None:
        """Every token here is whole characters, so that each is shown before the next is drawn."""
        events: list[Any] = []
        run(
            model,
            PROMPT,
            options=plain,
            on_text=lambda row, text: events.append(text),
            on_token=lambda row, token, logprob: events.append(token),
        )
        assert events[::2] == whole.ids
        assert events[1::2] == [model.tokenizer.decode([token]) for token in whole.ids]

    def test_an_error_in_a_callback_comes_through(self, model: CausalLM) -> None:
        def fail(row: int, token: int, logprob: float) -> None:
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            run(model, on_token=fail)


class TestBadInput:
    @pytest.mark.parametrize("prompt", ["", [""], ["God", ""], [], [[]], [[1], []], (), np.zeros((1, 0), np.int64)])
    def test_no_prompt(self, model: CausalLM, prompt: Any) -> None:
        with pytest.raises(InputError, match=r"prompt: expected .*(found none|found an empty prompt)"):
            run(model, prompt)

    @pytest.mark.parametrize("bad", [-1, 320, 2**63, 2**70])
    def test_ids_outside_the_vocabulary(self, model: CausalLM, bad: int) -> None:
        for prompt in ([bad], [1, bad], [[1, 2], [3, bad]]):
            with pytest.raises(InputError, match=f"prompt: ids must be from 0 to 319, found {bad}"):
                run(model, prompt)

    @pytest.mark.parametrize("bad", [1.0, 2.7, True, None, "1", "a", b"1", [1], math.nan])
    def test_ids_that_are_no_integers(self, model: CausalLM, bad: Any) -> None:
        """A fraction must not be cut off, nor a string read as a number."""
        for prompt in ([1, bad], [[bad]], [[1, bad]], [[1], [bad, 1]]):
            with pytest.raises(InputError, match="prompt"):
                run(model, prompt)

    @pytest.mark.parametrize("prompt", [None, 5, 1.5, b"God", [None], [1.5, 2], {1: 2}, np.array([1.0, 2.0])])
    def test_no_prompt_at_all(self, model: CausalLM, prompt: Any) -> None:
        with pytest.raises(InputError, match="prompt"):
            run(model, prompt)

    @pytest.mark.parametrize("prompt", ["God \udcff", "\ud800"])
    def test_text_that_is_no_unicode(self, model: CausalLM, prompt: str) -> None:
        """The command line hands over what is no UTF-8 in this form."""
        with pytest.raises(InputError, match="prompt"):
            run(model, prompt)

    @pytest.mark.parametrize("count", [0, -1, 1.0, True, "5", None, math.inf])
    def test_max_new_tokens(self, model: CausalLM, count: Any) -> None:
        with pytest.raises(InputError, match="--max-new-tokens must be an integer of at least 1"):
            run(model, max_new_tokens=count)

    def test_more_tokens_than_fit_are_refused_before_the_first(self, model: CausalLM) -> None:
        with pytest.raises(InputError, match="context too long: 3 tokens and 1,000,000,000 new ones"):
            run(model, max_new_tokens=10**9, on_token=lambda *token: pytest.fail("it ran"))

    @pytest.mark.parametrize(
        ("stop", "found"), [("ab", "'ab'"), ([""], "''"), (["a", ""], "''"), ([1], "1"), ([None], "None")]
    )
    def test_stop(self, model: CausalLM, stop: Any, found: str) -> None:
        with pytest.raises(InputError, match=f"--stop: .*found .*{found}"):
            run(model, stop=stop)

    @pytest.mark.parametrize("stop_ids", [[-1], [320], [1.0], ["1"], [None], [True], [[1]], 5, "12"])
    def test_stop_ids(self, model: CausalLM, stop_ids: Any) -> None:
        with pytest.raises(InputError, match="stop_ids"):
            run(model, stop_ids=stop_ids)

    def test_logit_bias_outside_the_vocabulary(self, model: CausalLM) -> None:
        with pytest.raises(InputError, match="logit_bias: ids must be from 0 to 319, found 320"):
            run(model, options=SamplingOptions(logit_bias={320: 1.0}))

    def test_logits_that_are_not_finite(self, copy: Any) -> None:
        copy.weight("norm.weight")[3] = np.nan
        copy.rehash()
        for options in (GREEDY, SamplingOptions()):
            with pytest.raises(NumericError, match="logits"):
                run(copy.model(), options=options)


class TestWithoutTokenizer:
    @pytest.fixture
    def bare(self, copy: Any) -> CausalLM:
        copy.drop_tokenizer()
        return copy.model()

    def test_ids_work(self, bare: CausalLM, model: CausalLM) -> None:
        texts: list[str] = []
        result = run(bare, on_text=lambda row, text: texts.append(text))
        assert (result.ids, result.text, texts) == (run(model).ids, None, [])

    @pytest.mark.parametrize("prompt", ["God", ["God"], [[1], "God"]])
    def test_text_is_refused(self, bare: CausalLM, prompt: Any) -> None:
        with pytest.raises(BundleError, match=r"no tokenizer\.json.*use token ids"):
            run(bare, prompt)

    def test_stop_strings_are_refused(self, bare: CausalLM) -> None:
        with pytest.raises(BundleError, match=r"no tokenizer\.json"):
            run(bare, stop=["a"])


class TestRecompute:
    def test_prefill_and_steps_are_the_forward_pass(self, model: CausalLM) -> None:
        rows = [list(prompt) for prompt in PROMPTS]
        decoder = Recompute(model)

        def expected(chosen: Sequence[int]) -> NDArray[np.float32]:
            return np.stack([model.forward([rows[index]])[0, -1] for index in chosen])

        logits = decoder.prefill(rows)
        assert (logits.shape, logits.dtype) == ((5, VOCABULARY), np.float32)
        np.testing.assert_allclose(logits, expected(range(5)), rtol=1e-4, atol=1e-4)
        # Rows grow independently and are answered in the order of the question.
        for chosen, tokens in (
            ([0, 1, 2, 3, 4], [9, 8, 7, 6, 5]),
            ([3, 0], [1, 2]),
            ([4], [0]),
            ([1, 4, 2], [3, 3, 3]),
        ):
            logits = decoder.step(chosen, tokens)
            for row, token in zip(chosen, tokens, strict=True):
                rows[row].append(token)
            np.testing.assert_allclose(logits, expected(chosen), rtol=1e-4, atol=1e-4)

    def test_prefill_starts_anew_and_keeps_the_prompts_as_they_are(self, model: CausalLM) -> None:
        decoder = Recompute(model)
        first = decoder.prefill([[1, 2], [3]])
        decoder.step([0, 1], [5, 6])
        prompts = [[1, 2], [3]]
        np.testing.assert_array_equal(decoder.prefill(prompts), first)
        decoder.step([0], [9])
        assert prompts == [[1, 2], [3]]
