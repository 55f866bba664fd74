"""Prompts and tokens against llama.cpp and onnxruntime-genai, which run a Llama of the same size in processes of their own.

All sides have the same threads and take their turns in one loop; each measures its own seconds, so that what goes between the
processes is not counted. Only where a side's weights have the same bits are two compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.model import CausalLM

from benchmarks import bounds, ceilings
from benchmarks.decoding import row_at, stepper
from benchmarks.interleave import Samples, Side, interleave, ratio, summary, timed
from benchmarks.models import random_bundle, random_model
from benchmarks.outcome import NotMeasuredError, Outcome, Settings
from benchmarks.peers.process import INSTALLED_AS, PeerEndedError, PeerProcess
from caracal.config import PRESETS

PRESET = "small"
PREFILL_LENGTHS = (2048, 8192)
DECODE_CONTEXTS = (128, 16384)
_ROOM = 128  # tokens that a context has beyond what is read
_TRIED_AT = 64  # tokens that are read to see whether a peer runs at all
_CHOOSE_AT = 1024  # the context at which llama.cpp's faster attention is chosen


class _Peers:
    """The peers that are here, and why the others are not. Raises NotMeasuredError when none is."""

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self.settings = settings
        self.found: dict[str, PeerProcess] = {}
        self._missing: dict[str, str] = {}
        self._crashed: dict[tuple[str, str], str] = {}  # by peer and precision
        self._loaded: list[tuple[PeerProcess, str]] = []
        self._stack = stack
        for name in INSTALLED_AS:
            self._start(name)
        if not self.found:
            raise NotMeasuredError("; ".join(self._missing.values()))

    def _start(self, name: str) -> None:
        arguments = (name, self.settings.peers[name]) if name in self.settings.peers else (name,)
        try:
            self.found[name] = self._stack.enter_context(PeerProcess(*arguments))
        except NotMeasuredError as error:
            self._missing[name] = str(error)

    def runs(self, peer: str, precision: str) -> bool:
        """Whether a peer is here, and reads and writes with weights of this precision. One that crashes is started anew."""
        if peer not in self.found or (peer, precision) in self._crashed:
            return False
        try:
            self.load(peer, "trying", precision, _TRIED_AT)
            self.found[peer].call("prefill", name="trying", length=_TRIED_AT)
            self.found[peer].call("decode", name="trying", context=_TRIED_AT, count=2)
        except PeerEndedError as error:
            self._crashed[peer, precision] = f"{error} with {precision} weights"
            ended = self.found.pop(peer)
            self._loaded = [(process, loaded) for process, loaded in self._loaded if process is not ended]
            self._start(peer)
            return False
        self.free()
        return True

    def why_not(self, peer: str, precision: str) -> str | None:
        """Why a peer is not compared with, None if it is."""
        return self._missing.get(peer) or self._crashed.get((peer, precision))

    def load(self, peer: str, name: str, precision: str, context: int, **options: Any) -> PeerProcess:
        """A peer with a model that is ready to read."""
        found = self.found[peer]
        found.call(
            "load",
            name=name,
            folder=str(self.settings.folder),
            precision=precision,
            threads=self.settings.threads,
            context=context + _ROOM,
            **options,
        )
        self._loaded.append((found, name))
        return found

    def free(self) -> None:
        """Gives back the memory of everything that was loaded, but for weights."""
        while self._loaded:
            peer, name = self._loaded.pop()
            peer.call("free", name=name)

    def versions(self) -> dict[str, str]:
        """Of those that are here."""
        return {INSTALLED_AS[name]: peer.version for name, peer in self.found.items()}


@contextmanager
def _peers(settings: Settings) -> Iterator[_Peers]:
    with ExitStack() as stack:
        yield _Peers(settings, stack)


def _ours(settings: Settings, precisions: Sequence[str], **options: str) -> dict[str, CausalLM]:
    """Our model by precision; with int4 weights in the settings in which what they multiply has 8 bits, as both peers do it."""
    preset = "tiny" if settings.quick else PRESET
    model, found = random_model(preset), {}
    for precision in precisions:
        bundle = Bundle.open(random_bundle(model, settings.folder, preset, precision), check_hashes=False)
        found[precision] = bundle.model(threads=settings.threads, fast=precision == "int4", ep_options=options)
    return found


def measure_prefill(settings: Settings) -> dict[str, Outcome]:
    """Both rows of prompts: int8 against llama.cpp, float32 against onnxruntime-genai."""
    config = PRESETS["tiny" if settings.quick else PRESET]
    lengths = settings.lengths(PREFILL_LENGTHS)
    against_llama, against_genai = Outcome(), Outcome()
    every: dict[str, Any] = {}
    with _peers(settings) as peers:
        precisions = {"prefill-genai": "float32", "prefill-llama-int8": "int8"}
        models = _ours(settings, [precision for row, precision in precisions.items() if row in settings.rows])
        if "float32" in models:  # as the peer holds its weights: in a copy that is laid out for this processor
            models["float32, packed"] = _ours(settings, ("float32",), pack="1")["float32"]
        llama = "int8" in models and peers.runs("llama_cpp", "int8")
        genai = "float32" in models and peers.runs("ort_genai", "float32")
        for length in lengths:
            ids, last = np.random.default_rng(length).integers(2, 50257, (1, length)), np.asarray([[length - 1]])
            sides: dict[str, Side] = {
                f"caracal {precision}": timed(partial(model.forward, ids, last)) for precision, model in models.items()
            }
            if llama:
                for flash in (False, True):
                    name = f"llama.cpp int8{', flash attention' if flash else ''}"
                    peer = peers.load("llama_cpp", name, "int8", length, flash_attention=flash)
                    sides[name] = _reading(peer, name, length)
            if genai:
                name = "onnxruntime-genai float32"
                sides[name] = _reading(peers.load("ort_genai", name, "float32", length), name, length)
            ceiling = ceilings.measure(settings.threads)
            samples = interleave(sides, settings.turns(5), seconds=settings.seconds)
            peers.free()
            found = {name: summary(rounds) for name, rounds in samples.items()}
            every[str(length)] = {
                name: each | {"tokens_per_s": 1e3 * length / each["median_ms"]} for name, each in found.items()
            }
            if "int8" in models:
                bound = bounds.prompt(config, length, "int8", ceiling)
                _compare(against_llama, str(length), samples, "int8", ("llama_cpp",), peers, bound)
            if "float32" in models:
                bound = bounds.prompt(config, length, "float32", ceiling)
                _compare(against_genai, str(length), samples, "float32", ("ort_genai",), peers, bound)
        versions = peers.versions()
    outcomes = {"prefill-llama-int8": against_llama, "prefill-genai": against_genai}
    for outcome in outcomes.values():
        outcome.details = {"peers": versions, "lengths": every}
    return {row: outcome for row, outcome in outcomes.items() if row in settings.rows}


def measure_decode(settings: Settings) -> dict[str, Outcome]:
    """One token at a short and at a long context, against the better of the two peers."""
    config = PRESETS["tiny" if settings.quick else PRESET]
    contexts = settings.lengths(DECODE_CONTEXTS)
    outcome, every = Outcome(), {}
    with _peers(settings) as peers:
        models = _ours(settings, ("float32", "int4"))
        for precision, model in models.items():
            llama, genai = (peers.runs(peer, precision) for peer in ("llama_cpp", "ort_genai"))
            flash = llama and _flash_is_faster(peers, precision)
            for context in contexts:
                key = f"{precision} at {context}"
                sides = {f"caracal {precision}": stepper(model.graphs, row_at(model.graphs, context), 8)}
                if precision == "float32":  # as both peers hold theirs: in one copy that is laid out for this processor
                    packed = _ours(settings, (precision,), pack="1")[precision]
                    sides[f"caracal {precision}, packed"] = stepper(packed.graphs, row_at(packed.graphs, context), 8)
                if llama:
                    name = f"llama.cpp {precision}{', flash attention' if flash else ''}"
                    peer = peers.load("llama_cpp", name, precision, context, flash_attention=flash)
                    sides[name] = _writing(peer, name, context)
                if genai:
                    name = f"onnxruntime-genai {precision}"
                    sides[name] = _writing(peers.load("ort_genai", name, precision, context), name, context)
                bound = bounds.token(config, precision, ceilings.measure(settings.threads))
                samples = interleave(sides, settings.turns(12), seconds=settings.seconds)
                peers.free()
                every[key] = {name: summary(rounds) for name, rounds in samples.items()}
                _compare(outcome, key, samples, precision, tuple(INSTALLED_AS), peers, bound)
        outcome.details = {"peers": peers.versions(), "contexts": every}
    return {"decode-peers": outcome}


def _reading(peer: PeerProcess, name: str, length: int) -> Side:
    return lambda: [peer.call("prefill", name=name, length=length)]


def _writing(peer: PeerProcess, name: str, context: int) -> Side:
    def turn() -> list[float]:
        seconds: list[float] = peer.call("decode", name=name, context=context, count=8)
        return seconds

    return turn


def _flash_is_faster(peers: _Peers, precision: str) -> bool:
    """Which of llama.cpp's two forms of attention writes faster here, at a context that is soon read."""
    samples = {}
    for flash in (False, True):
        name = f"choosing {flash}"
        peer = peers.load("llama_cpp", name, precision, _CHOOSE_AT, flash_attention=flash)
        samples[flash] = _writing(peer, name, _CHOOSE_AT)
    found = interleave({str(flash): side for flash, side in samples.items()}, 3)
    peers.free()
    return summary(found["True"])["median_ms"] < summary(found["False"])["median_ms"]


def _compare(
    outcome: Outcome,
    key: str,
    samples: Samples,
    precision: str,
    wanted: Sequence[str],
    peers: _Peers,
    bound: dict[str, Any],
) -> None:
    """Puts our side against the fastest of the wanted peers' into the outcome."""
    labels = {"llama_cpp": "llama.cpp", "ort_genai": "onnxruntime-genai"}
    theirs = [name for name in samples if any(name.startswith(f"{labels[peer]} {precision}") for peer in wanted)]

    def fastest(names: Sequence[str]) -> str:
        return min(names, key=lambda name: summary(samples[name])["median_ms"])

    missing = [reason for peer in wanted if (reason := peers.why_not(peer, precision))]
    if not theirs:
        outcome.reasons[key] = "; ".join(missing)
    else:
        own = [name for name in samples if name.startswith(f"caracal {precision}")]
        ours, best = fastest(own), fastest(theirs)
        outcome.figures[key] = {
            **ratio(samples[best], samples[ours]),
            "against": best,
            "sides": {name: summary(samples[name]) for name in (*own, *theirs)},
            "missing": missing,
            "bound": bound,
        }
        print(f"{key}: {outcome.figures[key]['value']:.2f}x {best}", flush=True)
