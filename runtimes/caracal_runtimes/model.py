"""A bundle as a language model: logits, text, likelihood. The face that Python users see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from caracal_runtimes.decode_graphs import DecodeGraphs
from caracal_runtimes.decode_state import CHUNK
from caracal_runtimes.errors import NotRunError
from caracal_runtimes.forward import ForwardPass, token_ids
from caracal_runtimes.generation import Generated, OnText, OnToken, Prompts
from caracal_runtimes.generation_session import GenerationSession, Source, check_request
from caracal_runtimes.sampling import SamplingOptions
from caracal_runtimes.scoring import Score, score
from caracal_runtimes.session import Placement

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class CausalLM(ForwardPass):
    """A loaded bundle, made by `Bundle.model`.

    Args:
        graphs: the bundle's graphs.
        mixing: how they compute the transform.
        bundle_id: what a saved state is tied to.
        load_tokenizer: called when text is first read or written; raises what the user should see when it cannot.
        has_tokenizer: whether generated ids can be turned into text.
    """

    def __init__(
        self,
        graphs: DecodeGraphs,
        *,
        mixing: str,
        bundle_id: str,
        load_tokenizer: Callable[[], Tokenizer],
        has_tokenizer: bool,
    ) -> None:
        super().__init__(
            graphs.session("forward"),
            graphs.spec,
            mixing=mixing,
            keeps_memory=graphs.keeps_memory,
            lengths=graphs.lengths,
        )
        self.graphs, self.bundle_id = graphs, bundle_id
        self._load_tokenizer = load_tokenizer
        self.has_tokenizer = has_tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError when it has none."""
        return self._load_tokenizer()

    def start(
        self,
        prompts: Prompts,
        *,
        prefill_chunk: int = CHUNK,
        new_tokens: int = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> GenerationSession:
        """Reads prompts into a session that can be continued, forked and saved. See `GenerationSession.start`."""
        return GenerationSession.start(
            self._source(), prompts, chunk=prefill_chunk, new_tokens=new_tokens, progress=progress
        )

    def load_session(self, path: str | Path, *, prefill_chunk: int = CHUNK) -> GenerationSession:
        """A session that was saved with this bundle. See `GenerationSession.load`."""
        return GenerationSession.load(self._source(), path, chunk=prefill_chunk)

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 128,
        options: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        stop_ids: Iterable[int] | None = None,
        prefill_chunk: int = CHUNK,
        on_text: OnText | None = None,
        on_token: OnToken | None = None,
    ) -> list[Generated]:
        """Continues one or several prompts: `start` and `GenerationSession.generate` in one, with the same arguments.

        All that can be checked is checked before the prompts are read. Rows of a batch are sampled from streams of their
        own, so a row's text does not depend on its neighbours.

        Raises:
            InputError: an empty prompt, ids outside the vocabulary, options out of range, or more than memory allows.
            NumericError: the model's logits are not finite.
        """
        stop_ids = None if stop_ids is None else token_ids("stop_ids", stop_ids)  # an iterator is read once
        self.check_request(max_new_tokens=max_new_tokens, options=options, stop=stop, stop_ids=stop_ids)
        session = self.start(prompts, prefill_chunk=prefill_chunk, new_tokens=max_new_tokens)
        return session.generate(
            max_new_tokens=max_new_tokens,
            options=options,
            stop=stop,
            stop_ids=stop_ids,
            on_text=on_text,
            on_token=on_token,
        )

    def check_request(
        self,
        *,
        max_new_tokens: int = 128,
        options: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        stop_ids: Iterable[int] | None = None,
    ) -> None:
        """Checks the arguments of `GenerationSession.generate`, for callers who want to know before a long prompt is read.

        Raises:
            InputError: as `GenerationSession.generate`.
        """
        check_request(self._source(), max_new_tokens, options, stop, stop_ids)

    def placements(self) -> dict[str, Placement]:
        """Which provider each node was assigned to, by graph that is used; one is missing where the runtime does not tell."""
        parts = {graph: self.graphs.session(graph).placement() for graph in self.graphs.used}
        return {graph: part for graph, part in parts.items() if part is not None}

    def placement(self) -> Placement:
        """The same, all graphs together."""
        return Placement.sum(self.placements().values())

    def _source(self) -> Source:
        return Source(self.graphs, self.mixing, self.bundle_id, self._tokenizer)

    def _tokenizer(self, needed: bool) -> Tokenizer | None:
        """Ids in and ids out need no tokenizer; without one, or without its library, the result has no text."""
        if needed:
            return self.tokenizer
        if not self.has_tokenizer:
            return None
        try:
            return self.tokenizer
        except NotRunError:
            return None

    def score(
        self, text: str | Sequence[int], *, context: int = 1024, progress: Callable[[int, int], None] | None = None
    ) -> Score:
        """Likelihood of a text or of ids. See `caracal_runtimes.scoring.score`."""
        tokenizer = self.tokenizer if isinstance(text, str) else None
        return score(self, tokenizer, text, context=context, progress=progress)
