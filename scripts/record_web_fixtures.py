"""Records what Python makes of inputs that the tests of `runtimes/web` try too: `python scripts/record_web_fixtures.py`.

Needs onnxruntime and tokenizers. What is recorded is deterministic, so that a test can hold the files equal to what Python gives.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from caracal_runtimes import Bundle, probe
from caracal_runtimes.metrics import compare_logits
from caracal_runtimes.sampling import Generator, SamplingOptions, next_token
from caracal_runtimes.text import StopMatcher, TextStream, encode_text, read_tokenizer
from caracal_runtimes.tolerances import tolerance_for
from caracal_runtimes.transform_factors import factors, multiplications

HERE = Path(__file__).resolve().parents[1]
TARGET = HERE / "runtimes" / "web" / "test" / "fixtures"
TOKENIZER = HERE / "export/caracal_export/checkpoints/kjv/tokenizer.json"

_OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 0},
    {"temperature": 0.7, "top_k": 5, "seed": 1},
    {"temperature": 1.3, "top_p": 0.9, "seed": 2**63},
    {"temperature": 1.0, "min_p": 0.05, "seed": 2**64 - 1},
    {"temperature": 2.0, "top_k": 40, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 7},
    {"temperature": 1.0, "repetition_penalty": 0.8, "logit_bias": {3: 4.0, 5: -100.0}, "seed": 11},
    {"temperature": 1e-3, "seed": 5},
    {"temperature": 50.0, "seed": 6},
)
_TEXTS = (
    "And it came to pass",
    "In the beginning",
    " two  blanks\n\nand lines",
    "naïve café \u2013 “quotes”",
    "日本語",
    "🙂👍🏽",
    "a",
)
_STOPS = ((["abcd", "c"], "xxabcx"), (["abcd", "c"], "xxabcdx"), (["LORD"], "the LO"), (["aa"], "aaab"), ([], "plain"))


def logits_of(size: int, seed: int) -> list[float]:
    """Float32 logits that any language can make again: the recorded generator's, scaled to [-8, 8), with some equal ones."""
    generator = Generator(seed)
    values = [np.float32(np.floor(generator.uniform() * 4096) / 256 - 8) for _ in range(size)]
    return [float(value) for value in values]


def sampling() -> dict[str, Any]:
    """Tokens of several draws in a row for each set of options, from vocabularies smaller and larger than the head that is ranked first."""
    cases = []
    for size in (7, 64, 3000):
        for row, given in enumerate(_OPTIONS):
            options = SamplingOptions(**given)
            generator = Generator(options.seed, row)
            previous, tokens, logprobs = [1, 3], [], []
            for draw in range(6):
                token, logprob = next_token(np.asarray(logits_of(size, draw), np.float32), previous, options, generator)
                previous.append(token)
                tokens.append(token)
                logprobs.append(logprob)
            named = {
                **given,
                "seed": str(options.seed),
                "logit_bias": {str(k): v for k, v in options.logit_bias.items()},
            }
            cases.append({"size": size, "row": row, "options": named, "tokens": tokens, "logprobs": logprobs})
    bits = [
        {"seed": str(seed), "row": row, "bits": [str(Generator(seed, row).bits())]}
        for seed in (0, 1, 2**64 - 1)
        for row in (0, 1, 5)
    ]
    return {"cases": cases, "generator": bits}


def texts() -> dict[str, Any]:
    """Ids of texts, their text again, and the pieces in which it comes."""
    tokenizer = read_tokenizer(TOKENIZER, 3072)
    found = []
    for text in _TEXTS:
        ids = list(encode_text(tokenizer, text).ids)
        stream = TextStream(tokenizer)
        pieces = [*(stream.push(i) for i in ids), stream.finish()]
        found.append({"text": text, "ids": ids, "pieces": pieces, "decoded": tokenizer.decode(ids)})
    stops = []
    for stop, text in _STOPS:
        matcher = StopMatcher(stop)
        shown = [matcher.push(character)[0] for character in text]
        stops.append({"stops": stop, "text": text, "shown": [*shown, matcher.finish()], "stopped": matcher.stopped})
    return {"texts": found, "stops": stops}


def metrics() -> list[dict[str, Any]]:
    """Figures of comparisons: close ones, one beyond the limits, one with another best token."""
    limit = tolerance_for("strict", "float32")
    found = []
    for name, scale, at in (("close", 1e-6, None), ("far", 1e-2, None), ("spike", 0.0, 5)):
        ref = np.asarray([logits_of(12, seed) for seed in range(6)], np.float32).reshape(2, 3, 12)
        noise = np.asarray([logits_of(12, seed + 100) for seed in range(6)], np.float32).reshape(2, 3, 12)
        got = ref + np.float32(scale) * noise
        if at is not None:
            got[0, 1, at] += 100
        result = compare_logits(got, ref, limit, whole_vocabulary=True)
        figures = {**asdict(result), "outlier_ratio": result.outlier_ratio}
        found.append({"name": name, "got": got.ravel().tolist(), "ref": ref.ravel().tolist(), "dims": [2, 3, 12], "metrics": figures,
                      "failures": result.failures(limit)})  # fmt: skip
    return found


def generation() -> list[dict[str, Any]]:
    """What the shipped probe writes, greedily and sampled, one row and several."""
    model = Bundle.open(probe.PROBE).model("cpu", threads=1)
    found = []
    for prompts, given in (
        ([[1, 2, 3]], {"temperature": 0.0}),
        ([[5]], {"temperature": 1.0, "seed": 7}),
        ([[1, 2, 3], [4], list(range(1, 30))], {"temperature": 0.8, "top_p": 0.95, "seed": 3}),
        ([list(range(60))], {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 9}),
    ):
        results = model.generate(prompts, max_new_tokens=70, options=SamplingOptions(**given), stop_ids=())
        found.append(
            {
                "prompts": prompts,
                "options": {**given, "seed": str(given.get("seed", 0))},
                "ids": [r.ids for r in results],
            }
        )
    return found


def arithmetic() -> list[dict[str, Any]]:
    """Factors and costs of transforms."""
    return [
        {"points": n, "factors": list(factors(n)), "multiplications": multiplications(2 * n, pairs=2)}
        for n in (1, 2, 3, 64, 65, 192, 500, 2048, 5000, 32768, 100_000)
    ]


FIXTURES = {
    "sampling.json": sampling,
    "texts.json": texts,
    "metrics.json": metrics,
    "generation.json": generation,
    "factors.json": arithmetic,
}


def main() -> None:
    """Writes them all."""
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, record in FIXTURES.items():
        (TARGET / name).write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
        print(f"written: {TARGET / name}")


if __name__ == "__main__":
    main()
