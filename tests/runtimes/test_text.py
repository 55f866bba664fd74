"""Streamed text against what the tokenizer decodes at once, and stop strings against `str.find` on the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from caracal_runtimes.errors import InputError
from caracal_runtimes.text import StopMatcher, TextStream
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

REPLACEMENT = "\ufffd"
LINES = [
    "In the beginning God created the heaven and the earth.",
    "  and the earth was without form, and void;   and darkness",
    "naïve café — 「日本語のテキスト」 한국어 и по-русски",
    "😀😀 👨‍👩‍👧‍👦 e\u0301 ก็ 🇸🇪",
] * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<|Łódź 😀|>", special=False)])
    return tokenizer


TOKENIZER = byte_level()
VOCABULARY = TOKENIZER.get_vocab()
# The byte-level alphabet: bytes with a visible character stand for it, the others for U+0100 and on, in order.
VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [b for b in range(0x100) if b not in VISIBLE]
BYTES = {b: VOCABULARY[chr(b)] for b in VISIBLE} | {b: VOCABULARY[chr(0x100 + i)] for i, b in enumerate(HIDDEN)}
END = VOCABULARY["<|endoftext|>"]
NO_TOKEN = TOKENIZER.get_vocab_size() + 5


def ids_of(data: bytes) -> list[int]:
    return [BYTES[b] for b in data]


def stream(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The pieces, the last from `finish()`."""
    text = TextStream(tokenizer)
    return [*(text.push(i) for i in ids), text.finish()]


