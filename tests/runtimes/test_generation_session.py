"""Sessions: whatever the calls, the text is that of one call that reads everything at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caracal_runtimes import generation, limits, state_file
from caracal_runtimes.decode_graphs import DecodeGraphs
from caracal_runtimes.errors import BundleError, InputError, LimitError, NumericError
from caracal_runtimes.generation import Generated
from caracal_runtimes.generation_session import GenerationSession
from caracal_runtimes.model import CausalLM
from caracal_runtimes.safetensors_file import SafetensorsFile, write_safetensors
from caracal_runtimes.sampling import SamplingOptions

GREEDY = SamplingOptions(temperature=0)
SAMPLED = SamplingOptions(seed=5, temperature=1.5)
PENALISED = SamplingOptions(seed=6, repetition_penalty=1.3, top_k=40)
PROMPTS = [[0], [5, 7, 9], list(range(40, 57)), list(range(100, 150))]
OPTIONS = pytest.mark.parametrize("options", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])


def write(session: GenerationSession, count: int = 10, options: SamplingOptions = GREEDY) -> list[list[int]]:
    return [row.ids for row in session.generate(max_new_tokens=count, options=options, stop_ids=())]


def fresh(model: CausalLM, prompts: Any, count: int = 10, options: SamplingOptions = GREEDY) -> list[list[int]]:
    return write(model.start(prompts), count, options)


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text and 10 < len(text) < 600
    return text


class TestGenerate:
    @OPTIONS
    @pytest.mark.parametrize("parts", [[10, 10], [1] * 20, [19, 1], [3, 1, 9, 7]], ids=str)
    def test_in_parts(self, model: CausalLM, options: SamplingOptions, parts: list[int]) -> None:
        session = model.start(PROMPTS)
        whole = model.start(PROMPTS).generate(max_new_tokens=20, options=options, stop_ids=())
        done: list[list[Generated]] = [
            session.generate(max_new_tokens=count, options=options, stop_ids=()) for count in parts
        ]
        for row, expected in enumerate(whole):
            assert [token for part in done for token in part[row].ids] == expected.ids
            logprobs = [value for part in done for value in part[row].logprobs]
            np.testing.assert_allclose(logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
            prompt = list(PROMPTS[row])
            for part in done:
                assert part[row].prompt_ids == prompt
                prompt += part[row].ids
            assert session.ids[row] == prompt

    @OPTIONS
    def test_is_what_the_model_generates(self, model: CausalLM, options: SamplingOptions) -> None:
        expected = model.generate(PROMPTS, max_new_tokens=15, options=options, stop_ids=())
        assert fresh(model, PROMPTS, 15, options) == [result.ids for result in expected]

    def test_rows_that_ended_go_on(self, model: CausalLM) -> None:
        """A row that met a stop id goes on behind it, others behind their last token."""
        whole = fresh(model, PROMPTS, 30)
        end = whole[1][4]
        session = model.start(PROMPTS)
        first = [row.ids for row in session.generate(max_new_tokens=12, options=GREEDY, stop_ids=[end])]
        assert len(first[1]) == whole[1].index(end) + 1 < 12
        assert len(set(map(len, first))) > 1
        second = write(session, 9)
        assert [a + b for a, b in zip(first, second, strict=True)] == [
            ids[: len(a) + 9] for ids, a in zip(whole, first, strict=True)
        ]

    def test_another_seed_starts_its_own_stream(self, model: CausalLM) -> None:
        a, b = SamplingOptions(seed=1), SamplingOptions(seed=2)
        session = model.start([0, 5])
        (first,), (second,) = write(session, 8, a), write(session, 8, b)
        assert [second] == fresh(model, [0, 5, *first], 8, b)
        assert [first] == fresh(model, [0, 5], 8, a)

    def test_options_may_change_from_call_to_call(self, model: CausalLM) -> None:
        session = model.start([0, 5])
        (first,) = write(session, 8, SAMPLED)
        assert write(session, 8, GREEDY) == fresh(model, [0, 5, *first], 8, GREEDY)

    def test_what_was_read_is_never_read_again(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        session = model.start(PROMPTS)
        for name in ("forward", "extend"):
            monkeypatch.setattr(DecodeGraphs, name, lambda *arguments: pytest.fail("it read"))
        write(session, 5)
        write(session.fork(), 5)

    @pytest.mark.parametrize("chunk", [1, 8, 16, 17])
    def test_chunks_change_nothing(self, model: CausalLM, chunk: int) -> None:
        session = model.start(PROMPTS, prefill_chunk=chunk)
        assert write(session) == fresh(model, PROMPTS)

    def test_the_ids_are_a_copy(self, model: CausalLM) -> None:
        session = model.start([0, 5])
        session.ids[0].append(300)
        session.ids.append([1])
        assert session.ids == [[0, 5]]
        assert write(session) == fresh(model, [0, 5])

    def test_results_are_not_shared_with_the_session(self, model: CausalLM) -> None:
        session = model.start([0, 5])
        (result,) = session.generate(max_new_tokens=4, options=GREEDY, stop_ids=())
        expected = fresh(model, [0, 5], 8)[0][4:]
        result.ids.append(300)
        result.prompt_ids.append(300)
        assert write(session, 4) == [expected]

    def test_state_bytes(self, model: CausalLM) -> None:
        session = model.start([0, 5])
        before = session.state_bytes
        write(session, 600)
        assert before < session.state_bytes < before + 2 * 768 * 1024


class TestAppend:
    @pytest.mark.parametrize("known", [1, 3, 7, 8, 9, 30])
    @pytest.mark.parametrize("count", [1, 2, 8, 25])
    def test_is_reading_all_at_once(self, model: CausalLM, known: int, count: int) -> None:
        text = np.random.default_rng(known).integers(0, 320, known + count).tolist()
        session = model.start(text[:known])
        session.append(text[known:])
        assert session.ids == [text]
        assert write(session, 15) == fresh(model, text, 15)

    def test_after_and_between_generated_tokens(self, model: CausalLM) -> None:
        session, text = model.start([3, 1]), [3, 1]
        for count, new in ((5, [7, 8]), (1, [9] * 12), (20, [11]), (3, list(range(60, 90)))):
            (ids,) = write(session, count)
            session.append(new)
            text += [*ids, *new]
            assert session.ids == [text]
        assert write(session, 12) == fresh(model, text, 12)

    def test_twice_is_once(self, model: CausalLM) -> None:
        one, two = model.start([3, 1]), model.start([3, 1])
        one.append([5, 6, 7])
        one.append([8, 9])
        two.append([5, 6, 7, 8, 9])
        assert write(one, 15) == write(two, 15)

    def test_to_one_row_or_to_all(self, model: CausalLM) -> None:
        session = model.start(PROMPTS)
        session.append([9, 9, 9], row=2)
        session.append([4])
        session.append([6, 5], row=0)
        texts = [[*prompt, *([9] * 3 if row == 2 else []), 4] for row, prompt in enumerate(PROMPTS)]
        texts[0] += [6, 5]
        assert session.ids == texts
        assert write(session) == fresh(model, texts)

    def test_text_is_not_opened_again(self, model: CausalLM) -> None:
        """The tokenizer begins a text with id 0; in the middle of one it does not belong."""
        session = model.start("God said")
        session.append(" light")
        assert session.ids[0].count(0) == 1
        assert model.tokenizer.decode(session.ids[0][1:]) == "God said light"
        text = session.ids
        assert write(session) == fresh(model, text)

    @pytest.mark.parametrize("kind", [tuple, list, np.asarray])
    def test_ids_of_any_kind(self, model: CausalLM, kind: Any) -> None:
        session = model.start([1, 2])
        session.append(kind([3, 4]))
        assert session.ids == [[1, 2, 3, 4]]

    @pytest.mark.parametrize("text", ["", [], (), [320], [-1], [1.5], [True], [None], None, 5, "\ud800"], ids=repr)
    def test_what_is_no_text(self, model: CausalLM, text: Any) -> None:
        session = model.start([1, 2])
        with pytest.raises(InputError) as error:
            session.append(text)
        one_line(error)
        assert session.ids == [[1, 2]]
        assert write(session) == fresh(model, [1, 2])

    @pytest.mark.parametrize("text", [["a", "b"], [[1], [2]], [[1, 2], "b"]], ids=repr)
    def test_several_texts(self, model: CausalLM, text: Any) -> None:
        session = model.start([[1, 2], [3]])
        with pytest.raises(InputError) as error:
            session.append(text)
        one_line(error)
        assert session.ids == [[1, 2], [3]]

    @pytest.mark.parametrize("row", [2, -1, True, 1.0, "0", [0]], ids=repr)
    def test_no_such_row(self, model: CausalLM, row: Any) -> None:
        session = model.start([[1, 2], [3]])
        with pytest.raises(InputError, match="row: expected 0 to 1, found"):
            session.append([5], row=row)
        assert session.ids == [[1, 2], [3]]

    def test_text_without_a_tokenizer(self, copy: Any) -> None:
        copy.drop_tokenizer()
        session = copy.model().start([1, 2])
        with pytest.raises(BundleError, match=r"no tokenizer\.json"):
            session.append("God")
        session.append([3])
        (result,) = session.generate(max_new_tokens=3, options=GREEDY, stop_ids=())
        assert (result.text, result.prompt_ids) == (None, [1, 2, 3])


class TestFork:
    @OPTIONS
    @pytest.mark.parametrize("before", [0, 1, 7, 40])
    def test_both_continue_as_fresh_sessions_would(
        self, model: CausalLM, options: SamplingOptions, before: int
    ) -> None:
        session = model.start(PROMPTS[:3])
        if before:
            write(session, before, options)
        text = session.ids
        fork = session.fork()
        assert fork.ids == text
        fork.append([7, 7, 7])
        session.append([8], row=1)
        ours = [text[0], [*text[1], 8], text[2]]
        theirs = [[*row, 7, 7, 7] for row in text]
        one, two = [[], [], []], [[], [], []]
        for _ in range(3):  # in turns
            for ids, part in zip(one, write(session, 5), strict=True):
                ids += part
            for ids, part in zip(two, write(fork, 6), strict=True):
                ids += part
        assert one == fresh(model, ours, 15)
        assert two == fresh(model, theirs, 18)

    def test_draws_the_same_numbers(self, model: CausalLM) -> None:
        session = model.start([[0, 5], [4]])
        write(session, 6, SAMPLED)
        fork = session.fork()
        assert write(fork, 20, SAMPLED) == write(session, 20, SAMPLED)

    def test_best_of_several(self, model: CausalLM) -> None:
        session = model.start([0, 5])
        texts = {tuple(write(session.fork(), 12, SamplingOptions(seed=seed))[0]) for seed in range(8)}
        assert len(texts) == 8
        assert session.ids == [[0, 5]]
        assert texts == {tuple(fresh(model, [0, 5], 12, SamplingOptions(seed=seed))[0]) for seed in range(8)}

    def test_survives_its_origin(self, model: CausalLM) -> None:
        session = model.start(list(range(40, 90)))
        fork = session.fork()
        write(session, 300)
        del session
        assert write(fork, 30) == fresh(model, list(range(40, 90)), 30)


class TestSaved:
    @OPTIONS
    @pytest.mark.parametrize("before", [0, 1, 40, 270])
    def test_goes_on_exactly(self, model: CausalLM, tmp_path: Path, options: SamplingOptions, before: int) -> None:
        session = model.start(PROMPTS)
        if before:
            write(session, before, options)
        session.save(tmp_path / "state")
        loaded = model.load_session(tmp_path / "state")
        assert loaded.ids == session.ids
        loaded.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "state").read_bytes()
        for count in (25, 40):
            results = (one.generate(max_new_tokens=count, options=options, stop_ids=()) for one in (loaded, session))
            for got, want in zip(*results, strict=True):
                assert (got.prompt_ids, got.ids, got.text) == (want.prompt_ids, want.ids, want.text)
                np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-4, atol=1e-5)
            session.append([7] * 20)
            loaded.append([7] * 20)

    def test_with_another_chunk(self, model: CausalLM, tmp_path: Path) -> None:
        session = model.start(PROMPTS)
        write(session, 5)
        session.save(tmp_path / "state")
        loaded = model.load_session(str(tmp_path / "state"), prefill_chunk=16)
        for one in (session, loaded):
            one.append(list(range(70)))
        assert write(loaded) == write(session)

    def test_saving_changes_nothing(self, model: CausalLM, tmp_path: Path) -> None:
        session = model.start(PROMPTS)
        texts: list[list[int]] = [[] for _ in PROMPTS]
        for _ in range(6):
            for text, part in zip(texts, write(session, 7), strict=True):
                text += part
            session.save(tmp_path / "state")
        assert texts == fresh(model, PROMPTS, 42)

    def test_rows_of_which_one_has_a_token_to_read(self, model: CausalLM, tmp_path: Path) -> None:
        session = model.start(PROMPTS[:2])
        write(session, 4)
        session.append([9], row=0)
        session.save(tmp_path / "state")
        assert write(model.load_session(tmp_path / "state"), 9) == write(session, 9)

    def test_can_be_read_by_another_library(self, model: CausalLM, tmp_path: Path) -> None:
        from safetensors.numpy import load_file

        model.start([[1, 2, 3], [4]]).save(tmp_path / "state.safetensors")
        tensors = load_file(tmp_path / "state.safetensors")
        assert tensors["0.ids"].tolist() == [1, 2, 3]
        assert tensors["1.streams"].shape == (2, 2, 1, 48)

    def test_replaces_an_older_one(self, model: CausalLM, tmp_path: Path) -> None:
        path = tmp_path / "state"
        model.start(list(range(100))).save(path)
        reader = path.open("rb")  # whoever reads the older one at the time must not see half of each
        before = path.read_bytes()
        model.start([1, 2]).save(path)
        with reader:
            assert reader.read() == before
        assert model.load_session(path).ids == [[1, 2]]
        assert list(tmp_path.iterdir()) == [path]

    def test_under_the_longest_name_there_is(self, model: CausalLM, tmp_path: Path) -> None:
        model.start([1, 2]).save(tmp_path / ("n" * 255))
        assert model.load_session(tmp_path / ("n" * 255)).ids == [[1, 2]]

    def test_is_written_whole_or_not_at_all(
        self, model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(path: Path, *rest: Any) -> None:
            path.write_bytes(b"half a state")
            raise OSError(28, "No space left on device")

        session, path = model.start([1, 2]), tmp_path / "state"
        for before in (None, b"an older one"):
            if before is not None:
                path.write_bytes(before)
            with monkeypatch.context() as patch:
                patch.setattr(state_file, "write_safetensors", fail)
                with pytest.raises(
                    InputError, match=r"state: .* cannot be written \(No space left on device\)"
                ) as error:
                    session.save(path)
            one_line(error)
            assert [(p, p.read_bytes()) for p in tmp_path.iterdir()] == ([] if before is None else [(path, before)])
        assert write(session) == fresh(model, [1, 2])

    @pytest.mark.parametrize(
        "target",
        ["folder", "nowhere/state", "file/state", "n" * 300, "nul\0byte", "", ".", "/", ".."],
        ids=lambda target: repr(target)[:20],
    )
    def test_where_nothing_can_be_written(
        self, model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        (tmp_path / "file").write_bytes(b"x")
        with pytest.raises(InputError, match=r"state: .*cannot be written") as error:
            model.start([1, 2]).save(target)
        one_line(error)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
        assert (tmp_path / "file").read_bytes() == b"x" and not list((tmp_path / "folder").iterdir())


@pytest.fixture(scope="module")
def saved(model: CausalLM, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A state of two rows of 7 and 34 tokens, the last of them not read yet."""
    path = tmp_path_factory.mktemp("saved") / "state"
    session = model.start([[1, 2, 3], list(range(30))])
    write(session, 4, SAMPLED)
    session.save(path)
    return path.read_bytes()


