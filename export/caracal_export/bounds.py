"""`--max-length` and `--static-length`: what may be asked for, and what it costs in the graphs."""

from __future__ import annotations

from caracal_runtimes.attention_blocks import layout
from caracal_runtimes.errors import InputError
from caracal_runtimes.pass_lengths import PassLengths
from caracal_runtimes.transform_factors import factors

from caracal_export.folding import LARGE

#: Tokens from which on the tables would be hundreds of megabytes in each graph.
MOST = 1 << 16
LEAST = 2  # the step graph mixes that many by itself


def bounds(max_length: object, static_length: object) -> PassLengths:
    """The lengths that graphs are made for.

    Args:
        max_length: tokens of one pass and row at most; None for graphs that take any length.
        static_length: whether each pass has exactly so many.

    Raises:
        InputError: out of range, or a static length without its number.
    """
    if max_length is None:
        if static_length:
            raise InputError(
                "--static-length makes every pass as long as --max-length says, which is missing; add --max-length N, or leave "
                "--static-length out"
            )
        return PassLengths()
    if isinstance(max_length, bool) or not isinstance(max_length, int) or not LEAST <= max_length <= MOST:
        raise InputError(
            f"--max-length must be an integer from {LEAST} to {MOST:,}, found {max_length!r:.40}; it bounds a single pass, longer "
            f"texts are read in several"
        )
    return PassLengths(max_length, bool(static_length))


def bounded_lags(lags: int, lengths: PassLengths) -> int:
    """M of the step graph: not more than a pass can read, and a power of two."""
    return lags if lengths.most is None else min(lags, 1 << (lengths.most.bit_length() - 1))


def table_bytes(lengths: PassLengths, mixing: str, window: int) -> int:
    """Bytes that the constants of one bounded graph take, at most about; 0 without a bound.

    The last stage's matrices exist for the way there and for that back, where they are twice as wide; so do the others, of which
    the middle ones are the larger. A static length adds the attention's mask, whole or as what it is a sum of, and its positions.
    """
    if lengths.most is None:
        return 0
    n1, n2, n3 = factors(lengths.most) if mixing == "matmul" else (0, 0, 0)
    transform = 12 * n1 * n2 * n3 * n3 + 8 * n1 * n2 * n2 + 8 * n1 * n1
    return 4 * (transform + (_mask_elements(lengths.most, window) + 4 * lengths.most if lengths.static else 0))


def _mask_elements(length: int, window: int) -> int:
    blocks, block, keys = layout(length, window)
    whole = blocks * block * keys
    return whole if whole < LARGE else keys * (block + blocks)