class Counting:
    """Passes through and notes the most ids that were decoded at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.most = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.most = max(self.most, len(ids))
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


class TestByteLevel:
    @settings(max_examples=300, deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.text(max_size=6),
                st.text("😀👨‍👩‍👧🇸🇪", max_size=6),
                st.text("e\u0301\u0323ก็", max_size=6),
                st.text("日本語のテキスト한국어", max_size=6),
                st.sampled_from([" the", "  ", "\n", REPLACEMENT, " ,"]),
            ),
            max_size=8,
        ).map("".join)
    )
    def test_pieces_of_any_text(self, text: str) -> None:
        ids = TOKENIZER.encode(text).ids
        assert TOKENIZER.decode(ids) == text
        pieces = stream(TOKENIZER, ids)
        assert "".join(pieces) == text
        for piece in pieces[:-1]:
            assert REPLACEMENT not in piece or REPLACEMENT in text

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 1), max_size=60))
    def test_pieces_of_any_ids(self, ids: list[int]) -> None:
        assert "".join(stream(TOKENIZER, ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)

    @settings(max_examples=300, deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.sampled_from([0x80, 0x98, 0x9F, 0xC3, 0xE2, 0xE5, 0xED, 0xF0, 0xF4, 0xFF]).map(BYTES.__getitem__),
                st.sampled_from([END, NO_TOKEN, BYTES[0x41], VOCABULARY["<|Łódź 😀|>"]]),
            ),
            max_size=80,
        )
    )
    def test_pieces_of_broken_bytes(self, ids: list[int]) -> None:
        counting = Counting(TOKENIZER)
        assert "".join(stream(counting, ids)) == TOKENIZER.decode(ids, skip_special_tokens=True)
        assert counting.most <= 40

    def test_a_character_appears_with_its_last_byte(self) -> None:
        assert stream(TOKENIZER, ids_of("a😀é!".encode())) == ["a", "", "", "", "😀", "", "é", "!", ""]

    def test_text_in_front_of_an_unfinished_character_is_not_held(self) -> None:
        tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "Ã": 1, "aÃ": 2, "©": 3}, merges=[("a", "Ã")]))
        tokenizer.decoder = decoders.ByteLevel()
        assert stream(tokenizer, [2, 3, 0]) == ["a", "é", "a", ""]

    def test_an_unfinished_character_comes_out_at_the_end(self) -> None:
        assert stream(TOKENIZER, ids_of(b"ab\xf0\x9f\x98")) == ["a", "b", "", "", "", REPLACEMENT]

    def test_special_and_unknown_ids_may_split_a_character(self) -> None:
        first, *rest = ids_of("😀".encode())
        assert stream(TOKENIZER, [END, first, END, NO_TOKEN, *rest, END]) == ["", "", "", "", "", "", "😀", "", ""]

    def test_any_number_of_them_may(self) -> None:
        first, *rest = ids_of("😀".encode())
        for silent in (END, NO_TOKEN):
            assert stream(TOKENIZER, [first, *[silent] * 100, *rest])[-2:] == ["😀", ""]

    def test_a_character_after_broken_bytes_is_whole(self) -> None:
        # Somewhere in this range the stream stops waiting, with each part of the character in turn at the end.
        for count in range(60):
            data = b"\x80" * count + "😀é".encode()
            assert "".join(stream(TOKENIZER, ids_of(data))) == REPLACEMENT * count + "😀é"

    def test_broken_bytes_do_not_wait_for_the_end(self) -> None:
        pieces = stream(TOKENIZER, ids_of(b"\x80" * 200))
        assert "".join(pieces) == REPLACEMENT * 200
        assert sum(map(len, pieces[:100])) >= 80

    @pytest.mark.parametrize(
        "ids",
        [ids_of(b"word "), ids_of(b"\x80"), ids_of(REPLACEMENT.encode()), [END], [NO_TOKEN], ids_of(b"\xf0\x9f\xe2")],
        ids=["words", "continuation bytes", "true U+FFFD", "special", "unknown", "starts without an end"],
    )
    def test_cost_does_not_grow_with_the_text(self, ids: list[int]) -> None:
        counting = Counting(TOKENIZER)
        pieces = stream(counting, ids * 1000)
        assert counting.most <= 40
        assert "".join(pieces) == TOKENIZER.decode(ids * 1000, skip_special_tokens=True)

    def test_nothing(self) -> None:
        assert stream(TOKENIZER, []) == [""]

    def test_finish_gives_the_rest_once(self) -> None:
        text = TextStream(TOKENIZER)
        text.push(BYTES[0xC3])
        assert [text.finish(), text.finish()] == [REPLACEMENT, ""]


class TestOtherDecoders:
    """Decoders whose output for an id depends on where it stands."""

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.integers(0, 5), max_size=20))
    def test_leading_space_is_stripped_from_the_whole_only(self, ids: list[int]) -> None:
        vocab = {"▁Hello": 0, "▁": 1, "world": 2, "▁world": 3, "!": 4, "▁▁": 5}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)

    def test_spaces_between_words(self) -> None:
        tokenizer = Tokenizer(models.WordLevel({"Hello": 0, "world": 1, "##s": 2, ",": 3, "[UNK]": 4}, "[UNK]"))
        tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
        pieces = stream(tokenizer, [0, 3, 1, 2, 0])
        assert pieces == ["Hello", ",", " world", "s", " Hello", ""]

    def test_byte_fallback(self) -> None:
        text = "▁日本"
        vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁a": 256}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        ids = [256, *text.encode(), 256]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == f"a{text} a"


class TestStopMatcher:
    @settings(max_examples=500, deadline=None)
    @given(
        pieces=st.lists(st.text("ab\n", max_size=5), max_size=10),
        stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    )
    def test_cuts_where_str_find_does(self, pieces: list[str], stops: list[str]) -> None:
        text = "".join(pieces)
        found = [text.find(stop) for stop in stops if stop in text]
        matcher = StopMatcher(stops)
        got = [matcher.push(piece) for piece in pieces]
        rest = matcher.finish()
        assert "".join(safe for safe, _ in got) + rest == text[: min(found, default=len(text))]
        assert matcher.stopped == bool(found)
        met = [stopped for _, stopped in got]
        # Once met, it stays so, and nothing more is shown.
        assert met == sorted(met)
        assert all(safe == "" for (safe, _), before in zip(got[1:], met, strict=False) if before)

    @settings(max_examples=500, deadline=None)
    @given(
        pieces=st.lists(st.text("ab\n", max_size=5), max_size=10),
        stops=st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4),
    )
    def test_holds_no_more_than_could_become_a_stop(self, pieces: list[str], stops: list[str]) -> None:
        matcher = StopMatcher(stops)
        text = shown = ""
        for piece in pieces:
            text += piece
            safe, stopped = matcher.push(piece)
            shown += safe
            if stopped:
                return
            ends = [i for i in range(len(text)) if any(s != text[i:] and s.startswith(text[i:]) for s in stops)]
            assert shown == text[: min(ends, default=len(text))]

    def test_an_earlier_match_may_complete_later(self) -> None:
        matcher = StopMatcher(["abcd", "c"])
        assert matcher.push("xab") == ("x", False)
        assert matcher.push("c") == ("", False)
        assert matcher.push("d") == ("", True)
        assert matcher.push("more") == ("", True)
        assert matcher.finish() == ""

    def test_a_match_does_not_wait_for_a_longer_one_at_the_same_place(self) -> None:
        assert StopMatcher(["abc", "ab"]).push("xab") == ("x", True)

    def test_the_end_of_the_text_settles_it(self) -> None:
        matcher = StopMatcher(["abcd", "c"])
        assert matcher.push("xabc") == ("x", False)
        assert not matcher.stopped
        assert matcher.finish() == "ab"
        assert matcher.stopped

    def test_finish_gives_what_never_became_a_stop(self) -> None:
        matcher = StopMatcher(["\n\nQ:"])
        assert [matcher.push(t) for t in ("one\n", "\n", "Q")] == [("one", False), ("", False), ("", False)]
        assert [matcher.finish(), matcher.finish()] == ["\n\nQ", ""]
        assert not matcher.stopped

    def test_without_stops_everything_passes(self) -> None:
        matcher = StopMatcher([])
        assert matcher.push("text") == ("text", False)
        assert matcher.finish() == ""

    @pytest.mark.parametrize(
        ("stops", "message"),
        [
            ([""], "--stop: expected text of at least one character, found ''"),
            (["a", ""], "--stop: expected text of at least one character, found ''"),
            ([b"a"], "--stop: expected text of at least one character, found b'a'"),
            ([None], "--stop: expected text of at least one character, found None"),
            ("abc", "--stop: expected a list of strings, found the string 'abc'"),
        ],
    )
    def test_refuses(self, stops: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            StopMatcher(stops)
