"""Whole prompts through the whole model: this project, a plain export, PyTorch eager and compiled, in one interleaved run."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from caracal_runtimes.bundle import Bundle

from benchmarks import bounds, ceilings
from benchmarks.interleave import interleave, ratio, summary, timed
from benchmarks.models import random_bundle, random_model
from benchmarks.outcome import NotMeasuredError, Outcome, Settings
from benchmarks.peers.plain_export import PlainExport
from benchmarks.peers.torch_compiled import TorchCompiled
from benchmarks.peers.torch_eager import TorchEager

PRESET = "small"
LENGTHS = (2048, 4096, 8192)
#: By name of the row: the side that it is about.
SIDES = {
    "prefill-plain-export": "plain export",
    "prefill-torch-eager": "PyTorch eager",
    "prefill-torch-compiled": "torch.compile",
}
# Largest difference of logits between two sides that compute the same model in float32; a side that differs more is broken.
_AGREE = 1e-3


def measure(settings: Settings) -> dict[str, Outcome]:
    """All rows that compare with other ways to run the same model."""
    preset = "tiny" if settings.quick else PRESET
    asked = {row: name for row, name in SIDES.items() if row in settings.rows}
    torch.set_num_threads(settings.threads)
    model = random_model(preset)
    bundle = Bundle.open(random_bundle(model, settings.folder, preset), check_hashes=False)
    loaded = bundle.model(threads=settings.threads)
    packed = bundle.model(threads=settings.threads, ep_options={"pack": "1"})
    outcomes = {row: Outcome() for row in asked}
    every: dict[str, dict[str, Any]] = {}
    for length in settings.lengths(LENGTHS):
        ids = np.random.default_rng(length).integers(0, model.config.vocab_size, (1, length))
        last = np.asarray([[length - 1]])
        ours = loaded.forward(ids, last)[0, 0]
        runs: dict[str, Callable[[], object]] = {
            "caracal": partial(loaded.forward, ids, last),
            "caracal, packed": partial(packed.forward, ids, last),
        }
        packed.forward(ids, last)
        plain = settings.folder / f"plain-{preset}-{length}"
        plain.mkdir(parents=True, exist_ok=True)
        makers: dict[str, Callable[[], Callable[[], Any]]] = {
            "plain export": partial(PlainExport, model, plain / "model.onnx", ids, settings.threads),
            "PyTorch eager": partial(TorchEager, model, torch.from_numpy(ids)),
            "torch.compile": partial(TorchCompiled, model, torch.from_numpy(ids)),
        }
        for row, name in asked.items():
            try:
                side = makers[name]()
            except NotMeasuredError as error:
                outcomes[row].reasons[str(length)] = str(error)
                continue
            difference = float(np.abs(np.asarray(side())[0, -1] - ours).max())
            if not difference <= _AGREE:
                outcomes[row].reasons[str(length)] = f"its logits differ from ours by {difference:.1e}"
                continue
            runs[name] = side
        # Each side has run once by now.
        bound = bounds.prompt(model.config, length, "float32", ceilings.measure(settings.threads))
        sides_in_turn = {name: timed(run) for name, run in runs.items()}
        samples = interleave(sides_in_turn, settings.turns(7), warmup=0, seconds=settings.seconds)
        sides = {name: summary(rounds) for name, rounds in samples.items()}
        every[str(length)] = {
            "sides": sides,
            "tokens_per_s": {name: 1e3 * length / side["median_ms"] for name, side in sides.items()},
        }
        for row, name in asked.items():
            if name in samples:
                ours = min(("caracal", "caracal, packed"), key=lambda side: sides[side]["median_ms"])
                found = ratio(samples[name], samples[ours])
                compared = {key: sides[key] for key in ("caracal", "caracal, packed", name)}
                outcomes[row].figures[str(length)] = {**found, "sides": compared, "bound": bound}
                print(f"prefill at {length}: {found['value']:.2f}x {name}", flush=True)
        runs.clear()
        gc.collect()  # sessions of the plain export hold a copy of the weights each
        shutil.rmtree(plain, ignore_errors=True)
    for outcome in outcomes.values():
        outcome.details = {"preset": preset, "lengths": every}
    return outcomes
