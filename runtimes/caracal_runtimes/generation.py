"""Text generation: prompts in, sampled tokens and streamed text out, several rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from caracal_runtimes.decoding import Recompute
from caracal_runtimes.errors import InputError
from caracal_runtimes.forward import ForwardPass, token_ids
from caracal_runtimes.sampling import Generator, SamplingOptions, next_token
from caracal_runtimes.text import StopMatcher, TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
StopReason = Literal["length", "stop_id", "stop_string"]


@dataclass(frozen=True)
class Generated:
    """One finished continuation.

    `ids` are all sampled tokens, a stop id included; `logprobs` their natural log-probabilities under the model's own
    distribution (before temperature and filters). `text` is the continuation without the prompt, cut in front of a stop
    string, or None for a bundle without tokenizer.
    """

    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    text: str | None
    stopped_by: StopReason


def generate(
    model: ForwardPass,
    tokenizer: Tokenizer | None,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    options: SamplingOptions | None = None,
    stop: Sequence[str] = (),
    stop_ids: Iterable[int] | None = None,
    on_text: Callable[[int, str], None] | None = None,
    on_token: Callable[[int, int, float], None] | None = None,
) -> list[Generated]:
    """Continues one or several prompts.

    Args:
        model: a loaded forward graph.
        tokenizer: reads and writes text; without one only ids go in and out.
        prompts: a text, a list of ids, or a list of either. Rows of a batch are sampled from streams of their own, so a
            row's text does not depend on its neighbours.
        max_new_tokens: at least 1.
        options: how to sample; the default samples at temperature 1.
        stop: strings that end a row; they are not part of its text. They need a tokenizer.
        stop_ids: ids that end a row; the model's `eos_token_id` when None.
        on_text: called with row and newly completed text, as soon as it cannot change any more.
        on_token: called with row, id and log-probability of each token.

    Raises:
        InputError: an empty prompt, ids outside the vocabulary, options out of range, or more than memory allows.
        NumericError: the model's logits are not finite.
    """
    options = options or SamplingOptions()
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise InputError(f"--max-new-tokens must be an integer of at least 1, found {max_new_tokens!r}")
    rows = _encode(tokenizer, prompts, model.spec.vocab_size)
    vocab_size = model.spec.vocab_size
    _check_ids("logit_bias", options.logit_bias, vocab_size)
    if stop_ids is None:
        stop_ids = () if model.spec.eos_token_id is None else (model.spec.eos_token_id,)
    stops = token_ids("stop_ids", stop_ids)
    _check_ids("stop_ids", stops, vocab_size)
    ends = frozenset(stops)
    # Fail before the first token rather than after a thousand.
    model.check(len(rows), max(map(len, rows)) + max_new_tokens, 1)

    states = [_Row(ids, Generator(options.seed, index), tokenizer, stop) for index, ids in enumerate(rows)]
    decoder = Recompute(model)
    logits = decoder.prefill(rows)
    active = list(range(len(rows)))
    while True:
        still_active: list[int] = []
        for row, scores in zip(active, logits, strict=True):
            state = states[row]
            token, logprob = next_token(scores, state.context, options, state.generator)
            text = state.push(token, logprob, ends)
            if on_token is not None:
                on_token(row, token, logprob)
            if len(state.ids) == max_new_tokens and state.stopped_by is None:
                state.stopped_by = "length"
            if state.stopped_by is not None:
                text += state.finish()
            if text and on_text is not None:
                on_text(row, text)
            if state.stopped_by is None:
                still_active.append(row)
        active = still_active
        if not active:
            return [state.result() for state in states]
        logits = decoder.step(active, [states[row].ids[-1] for row in active])


class _Row:
    """One row of a batch while it grows."""

    def __init__(self, prompt: list[int], generator: Generator, tokenizer: Any, stop: Sequence[str]) -> None:
        self.prompt = prompt
        self.context = list(prompt)
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.generator = generator
        self.stopped_by: StopReason | None = None
        self._stream = None if tokenizer is None else TextStream(tokenizer)
        self._matcher = StopMatcher(stop)
        self._pieces: list[str] = []

    def push(self, token: int, logprob: float, ends: frozenset[int]) -> str:
        """Takes a sampled token; returns the text that it completes."""
        self.context.append(token)
        self.ids.append(token)
        self.logprobs.append(logprob)
        if token in ends:
            self.stopped_by = "stop_id"
            return ""
        if self._stream is None:
            return ""
        safe, stopped = self._matcher.push(self._stream.push(token))
        if stopped:
            self.stopped_by = "stop_string"
        self._pieces.append(safe)
        return safe

    def finish(self) -> str:
        """The text that was held back."""
        if self._stream is None or self.stopped_by == "stop_string":
            return ""
        safe, stopped = self._matcher.push(self._stream.finish())
        if not stopped:
            safe += self._matcher.finish()
        if self._matcher.stopped:  # `finish` settles a match that a longer stop string had left open
            self.stopped_by = "stop_string"
        self._pieces.append(safe)
        return safe

    def result(self) -> Generated:
        assert self.stopped_by is not None
        text = None if self._stream is None else "".join(self._pieces)
        return Generated(self.prompt, self.ids, self.logprobs, text, self.stopped_by)


def _encode(tokenizer: Tokenizer | None, prompts: Any, vocab_size: int) -> list[list[int]]:
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str) or (
        isinstance(prompts, (list, tuple)) and isinstance(next(iter(prompts), None), (int, np.integer))
    ):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)) or not prompts:
        raise InputError("prompt: expected a text or token ids, found none")
    rows: list[list[int]] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if not prompt:
                raise InputError("prompt: expected some text, found an empty prompt")
            if tokenizer is None:
                raise InputError("prompt: a text needs a tokenizer, this bundle has none; pass token ids instead")
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError:
                raise InputError("prompt: expected text, found bytes that are not UTF-8") from None
            ids = [int(i) for i in tokenizer.encode(prompt).ids]
        else:
            ids = token_ids("prompt", prompt)
        if not ids:
            raise InputError("prompt: expected at least one token id, found none")
        _check_ids("prompt", ids, vocab_size)
        rows.append(ids)
    return rows


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError(f"{name}: ids must be from 0 to {vocab_size - 1}, found {token!r}")
