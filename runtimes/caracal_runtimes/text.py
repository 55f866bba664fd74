"""Between text and ids: the tokenizer's file and its faults, detokenisation as a text grows, stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from caracal_runtimes.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_REPLACEMENT = "\ufffd"
# A UTF-8 sequence has four bytes at most, so an unfinished one has three, each shown as one U+FFFD at most.
_LONGEST_UNFINISHED = 3
# Ids may wait for this many successors to complete their text.
_MAX_PENDING = 16
# Ids kept after waiting in vain: each adds a byte at least, so that they hold all of an unfinished sequence and more.
_KEPT = 8


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Reads a `tokenizer.json` and tries it on no text at all. Whatever truncation and padding it asks for is turned off.

    Raises:
        ValueError: what is wrong with it, in one line to go behind its name.
        ImportError: the package `tokenizers` is missing.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
        # Settings for training batches travel in the file; here they would cut a text without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.encode("").ids
        tokenizer.decode(added, skip_special_tokens=True)
        highest = max([*tokenizer.get_vocab(with_added_tokens=True).values(), *added], default=-1)
    except BaseException as error:  # noqa: BLE001 - `_reason` raises what is no fault of the library's
        raise ValueError(f"is no tokenizer that the package `tokenizers` reads ({_reason(error)})") from None
    if highest >= vocab_size:
        raise ValueError(
            f"has token ids up to {highest}, the model's vocab_size is {vocab_size}; the tokenizer is of another model"
        )
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str, *, special: bool = True) -> Encoding:
    """What the tokenizer makes of a text.

    Args:
        tokenizer: from `read_tokenizer`.
        text: to be encoded.
        special: add the special tokens that open a sequence.

    Raises:
        InputError: it cannot, for instance because it has no token for a word and none for unknown ones.
    """
    try:
        return tokenizer.encode(text, add_special_tokens=special)
    except BaseException as error:  # noqa: BLE001 - `_reason` raises what is no fault of the library's
        raise InputError(
            f"tokenizer: it cannot encode the text ({_reason(error)}); use another text, or pass token ids"
        ) from None


def _reason(error: BaseException) -> str:
    """What the library says of its fault, in one line; what is none of its faults is raised again.

    What it calls a panic, a fault that its authors did not expect, is no Exception.
    """
    if isinstance(error, MemoryError) or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
        raise error
    return "".join(c if c.isprintable() else " " for c in str(error))[:200]


class TextStream:
    """Turns ids into text one at a time.

    The pieces, `finish()` included, join to what the tokenizer makes of all ids at once. That holds for any ids with
    byte-level BPE; with another decoder it holds as long as an id leaves the text before it unchanged.

    An id is decoded together with a few before it and the known text is cut off, as text-generation-inference does:
    decoded alone, an id may lose its leading space or split a character. The cost of an id does not depend on the
    length of the text. U+FFFD at the end may be an unfinished character and waits for the next ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts an empty text. `tokenizer` needs `decode(ids, skip_special_tokens=True)` only."""
        self._tokenizer = tokenizer
        # The ids that are decoded together, their text, and how much of it was returned. The first `_context` ids are
        # there only so that the others are decoded as they would be inside the whole text.
        self._window: list[int] = []
        self._context = 0
        self._text = ""
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """Takes the next id; returns the text that it completes, often "" inside a character."""
        window = [*self._window, token_id]
        text = self._decode(window)
        if text == self._text and self._is_silent(token_id):
            return ""
        self._window, self._text = window, text
        complete = len(text.rstrip(_REPLACEMENT))
        piece = text[self._emitted : complete]
        self._emitted = max(self._emitted, complete)
        if piece and complete == len(text):
            self._set_window(window[self._context :])
            self._context = len(self._window)
            self._emitted = len(self._text)
        elif len(window) - self._context > _MAX_PENDING:
            piece += self._give_up()
        return piece

    def finish(self) -> str:
        """The text that was held back, U+FFFD included. To be called once, after the last id."""
        rest = self._text[self._emitted :]
        self._emitted = len(self._text)
        return rest

    def _set_window(self, ids: list[int]) -> None:
        self._window = ids
        self._text = self._decode(ids)

    def _give_up(self) -> str:
        """Shortens the window in the middle of text that stays incomplete, such as a run of bytes that are no UTF-8."""
        complete = len(self._text.rstrip(_REPLACEMENT))
        held = min(len(self._text) - complete, _LONGEST_UNFINISHED)
        piece = self._text[self._emitted : len(self._text) - held]
        self._set_window(self._window[-_KEPT:])
        self._context = 0
        self._emitted = max(0, len(self._text) - held)
        return piece

    def _is_silent(self, token_id: int) -> bool:
        # Special ids and ids without a token never show. Twice, since a tokenizer may strip the first leading space.
        return not self._decode([token_id, token_id])

    def _decode(self, ids: list[int]) -> str:
        try:
            return self._tokenizer.decode(ids, skip_special_tokens=True)
        except BaseException as error:  # noqa: BLE001 - `_reason` raises what is no fault of the library's
            raise InputError(
                f"tokenizer: it cannot decode the ids {ids!r:.60} ({_reason(error)}); work with token ids"
            ) from None


class StopMatcher:
    """Cuts a growing text in front of the first stop string.

    The match that begins earliest in the whole text counts, however the text was split into pieces. So a complete match
    is not final while an earlier one may still complete: with the stops "abcd" and "c", "abc" is undecided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Takes the stop strings; none is allowed.

        Raises:
            InputError: a stop string that is empty or not a string, or one string in place of a list.
        """
        # A string is a sequence too: each of its characters would stop.
        if isinstance(stops, str):
            raise InputError(f"--stop: expected a list of strings, found the string {stops!r}; use [{stops!r}]")
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise InputError(f"--stop: expected text of at least one character, found {stop!r}")
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met, in `push` or in `finish`."""
        return self._stopped

    def push(self, text: str) -> tuple[str, bool]:
        """Takes more text.

        Returns:
            The text that can be shown, and whether a stop string was met. Neither the stop string nor anything after it
            is ever shown; without one, the longest end of the text that may become a stop string is held back.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        match = self._first_match(text)
        undecided = self._undecided(text)
        if match is not None and match <= undecided:
            self._held, self._stopped = "", True
            return text[:match], True
        self._held = text[undecided:]
        return text[:undecided], False

    def finish(self) -> str:
        """The text that was held back, cut in front of a stop string in it (then `stopped` is true)."""
        rest, self._held = self._held, ""
        match = self._first_match(rest)
        if match is None:
            return rest
        self._stopped = True
        return rest[:match]

    def _first_match(self, text: str) -> int | None:
        return min((found for found in map(text.find, self._stops) if found >= 0), default=None)

    def _undecided(self, text: str) -> int:
        """Where the longest end of `text` begins that is the beginning of a stop string, but not a whole one."""
        return len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
