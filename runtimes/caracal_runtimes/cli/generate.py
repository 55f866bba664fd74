"""Continue a prompt with an exported bundle, streaming the text.

Text goes to standard output as it is written; `--ids` reads token ids instead of text and prints ids.
"""

from __future__ import annotations

import argparse
import json
import sys

from caracal_runtimes.cli.arguments import add_format_argument, add_runtime_arguments, ep_options, parse_ids, read_text

HELP = "continue a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add_runtime_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt")
    source.add_argument("--prompt-file", metavar="FILE", help="a UTF-8 file with the prompt, - for standard input")
    source.add_argument("--ids", metavar="IDS", help="token ids instead of text, as 1,2,3; ids are printed")
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
    add_format_argument(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from caracal_runtimes.bundle import Bundle
    from caracal_runtimes.sampling import SamplingOptions

    options = SamplingOptions(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    prompt: str | list[int]
    if args.ids is not None:
        prompt = parse_ids(args.ids)
    else:
        prompt = args.prompt if args.prompt is not None else read_text(args.prompt_file)
    model = Bundle.open(args.bundle).model(args.ep, threads=args.threads, ep_options=ep_options(args))
    stop_ids = () if args.ignore_eos and args.stop_id is None else args.stop_id
    streamed = args.format == "text"
    as_ids = args.ids is not None

    def show_text(row: int, text: str) -> None:
        if streamed and not as_ids:
            sys.stdout.write(text)
            sys.stdout.flush()

    def show_token(row: int, token: int, logprob: float) -> None:
        if streamed and as_ids:
            sys.stdout.write(f"{token} ")
            sys.stdout.flush()

    (generated,) = model.generate(
        prompt,
        max_new_tokens=args.max_new_tokens,
        options=options,
        stop=args.stop,
        stop_ids=stop_ids,
        on_text=show_text,
        on_token=show_token,
    )
    if streamed:
        print()
    else:
        result = {
            "prompt_ids": generated.prompt_ids,
            "ids": generated.ids,
            "logprobs": generated.logprobs,
            "text": generated.text,
            "stopped_by": generated.stopped_by,
            "ep": model.ep,
            "threads": model.threads,
        }
        print(json.dumps(result))
    return 0