class TestWhatIsNoState:
    @pytest.fixture
    def load(self, model: CausalLM, tmp_path: Path) -> Callable[[bytes], GenerationSession]:
        def load(data: bytes) -> GenerationSession:
            (tmp_path / "state").write_bytes(data)
            return model.load_session(tmp_path / "state")

        return load

    def test_the_state_itself_is_one(self, load: Any, saved: bytes, model: CausalLM) -> None:
        assert [len(ids) for ids in load(saved).ids] == [7, 34]

    def test_of_another_bundle(self, model: CausalLM, copy: Any, tmp_path: Path) -> None:
        model.start([1, 2]).save(tmp_path / "state")
        copy.model().load_session(tmp_path / "state")  # the same files make the same bundle
        copy.weight("norm.weight")[3] += 1e-3
        copy.rehash()
        with pytest.raises(
            InputError, match=r"state: .* belongs to the bundle .*, this one is .*read the prompt again"
        ) as e:
            copy.model().load_session(tmp_path / "state")
        one_line(e)

    def test_of_another_version(self, load: Any, saved: bytes) -> None:
        with pytest.raises(InputError, match="is of version '2', this version reads 1") as error:
            load(saved.replace(b'"version":"1"', b'"version":"2"'))
        one_line(error)

    def test_any_altered_byte_of_its_data(self, load: Any, saved: bytes) -> None:
        begin = 8 + int.from_bytes(saved[:8], "little")
        places = np.random.default_rng(0).integers(begin, len(saved), 60).tolist()
        for place in [begin, len(saved) - 1, *places]:
            data = bytearray(saved)
            data[place] ^= 1
            with pytest.raises(InputError, match="was altered, its sha256 is not the one it states") as error:
                load(bytes(data))
            one_line(error)

    @pytest.mark.parametrize("bit", [0, 3, 7])
    def test_any_altered_byte_of_its_header(self, load: Any, saved: bytes, bit: int) -> None:
        """Refused with a sentence; what is not refused is the same state, its header spelled otherwise."""
        header = 8 + int.from_bytes(saved[:8], "little")
        accepted = 0
        for place in range(0, header, 7):
            data = bytearray(saved)
            data[place] ^= 1 << bit
            try:
                session = load(bytes(data))
            except InputError as error:
                assert str(error).startswith("state: ") and "\n" not in str(error)
            else:
                accepted += 1
                assert [len(ids) for ids in session.ids] == [7, 34]
        assert accepted <= 12

    @pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.3, 0.999])
    def test_cut_short(self, load: Any, saved: bytes, share: float) -> None:
        for data in (saved[: int(share * len(saved))], saved[: -1 - int(share * 100)], saved + b"\0"):
            with pytest.raises(InputError, match=r"state: .* is no whole saved state") as error:
                load(data)
            one_line(error)

    @pytest.mark.parametrize("data", [b"", b"{}", b"God said", bytes(100), b"\xff" * 100, b"\x02" + bytes(7) + b"{}"])
    def test_something_else(self, load: Any, data: bytes) -> None:
        with pytest.raises(InputError, match=r"state: .* is no (whole )?saved state") as error:
            load(data)
        one_line(error)

    def test_weights(self, model: CausalLM, exported: Any) -> None:
        with pytest.raises(InputError, match="is no saved state; expected a file that a session saved"):
            model.load_session(exported.bundle / "weights.safetensors")

    @pytest.mark.parametrize("path", ["nowhere", "", ".", "nul\0byte", "n" * 300], ids=lambda path: repr(path)[:20])
    def test_no_file(self, model: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(InputError, match="state: ") as error:
            model.load_session(path)
        one_line(error)

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data.update(lags=16),
            lambda data: data.update(rows=[]),
            lambda data: data.update(rows=data["rows"][:1]),
            lambda data: data.update(rows=None),
            lambda data: data.update(generators=[1]),
            lambda data: data.update(generators=[-1, 1]),
            lambda data: data["rows"][0].update(spans=[]),
            lambda data: data["rows"][0].update(spans=[[99, 0]]),
            lambda data: data["rows"][0].update(spans=[[3, 0], [2, 0], [6, 0]]),
            lambda data: data["rows"][0].update(unread=[320]),
            lambda data: data["rows"][0].update(unread=[1, 2]),
            lambda data: data["rows"][0].pop("unread"),
            lambda data: data["rows"][0].update(unread=[1.5]),
            lambda data: data["rows"][0].update(unread=[True]),
            lambda data: data["rows"][0]["spans"][0].__setitem__(1, 3),
            lambda data: data["rows"][0]["spans"][-1].__setitem__(0, 7.5),
            lambda data: data.update(seed="x"),
            lambda data: data.update(generators=[]),
        ],
        ids=range(18),
    )
    def test_a_forged_one(self, load: Any, saved: bytes, change: Any) -> None:
        """The hash keeps accidents out, not intent; a state that is made to fit its hash must still make sense."""
        size = int.from_bytes(saved[:8], "little")
        header = json.loads(saved[8 : 8 + size])
        data = json.loads(header["__metadata__"]["rows"])
        change(data)
        tensors = {
            name: np.frombuffer(
                saved,
                {"F32": "<f4", "I64": "<i8"}[e["dtype"]],
                int(np.prod(e["shape"])),
                8 + size + e["data_offsets"][0],
            ).reshape(e["shape"])
            for name, e in header.items()
            if name != "__metadata__"
        }
        header["__metadata__"]["rows"] = json.dumps(data)
        header["__metadata__"]["sha256"] = state_file._digest(tensors, data)
        raw = json.dumps(header).encode()
        with pytest.raises(InputError, match=r"state: .* is no whole saved state") as error:
            load(len(raw).to_bytes(8, "little") + raw + saved[8 + size :])
        one_line(error)

    @pytest.mark.parametrize("name", ["ids", "streams", "pending", "conv", "keys", "values", "logits"])
    @pytest.mark.parametrize("change", ["row", "type"])
    def test_a_forged_tensor(self, load: Any, saved: bytes, tmp_path: Path, name: str, change: str) -> None:
        """numpy would broadcast a shape that is not right, and take integers for floats."""
        (tmp_path / "whole").write_bytes(saved)
        file = SafetensorsFile.open(tmp_path / "whole")
        tensors = {key: np.array(file.tensor(key)) for key in file.entries}
        tensor = tensors[f"0.{name}"]
        if change == "row":
            tensors[f"0.{name}"] = np.concatenate([tensor, tensor[:1]])
        else:
            tensors[f"0.{name}"] = tensor.astype(np.float32 if name == "ids" else np.int64)
        data = json.loads(file.metadata["rows"])
        metadata = {**file.metadata, "sha256": state_file._digest(tensors, data)}
        write_safetensors(tmp_path / "forged", tensors, metadata)
        with pytest.raises(InputError, match=r"state: .* is no whole saved state") as error:
            load((tmp_path / "forged").read_bytes())
        one_line(error)


