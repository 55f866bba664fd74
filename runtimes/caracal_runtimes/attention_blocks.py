"""How whole passes cut the sliding-window attention into blocks: the exporter writes it into its graphs, limits count with it."""

from __future__ import annotations

#: Blocks in front of its own that a block's queries see: of half the window each, so that two hold it. Of the scores that are computed
#: then a third is masked; with blocks as long as the window it is half, and with shorter ones every key is copied more often.
BEFORE = 2


def block_length(window: int) -> int:
    """C, the positions of a block; a shorter sequence is one block of its own length."""
    return -(-window // BEFORE)


def layout(length: int, window: int) -> tuple[int, int, int]:
    """Blocks, positions of each, and keys that each meets, for so many tokens."""
    block = min(block_length(window), length)
    return -(-length // block), block, (BEFORE + 1) * block
