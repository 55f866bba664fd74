"""`tokenizer.json`, which the package `tokenizers` reads: what it refuses, and how, is made ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError, InputError
from caracal_runtimes.text import TextStream, encode_text
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, attempt, damaged, encoded, mutants

tokenizers = pytest.importorskip("tokenizers")

TEXT = "In the beginning God created the heaven and the earth. e\u0301 🦁"
VOCABULARY = 64  # of the probe's model


def _word_level() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "In": 1, "the": 2, "God": 63}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def _bpe() -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = ["<end>", "i", "n", "t", "h", "e", "Ġ", "b", "g", "in", "th", "the"]
    tokenizer = Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, [("i", "n"), ("t", "h"), ("th", "e")])
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    return tokenizer


DOCUMENTS = {"word level": json.loads(_word_level().to_str()), "BPE": json.loads(_bpe().to_str())}


@pytest.fixture(scope="module")
def bundle(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The probe with a tokenizer, which the tests write."""
    folder = tmp_path_factory.mktemp("fuzz")
    return Bundle(folder, replace(Bundle.open(probe).manifest, tokenizer="tokenizer.json"))


def check(bundle: Bundle, content: bytes) -> None:
    (bundle.path / "tokenizer.json").write_bytes(content)
    tokenizer = attempt(BundleError, bundle.tokenizer)
    if tokenizer is None:
        return
    ids = attempt(InputError, encode_text, tokenizer, TEXT)
    assert ids is None or max(ids.ids, default=0) < VOCABULARY
    stream = TextStream(tokenizer)
    for token in (1, 2, 63):
        attempt(InputError, stream.push, token)
    assert tokenizer.truncation is None
    assert tokenizer.padding is None


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_documents_themselves_are_read(bundle: Bundle, kind: str) -> None:
    content = json.dumps(DOCUMENTS[kind]).encode()
    check(bundle, content)
    assert bundle.tokenizer().encode(TEXT).ids


def _long_prefix(document: dict[str, Any]) -> None:
    document["model"]["continuing_subword_prefix"] = "x" * 10


def _template_without_its_token(document: dict[str, Any]) -> None:
    document["post_processor"]["special_tokens"] = {}


@pytest.mark.parametrize("change", [_long_prefix, _template_without_its_token])
def test_a_panic_of_the_library_is_bad_input(bundle: Bundle, change: Callable[[dict[str, Any]], None]) -> None:
    """What the library did not expect is raised as something that is no Exception."""
    document = json.loads(json.dumps(DOCUMENTS["BPE"]))
    change(document)
    (bundle.path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(BundleError, match=r"bundle: tokenizer\.json is no tokenizer that the package"):
        bundle.tokenizer()


def test_a_word_that_the_tokenizer_does_not_know_is_bad_input(bundle: Bundle) -> None:
    document = json.loads(json.dumps(DOCUMENTS["word level"]))
    document["model"]["unk_token"] = "missing"
    (bundle.path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    tokenizer = bundle.tokenizer()
    assert encode_text(tokenizer, "In the").ids == [1, 2]
    with pytest.raises(
        InputError, match=r"tokenizer: it cannot encode the text \(WordLevel error: .*\); use another text"
    ):
        encode_text(tokenizer, "Egypt")


def test_an_interrupt_is_no_fault_of_the_tokenizer() -> None:
    class Interrupted:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_text(Interrupted(), "In the")


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_tokenizers_with_changed_values(bundle: Bundle, kind: str) -> None:
    @FUZZ
    @given(mutants(DOCUMENTS[kind]))
    def prop(text: str) -> None:
        check(bundle, encoded(text))

    prop()


@FUZZ
@given(content=st.binary() | damaged(json.dumps(DOCUMENTS["BPE"]).encode()))
def test_damaged_tokenizers(bundle: Bundle, content: bytes) -> None:
    check(bundle, content)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_the_exporter_refuses_the_same(bundle: Bundle, kind: str) -> None:
    pytest.importorskip("torch")
    from caracal_export.exporter import check_tokenizer

    from caracal import CaracalConfig

    config = CaracalConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=2)

    @FUZZ
    @given(mutants(DOCUMENTS[kind]))
    def prop(text: str) -> None:
        path = bundle.path / "tokenizer.json"
        path.write_bytes(encoded(text))
        taken = attempt(InputError, check_tokenizer, "export", path, config)
        assert (taken is None) == (attempt(BundleError, bundle.tokenizer) is None)

    prop()