class TestBadInput:
    @pytest.mark.parametrize("arguments", [{"options": {"temperature": 0}}, {"max_new_tokens": "5"}], ids=repr)
    def test_arguments_of_another_type(self, model: CausalLM, arguments: Any) -> None:
        session = model.start([1, 2])
        with pytest.raises(InputError) as error:
            session.generate(**arguments)
        one_line(error)

    def test_paths_that_are_none(self, model: CausalLM) -> None:
        with pytest.raises(InputError, match="expected a path"):
            model.start([1]).save(None)
        with pytest.raises(InputError, match="expected a path"):
            model.load_session(None)

    def test_a_set_has_no_order(self, model: CausalLM) -> None:
        with pytest.raises(InputError, match="in an order"):
            model.start([{1, 2}])

    @pytest.mark.parametrize("prompt", ["", [""], ["God", ""], [], [[]], [[1], []], [[1], [2], []]], ids=repr)
    def test_an_empty_prompt(self, model: CausalLM, prompt: Any) -> None:
        with pytest.raises(InputError, match=r"prompt: expected .*(found none|found an empty prompt)"):
            model.start(prompt)

    @pytest.mark.parametrize("chunk", [0, -1, True, 1.5, None, "8", [8]], ids=repr)
    def test_a_bad_chunk(self, model: CausalLM, chunk: Any, tmp_path: Path) -> None:
        model.start([1, 2]).save(tmp_path / "state")
        for call in (
            lambda: model.start([1, 2], prefill_chunk=chunk),
            lambda: model.generate([1, 2], prefill_chunk=chunk),
            lambda: model.load_session(tmp_path / "state", prefill_chunk=chunk),
        ):
            with pytest.raises(InputError, match="--prefill-chunk must be an integer of at least 1, found") as error:
                call()
            one_line(error)

    @pytest.mark.parametrize("count", [0, -1, 1.0, True, "5", None])
    def test_max_new_tokens(self, model: CausalLM, count: Any) -> None:
        session = model.start([1, 2])
        with pytest.raises(InputError, match="--max-new-tokens must be an integer of at least 1"):
            session.generate(max_new_tokens=count)
        assert session.ids == [[1, 2]]

    def test_a_bad_argument_leaves_the_session_as_it_was(self, model: CausalLM) -> None:
        session = model.start([1, 2])
        write(session, 3)
        for arguments in (
            {"stop": "ab"},
            {"stop_ids": [320]},
            {"options": SamplingOptions(logit_bias={320: 1.0})},
            {"max_new_tokens": 10**9},
        ):
            with pytest.raises(InputError):
                session.generate(**arguments)
        assert write(session, 7) == [fresh(model, [1, 2], 10)[0][3:]]


