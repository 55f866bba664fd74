"""Likelihoods against sums over the forward pass, token by token, each with the context that the rule gives it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from caracal_runtimes.errors import BundleError, InputError, NumericError
from caracal_runtimes.model import CausalLM
from caracal_runtimes.scoring import Score, score

TEXT = "And God said, Let there be naïve light: 「日本語」 and there was light."


def logprob(model: CausalLM, context: Sequence[int], token: int) -> float:
    x = model.forward([list(context)])[0, -1].astype(np.float64)
    return float(x[token] - x.max()) - math.log(math.fsum(np.exp(x - x.max())))


def expected_nats(model: CausalLM, body: Sequence[int], context: int, opening: Sequence[int] = (0,)) -> float:
    """Windows of at most `context` tokens, the opening token included; each but the first begins half a window back."""
    nats = 0.0
    end = scored = 0 if opening else 1
    window = 0
    while end < len(body):
        begin = max(0, end - context // 2) if window else 0
        stop = min(len(body), begin + context - len(opening))
        for index in range(end, stop):
            nats -= logprob(model, [*opening, *body[begin:index]], body[index])
            scored += 1
        end, window = stop, window + 1
    assert scored == len(body)
    return nats


def body_of(count: int) -> list[int]:
    return np.random.default_rng(count).integers(1, 320, count).tolist()


class TestOneWindow:
    def test_a_text(self, model: CausalLM) -> None:
        ids = model.tokenizer.encode(TEXT).ids
        assert ids[0] == 0
        result = model.score(TEXT)
        assert result.nats == pytest.approx(expected_nats(model, ids[1:], 1024), rel=1e-5)
        assert (result.tokens, result.windows, result.context) == (len(ids) - 1, 1, 1024)
        assert result.text_bytes == len(TEXT.encode("utf-8")) > len(TEXT)

    def test_one_token(self, model: CausalLM) -> None:
        result = model.score([5])
        assert (result.tokens, result.nats) == (1, pytest.approx(-logprob(model, [0], 5), rel=1e-5))

    def test_ids_are_opened_by_the_models_beginning(self, model: CausalLM) -> None:
        ids = model.tokenizer.encode(TEXT).ids
        text, whole, bare = model.score(TEXT), model.score(ids), model.score(ids[1:])
        assert text.nats == whole.nats == bare.nats
        assert (whole.text_bytes, whole.bits_per_byte) == (None, None)

    def test_ids_of_any_kind(self, model: CausalLM) -> None:
        expected = model.score([5, 6, 7]).nats
        for ids in ((5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8), list(np.array([5, 6, 7]))):
            assert model.score(ids).nats == expected

    def test_many_positions(self, model: CausalLM) -> None:
        """Log-softmax is taken in pieces; none is lost at their borders."""
        for count in (127, 128, 129, 257):
            ids = [0, *body_of(count)]
            logits = model.forward([ids])[0].astype(np.float64)
            logits -= logits.max(axis=-1, keepdims=True)
            logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            assert model.score(ids).nats == pytest.approx(-logprobs[np.arange(count), ids[1:]].sum(), rel=1e-6)

    def test_the_second_beginning_is_scored(self, model: CausalLM) -> None:
        expected = -logprob(model, [0], 0) - logprob(model, [0, 0], 5)
        assert model.score([0, 0, 5]).nats == pytest.approx(expected, rel=1e-5)


class TestWindows:
    @pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 8, 20, 33])
    @pytest.mark.parametrize("context", [2, 3, 4, 5, 8, 9])
    def test_the_documented_rule(self, model: CausalLM, count: int, context: int) -> None:
        body = body_of(count)
        if context == 2:  # the opening token and half a window leave no room: one of them gives way
            assert model.score(body, context=2).tokens == count
            return
        result = model.score(body, context=context)
        assert result.nats == pytest.approx(expected_nats(model, body, context), rel=1e-5)
        assert (result.tokens, result.context) == (count, context)

    @pytest.mark.parametrize("context", [2, 3, 4, 7, 16])
    def test_every_token_once_in_windows_that_fit(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, context: int
    ) -> None:
        body = list(range(1, 41))  # all different, so that a token tells its place
        scored: list[int] = []
        contexts: list[int] = []
        forward = model.forward

        def watch(ids: Any, positions: Any) -> Any:
            (row,), (chosen,) = ids, positions
            assert 1 <= len(row) <= context
            assert row[0] == 0
            scored.extend(int(row[position + 1]) for position in chosen)
            contexts.extend(int(position) for position in chosen)  # tokens of the text in front of the scored one
            return forward(ids, positions)

        monkeypatch.setattr(model, "forward", watch)
        result = score(model, None, body, context=context)
        assert scored == body
        # Half a window, where the text has it.
        assert all(seen + 1 >= min(place + 1, context / 2) for place, seen in enumerate(contexts))
        assert result.windows > 1

    def test_without_a_beginning_the_first_token_is_only_context(self, copy: Any) -> None:
        copy.edit_manifest(lambda data: data["config"].update(bos_token_id=None))
        model = copy.model()
        for context in (2, 3, 5, 100):
            body = body_of(12)
            result = model.score(body, context=context)
            assert result.nats == pytest.approx(expected_nats(model, body, context, opening=()), rel=1e-5)
            assert result.tokens == 11

    def test_progress(self, model: CausalLM) -> None:
        seen: list[tuple[int, int]] = []
        result = model.score(body_of(30), context=8, progress=lambda done, total: seen.append((done, total)))
        assert len(seen) == result.windows
        assert seen == sorted(seen)
        assert {total for _, total in seen} == {30}
        assert seen[-1] == (30, 30)


class TestFigures:
    def test_relations(self, model: CausalLM) -> None:
        result = model.score(TEXT)
        bits = result.nats / math.log(2)
        assert result.perplexity == pytest.approx(2**result.bits_per_token)
        assert result.bits_per_token == pytest.approx(bits / result.tokens)
        assert result.bits_per_byte == pytest.approx(bits / len(TEXT.encode()))

    def test_by_hand(self) -> None:
        """Four tokens of probability 1/8 for six bytes: three bits each."""
        result = Score(tokens=4, windows=1, context=8, text_bytes=6, nats=4 * math.log(8))
        assert result.perplexity == pytest.approx(8)
        assert (result.bits_per_token, result.bits_per_byte) == (pytest.approx(3), pytest.approx(2))

    def test_a_text_that_the_model_holds_for_impossible(self) -> None:
        """e^1000 is more than a double holds."""
        result = Score(tokens=1, windows=1, context=8, text_bytes=1, nats=1000.0)
        assert (result.perplexity, result.bits_per_token) == (math.inf, pytest.approx(1000 / math.log(2)))


class TestBadInput:
    @pytest.mark.parametrize("context", [1, 0, -5, 2.0, True, "8", None])
    def test_context(self, model: CausalLM, context: Any) -> None:
        with pytest.raises(InputError, match="--context must be an integer of at least 2"):
            model.score(TEXT, context=context)

    @pytest.mark.parametrize("text", ["", [], [0], (), np.zeros(0, np.int64)])
    def test_nothing_to_score(self, model: CausalLM, text: Any) -> None:
        with pytest.raises(InputError, match="score: expected a text of at least one token to score, found none"):
            model.score(text)

    @pytest.mark.parametrize("bad", [-1, 320, 2**70])
    def test_ids_outside_the_vocabulary(self, model: CausalLM, bad: int) -> None:
        with pytest.raises(InputError, match="ids"):
            model.score([5, bad, 7])

    @pytest.mark.parametrize("bad", [1.0, 2.5, True, None, "1", "a", [1]])
    def test_ids_that_are_no_integers(self, model: CausalLM, bad: Any) -> None:
        with pytest.raises(InputError, match=r"ids|integer"):
            model.score([5, bad, 7])

    @pytest.mark.parametrize("text", [None, 5, b"God", np.zeros((2, 2), np.int64), np.zeros(3)])
    def test_no_text(self, model: CausalLM, text: Any) -> None:
        with pytest.raises(InputError):
            model.score(text)

    def test_text_that_is_no_unicode(self, model: CausalLM) -> None:
        with pytest.raises(InputError):
            model.score("God \udcff")

    def test_more_than_memory_holds(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "_granted", 0)
        monkeypatch.setattr("caracal_runtimes.limits.available_bytes", lambda: 10**5)
        with pytest.raises(InputError, match="too large for memory"):
            model.score(body_of(50))

    def test_text_without_a_tokenizer(self, copy: Any) -> None:
        copy.drop_tokenizer()
        with pytest.raises(BundleError, match=r"no tokenizer\.json"):
            copy.model().score(TEXT)
        assert copy.model().score([5, 6]).tokens == 2

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_logits_that_are_not_finite(self, copy: Any, value: float) -> None:
        """A likelihood that is no number is never a result."""
        copy.weight("norm.weight")[3] = value
        copy.rehash()
        with pytest.raises(NumericError):
            copy.model().score(TEXT)
