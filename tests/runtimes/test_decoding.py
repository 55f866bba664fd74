"""`Stateful` against the whole forward pass, token by token, and what happens to that comparison when a part is broken.

Tokens are random and given beforehand, so that a deviation cannot hide behind another choice of token; what a decoder
says after each one is compared with one forward pass over the row's final text.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from caracal_runtimes import decode_state, decoding, products, step_batch
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.decode_graphs import Carried, DecodeGraphs
from caracal_runtimes.decode_state import CHUNK, Row
from caracal_runtimes.decoding import Recompute, Stateful
from caracal_runtimes.errors import NotRunError
from caracal_runtimes.history import History
from caracal_runtimes.machine import resident_bytes
from caracal_runtimes.model import CausalLM
from caracal_runtimes.products import ProductQueue
from caracal_runtimes.safetensors_file import SafetensorsFile
from caracal_runtimes.schedule import Schedule
from caracal_runtimes.step_batch import StepBatch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

LIMIT = 1e-5  # `strict` of docs/tolerances.md; here for all logits of a row and, twice that, for each position
M = W = 8
VOCABULARY = 320


def relative_l2(got: Any, want: Any) -> float:
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert a.shape == b.shape
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@cache
def random_text(seed: int, count: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocabulary, count).tolist())


@pytest.fixture(scope="module")
def model(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """The tiny bundle with more attention: as it is, it looks at all keys alike, and wrong ones would hardly show."""
    folder = tmp_path_factory.mktemp("attentive") / "bundle"
    shutil.copytree(exported.bundle, folder)
    weights = SafetensorsFile.open(folder / "weights.safetensors")
    for name, factor in (("q_proj", 16), ("out_proj", 8)):
        entry = weights.entries[f"blocks.2.swa.{name}.weight"]
        np.memmap(weights.path, "<f4", "r+", entry.offset, entry.shape)[...] *= factor
    return Bundle.open(folder, check_hashes=False).model(threads=1)


@pytest.fixture(scope="module", autouse=True)
def fine_pieces() -> Iterator[None]:
    """Cuts products as finely as it goes. A product of the tiny model is one piece otherwise, and never waits."""

    def queue_for(graphs: DecodeGraphs, history: History) -> ProductQueue:
        return ProductQueue(history, graphs.convolve, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_state, "queue_for", queue_for)
        yield


class Reader:
    """Rows of given random text, of which a decoder reads more and more; keeps what it said for `errors`.

    Args:
        model: whose `forward` is right.
        chunk: of the decoder.
        first_seed: row i reads `random_text(first_seed + i)`.
    """

    def __init__(self, model: CausalLM, chunk: int = CHUNK, first_seed: int = 0, length: int = 520) -> None:
        self.model, self.seeds, self.length = model, first_seed, length
        self.decoder = Stateful(model.graphs, chunk)
        self.known: list[int] = []
        self.said: list[list[tuple[int, NDArray[np.float32]]]] = []  # per row: last token's position, logits
        self.changed: dict[int, list[int]] = {}

    def text(self, row: int) -> list[int]:
        return self.changed.get(row) or list(random_text(self.seeds + row, self.length, self.model.spec.vocab_size))

    def prefill(self, *counts: int) -> Reader:
        logits = self.decoder.prefill([self.text(row)[:count] for row, count in enumerate(counts)])
        self.known, self.said = [0] * len(counts), [[] for _ in counts]
        for row, count in enumerate(counts):
            self._note(row, count, logits[row])
        return self

    def step(self, *rows: int, times: int = 1) -> Reader:
        for _ in range(times):
            logits = self.decoder.step(rows, [self.text(row)[self.known[row]] for row in rows])
            assert (logits.shape, logits.dtype) == ((len(rows), self.model.spec.vocab_size), np.float32)
            for index, row in enumerate(rows):
                self._note(row, 1, logits[index])
        return self

    def extend(self, row: int, count: int) -> Reader:
        begin = self.known[row]
        self._note(row, count, self.decoder.extend(row, self.text(row)[begin : begin + count]))
        return self

    def fork(self, seed: int) -> Reader:
        """Continues independently, with other tokens from here on."""
        other = Reader(self.model, first_seed=seed, length=self.length)
        other.decoder = self.decoder.copy()
        other.known, other.said = list(self.known), [list(said) for said in self.said]
        other.changed = {row: self.text(row)[:known] + other.text(row)[known:] for row, known in enumerate(self.known)}
        return other

    def errors(self) -> tuple[float, float]:
        """Relative L2 of all that was said, the worst row; and of single positions, the worst."""
        rows, positions = [], []
        for row, said in enumerate(self.said):
            text, want = self.text(row), []
            # A forward pass rounds early positions on the scale of the whole text, so each is read in one of its own size.
            for _, part in groupby((position for position, _ in said), key=int.bit_length):
                places = list(part)
                end = min(self.known[row], 1 << places[0].bit_length())
                want.append(self.model.forward([text[:end]], [places])[0])
            got, expected = np.stack([logits for _, logits in said]), np.concatenate(want)
            rows.append(relative_l2(got, expected))
            positions += [relative_l2(a, b) for a, b in zip(got, expected, strict=True)]
        return max(rows), max(positions)

    def check(self) -> None:
        whole, one = self.errors()
        assert whole <= LIMIT and one <= 2 * LIMIT, (whole, one)
        for row, state in enumerate(self.decoder.rows()):
            assert state.ids == self.text(row)[: self.known[row]]
            assert state.known == state.history.known == state.schedule.known == self.known[row]

    def _note(self, row: int, count: int, logits: NDArray[np.float32]) -> None:
        self.known[row] += count
        self.said[row].append((self.known[row] - 1, np.array(logits)))


class TestSteps:
    @pytest.mark.parametrize("count", [1, 2, 3, W - 1, W, W + 1, 2 * W, 2 * W + 3, 3 * W, 100])
    def test_after_a_prompt(self, model: CausalLM, count: int) -> None:
        Reader(model).prefill(count).step(0, times=max(300, 2 * count + 5)).check()

    def test_the_first_of_them(self, model: CausalLM) -> None:
        """Few positions, so that an error at one of them is not outweighed by the others."""
        for count in range(1, 3 * M):
            Reader(model, first_seed=count).prefill(count).step(0, times=3).check()

    def test_logits_are_those_of_recompute(self, model: CausalLM) -> None:
        prompts = [list(random_text(row, count, VOCABULARY)) for row, count in enumerate((3, 9, 30))]
        both = [Stateful(model.graphs), Recompute(model)]
        got, want = (decoder.prefill(prompts) for decoder in both)
        assert relative_l2(got, want) <= LIMIT
        for rows, tokens in (([0, 1, 2], [5, 6, 7]), ([2, 0], [8, 9]), ([1], [10]), ([0, 2, 1], [1, 2, 3])):
            got, want = (decoder.step(rows, tokens) for decoder in both)
            assert relative_l2(got, want) <= LIMIT

    def test_the_longest_text_from_one_token(self, model: CausalLM) -> None:
        """Blocks of every size up to 512, and several segments of history."""
        Reader(model, length=1300).prefill(1).step(0, times=1250).check()

    @pytest.mark.parametrize("prompt", [[5], [0, 17, 3], list(range(40, 69))])
    def test_greedy_text_is_recomputes(self, model: CausalLM, prompt: list[int]) -> None:
        texts = []
        for decoder in (Stateful(model.graphs), Recompute(model)):
            text = list(prompt)
            logits = decoder.prefill([prompt])
            for _ in range(120):
                text.append(int(logits[0].argmax()))
                logits = decoder.step([0], text[-1:])
            texts.append(text)
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("work", [5e4, 2e5, 1e12])
    def test_however_finely_the_work_is_cut(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, work: float
    ) -> None:
        monkeypatch.setattr(
            decode_state, "queue_for", lambda graphs, history: ProductQueue(history, graphs.convolve, work)
        )
        Reader(model).prefill(5).step(0, times=200).check()


class TestPrompts:
    @pytest.mark.parametrize("chunk", [1, 16, 20, 32])
    @pytest.mark.parametrize("count", [15, 17, 31, 33, 47, 65, 129, 301])
    def test_longer_than_a_chunk(self, model: CausalLM, count: int, chunk: int) -> None:
        Reader(model, chunk).prefill(count).step(0, times=25).check()

    def test_every_length_in_chunks_of_16(self, model: CausalLM) -> None:
        for count in range(1, 70):
            Reader(model, 16, first_seed=count).prefill(count).step(0, times=2).check()

    def test_a_pass_reads_no_more_than_a_chunk(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[tuple[int, ...]] = []
        forward, extend = DecodeGraphs.forward, DecodeGraphs.extend
        monkeypatch.setattr(
            DecodeGraphs, "forward", lambda self, ids, lengths: sizes.append(ids.shape) or forward(self, ids, lengths)
        )
        monkeypatch.setattr(
            DecodeGraphs, "extend", lambda self, ids, *rest: sizes.append(ids.shape) or extend(self, ids, *rest)
        )
        Reader(model, 32).prefill(5, 100, 31, 9, 9, 9, 32, 1).check()
        assert max(np.prod(size) for size in sizes) == 32
        assert len([size for size in sizes if len(size) == 2 and size[0] > 1]) >= 2, "short rows are read together"

    @pytest.mark.parametrize("before", [8, 11, 13, 16])
    def test_chunks_of_a_long_text_need_no_settling(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, before: int
    ) -> None:
        """Wherever it begins: the first chunks go up to a multiple of the later ones' length."""
        monkeypatch.setattr(Row, "settle", lambda self: pytest.fail("it settled"))
        Reader(model, 16).prefill(301).check()
        Reader(model, 16).prefill(before).extend(0, 300).check()

    def test_progress_counts_every_token_of_every_row(self, model: CausalLM) -> None:
        told: list[tuple[int, int]] = []
        prompts = [list(random_text(row, count, VOCABULARY)) for row, count in enumerate((5, 100, 31, 9))]
        Stateful(model.graphs, 16).prefill(prompts, lambda done, total: told.append((done, total)))
        done = [0, *(part for part, _ in told)]
        assert {total for _, total in told} == {145} and done[-1] == 145
        assert all(0 < b - a <= 16 for a, b in pairwise(done))

    def test_prefill_starts_anew(self, model: CausalLM) -> None:
        reader = Reader(model).prefill(20, 3).step(0, 1, times=9)
        reader.prefill(5, 40, 8).step(2, 0, times=20).check()

    def test_prompts_are_left_alone(self, model: CausalLM) -> None:
        prompts = [[1, 2], list(range(30))]
        decoder = Stateful(model.graphs, 16)
        decoder.prefill(prompts)
        decoder.step([0, 1], [5, 6])
        decoder.extend(0, [7, 8])
        assert prompts == [[1, 2], list(range(30))]


