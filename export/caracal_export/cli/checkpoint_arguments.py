"""The arguments with which commands read a checkpoint, and from them to an opened one."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from caracal_runtimes.errors import InputError

from caracal.checkpoint.options import LINEAR_LAYOUTS, ReadOptions

if TYPE_CHECKING:
    from caracal.checkpoint.hub import Snapshot
    from caracal.checkpoint.opening import Checkpoint

CHECKPOINT_HELP = (
    "folder or file with the weights: safetensors, .pt/.pth/.ckpt/.bin, shards with an index, or a "
    "torch.distributed.checkpoint folder; with --hub a Hugging Face id"
)


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """What a checkpoint's files may not say."""
    group = parser.add_argument_group("reading the checkpoint")
    group.add_argument("--config", metavar="FILE", help="a config.json, instead of one beside the weights")
    group.add_argument("--key-map", metavar="FILE", help="rules for other names (TOML); `caracal info` prints a draft")
    group.add_argument("--entry", metavar="NAME", help="which weights of a training checkpoint, such as ema or model")
    group.add_argument("--linear-layout", choices=LINEAR_LAYOUTS, help="how square matrices are stored, whose shape "
                       "does not tell: [out, in] as PyTorch does, or [in, out]")  # fmt: skip
    group.add_argument("--num-attention-heads", type=int, metavar="H", help="for weights without a configuration")
    group.add_argument("--sliding-window", type=int, metavar="W", help="for weights without a configuration")
    group.add_argument(
        "--layer-norm-eps", type=float, metavar="E", help="for weights without a configuration (default: 1e-5)"
    )
    group.add_argument("--tie-word-embeddings", action=argparse.BooleanOptionalAction, default=None,
                       help="for weights without a configuration: the head is the embedding")  # fmt: skip
    group.add_argument(
        "--hub", action="store_true", help="CHECKPOINT is an id on the Hugging Face hub, organization/name"
    )
    group.add_argument("--revision", metavar="REV", help="with --hub: branch, tag or commit (default: main)")


def read_options(args: argparse.Namespace) -> ReadOptions:
    """The arguments as `ReadOptions`."""
    return ReadOptions(
        config=None if args.config is None else Path(args.config),
        key_map=None if args.key_map is None else Path(args.key_map),
        entry=args.entry,
        linear_layout=args.linear_layout,
        num_attention_heads=args.num_attention_heads,
        sliding_window=args.sliding_window,
        layer_norm_eps=args.layer_norm_eps,
        tie_word_embeddings=args.tie_word_embeddings,
    )


def locate(args: argparse.Namespace, path: str) -> tuple[str | Path, Snapshot | None]:
    """Where the checkpoint lies; with `--hub` it is fetched first, and its commit is said on standard error.

    Raises:
        InputError, CheckpointError, MissingPackageError: contradicting arguments, or it cannot be fetched.
    """
    if not args.hub:
        if args.revision is not None:
            raise InputError("--revision is about the hub; add --hub, or leave it out")
        return path, None
    from caracal.checkpoint.hub import fetch_snapshot

    snapshot = fetch_snapshot(path, args.revision)
    print(f"{snapshot.repository} at commit {snapshot.commit}", file=sys.stderr)
    return snapshot.path, snapshot


def open_from(args: argparse.Namespace, path: str) -> Checkpoint:
    """The checkpoint that the arguments describe, with what was assumed of it said on standard error.

    Raises:
        InputError, CaracalError: what `locate` and `open_checkpoint` raise.
    """
    from caracal.checkpoint.opening import open_checkpoint

    place, snapshot = locate(args, path)
    checkpoint = open_checkpoint(place, read_options(args))
    for assumed in checkpoint.assumed:
        print(f"assumed: {assumed}", file=sys.stderr)
    if snapshot is not None:
        return replace(checkpoint, path=Path(snapshot.repository), record={**checkpoint.record, "hub": snapshot.record})
    return checkpoint
