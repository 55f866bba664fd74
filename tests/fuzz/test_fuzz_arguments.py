"""Numbers on the command line."""

from __future__ import annotations

import argparse

from caracal_runtimes.cli.arguments import ep_options, parse_bias, parse_ids
from caracal_runtimes.errors import InputError
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, attempt

WORDS = st.sampled_from(
    ("0", "-1", "7", "9" * 19, "9" * 20, "9" * 5000, "1.5", "1e3", "nan", "inf", "-inf", "1_0", "٣", "²", "0x1", "+1", "--1", "", " ", ",", "=", "\0", "\n", "\x1b[0m", "\ud800", "x" * 300)
)  # fmt: skip
LINES = st.lists(WORDS | st.text(st.characters(), max_size=5), max_size=6)


@FUZZ
@given(LINES, st.sampled_from((",", " ", "\n", "")))
def test_ids(words: list[str], between: str) -> None:
    ids = attempt(InputError, parse_ids, between.join(words))
    assert ids is None or (ids and all(type(number) is int and abs(number) < 10**19 for number in ids))


@FUZZ
@given(st.lists(st.tuples(WORDS, st.sampled_from(("=", "", "==", " = ")), WORDS).map("".join), max_size=4))
def test_biases(items: list[str]) -> None:
    bias = attempt(InputError, parse_bias, items)
    assert bias is None or len(bias) == len(items)


@FUZZ
@given(st.lists(st.tuples(WORDS, st.sampled_from(("=", "", "==")), WORDS).map("".join), max_size=4))
def test_options(items: list[str]) -> None:
    options = attempt(InputError, ep_options, argparse.Namespace(ep_option=items))
    assert options is None or (len(options) == len(items) and all(options))