class TestLimit:
    @pytest.fixture(autouse=True)
    def low(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "MAX_CONTEXT", 64)

    def test_up_to_the_limit(self, model: CausalLM) -> None:
        session = model.start(list(range(40)))
        write(session, 14)
        session.append(list(range(9)))
        write(session, 1)
        assert len(session.ids[0]) == 64
        assert len(model.generate(list(range(40)), max_new_tokens=24, stop_ids=())[0].ids) == 24

    def test_a_prompt(self, model: CausalLM) -> None:
        with pytest.raises(LimitError, match=r"context too long: .*64") as error:
            model.start([[1], list(range(65))])
        one_line(error)

    def test_a_prompt_and_what_follows(self, model: CausalLM) -> None:
        with pytest.raises(LimitError, match="context too long"):
            model.generate(list(range(60)), max_new_tokens=5, on_token=lambda *token: pytest.fail("it ran"))

    def test_what_follows(self, model: CausalLM) -> None:
        session = model.start([[1], list(range(60))])
        with pytest.raises(LimitError, match="context too long") as error:
            session.generate(max_new_tokens=5, options=GREEDY, stop_ids=())
        one_line(error)
        assert session.ids == [[1], list(range(60))]

    def test_what_is_appended(self, model: CausalLM) -> None:
        session = model.start([[1], list(range(60))])
        for row in (1, None):
            with pytest.raises(LimitError, match="context too long"):
                session.append(list(range(5)), row)
            assert session.ids == [[1], list(range(60))], "all rows or none"
        session.append(list(range(5)), 0)


