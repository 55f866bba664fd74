"""How many weights must keep a higher precision for a bound on the whole: ranked by measurement, then measured together."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError
from caracal_runtimes.parity import Progress
from caracal_runtimes.session import check_threads

from caracal_export.precision.plan import Precision, check_bound, plan, roles_of
from caracal_export.precision.quantizing import write_quantized
from caracal_export.precision.sensitivity import Sensitivity, divergence, enough, measure

_ROUNDS = 6  # of keeping more, should effects add up to more than their sum


@dataclass(frozen=True)
class Mixed:
    """The outcome.

    Args:
        higher: weights that keep a higher precision.
        kl: of the whole, as measured, in nats.
        bound: what was asked for.
        tokens: of the calibration text that was read.
        sensitivities: of each weight alone, the most sensitive first.
    """

    higher: tuple[str, ...]
    kl: float
    bound: float
    tokens: int
    sensitivities: tuple[Sensitivity, ...]


def choose_higher(
    bundle: Bundle,
    precision: Precision,
    bound: float,
    ids: Sequence[int],
    *,
    threads: int = 0,
    progress: Progress | None = None,
) -> Mixed:
    """The weights that must keep a higher precision so that the mean KL from float32 on a text stays within a bound.

    Args:
        bundle: the float32 bundle.
        precision: of the others.
        bound: nats per token.
        ids: the calibration text.
        threads: of ONNX Runtime, 0 for one per core.
        progress: called with what is being done, done and total.

    Raises:
        InputError: a bound that is no positive number, or that is missed unless every weight keeps more.
    """
    check_bound(bound)
    check_threads(threads)
    report = progress or (lambda what, done, total: None)
    models = [ir.load(bundle.file(graph.file)) for graph in bundle.manifest.graphs.values()]
    shapes = {name: file.entries[name].shape for name, file in bundle.weights().holders.items()}
    roles = roles_of(models)
    planned = plan(precision, roles, shapes)
    # Beside int4, a table of which rows are taken is int8 in any case.
    raised = set(plan(precision, roles, shapes, higher=roles)) if precision.name == "int4" else set()
    numbers = {each.weight: math.prod(each.shape) for each in planned if each not in raised}
    sensitivities = measure(bundle, planned, ids, threads=threads, progress=progress)
    target, higher, kl = bound, list[str](), math.inf
    for number in range(_ROUNDS):
        report("measuring the precisions together", number, _ROUNDS)
        higher = enough(sensitivities, target if number < _ROUNDS - 1 else 0.0, numbers)
        if len(higher) == len(numbers) and not raised:
            raise InputError(
                f"--max-kl {bound:g}: all {len(numbers)} weights would have to stay float32; allow more, or choose another "
                f"precision"
            )
        with tempfile.TemporaryDirectory() as folder:
            write_quantized(bundle, Path(folder), precision, higher=higher, verify=False)
            kl = divergence(bundle, Bundle.open(folder, check_hashes=False), ids, threads=threads)
        if kl <= bound:
            return Mixed(tuple(higher), kl, bound, len(ids), tuple(sensitivities))
        if len(higher) == len(numbers):
            break
        target *= min(0.5, bound / kl)
    raise InputError(
        f"--max-kl {bound:g}: {precision.name} is {kl:.1e} nats from float32 on this text with {len(higher)} of "
        f"{len(sensitivities)} weights in a higher precision; allow more, or choose another precision"
    )