class TestBatches:
    LENGTHS = (1, 3, M - 1, M, M + 1, 2 * M, 37, 100)

    def test_rows_of_different_lengths(self, model: CausalLM) -> None:
        Reader(model).prefill(*self.LENGTHS).step(*range(8), times=70).check()

    @pytest.mark.parametrize("chunk", [8, 16, 64])
    def test_in_chunks(self, model: CausalLM, chunk: int) -> None:
        Reader(model, chunk).prefill(*self.LENGTHS).step(*range(8), times=20).check()

    def test_rows_that_stop_early(self, model: CausalLM) -> None:
        reader = Reader(model).prefill(*self.LENGTHS)
        rows = list(range(8))
        while rows:
            reader.step(*rows, times=7)
            rows.pop(len(rows) // 2)
        reader.check()

    def test_rows_that_come_back_in_another_order(self, model: CausalLM) -> None:
        reader = Reader(model).prefill(*self.LENGTHS)
        generator = np.random.default_rng(4)
        for _ in range(40):
            rows = generator.permutation(8)[: generator.integers(1, 9)].tolist()
            reader.step(*rows, times=int(generator.integers(1, 12)))
        reader.check()

    def test_the_same_rows_in_another_order(self, model: CausalLM) -> None:
        """A batch that only looks like the last one must not be taken for it."""
        Reader(model).prefill(4, 30).step(0, 1, times=5).step(1, 0, times=5).step(0, 1).check()

    def test_a_row_does_not_depend_on_its_neighbours(self, model: CausalLM) -> None:
        alone = Reader(model).prefill(5).step(0, times=40)
        among = Reader(model).prefill(5, 200, 1).step(0, 1, 2, times=20).step(2, 0, times=20)
        for (_, a), (_, b) in zip(alone.said[0], among.said[0], strict=True):
            assert relative_l2(a, b) <= LIMIT

    def test_one_row_that_is_not_finite_leaves_the_others_alone(self, model: CausalLM) -> None:
        reader = Reader(model).prefill(3, 20, 6).step(0, 1, 2, times=4)
        state = reader.decoder.rows()[1]
        poison = np.full((state.history.layers, 4 * M, state.history.channels), np.nan, np.float32)
        state.history.add(state.known, poison)
        for _ in range(3 * M):
            logits = reader.decoder.step([0, 1, 2], [reader.text(row)[reader.known[row]] for row in range(3)])
            assert np.isnan(logits[1]).all()
            for row in range(3):
                reader._note(row, 1, logits[row])
        reader.said[1] = reader.said[1][:1]
        reader.check()


class TestExtend:
    @pytest.mark.parametrize("steps", [0, 1, 21])
    @pytest.mark.parametrize("known", [1, 3, M - 1, M, M + 1, 21, 40])
    def test_many_lengths(self, model: CausalLM, known: int, steps: int) -> None:
        for count in (1, M - 1, M, M + 1, 13, 45):
            reader = Reader(model, first_seed=count).prefill(known)
            if steps:
                reader.step(0, times=steps)
            reader.extend(0, count).step(0, times=13).check()

    @pytest.mark.parametrize("chunk", [8, 16, CHUNK])
    def test_again_and_again(self, model: CausalLM, chunk: int) -> None:
        reader = Reader(model, chunk).prefill(11)
        for count in (1, 1, 5, 8, 3, 16, 30, 2, 8, 64, 1, 33):
            reader.extend(0, count)
        reader.check()

    @pytest.mark.parametrize("chunk", [8, 16, CHUNK])
    def test_between_steps(self, model: CausalLM, chunk: int) -> None:
        reader = Reader(model, chunk).prefill(3)
        for count in (4, 1, 9, 16, 3, 25, 8, 40):
            reader.step(0, times=count).extend(0, count)
        reader.step(0, times=60).check()

    def test_right_after_blocks_that_are_still_owed(self, model: CausalLM) -> None:
        """Products that are cut into pieces wait for their turn; a chunk needs them at once."""
        for steps in range(20, 70, 3):
            Reader(model).prefill(2).step(0, times=steps).extend(0, 9).step(0, times=15).check()

    def test_one_row_of_several(self, model: CausalLM) -> None:
        reader = Reader(model).prefill(2, 9, 40).step(0, 1, 2, times=10)
        reader.extend(1, 12).step(0, 1, 2, times=10).extend(0, 3).extend(2, 30).step(2, 1, 0, times=30).check()

    def test_as_one_prompt(self, model: CausalLM) -> None:
        """The same state as if all had been read at once: what follows agrees as well."""
        text = list(random_text(9, 120, VOCABULARY))
        decoders = [Stateful(model.graphs), Stateful(model.graphs)]
        decoders[0].prefill([text[:40]])
        got, want = decoders[0].extend(0, text[40:90]), decoders[1].prefill([text[:90]])[0]
        assert relative_l2(got, want) <= LIMIT
        for token in text[90:]:
            got, want = (decoder.step([0], [token]) for decoder in decoders)
            assert relative_l2(got, want) <= LIMIT


class TestCopy:
    @pytest.mark.parametrize("steps", [1, 7, 30, 260])
    def test_both_continue_on_their_own(self, model: CausalLM, steps: int) -> None:
        reader = Reader(model).prefill(3, 30).step(0, 1, times=steps)
        other = reader.fork(seed=50)
        for _ in range(4):  # in turns, so that what one writes would show in the other
            reader.step(1, 0, times=9)
            other.step(0, 1, times=11)
            reader.extend(0, 10)
            other.extend(1, 5)
        reader.check()
        other.check()

    def test_of_a_copy(self, model: CausalLM) -> None:
        readers = [Reader(model).prefill(5).step(0, times=40)]
        for seed in (60, 70, 80):
            readers.append(readers[-1].step(0, times=3).fork(seed))
        for reader in readers:
            reader.step(0, times=50)
        for reader in readers:
            reader.check()

    def test_nothing_is_read_again(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = Reader(model).prefill(100)
        for name in ("forward", "extend"):
            monkeypatch.setattr(DecodeGraphs, name, lambda *arguments: pytest.fail("it read"))
        other = reader.fork(50).step(0, times=9)
        monkeypatch.undo()
        other.check()


class TestInterrupted:
    """An interrupt in the middle of a token leaves sums that lack a part: nobody may go on with them."""

    @pytest.mark.parametrize("where", [(StepBatch, "_grow"), (StepBatch, "leave"), (ProductQueue, "advance")], ids=str)
    def test_is_refused_until_a_new_start(
        self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
    ) -> None:
        def interrupt(*arguments: Any) -> None:
            raise KeyboardInterrupt

        reader = Reader(model).prefill(5, 9).step(0, 1, times=20)
        other = reader.fork(60)
        reader.step(1, times=2)
        with monkeypatch.context() as patch:
            patch.setattr(*where, interrupt)
            with pytest.raises(KeyboardInterrupt):
                reader.step(0, 1)
        decoder = reader.decoder
        for call in (
            lambda: decoder.step([0], [1]),
            lambda: decoder.extend(0, [1, 2]),
            decoder.copy,
            decoder.rows,
        ):
            with pytest.raises(NotRunError, match="in the middle of a token"):
                call()
        other.step(1, 0, times=9).check()
        reader.prefill(3, 3).step(0, 1, times=9).check()

    def test_a_chunk(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = Reader(model, 16).prefill(30)
        with monkeypatch.context() as patch:
            patch.setattr(Schedule, "append", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                reader.extend(0, 40)
        with pytest.raises(NotRunError, match="interrupted"):
            reader.step(0)


class TestState:
    def test_bytes_grow_with_the_text(self, model: CausalLM) -> None:
        """v and g of 2 MHF layers of 48 channels in float32 are 768 bytes a token."""
        sizes = {count: Reader(model, length=5000).prefill(count).decoder.state_bytes for count in (1024, 4096)}
        assert 768 * 1024 <= sizes[1024] <= 2 * 768 * 1024 + 65536
        assert 768 * 3072 <= sizes[4096] - sizes[1024] <= 2 * 768 * 3072

    def test_what_is_past_is_given_back(self, model: CausalLM) -> None:
        reader = Reader(model, length=2200).prefill(1024)
        before = reader.decoder.state_bytes
        reader.step(0, times=1024)
        assert reader.decoder.state_bytes - before <= 768 * 1024 + 768 * 512


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], int, list[Any]]:
    counts = draw(st.lists(st.integers(1, 70), min_size=1, max_size=3))
    rows = st.permutations(range(len(counts))).flatmap(
        lambda order: st.integers(1, len(order)).map(lambda count: tuple(order[:count]))
    )
    operations = st.one_of(
        st.tuples(rows, st.integers(1, 20)),
        st.tuples(st.integers(0, len(counts) - 1), st.integers(1, 40)),
        st.just("copy"),
    )
    return counts, draw(st.sampled_from([1, 8, 16, 32, CHUNK])), draw(st.lists(operations, max_size=8))


@settings(max_examples=30, deadline=None, database=None, derandomize=True)
@given(program=programs())
def test_any_mixture(model: CausalLM, program: tuple[list[int], int, list[Any]]) -> None:
    counts, chunk, operations = program
    readers = [Reader(model, chunk).prefill(*counts)]
    for operation in operations:
        if operation == "copy":
            readers.append(readers[-1].fork(100 * len(readers)))
            continue
        what, times = operation
        for reader in readers[-2:]:
            if isinstance(what, tuple):
                reader.step(*what, times=times)
            else:
                reader.extend(what, times)
    for reader in readers:
        reader.check()


class TestPyTorch:
    def test_the_checkpoint_itself_in_double_precision(self, exported: Any) -> None:
        """No forward graph in between: a mistake that both graphs share would show here, and rounding is held tighter."""
        import torch

        from caracal import load_checkpoint

        model = Bundle.open(exported.bundle).model(threads=1)
        reader = Reader(model, 16).prefill(3, 37).step(0, 1, times=30).extend(0, 21).extend(1, 9).step(1, 0, times=60)
        checkpoint = load_checkpoint(exported.checkpoint).double()
        for row, said in enumerate(reader.said):
            with torch.no_grad():
                ids = torch.tensor([reader.text(row)[: reader.known[row]]])
                want = checkpoint(ids)[0].numpy()
            for position, got in said:
                assert relative_l2(got, want[position]) <= 2e-6


# Models of other shapes, each with several of them at once: what the tiny bundle does not have.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one MHF layer, no convolution, norm in front of it, untied head, M 16": (
        {
            "layer_types": ("mhf",),
            "num_hidden_layers": 1,
            "conv_kernel": 1,
            "norm_before_conv": True,
            "tie_word_embeddings": False,
        },
        {"lags": 16},
    ),
    "attention only, window 19": (
        {"layer_types": ("sliding_attention",) * 2, "num_hidden_layers": 2, "sliding_window": 19},
        {"lags": 4},
    ),
    "5 taps, window 1, GELU, no biases, M 2, dft": (
        {
            "layer_types": ("mhf", "sliding_attention"),
            "num_hidden_layers": 2,
            "conv_kernel": 5,
            "sliding_window": 1,
            "hidden_act": "gelu",
            "use_bias": False,
        },
        {"lags": 2, "mixing": "dft"},
    ),
}


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CausalLM]:
    """`variant(name)`: a model with random weights of one of `VARIANTS`, exported once."""
    import torch
    from caracal_export import export_checkpoint

    from caracal import CaracalConfig, CaracalModel, save_checkpoint

    def checkpoint(name: str, folder: Path) -> Path:
        sizes = {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
        reference = CaracalModel(CaracalConfig(**{"sliding_window": 8, **sizes, **VARIANTS[name][0]}))
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for key, parameter in reference.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() == 1:
                    parameter.copy_(0.3 * noise + (0.0 if key.endswith("bias") else 1.0))
                else:
                    parameter.copy_(0.5 * noise / parameter[0].numel() ** 0.5)
        save_checkpoint(reference, folder)
        return folder

    @cache
    def load(name: str) -> CausalLM:
        folder = tmp_path_factory.mktemp("variant")
        bundle = folder / "bundle"
        export_checkpoint(checkpoint(name, folder / "checkpoint"), bundle, verify=False, threads=1, **VARIANTS[name][1])
        return Bundle.open(bundle).model(threads=1)

    return load


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
class TestVariants:
    @pytest.mark.parametrize("count", [1, 2, 7, 20, 39])
    def test_steps(self, variant: Callable[[str], CausalLM], name: str, count: int) -> None:
        Reader(variant(name)).prefill(count).step(0, times=100).check()

    def test_chunks(self, variant: Callable[[str], CausalLM], name: str) -> None:
        for count in (5, 17, 33, 75):
            Reader(variant(name), 16).prefill(count).step(0, times=20).check()

    def test_everything(self, variant: Callable[[str], CausalLM], name: str) -> None:
        for reader in everything(variant(name)):
            reader.check()

    @pytest.mark.parametrize("known", [2, 3, 4, 17])
    def test_extend(self, variant: Callable[[str], CausalLM], name: str, known: int) -> None:
        """Chunks while fewer tokens are known than the window is long, or than there are taps."""
        reader = Reader(variant(name)).prefill(known)
        for count in (1, 2, 1, 3, 16, 5, 40):
            reader.extend(0, count)
        reader.step(0, times=9).check()

    def test_saved(self, variant: Callable[[str], CausalLM], name: str, tmp_path: Path) -> None:
        session = variant(name).start([[1, 2], list(range(30))])
        session.generate(max_new_tokens=50, stop_ids=())
        session.save(tmp_path / "state")
        loaded = variant(name).load_session(tmp_path / "state")
        for got, want in zip(*(s.generate(max_new_tokens=50, stop_ids=()) for s in (loaded, session)), strict=True):
            assert (got.prompt_ids, got.ids) == (want.prompt_ids, want.ids)
            np.testing.assert_allclose(got.logprobs, want.logprobs, rtol=1e-4, atol=1e-5)


def everything(model: CausalLM) -> list[Reader]:
    """A bit of all that a decoder does, in few tokens."""
    one = Reader(model, 16).prefill(3, 13, 44).step(0, 1, 2, times=28).step(2, 0, times=6)
    one.extend(1, 12).extend(1, 2).step(1, times=3).extend(1, 3).step(1, 2, times=21)
    two = one.fork(40)
    one.step(0, 1, times=9)
    two.extend(0, 30).step(0, 1, 2, times=9)
    one.step(2, 1, times=15)
    return [one, two]


def without_calling(name: str, owner: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, lambda *arguments, **named: None)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """`around(original, *arguments)` in place of a function."""
    original = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *a, **k: around(original, *a, **k))


