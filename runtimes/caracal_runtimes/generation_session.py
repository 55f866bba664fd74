"""Sequences that stay: generate, append, generate again; fork; save and load. What was read is never read twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from caracal_runtimes import generation, state_file
from caracal_runtimes.decode_graphs import DecodeGraphs
from caracal_runtimes.decode_state import CHUNK
from caracal_runtimes.decoding import Stateful
from caracal_runtimes.errors import InputError
from caracal_runtimes.generation import Generated, OnText, OnToken, Progress, Prompts, StopRule
from caracal_runtimes.limits import check_decode, forward_bytes, prompt_pass
from caracal_runtimes.sampling import SamplingOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Source:
    """What sessions take from the model that starts them.

    `tokenizer(needed)` gives the bundle's tokenizer; without one it gives None or, if it is needed, raises.
    """

    graphs: DecodeGraphs
    mixing: str
    bundle_id: str
    tokenizer: Callable[[bool], Tokenizer | None]


class GenerationSession:
    """One or several sequences with their decode state, made by `CausalLM.start` or `CausalLM.load_session`."""

    def __init__(self, source: Source, decoder: Stateful, progress: Progress, chunk: int) -> None:
        self._source, self._decoder, self._progress, self._chunk = source, decoder, progress, chunk

    @classmethod
    def start(
        cls,
        source: Source,
        prompts: Prompts,
        *,
        chunk: int = CHUNK,
        new_tokens: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> GenerationSession:
        """Reads prompts.

        Args:
            source: of the model.
            prompts: a text, a list of ids, or a list of either.
            chunk: tokens that one pass reads at most, over all rows; bounds the memory of a pass.
            new_tokens: how many tokens are meant to follow; refused now if they would not fit.
            progress: called with tokens read and tokens in all after each pass.

        Raises:
            InputError: an empty prompt, ids outside the vocabulary, a bad chunk, or more than memory allows.
        """
        check_chunk(chunk)
        if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 0:
            raise InputError(f"new_tokens must be an integer of at least 0, found {new_tokens!r}")
        spec = source.graphs.spec
        texts = prompts if isinstance(prompts, (list, tuple)) else (prompts,)
        rows = generation.encode(
            source.tokenizer(any(isinstance(text, str) for text in texts)), prompts, spec.vocab_size
        )
        session = cls(
            source, Stateful(source.graphs, chunk), Progress([], np.empty((0, spec.vocab_size), np.float32)), chunk
        )
        session._check(list(map(len, rows)), new_tokens)
        logits = session._decoder.prefill(rows, progress)
        session._progress = Progress(rows, logits, [[] for _ in rows])
        session._grant(list(map(len, rows)))
        return session

    @property
    def ids(self) -> list[list[int]]:
        """All tokens of each row, prompt and continuation."""
        return [list(context) for context in self._progress.contexts]

    @property
    def state_bytes(self) -> int:
        """Bytes of decode state that this session holds."""
        return self._decoder.state_bytes

    def generate(
        self,
        *,
        max_new_tokens: int = 128,
        options: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        stop_ids: Iterable[int] | None = None,
        on_text: OnText | None = None,
        on_token: OnToken | None = None,
    ) -> list[Generated]:
        """Continues every row until it stops. Called again, it goes on from there.

        Text is decoded call by call: a character whose bytes two calls share is a U+FFFD in both.

        Args:
            max_new_tokens: at least 1, for each row.
            options: how to sample; the default samples at temperature 1. With the seed of the call before, the random
                numbers go on where they were: two calls for 10 tokens give what one call for 20 gives.
            stop: strings that end a row; they are not part of its text. They need a tokenizer.
            stop_ids: ids that end a row; the model's `eos_token_id` when None.
            on_text: called with row and newly completed text, as soon as it cannot change any more.
            on_token: called with row, id and log-probability of each token.

        Raises:
            InputError: options out of range, or more than memory allows.
            NumericError: the model's logits are not finite.
        """
        rule, options, tokenizer = check_request(self._source, max_new_tokens, options, stop, stop_ids)
        # The token that is read first is the last of the context.
        longest = max(map(len, self._progress.contexts))
        self._check([1] * len(self._progress.contexts), rule.max_new_tokens, known=longest - 1)
        return generation.write(self._decoder, self._progress, tokenizer, rule, options, on_text, on_token)

    def append(self, text: str | Sequence[int], row: int | None = None) -> None:
        """Adds text or ids to a row, to all rows when None, as if they had been generated; reads them in one go.

        Raises:
            InputError: nothing to add, no such row, ids outside the vocabulary, or more than memory allows.
        """
        rows = range(len(self._progress.contexts)) if row is None else [row]
        whole = isinstance(row, (int, np.integer)) and not isinstance(row, bool)
        if row is not None and not (whole and 0 <= row < len(self._progress.contexts)):
            raise InputError(f"row: expected 0 to {len(self._progress.contexts) - 1}, found {row!r}")
        tokenizer = self._source.tokenizer(isinstance(text, str))
        ids, *others = generation.encode(tokenizer, text, self._source.graphs.spec.vocab_size, opening=False)
        if others:
            raise InputError(f"prompt: expected one text or one list of ids, found {1 + len(others)}")
        for index in rows:
            self._check([len(ids)], 0, known=len(self._progress.contexts[index]))
        for index in rows:
            new = [*self._progress.unread[index], *ids]
            self._progress.logits[index] = self._decoder.extend(index, new)
            self._progress.contexts[index] += ids
            self._progress.unread[index] = []
            self._grant([len(new)])

    def fork(self) -> GenerationSession:
        """An independent session that continues from here; nothing is read again."""
        return GenerationSession(self._source, self._decoder.copy(), deepcopy(self._progress), self._chunk)

    def save(self, path: str | Path) -> None:
        """Writes the state to a file that `CausalLM.load_session` reads with the same bundle.

        Raises:
            InputError: the file cannot be written; what was there is untouched.
        """
        state_file.save(_path(path), self._source.bundle_id, self._decoder.rows(), self._progress)

    @classmethod
    def load(cls, source: Source, path: str | Path, *, chunk: int = CHUNK) -> GenerationSession:
        """Reads a file that `save` wrote.

        Raises:
            InputError: it is no such file, was altered, or belongs to another bundle or version.
        """
        check_chunk(chunk)
        rows, progress = state_file.load(_path(path), source.bundle_id, source.graphs)
        decoder = Stateful(source.graphs, chunk)
        decoder.adopt(rows)
        return cls(source, decoder, progress, chunk)

    def _check(self, lengths: Sequence[int], new_tokens: int, *, known: int = 0) -> None:
        """Refuses rows of so many tokens after `known` ones, and new ones after them."""
        graphs = self._source.graphs
        check_decode(
            graphs.spec,
            lengths,
            new_tokens,
            self._chunk,
            known=known,
            mixing=self._source.mixing,
            granted=graphs.granted,
            bounds=graphs.lengths,
        )

    def _grant(self, lengths: Sequence[int]) -> None:
        """Notes what the sessions' arenas keep after a pass."""
        graphs = self._source.graphs
        rows, size = prompt_pass(lengths, self._chunk, graphs.lengths)
        graphs.grant(forward_bytes(graphs.spec, rows, size, rows, self._source.mixing, graphs.lengths))


def check_request(
    source: Source,
    max_new_tokens: object,
    options: SamplingOptions | None,
    stop: Sequence[str],
    stop_ids: Iterable[int] | None,
) -> tuple[StopRule, SamplingOptions, Tokenizer | None]:
    """Checks the arguments of `GenerationSession.generate`; returns what it works with. Raises InputError."""
    options, spec = options or SamplingOptions(), source.graphs.spec
    if not isinstance(options, SamplingOptions):
        raise InputError(f"options: expected SamplingOptions, found {options!r:.60}")
    rule = StopRule.make(spec, max_new_tokens, stop, stop_ids)
    generation.check_ids("logit_bias", options.logit_bias, spec.vocab_size)
    return rule, options, source.tokenizer(bool(rule.strings))


def _path(path: object) -> Path:
    if not isinstance(path, (str, PathLike)):
        raise InputError(f"state: expected a path, found {path!r:.60}")
    return Path(path)


def check_chunk(chunk: object) -> None:
    """Raises InputError for a number of tokens that cannot be a chunk."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise InputError(f"--prefill-chunk must be an integer of at least 1, found {chunk!r}")
