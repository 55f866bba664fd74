"""Which weights suffer most from fewer bits: each is rounded alone, and the change of a calibration text's logits measured.

The effects of single weights add up well enough to rank them and to say beforehand how many must keep a higher precision for
a bound on the whole; `quantizing` then measures the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.metrics import log_softmax
from caracal_runtimes.parity import Progress
from caracal_runtimes.providers.ort import CPU, import_onnxruntime
from caracal_runtimes.session import contiguous, default_threads, first_line
from numpy.typing import NDArray

from caracal_export.precision.plan import Planned
from caracal_export.precision.quantizing import StoredWeights

#: Tokens of the calibration text that are read in one pass, and positions of them whose logits are compared.
TOKENS, POSITIONS = 512, 128


@dataclass(frozen=True)
class Sensitivity:
    """What rounding one weight alone changes: mean KL(float32 || rounded) in nats over the compared positions."""

    weight: str
    kl: float


def measure(
    bundle: Bundle,
    planned: Sequence[Planned],
    ids: Sequence[int],
    *,
    threads: int = 0,
    progress: Progress | None = None,
) -> list[Sensitivity]:
    """Rounds each planned weight alone, in float32 arithmetic, and compares the logits. The most sensitive comes first.

    Args:
        bundle: the float32 bundle.
        planned: the formats, from `plan.plan`.
        ids: of the calibration text; the first `TOKENS` are read.
        threads: of ONNX Runtime, 0 for one per core.
        progress: called with what is being done, done and total.

    Raises:
        InputError: fewer than two ids.
        NotRunError: the graph does not run.
    """
    if len(ids) < 2:
        raise InputError(f"calibration: expected a text of at least 2 tokens, found {len(ids)}; give a longer one")
    runner = _Runner(bundle, list(ids)[:TOKENS], threads)
    reference = runner.log_probabilities({})
    source = bundle.weights()
    stored = StoredWeights(source, planned)
    by_weight: dict[str, list[Planned]] = {}
    for each in planned:
        by_weight.setdefault(each.weight, []).append(each)
    found = []
    for index, (name, uses) in enumerate(by_weight.items()):
        if progress is not None:
            progress("measuring what each weight bears", index, len(by_weight))
        # A tied table is rounded once for each of its uses; by the one that loses more it is judged.
        costs = []
        for each in uses:
            tensors = {ending: stored.read(each.stored_as + ending) for ending in each.format.heads(each.shape)}
            dense = each.format.dense(tensors, each.shape)
            weight = np.ascontiguousarray(dense.T if each.turned else dense)
            costs.append(_divergence(reference, runner.log_probabilities({name: weight})))
        found.append(Sensitivity(name, max(costs)))
    return sorted(found, key=lambda each: (-each.kl, each.weight))


def enough(sensitivities: Sequence[Sensitivity], bound: float, numbers: Mapping[str, int]) -> list[str]:
    """The weights to keep in a higher precision so that the others together stay below a bound, as far as effects add up.

    Taken in order of what a weight costs for each of its numbers, so that little memory buys much.

    Args:
        sensitivities: from `measure`.
        bound: on the sum, in nats.
        numbers: how many numbers each of the weights has that can be kept so; the others count in any case.
    """
    left = sum(each.kl for each in sensitivities)
    kept = []
    able = [each for each in sensitivities if each.weight in numbers]
    for each in sorted(able, key=lambda each: (-each.kl / numbers[each.weight], each.weight)):
        if left <= bound:
            break
        kept.append(each.weight)
        left -= each.kl
    return kept


def divergence(bundle: Bundle, other: Bundle, ids: Sequence[int], *, threads: int = 0) -> float:
    """Mean KL(bundle || other) in nats over the compared positions of a text."""
    a, b = (_Runner(each, list(ids)[:TOKENS], threads).log_probabilities({}) for each in (bundle, other))
    return _divergence(a, b)


def _divergence(reference: NDArray[np.float64], got: NDArray[np.float64]) -> float:
    if not np.isfinite(got).all():
        return float("inf")
    # Rounding may leave a tiny negative, which counts as zero.
    return max(float((np.exp(reference) * (reference - got)).sum(axis=-1).mean()), 0.0)


class _Runner:
    """The forward graph over one text, with some of its weights replaced."""

    def __init__(self, bundle: Bundle, ids: list[int], threads: int) -> None:
        self._ort = import_onnxruntime()
        self._graph = bundle.file(bundle.manifest.graphs["forward"].file)
        self._threads = threads or default_threads()
        self._values = {}
        if bundle.manifest.quantization is None:
            weights = bundle.weights()
            self._arrays = {name: np.asarray(weights.tensor(name)) for name in weights.holders}
            self._values = {name: self._value(array) for name, array in self._arrays.items()}
        count = min(POSITIONS, len(ids) - 1)
        positions = np.linspace(0, len(ids) - 1, count + 1).astype(np.int64)[1:]
        self._feeds = bundle.manifest.lengths.padded(
            {
                "input_ids": np.asarray([ids], np.int64),
                "lengths": np.asarray([len(ids)], np.int64),
                "logit_positions": positions[None],
            }
        )

    def log_probabilities(self, replaced: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float64]:
        """Of the compared positions: [positions, vocabulary]."""
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.log_severity_level = 4
        if self._values:
            options.add_session_config_entry("session.disable_prepacking", "1")
        values = {**self._values, **{name: self._value(array) for name, array in replaced.items()}}
        for name, value in values.items():
            options.add_initializer(name, value)
        try:
            session = self._ort.InferenceSession(str(self._graph), options, providers=[CPU], enable_fallback=0)
            logits = session.run(["logits"], contiguous(self._feeds))[0][0]
        except Exception as error:  # noqa: BLE001 - the library's own exception types are not public
            raise NotRunError(f"calibration: {self._graph.name} does not run: {first_line(error)}") from None
        return log_softmax(logits)

    def _value(self, array: NDArray[np.float32]) -> object:
        return self._ort.OrtValue.ortvalue_from_numpy(array)
