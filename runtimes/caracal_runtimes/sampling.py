"""From logits to the next token, drawn from a generator that any language can rebuild.

The same logits, options and seed give the same token in every runtime that follows these rules:

1. scores: the logits in float64, plus `logit_bias`;
2. repetition penalty: every id in `previous_ids`, once: score / penalty if the score is positive, else score * penalty;
3. greedy: the largest score, the lowest id among equals, and nothing is drawn. Otherwise:
4. weights: exp((score - largest score) / temperature), ranked by descending score, equal scores by ascending id;
5. top-k, top-p and min-p each keep the head of that ranking (see `SamplingOptions`); the shortest head counts;
6. one number u is drawn, even where one id is left: the token is the first in the ranking at which the running sum of
   the kept weights exceeds u times their sum.

The rules and their order are those of Hugging Face transformers' logits processors, except that top-k keeps exactly k
ids where scores tie.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import InputError, NumericError

_MASK = 2**64 - 1
_LARGEST = sys.float_info.max
_GAMMA = 0x9E3779B97F4A7C15
# Ids ranked at first. Sorting a whole vocabulary of 50,000 takes longer than a decode step of a small model, and a
# model's draw nearly always lands among the likeliest.
_HEAD = 1024


class Generator:
    """SplitMix64, a pseudo-random generator with 64 bits of state.

    Source: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the constants of
    java.util.SplittableRandom. All arithmetic is modulo 2^64:

        state = state + 0x9E3779B97F4A7C15
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB
        output = z ^ (z >> 31)

    Each row of a batch draws from a stream of its own. Row r starts at `seed ^ mix(r * 0x9E3779B97F4A7C15)`, where
    `mix` is the last three lines above applied to its argument. mix(0) = 0, so row 0 starts at the seed itself and a
    batch of one equals a single run.

    Not for cryptography.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        """Starts the stream of `row`.

        Args:
            seed: from 0 to 2^64 - 1.
            row: index in the batch, at least 0.

        Raises:
            InputError: either is not an integer in its range.
        """
        seed = _SEED.check("--seed", seed)
        row = _COUNT.check("row", row)
        self._state = seed ^ _mix(row * _GAMMA & _MASK)

    @property
    def state(self) -> int:
        """The 64 bits from which the stream goes on."""
        return self._state

    @classmethod
    def resume(cls, state: int) -> Generator:
        """The stream that goes on from a `state`."""
        return cls(state)

    def bits(self) -> int:
        """The next output: 64 random bits as an integer from 0 to 2^64 - 1."""
        self._state = (self._state + _GAMMA) & _MASK
        return _mix(self._state)

    def uniform(self) -> float:
        """The next output's upper 53 bits times 2^-53: a double in [0, 1), every step of 2^-53 equally likely."""
        return (self.bits() >> 11) * 2.0**-53


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How a token is chosen. The defaults draw from the model's own distribution.

    `temperature` divides the scores; 0 is greedy. `top_k` keeps the k largest; 0 is off, 1 is greedy. `top_p` keeps the
    smallest head of the ranking whose share of what top-k left reaches it, at least one id. `min_p` keeps ids at least
    this share as probable as the most probable one. `repetition_penalty` above 1 makes earlier ids less likely.
    `logit_bias` maps token ids to what is added to their logits. `seed` starts the generator.

    Raises:
        InputError: a value of the wrong type, out of range, NaN or infinite; the text names the command line's flag.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    # A mapping has no hash; equal options still hash equally without it.
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, rule in _OPTIONS.items():
            # numpy scalars become Python's: the generator needs integers without a width.
            object.__setattr__(self, name, rule.check("--" + name.replace("_", "-"), getattr(self, name)))
        object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken, without a draw."""
        return self.temperature == 0 or self.top_k == 1


def next_token(
    logits: NDArray[np.float32], previous_ids: Sequence[int], options: SamplingOptions, generator: Generator
) -> tuple[int, float]:
    """Chooses one token.

    Args:
        logits: [V], float32; -inf marks an id that cannot be chosen. Not changed.
        previous_ids: ids from 0 to V-1 to which the repetition penalty applies, prompt and continuation.
        options: how to choose.
        generator: gives one `uniform()` per call, none when greedy.

    Returns:
        The token's id and its natural log-probability under the model's own distribution, that is the log-softmax of
        the raw logits in float64, before bias, penalty, temperature and filters.

    Raises:
        InputError: logits that are not [V], or an id in `previous_ids` or `logit_bias` outside the vocabulary.
        NumericError: NaN or +inf among the logits, or no finite one; also where bias or penalty leads there.
    """
    raw = np.asarray(logits, dtype=np.float64)
    if raw.ndim != 1 or raw.size == 0:
        raise InputError(f"logits: expected one row [V], found the shape {list(raw.shape)}")
    _check_scores(raw, "the model's logits")
    scores = _adjusted(raw, previous_ids, options)
    token = int(np.argmax(scores)) if options.greedy else _draw(scores, options, generator.uniform())
    return token, _log_probability(raw, token)


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _check_scores(scores: NDArray[np.float64], what: str) -> None:
    # The largest of an array that holds a NaN is NaN, so that one look finds all three.
    largest = float(np.max(scores))
    if not math.isfinite(largest):
        bad = np.flatnonzero(np.isnan(scores) | np.isposinf(scores))
        found = f"{bad.size} of {scores.size} NaN or +inf, the first at id {bad[0]}" if bad.size else "-inf everywhere"
        raise NumericError(f"{what}: expected finite numbers or -inf, found {found}")


def _adjusted(raw: NDArray[np.float64], previous_ids: Sequence[int], options: SamplingOptions) -> NDArray[np.float64]:
    """Scores [V] after logit bias and repetition penalty; `raw` itself where neither is asked for."""
    penalised = options.repetition_penalty != 1 and len(previous_ids) > 0
    if not penalised and not options.logit_bias:
        return raw
    scores = raw.copy()
    if options.logit_bias:
        ids = _checked_ids("logit_bias", list(options.logit_bias), raw.size)
        scores[ids] += np.fromiter(options.logit_bias.values(), dtype=np.float64, count=ids.size)
    if penalised:
        ids = _checked_ids("previous_ids", previous_ids, raw.size)
        # Read before any is written: an id that occurs twice is still penalised once.
        old = scores[ids]
        with np.errstate(over="ignore"):
            scores[ids] = np.where(old > 0, old / options.repetition_penalty, old * options.repetition_penalty)
    _check_scores(scores, "the scores after logit_bias and --repetition-penalty")
    return scores


def _checked_ids(name: str, ids: Sequence[int], size: int) -> NDArray[np.intp]:
    found = np.asarray(ids)
    # numpy would truncate a fraction and count a negative id from the end.
    if found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= size:
        raise InputError(f"{name}: expected ids from 0 to {size - 1}, found {_first_wrong(ids, size)!r}")
    return found.astype(np.intp)


def _first_wrong(ids: Sequence[Any], size: int) -> Any:
    wrong = (i for i in ids if not (isinstance(i, (int, np.integer)) and not isinstance(i, bool) and 0 <= i < size))
    return next(wrong, ids)


def _draw(scores: NDArray[np.float64], options: SamplingOptions, uniform: float) -> int:
    with np.errstate(over="ignore"):
        weights = np.exp((scores - scores.max()) / options.temperature)
    count = min(options.top_k or scores.size, scores.size)
    if count == scores.size > _HEAD:
        ids = _ranked(scores, _HEAD)
        place = _pick(weights[ids], float(weights.sum()), options, uniform)
        if place < _HEAD:
            return int(ids[place])
    ids = _ranked(scores, count)
    return int(ids[_pick(weights[ids], None, options, uniform)])


def _ranked(scores: NDArray[np.float64], count: int) -> NDArray[np.intp]:
    """The `count` ids with the largest scores: descending score, equal scores by ascending id."""
    if count == scores.size:
        return np.argsort(-scores, kind="stable")
    border = np.partition(scores, scores.size - count)[scores.size - count]
    above = np.flatnonzero(scores > border)
    ids = np.concatenate([above, np.flatnonzero(scores == border)[: count - above.size]])
    return ids[np.argsort(-scores[ids], kind="stable")]


def _pick(weights: NDArray[np.float64], total: float | None, options: SamplingOptions, uniform: float) -> int:
    """Applies top-p and min-p to ranked weights and draws.

    Args:
        weights: [C], descending, the first is 1.
        total: the sum over all candidates where `weights` is only the head of their ranking; None where it is all.
        options: only `top_p` and `min_p` are read.
        uniform: in [0, 1).

    Returns:
        The drawn place in the ranking, or C where that cannot be told from the head.
    """
    mass = np.cumsum(weights)
    kept = _kept(weights, mass, float(mass[-1]) if total is None else total, options)
    if total is None or kept < weights.size:
        bound = float(mass[kept - 1])
    elif options.top_p < 1 or options.min_p > 0:
        return weights.size
    else:
        bound = total
    # u is at most 1 - 2^-53, and that times `bound` rounds to less than `bound`: only a head can be too short.
    return int(np.searchsorted(mass[:kept], uniform * bound, side="right"))


def _kept(weights: NDArray[np.float64], mass: NDArray[np.float64], total: float, options: SamplingOptions) -> int:
    """How many leading candidates pass top-p and min-p: from 1 to C, and C where a border lies at or past the end."""
    kept = weights.size
    if options.top_p < 1:
        kept = min(kept, int(np.searchsorted(mass, options.top_p * total)) + 1)
    if options.min_p > 0:
        kept = min(kept, int(np.searchsorted(-weights, -options.min_p, side="right")))
    return kept


def _log_probability(logits: NDArray[np.float64], token: int) -> float:
    shifted = logits - logits.max()
    return float(shifted[token] - np.log(np.exp(shifted).sum()))


class _Rule(NamedTuple):
    """What a number may be, and how that is said."""

    kind: type[int | float]
    allowed: Callable[[Any], bool]
    expected: str

    def check(self, name: str, value: object) -> Any:
        """The value as Python's own number. Raises InputError."""
        number = value.item() if isinstance(value, np.generic) else value
        types = int if self.kind is int else (int, float)
        # NaN fails every comparison, so that no range lets it pass.
        if isinstance(number, bool) or not isinstance(number, types) or not self.allowed(number):
            raise InputError(f"{name} must be {self.expected}, found {value!r}")
        return self.kind(number)


_SEED = _Rule(int, lambda v: 0 <= v <= _MASK, f"an integer from 0 to {_MASK}")
_COUNT = _Rule(int, lambda v: v >= 0, "an integer of at least 0")
_BIAS = _Rule(float, lambda v: abs(v) <= _LARGEST, "a finite number")
_OPTIONS = {
    "temperature": _Rule(float, lambda v: 0 <= v <= _LARGEST, "a finite number of at least 0"),
    "top_k": _COUNT,
    "top_p": _Rule(float, lambda v: 0 < v <= 1, "in (0, 1]"),
    "min_p": _Rule(float, lambda v: 0 <= v <= 1, "in [0, 1]"),
    "repetition_penalty": _Rule(float, lambda v: 0 < v <= _LARGEST, "a finite number above 0"),
    "seed": _SEED,
}


def _check_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InputError(f"logit_bias must map token ids to numbers, found {bias!r}")
    return {
        _COUNT.check("logit_bias: a token id", token): _BIAS.check(f"logit_bias of token {token!r}", value)
        for token, value in bias.items()
    }
