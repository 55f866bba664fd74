"""Likelihood of a text: bits per byte and perplexity, long texts in windows with the context stated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import InputError, NumericError
from caracal_runtimes.forward import ForwardPass, token_ids
from caracal_runtimes.metrics import log_softmax
from caracal_runtimes.text import encode_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PIECE = 128  # positions whose log-softmax is taken at once


@dataclass(frozen=True)
class Score:
    """Code length of a text under a model.

    `tokens` were scored, in `windows` windows of at most `context` tokens. Every window after the first sees the last
    half window before it, so a token has at least `context / 2` tokens of context where the text has them. `text_bytes`
    is the UTF-8 length of the text that was scored, or None when only ids were given.
    """

    tokens: int
    windows: int
    context: int
    text_bytes: int | None
    nats: float

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log-likelihood per token; infinite where that has no float."""
        try:
            return math.exp(self.nats / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_token(self) -> float:
        """Mean code length of a token in bits."""
        return self.nats / math.log(2) / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """Code length in bits over the UTF-8 length of the text; comparable between tokenizers."""
        return None if not self.text_bytes else self.nats / math.log(2) / self.text_bytes


def score(
    model: ForwardPass,
    tokenizer: Tokenizer | None,
    text: str | Sequence[int],
    *,
    context: int = 1024,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """Scores a text or a sequence of ids.

    A model with a beginning-of-text token (as the tokenizer adds it, or `bos_token_id` for ids) is conditioned on it and
    every token of the text is scored; without one the first token only serves as context.

    Args:
        model: a loaded forward graph.
        tokenizer: needed for text, not for ids.
        text: text for the tokenizer, or ids.
        context: the longest window in tokens, at least 2; a bundle's `max_length` bounds it.
        progress: called with tokens done and tokens in all.

    Raises:
        InputError: an empty text, ids outside the vocabulary, or a bad context.
        NumericError: the model's logits are not finite.
    """
    if isinstance(context, bool) or not isinstance(context, int) or context < 2:
        raise InputError(f"--context must be an integer of at least 2, found {context!r}")
    context = model.lengths.capped(context)
    text_bytes = None
    bos = model.spec.bos_token_id
    if isinstance(text, str):
        try:
            text_bytes = len(text.encode("utf-8"))
        except UnicodeEncodeError:
            raise InputError("score: expected text, found characters that UTF-8 cannot write") from None
        if tokenizer is None:
            raise InputError("score: a text needs a tokenizer, this bundle has none; score token ids instead")
        encoding = encode_text(tokenizer, text)
        ids = encoding.ids
        if ids and ids[0] != bos:  # the first token is given, not coded, and so are its bytes
            text_bytes -= len(text[: encoding.offsets[0][1]].encode("utf-8"))
    else:
        ids = token_ids("score", text)
        if bad := [i for i in ids if not 0 <= i < model.spec.vocab_size]:
            raise InputError(f"score: ids must be from 0 to {model.spec.vocab_size - 1}, found {bad[0]}")
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
    if len(ids) < 2:
        raise InputError("score: expected a text of at least one token to score, found none")
    opening = ids[:1] if bos is not None and ids[0] == bos else []
    body = ids[len(opening) :]
    scored_from = 0 if opening else 1
    nats, windows, end = 0.0, 0, scored_from
    while end < len(body):
        # The window holds `context` tokens: the opening token, half a window that only gives context, and what is new.
        keep = 0 if windows == 0 else min(end, context // 2, context - len(opening) - 1)
        begin = end - keep if windows else 0
        stop = min(len(body), begin + context - len(opening))
        row = np.asarray([*opening, *body[begin:stop]], dtype=np.int64)
        # logits at position p predict row[p + 1]
        first = len(opening) + (end - begin)
        positions = np.arange(first - 1, len(row) - 1, dtype=np.int64)
        logits = model.forward(row[None], positions[None])[0]
        if not np.isfinite(logits).all():
            raise NumericError("score: the model's logits are NaN or infinite; look at the bundle with caracal parity")
        nats -= _target_logprobs(logits, row[first:])
        windows += 1
        end = stop
        if progress is not None:
            progress(end - scored_from, len(body) - scored_from)
    return Score(len(body) - scored_from, windows, context, text_bytes, nats)


def _target_logprobs(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> float:
    """Sum of the targets' log-probabilities, in pieces: the float64 copy of all logits would triple the memory."""
    total = 0.0
    for begin in range(0, len(targets), _PIECE):
        piece = log_softmax(logits[begin : begin + _PIECE])
        total += float(np.take_along_axis(piece, targets[begin : begin + _PIECE, None], axis=-1).sum())
    return total