class TestNotFinite:
    """The fifth token makes one row's sums NaN; what was said before stands, nothing is said after."""

    @staticmethod
    def poisoned(model: CausalLM, prompts: Sequence[Sequence[int]]) -> GenerationSession:
        session = model.start(prompts)
        row = session._decoder.rows()[-1]
        terms = np.zeros((2, 5, 48), np.float32)
        terms[0, 4, 7] = np.nan
        row.history.add(row.known, terms)
        return session

    @pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("prompts", [[[1, 2]], [list(range(30))], [[5], [1, 2]]], ids=str)
    def test_in_the_middle(self, model: CausalLM, options: SamplingOptions, prompts: list[list[int]]) -> None:
        session = self.poisoned(model, prompts)
        tokens: list[list[int]] = [[] for _ in prompts]
        pieces: list[list[str]] = [[] for _ in prompts]
        with pytest.raises(NumericError, match="logits") as error:
            session.generate(
                max_new_tokens=20,
                options=options,
                stop_ids=(),
                on_text=lambda row, text: pieces[row].append(text),
                on_token=lambda row, token, logprob: tokens[row].append(token),
            )
        one_line(error)
        expected = [ids[:5] for ids in fresh(model, prompts, 5, options)]
        assert tokens[-1] == expected[-1]
        assert all(len(ids) in (5, 6) for ids in tokens)
        decode = model.tokenizer.decode
        assert decode(tokens[-1]).startswith("".join(pieces[-1]))
        assert session.ids == [[*prompt, *ids] for prompt, ids in zip(prompts, tokens, strict=True)]
        with pytest.raises(NumericError):
            write(session, 1)
        assert session.ids[-1] == [*prompts[-1], *tokens[-1]]

    def test_reading_what_is_not_finite(self, model: CausalLM) -> None:
        session = self.poisoned(model, [list(range(30))])
        session.append([1, 2, 3, 4, 5])
        with pytest.raises(NumericError):
            session.generate(max_new_tokens=5, on_token=lambda *token: pytest.fail("it said something"))

    def test_a_weight_that_one_token_reads(self, copy: Any) -> None:
        """The head is the embedding again: with a last norm that gives its bias alone, the token's own logit is -inf."""
        bad = 200
        copy.weight("embed_tokens.weight")[bad] = np.inf
        copy.weight("norm.weight")[...] = 0
        copy.weight("norm.bias")[...] = -1e-3
        copy.rehash()
        session = copy.model().start([1, 2, 3])
        said: list[int] = []
        session.generate(max_new_tokens=9, stop_ids=(), on_token=lambda row, token, logprob: said.append(token))
        assert len(said) == 9 and bad not in said
        session.append([bad])
        with pytest.raises(NumericError, match="logits"):
            session.generate(max_new_tokens=3, on_token=lambda *token: pytest.fail("it said something"))
        assert session.ids == [[1, 2, 3, *said, bad]]


