"""Saved decode states: damaged by accident, which their hash finds, and forged so that their hash fits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes import state_file
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError, InputError, RuntimeToolError
from caracal_runtimes.generation_session import GenerationSession
from caracal_runtimes.model import CausalLM
from caracal_runtimes.safetensors_file import SafetensorsFile
from caracal_runtimes.sampling import SamplingOptions
from hypothesis import given
from hypothesis import strategies as st
from mutations import FUZZ, attempt, damaged, encoded, mutants

GREEDY = SamplingOptions(temperature=0)


@dataclass(frozen=True)
class Saved:
    """A state that is right, taken apart."""

    model: CausalLM
    path: Path
    content: bytes

    @property
    def header(self) -> dict[str, Any]:
        return dict(json.loads(self.content[8 : self.start]))

    @property
    def start(self) -> int:
        return 8 + int.from_bytes(self.content[:8], "little")


@pytest.fixture(scope="module")
def saved(probe: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Two rows of 5 and 32 tokens, sampled, the last of them not read yet."""
    model = Bundle.open(probe).model(threads=1)
    path = tmp_path_factory.mktemp("fuzz") / "state"
    session = model.start([[1, 2, 3], list(range(30))])
    session.generate(max_new_tokens=2, options=SamplingOptions(temperature=0.8), stop_ids=[])
    session.save(path)
    return Saved(model, path, path.read_bytes())


def check(saved: Saved, content: bytes) -> None:
    """What is loaded goes on, and comes back as it was when it is saved again."""
    saved.path.write_bytes(content)
    session: GenerationSession | None = attempt(RuntimeToolError, saved.model.load_session, saved.path)
    if session is None:
        return
    session.save(saved.path)
    again = saved.model.load_session(saved.path)
    assert again.ids == session.ids
    attempt(RuntimeToolError, go_on, session)


def go_on(session: GenerationSession) -> None:
    lengths = [len(ids) for ids in session.ids]
    session.generate(max_new_tokens=3, options=GREEDY, stop_ids=[])
    assert [len(ids) for ids in session.ids] == [length + 3 for length in lengths]


def packed(header: dict[str, Any], tensors: bytes) -> bytes:
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + tensors


def forged(saved: Saved, header: dict[str, Any]) -> bytes:
    """A file with the header, whose hash is that of what is in it, as far as it can be read."""
    content = packed(header, saved.content[saved.start :])
    saved.path.write_bytes(content)
    try:
        file = SafetensorsFile.open(saved.path)
        tensors = {name: file.tensor(name) for name in file.entries}
        header["__metadata__"]["sha256"] = state_file._digest(tensors, json.loads(file.metadata["rows"]))
    except (BundleError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return content
    return packed(header, saved.content[saved.start :])


def test_the_state_itself_goes_on(saved: Saved) -> None:
    saved.path.write_bytes(saved.content)
    session = saved.model.load_session(saved.path)
    assert [len(ids) for ids in session.ids] == [5, 32]
    go_on(session)


def test_damaged_states(saved: Saved) -> None:
    @FUZZ
    @given(damaged(saved.content, saved.start + 200))
    def prop(content: bytes) -> None:
        check(saved, content)

    prop()


def test_forged_rows(saved: Saved) -> None:
    @FUZZ
    @given(mutants(json.loads(saved.header["__metadata__"]["rows"])))
    def prop(text: str) -> None:
        header = saved.header
        header["__metadata__"]["rows"] = encoded(text).decode("utf-8", "replace")
        check(saved, forged(saved, header))

    prop()


def test_forged_tensors(saved: Saved) -> None:
    @FUZZ
    @given(mutants(saved.header))
    def prop(text: str) -> None:
        try:
            header = json.loads(text)
        except (ValueError, RecursionError):
            header = None
        if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
            content = forged(saved, header)
        else:
            raw = encoded(text)
            content = len(raw).to_bytes(8, "little") + raw + saved.content[saved.start :]
        check(saved, content)

    prop()


@pytest.mark.parametrize("name", ["streams", "pending", "conv", "keys", "values", "logits"])
@pytest.mark.parametrize(
    "number", [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x81\x7f"], ids=["NaN", "inf", "sNaN"]
)
def test_a_state_that_is_not_finite_is_refused(saved: Saved, name: str, number: bytes) -> None:
    header, content = saved.header, bytearray(saved.content)
    at = saved.start + header[f"1.{name}"]["data_offsets"][1] - 4
    content[at : at + 4] = number
    altered = Saved(saved.model, saved.path, bytes(content))
    saved.path.write_bytes(forged(altered, header))
    with pytest.raises(InputError, match=rf"state: .* \(row 1 has {name} that are not finite\); read the prompt again"):
        saved.model.load_session(saved.path)


@pytest.mark.parametrize("names", [("conv", "keys"), ("streams", "pending"), ("keys", "values"), ("ids", "logits")])
def test_numbers_of_any_value(saved: Saved, names: tuple[str, str]) -> None:
    """The right shapes, and bytes that mean anything: NaN, infinities, ids far outside of the vocabulary."""

    @FUZZ
    @given(st.sampled_from(names), st.integers(0, 1), st.binary(min_size=8, max_size=8), st.integers(0, 10**6))
    def prop(name: str, row: int, number: bytes, place: int) -> None:
        header = saved.header
        begin, end = header[f"{row}.{name}"]["data_offsets"]
        content = bytearray(saved.content)
        at = saved.start + begin + 8 * (place % max(1, (end - begin) // 8))
        content[at : at + 8] = number
        altered = Saved(saved.model, saved.path, bytes(content))
        check(altered, forged(altered, header))

    prop()