def altered_products(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    def around(original: Any, product: Any, *rest: Any) -> None:
        altered = change(product)
        if altered is not None:
            original(altered, *rest)

    return wrapped(products, "compute", around)


class _StaleSlot(np.ndarray):
    """Keeps the token that should leave the ring."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not (len(key) == 3 and np.isscalar(value)):
            super().__setitem__(key, value)


class _KeepsBoth(np.ndarray):
    """Forgets that a pair of two early tokens is met from both sides."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not (len(key) == 4 and np.isscalar(value)):
            super().__setitem__(key, value)


def ring_of(kind: type[np.ndarray[Any, Any]]) -> Callable[[pytest.MonkeyPatch], None]:
    def around(original: Any, self: StepBatch, *rest: Any) -> None:
        original(self, *rest)
        self._recent = self._recent.view(kind)  # the same memory, as the graph has its address

    return wrapped(StepBatch, "__init__", around)


def after_entering(change: Callable[[StepBatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def around(original: Any, self: StepBatch, *rest: Any) -> None:
        original(self, *rest)
        change(self)

    return wrapped(StepBatch, "__init__", around)


def roll(array: NDArray[Any], axis: int) -> None:
    array[...] = np.roll(array, 1, axis)


def after_leaving(change: Callable[[Carried], Carried]) -> Callable[[pytest.MonkeyPatch], None]:
    def around(original: Any, self: StepBatch) -> None:
        original(self)
        for row in self.rows:
            row.carried = change(row.carried)

    return wrapped(StepBatch, "leave", around)


def taking(change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Alters what a pass has found before the row takes it."""
    return wrapped(Row, "take", lambda original, self, tokens, read, reach: original(self, tokens, change(read), reach))


def extending(**changes: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Alters what a chunk is given."""
    names = ("input_ids", "start", "pending", "lags", "carried", "length")

    def around(original: Any, self: Any, *arguments: Any) -> Any:
        given = dict(zip(names, arguments, strict=True))
        return original(self, **{name: changes.get(name, lambda v: v)(value) for name, value in given.items()})

    return wrapped(DecodeGraphs, "extend", around)


def zeroed(carried: Carried, *names: str) -> Carried:
    return replace(carried, **{name: np.zeros_like(getattr(carried, name)) for name in names})


def with_both_orders(original: Any, product: Any, piece: Any, history: History, convolve: Any) -> None:
    stop = product.first_lag + product.lags
    v_lags = history.streams(product.first_lag, stop, piece.layers, piece.channels)[:, 0]
    original(product, piece, history, lambda v, g, _, g_lags: convolve(v, g, v_lags, g_lags))


def half_settled(original: Any, self: Schedule) -> Any:
    return [product for product in original(self) if product.first_lag]


SABOTAGE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    # Products
    "no products": altered_products(lambda p: None),
    "no products of the smallest size": altered_products(lambda p: None if p.size == M // 2 else p),
    "no products of size 8": altered_products(lambda p: None if p.size == M else p),
    "no products of size 16": altered_products(lambda p: None if p.size == 2 * M else p),
    "no product that meets its own lags": altered_products(lambda p: None if p.start <= p.first_lag else p),
    "a product due one position late": altered_products(lambda p: replace(p, due=p.due + 1)),
    "a product one token short": altered_products(
        lambda p: replace(p, ranges=(*p.ranges[:-1], (p.ranges[-1][0], p.ranges[-1][1] - 1)))
    ),
    "a product that counts a token of a chunk again": altered_products(
        lambda p: replace(p, ranges=((p.start, p.start + p.size),)) if p.first_lag else p
    ),
    "lags one further": altered_products(lambda p: replace(p, first_lag=p.first_lag + 1)),
    "both orders of a pair inside the block": wrapped(products, "compute", with_both_orders),
    "only one order of a pair": wrapped(
        DecodeGraphs, "convolve", lambda original, self, v, g, v_lags, g_lags: original(self, v, g * 0, v_lags, g_lags)
    ),
    "a product that is forgotten by a copy": wrapped(
        ProductQueue, "copy", lambda original, self, history: ProductQueue(history, self.convolve, self.work)
    ),
    # The history
    "nothing pending": wrapped(History, "pending_at", lambda original, self, position, out: out.fill(0)),
    "pending of the next position": wrapped(
        History, "pending_at", lambda original, self, position, out: original(self, position + 1, out)
    ),
    "pending added one position late": wrapped(
        History, "add", lambda original, self, start, *rest: original(self, start + 1, *rest)
    ),
    "v and g swapped in the history": wrapped(
        History, "streams", lambda original, self, *rest: original(self, *rest)[:, ::-1]
    ),
    "a copy that shares its history": wrapped(History, "copy", lambda original, self: self),
    # Steps
    "the ring shifted by one": after_entering(lambda batch: roll(batch._recent, 2)),
    "the lags shifted by one": after_entering(lambda batch: roll(batch._lags, 2)),
    "the stale slot kept": ring_of(_StaleSlot),
    "early pairs counted twice": ring_of(_KeepsBoth),
    "early pairs counted twice after entering": lambda patch: patch.setattr(
        Schedule, "early", property(lambda self: False)
    ),
    "no ring on entering": after_entering(lambda batch: batch._recent.fill(0)),
    "first_g dropped": after_entering(lambda batch: batch._first[:, 1].fill(0)),
    "first_v dropped": after_entering(lambda batch: batch._first[:, 0].fill(0)),
    "the convolution's arrays not swapped": wrapped(
        StepBatch, "_bind", lambda original, self, binding, parity: original(self, binding, 0)
    ),
    "no convolution inputs on entering": after_entering(lambda batch: batch._conv.fill(0)),
    "the oldest key still visible": lambda patch: patch.setattr(step_batch, "HIDDEN", np.float32(0)),
    "keys of the next slot": after_entering(lambda batch: roll(batch._keys, -1)),
    "values of the next slot": after_entering(lambda batch: roll(batch._values, -2)),
    "nothing written back": without_calling("leave", StepBatch),
    "keys written back as they lie": after_leaving(lambda c: replace(c, keys=np.roll(c.keys, 1, axis=1))),
    "values written back as they lie": after_leaving(lambda c: replace(c, values=np.roll(c.values, 1, axis=1))),
    "convolution inputs not written back": after_leaving(lambda c: zeroed(c, "conv")),
    "a batch that is taken for another": wrapped(
        decoding.Stateful,
        "step",
        lambda original, self, rows, tokens: (
            self._batch.step(tokens)
            if self._batch is not None and len(self._members) == len(rows)
            else original(self, rows, tokens)
        ),
    ),
    # Passes over several tokens
    "nothing mixed into the future": taking(lambda read: replace(read, mixed=())),
    "mixed one position early": taking(
        lambda read: replace(read, mixed=tuple(np.roll(mixed, -1, axis=0) for mixed in read.mixed))
    ),
    "carried not taken": wrapped(
        Row,
        "take",
        lambda original, self, tokens, read, reach: original(
            self, tokens, replace(read, carried=zeroed(read.carried, "keys", "values", "conv")), reach
        ),
    ),
    "a chunk without pending": extending(pending=lambda p: p * 0),
    "a chunk without lags": extending(lags=lambda lags: lags * 0),
    "a chunk without keys": extending(carried=lambda c: zeroed(c, "keys")),
    "a chunk without convolution inputs": extending(carried=lambda c: zeroed(c, "conv")),
    "never settled": lambda patch: patch.setattr(Schedule, "may_extend", lambda self, count: True),
    "settled without the first lags": wrapped(Schedule, "settle", half_settled),
    "settled without unfilled blocks": wrapped(
        Schedule, "settle", lambda original, self: [p for p in original(self) if not p.first_lag]
    ),
    "debts not paid before a chunk": wrapped(
        ProductQueue,
        "finish",
        lambda original, self, position=None: None if position is None else original(self, position),
    ),
}


class TestSabotage:
    """Breaks one thing on purpose: each must show in the comparison, or the comparison proves nothing."""

    def test_the_scenario_is_right_when_nothing_is_broken(self, model: CausalLM) -> None:
        for reader in everything(model):
            reader.check()

    @pytest.mark.parametrize("name", SABOTAGE)
    def test_shows(self, model: CausalLM, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        SABOTAGE[name](monkeypatch)
        readers = everything(model)
        monkeypatch.undo()
        worst = max(reader.errors()[0] for reader in readers)
        assert not worst <= 5 * LIMIT, f"{name}: {worst}"


@pytest.mark.slow
def test_thousands_of_tokens_after_one_agree_with_one_pass_over_them(exported: Any) -> None:
    """Trained weights, 4,096 steps: blocks of 32 to 1,024 tokens, and every position against one forward pass."""
    loaded = Bundle.open(exported.shipped).model(threads=1)
    ids = np.random.default_rng(7).integers(0, loaded.spec.vocab_size, 4096).tolist()
    decoder = Stateful(loaded.graphs)
    logits = [decoder.prefill([ids[:1]])[0].copy()]
    logits += [decoder.step([0], [token])[0].copy() for token in ids[1:]]
    got, want = np.asarray(logits, np.float64), loaded.forward([ids])[0].astype(np.float64)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) <= 1e-5
    worst = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert worst.max() <= 1e-5


@pytest.mark.slow
def test_memory_beside_the_state_does_not_grow(exported: Any) -> None:
    """What is kept for a token is its state; nothing else is left behind by 3,000 of them."""
    if resident_bytes() is None:
        pytest.skip("this system does not tell")
    loaded = Bundle.open(exported.shipped).model(threads=1)
    decoder = Stateful(loaded.graphs)
    decoder.prefill([[1]])
    beside = []
    for index in range(4001):
        if index % 1000 == 0:
            beside.append((resident_bytes() or 0) - decoder.state_bytes)
        decoder.step([0], [index % 3000])
    # Pages of segments that are not written yet count as state and not as memory: at most one segment of each kind.
    assert max(beside[1:]) - beside[1] < 8e6