class TestStreaming:
    TEXT = "naïve 「日本語」 😀 e\u0301 по-русски"

    def test_characters_of_several_tokens(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        """The tokens of a given text come out, whatever the model says: most characters are several of them."""
        ids = model.tokenizer.encode(self.TEXT, add_special_tokens=False).ids
        assert len(ids) > len(self.TEXT)
        script = iter(ids)
        monkeypatch.setattr(generation, "next_token", lambda *arguments: (next(script), -1.0))
        pieces: list[str] = []
        (result,) = model.start([1, 2]).generate(
            max_new_tokens=len(ids), stop_ids=(), on_text=lambda row, text: pieces.append(text)
        )
        assert result.ids == ids
        assert "".join(pieces) == result.text == self.TEXT
        assert "" not in pieces and "\ufffd" not in "".join(pieces)
        assert len(pieces) > 20

    @pytest.mark.parametrize("seed", range(4))
    def test_pieces_join_to_the_text(self, model: CausalLM, seed: int) -> None:
        session = model.start(["God", "日本"])
        for _ in range(3):
            pieces: list[list[str]] = [[], []]
            results = session.generate(
                max_new_tokens=25,
                options=SamplingOptions(seed=seed, temperature=3),
                stop_ids=(),
                on_text=lambda row, text, pieces=pieces: pieces[row].append(text),
            )
            for row, result in enumerate(results):
                assert "".join(pieces[row]) == result.text == model.tokenizer.decode(result.ids)

    def test_an_error_in_a_callback_leaves_a_session_that_goes_on(self, model: CausalLM) -> None:
        session = model.start([[1, 2], [3]])
        count = 0

        def fail(row: int, token: int, logprob: float) -> None:
            nonlocal count
            count += 1
            if count == 6:
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            session.generate(max_new_tokens=9, options=GREEDY, stop_ids=(), on_token=fail)
        assert [len(ids) for ids in session.ids] == [5, 4]
        write(session, 6)
        assert session.ids == [
            [1, 2, *fresh(model, [[1, 2], [3]], 9)[0]],
            [3, *fresh(model, [[1, 2], [3]], 9)[1]],
        ]
