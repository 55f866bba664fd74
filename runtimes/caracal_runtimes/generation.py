"""Text generation: prompts in, sampled tokens and streamed text out, several rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.decoding import Decoder
from caracal_runtimes.errors import InputError
from caracal_runtimes.forward import token_ids
from caracal_runtimes.manifest import ModelSpec
from caracal_runtimes.sampling import Generator, SamplingOptions, next_token
from caracal_runtimes.text import StopMatcher, TextStream, encode_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
StopReason = Literal["length", "stop_id", "stop_string"]
OnText = Callable[[int, str], None]
OnToken = Callable[[int, int, float], None]


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


@dataclass(frozen=True)
class StopRule:
    """What ends a row: one of `ids`, one of `strings` (which need a tokenizer), or `max_new_tokens`.

    Raises:
        InputError: no ids, strings, or a number of tokens below 1.
    """

    max_new_tokens: int
    ids: frozenset[int]
    strings: tuple[str, ...] = ()

    @classmethod
    def make(
        cls, spec: ModelSpec, max_new_tokens: object, stop: Sequence[str], stop_ids: Iterable[int] | None
    ) -> StopRule:
        """Checks what a user asked for; the model's `eos_token_id` where `stop_ids` is None."""
        if isinstance(max_new_tokens, np.integer):
            max_new_tokens = int(max_new_tokens)
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise InputError(f"--max-new-tokens must be an integer of at least 1, found {max_new_tokens!r}")
        if stop_ids is None:
            stop_ids = () if spec.eos_token_id is None else (spec.eos_token_id,)
        ids = token_ids("stop_ids", stop_ids)
        check_ids("stop_ids", ids, spec.vocab_size)
        StopMatcher(stop)  # refuses what is no text
        return cls(max_new_tokens, frozenset(ids), tuple(stop))


@dataclass
class Progress:
    """What rows are at between two calls: everything but the decoder's state.

    `logits` [B, V] come after the last token that the decoder has; `unread` are tokens that were chosen since.
    """

    contexts: list[list[int]]
    logits: NDArray[np.float32]
    unread: list[list[int]] = field(default_factory=list)
    generators: list[Generator] = field(default_factory=list)
    seed: int | None = None


def write(
    decoder: Decoder,
    progress: Progress,
    tokenizer: Tokenizer | None,
    rule: StopRule,
    options: SamplingOptions,
    on_text: OnText | None = None,
    on_token: OnToken | None = None,
) -> list[Generated]:
    """Continues rows until each one stops.

    Args:
        decoder: has read the contexts but for `progress.unread`, each of which has at most one token.
        progress: updated in place. Rows are sampled from streams of their own, which go on where the seed is the same.
        tokenizer: writes text; without one only ids come out.
        rule: when a row ends.
        options: how to sample.
        on_text: called with row and newly completed text, as soon as it cannot change any more.
        on_token: called with row, id and log-probability of each token.

    Raises:
        NumericError: the model's logits are not finite.
    """
    if progress.seed != options.seed:
        progress.generators = [Generator(options.seed, row) for row in range(len(progress.contexts))]
        progress.seed = options.seed
    rows = [
        _Row(context, generator, tokenizer, rule.strings)
        for context, generator in zip(progress.contexts, progress.generators, strict=True)
    ]
    active = list(range(len(rows)))
    _read_unread(decoder, progress, active)
    while True:
        still_active: list[int] = []
        for row in active:
            state = rows[row]
            token, logprob = next_token(progress.logits[row], state.context, options, state.generator)
            text = state.push(token, logprob, rule.ids)
            progress.unread[row].append(token)
            if on_token is not None:
                on_token(row, token, logprob)
            if len(state.ids) == rule.max_new_tokens and state.stopped_by is None:
                state.stopped_by = "length"
            if state.stopped_by is not None:
                text += state.finish()
            if text and on_text is not None:
                on_text(row, text)
            if state.stopped_by is None:
                still_active.append(row)
        active = still_active
        if not active:
            return [state.result() for state in rows]
        _read_unread(decoder, progress, active)


def _read_unread(decoder: Decoder, progress: Progress, rows: Sequence[int]) -> None:
    """Feeds the decoder the tokens that it has not read yet, and takes the logits after them."""
    waiting = [row for row in rows if progress.unread[row]]
    if waiting:
        logits = decoder.step(waiting, [progress.unread[row][0] for row in waiting])
        progress.logits[waiting] = logits
        for row in waiting:
            progress.unread[row].clear()


class _Row:
    """One row of a batch while it grows."""

    def __init__(self, prompt: list[int], generator: Generator, tokenizer: Any, stop: Sequence[str]) -> None:
        self.prompt = list(prompt)
        self.context = prompt  # shared with whoever continues the row
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


def encode(tokenizer: Tokenizer | None, prompts: Any, vocab_size: int, *, opening: bool = True) -> list[list[int]]:
    """Prompts as rows of ids: a text, a list of ids, or a list of either.

    Args:
        tokenizer: reads texts.
        prompts: at least one, none of them empty.
        vocab_size: ids are below it.
        opening: texts begin a sequence, so that the tokenizer's special tokens are added.

    Raises:
        InputError: no prompt, an empty one, a text without a tokenizer, ids that are none.
    """
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
            ids = [int(i) for i in encode_text(tokenizer, prompt, special=opening).ids]
        elif isinstance(prompt, Set):
            raise InputError(f"prompt: expected token ids in an order, found {prompt!r:.40}")
        else:
            ids = token_ids("prompt", prompt)
        if not ids:
            raise InputError("prompt: expected at least one token id, found none")
        check_ids("prompt", ids, vocab_size)
        rows.append(ids)
    return rows


def check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises InputError for an id outside the vocabulary."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError(f"{name}: ids must be from 0 to {vocab_size - 1}, found {token!r}")
