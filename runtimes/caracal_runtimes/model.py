"""A bundle as a language model: logits, text, likelihood. The face that Python users see."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caracal_runtimes.errors import NotRunError
from caracal_runtimes.forward import ForwardPass
from caracal_runtimes.generation import Generated, Prompts, generate
from caracal_runtimes.manifest import ModelSpec
from caracal_runtimes.sampling import SamplingOptions
from caracal_runtimes.scoring import Score, score

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class CausalLM(ForwardPass):
    """A loaded bundle, made by `Bundle.model`.

    Args:
        graph, spec, ep, threads, ep_options: see `ForwardPass`.
        load_tokenizer: called when text is first read or written; raises what the user should see when it cannot.
        has_tokenizer: whether generated ids can be turned into text.
    """

    def __init__(
        self,
        graph: Path,
        spec: ModelSpec,
        ep: str = "cpu",
        *,
        load_tokenizer: Callable[[], Tokenizer],
        has_tokenizer: bool,
        mixing: str = "matmul",
        threads: int = 0,
        ep_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(graph, spec, ep, mixing=mixing, threads=threads, ep_options=ep_options)
        self._load_tokenizer = load_tokenizer
        self.has_tokenizer = has_tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError when it has none."""
        return self._load_tokenizer()

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 128,
        options: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        stop_ids: Iterable[int] | None = None,
        on_text: Callable[[int, str], None] | None = None,
        on_token: Callable[[int, int, float], None] | None = None,
    ) -> list[Generated]:
        """Continues one or several prompts. See `caracal_runtimes.generation.generate`."""
        texts = prompts if isinstance(prompts, (list, tuple)) else (prompts,)
        needs_text = bool(stop) or any(isinstance(text, str) for text in texts)
        return generate(
            self,
            self.tokenizer if needs_text else self._tokenizer_if_any(),
            prompts,
            max_new_tokens=max_new_tokens,
            options=options,
            stop=stop,
            stop_ids=stop_ids,
            on_text=on_text,
            on_token=on_token,
        )

    def _tokenizer_if_any(self) -> Tokenizer | None:
        """Ids in and ids out need no tokenizer; without one, or without its library, the result has no text."""
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
