"""Key maps: what their rules do, and drafts for layouts that nobody has seen."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from caracal import CaracalModel, CheckpointError, ReadOptions, open_checkpoint
from caracal.checkpoint.fitting import MisfitError
from caracal.checkpoint.key_map import KeyMap, Renamed
from caracal.checkpoint.key_map_draft import draft_key_map
from caracal.checkpoint.stores import Stored


def test_the_first_rule_that_matches_counts() -> None:
    rules = KeyMap.parse(
        "[[rule]]\nmatch = 'a\\.(.*)'\nname = 'first.\\1'\n"
        "[[rule]]\nmatch = 'a\\.b'\nname = 'second'\n"
        "[[rule]]\nmatch = '(?P<stem>c)\\.d'\nname = '\\g<stem>'\ntranspose = true\n"
        "[[rule]]\nmatch = '(?i)DROP'\ndrop = true\n"
    )
    assert rules.rename(["a.b", "a.c", "c.d", "drop", "other"]) == {
        "a.b": Renamed("first.b", None),
        "a.c": Renamed("first.c", None),
        "c.d": Renamed("c", True),
        "drop": Renamed(None, None),
    }


def test_a_rule_must_match_the_whole_name() -> None:
    with pytest.raises(CheckpointError, match=r"rule 1 \('b'\) matches no name"):
        KeyMap.parse("[[rule]]\nmatch = 'b'\nname = 'x'\n").rename(["a.b", "b.a", "bb"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rule = 3", r"must hold \[\[rule\]\] tables"),
        ("[rule]\nmatch = 'a'", r"must hold \[\[rule\]\] tables and nothing else, found one \[rule\]"),
        ("[[rule]]\nmatch = 'a'\nname = 'b'\n[other]\n", "nothing else, found other"),
        ("rule = [3]", "rule 1 must be a"),
        ("[[rule]]\nmatch = 'a'", "either name or drop = true"),
        ("[[rule]]\nname = 'a'", "must have match"),
        ("[[rule]]\nmatch = 'a'\nname = 'b'\ndrop = true", "either name or drop = true"),
        ("[[rule]]\nmatch = 'a'\ndrop = false", "either name or drop = true"),
        ("[[rule]]\nmatch = 'a'\ndrop = true\ntranspose = true", "transpose means nothing"),
        ("[[rule]]\nmatch = 1\nname = 'b'", "match must be str"),
        ("[[rule]]\nmatch = 'a'\nname = 'b'\ntranspose = 1", "transpose must be bool"),
        ("[[rule]]\nmatch = 'a'\nname = '\\g<x>'", "no regular expression with a replacement"),
        ("[[rule]]\nmatch = '(?P<x>a'\nname = 'b'", "no regular expression with a replacement"),
        ("[[rule]]\nmatch = '(a)(b)'\nname = '\\3'", "no regular expression with a replacement"),
        ("[[rule]]\nmatch = \"\\d\"\nname = 'b'", "is not TOML"),
    ],
)
def test_a_bad_rule_is_refused_by_its_number(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        KeyMap.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * ((1 << 20) + 1)], ids=["not UTF-8", "too large"])
def test_a_file_that_is_no_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_bytes(content)
    with pytest.raises(CheckpointError, match="--key-map"):
        KeyMap.from_file(tmp_path / "map.toml")


@pytest.mark.parametrize("name", ["nothing.toml", ".", "a\0b"])
def test_a_file_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--key-map: .* cannot be read"):
        KeyMap.from_file(tmp_path / name)


# ---------------------------------------------------------------------------------------------------------------
# Drafts


def entries_of(state: dict[str, torch.Tensor]) -> dict[str, Stored]:
    return {k: Stored(str(v.dtype).removeprefix("torch."), tuple(v.shape)) for k, v in state.items()}


@pytest.mark.parametrize("layers", [3, 13])
@pytest.mark.parametrize(
    "overrides", [{}, {"use_bias": False, "tie_word_embeddings": False}, {"hidden_act": "gelu", "conv_kernel": 5}]
)
def test_a_draft_reads_the_layout_that_it_was_drafted_for(
    forms: ModuleType,
    overrides: dict[str, object],
    layers: int,
    random_model: Callable[..., CaracalModel],
    tmp_path: Path,
) -> None:
    model = random_model(dtype=torch.float32, num_hidden_layers=layers, **overrides)
    state = forms.renamed(forms.state_of(model), forms.foreign_name)
    state["transformer.h.2.attn.mask"] = torch.ones(4, 4, dtype=torch.bool)
    forms.hugging_face(tmp_path, model, state)
    draft = draft_key_map(entries_of(state))
    assert "#? [[rule]]" not in draft
    assert draft.count("[[rule]]") < 30, "names that differ in a block's number are one rule"
    (tmp_path / "map.toml").write_text(draft, encoding="utf-8")
    loaded = open_checkpoint(tmp_path, ReadOptions(key_map=tmp_path / "map.toml")).model()
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_what_cannot_be_decided_is_left_to_the_user(
    forms: ModuleType, random_model: Callable[..., CaracalModel], tmp_path: Path
) -> None:
    model = random_model(dtype=torch.float32)
    names = {f"blocks.2.swa.{letter}_proj": f"blocks.2.swa.m{n}" for n, letter in enumerate("qkv")}
    state = forms.state_of(model)
    for ours, theirs in names.items():
        state = {name.replace(ours, theirs): tensor for name, tensor in state.items()}
    draft = draft_key_map(entries_of(state))
    undecided = [line for line in draft.splitlines() if line.startswith("#? name")]
    assert len(undecided) == 3
    assert all(f"swa.{letter}_proj" in line for line in undecided for letter in "qkv")
    assert "embed_tokens" not in draft, "names that are right need no rule"
    # As it stands it is no key map that would load something by chance.
    with pytest.raises(CheckpointError, match="no rules"):
        KeyMap.parse(draft)


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_of_names_without_sense_is_a_file_that_can_be_completed(
    forms: ModuleType, seed: int, random_model: Callable[..., CaracalModel], tmp_path: Path
) -> None:
    model, rng = random_model(dtype=torch.float32), random.Random(seed)
    letters = "abcxyz.é'\"{}[]0 \\"
    state = {
        "".join(rng.choices(letters, k=rng.randint(1, 20))) + str(n): t
        for n, t in enumerate(forms.state_of(model).values())
    }
    draft = draft_key_map(entries_of(state))
    # Every rule is decided by dropping its tensors.
    chosen = [
        "drop = true" if line.startswith(("name = ", "#? name")) else line.removeprefix("#? ")
        for line in draft.splitlines()
    ]
    renamed = KeyMap.parse("\n".join(chosen)).rename(state)
    assert all(renamed[key].name is None for key in state)
    forms.hugging_face(tmp_path, model, state)
    with pytest.raises(MisfitError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("rename", "undecided"),
    [
        # The part of a block that a name has says more than a number in it.
        ({"mhf.norm": "mhf.ln2", "ffn.norm": "ffn.ln_1", "swa.norm": "swa.ln2"}, False),
        ({"ffn.gate_proj": "mlp.in.0", "ffn.up_proj": "mlp.in.1"}, True),
    ],
)
def test_numbers_in_names_are_not_trusted_where_they_mislead(
    rename: dict[str, str],
    undecided: bool,
    forms: ModuleType,
    random_model: Callable[..., CaracalModel],
    tmp_path: Path,
) -> None:
    model = random_model(dtype=torch.float32)

    def other(name: str) -> str:
        name = name.replace("blocks.", "h.")
        for ours, theirs in rename.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        return name

    state = forms.renamed(forms.state_of(model), other)
    draft = draft_key_map(entries_of(state))
    assert ("#? [[rule]]" in draft) == undecided
    if not undecided:
        forms.hugging_face(tmp_path, model, state)
        (tmp_path / "map.toml").write_text(draft, encoding="utf-8")
        loaded = open_checkpoint(tmp_path, ReadOptions(key_map=tmp_path / "map.toml")).model()
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_three_numbered_norms_are_not_told_by_their_numbers(
    forms: ModuleType, random_model: Callable[..., CaracalModel]
) -> None:
    model = random_model(dtype=torch.float32, norm_before_conv=True, layer_types=("mhf",) * 3)
    names = {"mhf.input_norm": "mix.norm1", "mhf.norm": "mix.norm2", "ffn.norm": "norm3"}

    def other(name: str) -> str:
        for ours, theirs in names.items():
            name = name.replace(f".{ours}.", f".{theirs}.")
        return name.replace("blocks.", "h.")

    draft = draft_key_map(entries_of(forms.renamed(forms.state_of(model), other)))
    assert draft.count("#? [[rule]]") >= 2
