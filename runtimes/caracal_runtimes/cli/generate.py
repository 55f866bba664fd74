"""Continue a prompt with an exported bundle, streaming the text.

Text goes to standard output as it is written; `--ids` reads token ids instead of text and prints ids. The cost of a
token does not grow with the context. Several prompts are continued together and printed when all are done.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from caracal_runtimes.cli.arguments import (
    add_format_argument,
    add_runtime_arguments,
    check_writable,
    parse_bias,
    parse_ids,
    read_text,
)
from caracal_runtimes.cli.opening import open_bundle, open_model
from caracal_runtimes.cli.progress import ProgressLine
from caracal_runtimes.errors import InputError

if TYPE_CHECKING:
    from caracal_runtimes.generation import Generated
    from caracal_runtimes.generation_session import GenerationSession
    from caracal_runtimes.model import CausalLM

HELP = "continue a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_runtime_arguments(parser)
    prompt = parser.add_argument_group("prompt, one of these; several make a batch")
    prompt.add_argument("-p", "--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    prompt.add_argument("--prompt-file", action="append", default=[], metavar="FILE",
                        help="a UTF-8 file with one prompt, - for standard input; may be repeated")  # fmt: skip
    prompt.add_argument("--ids", action="append", default=[], metavar="IDS",
                        help="token ids instead of text, as 1,2,3; ids are printed; may be repeated")  # fmt: skip
    add = parser.add_argument
    add("-n", "--max-new-tokens", type=int, default=128, metavar="N", help="tokens to write at most (default: 128)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token (default: 1)")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens (default: all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens of total mass P (default: 1)",
    )
    add("--min-p", type=float, default=0.0, metavar="P", help="drop tokens below P times the likeliest (default: 0)")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1 discourages seen tokens (default: 1)",
    )
    add("--seed", type=int, default=0, metavar="S", help="seed of the sampling (default: 0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    add("--stop-id", action="append", type=int, default=None, metavar="ID", help="end at this token; may be repeated "
        "(default: the model's end-of-text token)")  # fmt: skip
    add("--ignore-eos", action="store_true", help="do not end at the model's end-of-text token")
    add(
        "--logit-bias",
        action="append",
        default=[],
        metavar="ID=B",
        help="add B to the logit of token ID; may be repeated",
    )
    add("--prefill-chunk", type=int, default=None, metavar="N",
        help="read prompts N tokens at a time, which bounds the memory (default: 2048)")  # fmt: skip
    add("--save-state", metavar="FILE", help="write the decode state to FILE when done")
    add("--load-state", metavar="FILE", help="continue from a saved state; a prompt is then appended to it")
    add_format_argument(parser)
    add("--json", action="store_const", const="json", dest="format", help="the same as --format json")


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.decode_state import CHUNK
    from caracal_runtimes.sampling import SamplingOptions

    began = time.perf_counter()
    prompts, as_ids = _prompts(args)
    options = SamplingOptions(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        logit_bias=parse_bias(args.logit_bias),
    )
    _check_together(args)
    if args.save_state is not None:
        check_writable("--save-state", args.save_state, args.bundle)
    chunk = CHUNK if args.prefill_chunk is None else args.prefill_chunk
    model = open_model(args, open_bundle(args))
    stop_ids = () if args.ignore_eos and args.stop_id is None else args.stop_id
    rule = {"max_new_tokens": args.max_new_tokens, "stop": args.stop, "stop_ids": stop_ids}
    model.check_request(options=options, **rule)
    as_ids = as_ids or not model.has_tokenizer
    loaded = time.perf_counter()
    if args.load_state is None:
        with ProgressLine() as progress:
            session = model.start(
                prompts,
                prefill_chunk=chunk,
                new_tokens=args.max_new_tokens,
                progress=lambda done, total: progress("reading", done, total) if total > chunk else None,
            )
    else:
        session = model.load_session(args.load_state, prefill_chunk=chunk)
        if prompts:
            session.append(prompts[0])
    read = time.perf_counter()
    show = _Stream(as_ids) if args.format == "text" and len(session.ids) == 1 else None
    times: list[float] = []

    def on_token(row: int, token: int, logprob: float) -> None:
        times.append(time.perf_counter())
        if show is not None:
            show.token(token)

    results = session.generate(
        options=options,
        on_text=None if show is None else lambda row, text: show.text(text),
        on_token=on_token,
        **rule,
    )
    try:
        _show(args, session, results, times, (began, loaded, read), show, as_ids, model)
        sys.stdout.flush()
    finally:  # also when whoever read the output has gone; and what was written stands, whatever becomes of the state
        if args.save_state is not None:
            session.save(args.save_state)
    return 0


def _show(
    args: argparse.Namespace,
    session: GenerationSession,
    results: Sequence[Generated],
    times: Sequence[float],
    marks: tuple[float, float, float],
    show: _Stream | None,
    as_ids: bool,
    model: CausalLM,
) -> None:
    """Prints the results, or what a stream of them has left out."""
    began, loaded, read = marks
    if args.format == "json":
        timings = {
            "load_s": loaded - began,
            "prefill_s": read - loaded,
            "first_token_s": times[0] - loaded,
            "decode_s": times[-1] - times[0],
            "decode_tokens_per_s": (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
        }
        data = {
            "results": [asdict(result) for result in results],
            "timings": timings,
            "state_bytes": session.state_bytes,
            "ep": model.ep,
            "threads": model.threads,
            "unchecked": args.no_check,
        }
        print(json.dumps(data))
    elif show is not None:
        print()
    else:
        for row, result in enumerate(results):
            text = " ".join(map(str, result.ids)) if as_ids or result.text is None else result.text
            print(f"== {row + 1} of {len(results)}, {len(result.ids)} tokens, ended by {result.stopped_by}\n{text}")


def _prompts(args: argparse.Namespace) -> tuple[list[str] | list[list[int]], bool]:
    """The prompts, and whether they are ids."""
    given = [name for name in ("prompt", "prompt_file", "ids") if getattr(args, name)]
    flags = ["--" + name.replace("_", "-") for name in given]
    if len(given) > 1:
        raise InputError(f"generate: expected prompts of one kind, found {' and '.join(flags)}")
    if not given and args.load_state is None:
        raise InputError("generate: expected a prompt, found none; pass -p, --prompt-file or --ids")
    if args.load_state is not None and sum(len(getattr(args, name)) for name in given) > 1:
        raise InputError("generate: --load-state continues with at most one prompt, which every row gets")
    if args.ids:
        return [parse_ids(text) for text in args.ids], True
    if args.prompt_file.count("-") > 1:
        raise InputError("generate: standard input can be read once, found --prompt-file - twice")
    return [*args.prompt, *(read_text(path) for path in args.prompt_file)], False


def _check_together(args: argparse.Namespace) -> None:
    """Refuses options of which one would make the other meaningless."""
    if args.ignore_eos and args.stop_id is not None:
        raise InputError(
            "generate: --ignore-eos and --stop-id contradict each other: the ids of --stop-id alone end a row"
        )
    if args.temperature == 0:
        for flag, value, unset in (
            ("--top-k", args.top_k, 0),
            ("--top-p", args.top_p, 1.0),
            ("--min-p", args.min_p, 0.0),
        ):
            if value != unset:
                raise InputError(
                    f"generate: --temperature 0 always takes the likeliest token, so {flag} {value} has no meaning; drop "
                    f"one of the two"
                )


class _Stream:
    """Writes what is generated as it comes."""

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids

    def text(self, text: str) -> None:
        if not self._as_ids:
            sys.stdout.write(text)
            sys.stdout.flush()

    def token(self, token: int) -> None:
        if self._as_ids:
            sys.stdout.write(f"{token} ")
            sys.stdout.flush()
