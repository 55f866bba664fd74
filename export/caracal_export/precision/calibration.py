"""The text that precisions are judged by: the caller's own, or the passage that bundles' goldens are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError
from caracal_runtimes.text import encode_text

from caracal_export.precision.sensitivity import TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_calibration(tokenizer: Tokenizer | None, text: str | None) -> None:
    """Refuses, before there is a bundle, a text that `calibration_ids` would refuse when there is one.

    Args:
        tokenizer: the checkpoint's.
        text: the caller's; None for the passage, which is recorded with a tokenizer.

    Raises:
        InputError: there is no tokenizer, or the text has too few tokens.
    """
    if tokenizer is None:
        raise InputError(
            "--max-kl: the checkpoint has no tokenizer.json, so no text can be read for it; put the model's own there, or name "
            "weights with --keep instead"
        )
    if text is not None:
        _read(tokenizer, text)


def calibration_ids(bundle: Bundle, text: str | None) -> list[int]:
    """Token ids of a text, or of the passage in the bundle's goldens.

    Args:
        bundle: whose tokenizer reads the text.
        text: the caller's; None for the passage.

    Raises:
        InputError: the bundle has no passage, as one without a tokenizer, or the text has too few tokens.
        BundleError: the bundle has no tokenizer to read the text.
    """
    if text is not None:
        ids = _read(bundle.tokenizer(), text)
    elif bundle.manifest.golden.text is not None:
        ids = np.asarray(bundle.golden().tensor(f"{bundle.manifest.golden.text.name}/ids")).tolist()
    elif bundle.manifest.tokenizer is not None:
        raise InputError("calibration: the bundle has no recorded passage; give a text of your own with --calibration")
    else:
        raise InputError(
            "calibration: the bundle has no recorded passage, since it has no tokenizer; name weights with --keep instead"
        )
    return [int(token) for token in _enough(ids)[: bundle.manifest.lengths.capped(TOKENS)]]


def _read(tokenizer: Tokenizer, text: str) -> list[int]:
    return _enough(list(encode_text(tokenizer, text[: 16 * TOKENS]).ids))


def _enough(ids: list[int]) -> list[int]:
    if len(ids) < 2:
        raise InputError(f"calibration: expected a text of at least 2 tokens, found {len(ids)}; give a longer one")
    return ids
