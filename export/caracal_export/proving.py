"""Proof that a staged bundle computes what its goldens say; needs no torch."""

from __future__ import annotations

import numpy as np
from caracal_runtimes import replay
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import NotRunError
from caracal_runtimes.metrics import compare_logits
from caracal_runtimes.parity import AT_ONCE, Progress, run_parity
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.report import verdict_line
from caracal_runtimes.tolerances import tolerance_for

from caracal_export.errors import VerificationError

_BEYOND = 8  # steps behind the first block product


def prove(opened: Bundle, *, threads: int, progress: Progress) -> ParityReport:
    """Runs every golden with ONNX Runtime's own kernels, and what parity does not: the step of a state on a device.

    Args:
        opened: the bundle, which has no README yet.
        threads: of ONNX Runtime, 0 for one per core.
        progress: called with what is being done, done and total.

    Raises:
        VerificationError: an output differs by more than its level allows.
        NotRunError: the comparison could not be made at all.
    """
    found = run_parity(
        opened,
        threads=threads,
        low_memory=True,
        progress=lambda what, done, total: progress(f"verifying: {what}", done, total),
    )
    line = verdict_line(found, found.providers[0])
    if found.verdict == "FAILED" and opened.manifest.quantization is not None:
        raise VerificationError(
            f"quantize: {opened.manifest.precision} costs this model more than its level allows, nothing was written: {line}; keep the most "
            f"sensitive weights in a higher precision (--keep, --max-kl), or choose another one",
            found,
        )
    if found.verdict == "FAILED":
        raise VerificationError(
            f"export: the bundle does not compute what the checkpoint does, nothing was written: {line}; "
            f"PyTorch's own float32 is {opened.manifest.golden.rounding:.1e} from float64",
            found,
        )
    if found.verdict == "NOT RUN":
        raise NotRunError(
            f"{_command(opened)}: the bundle could not be verified, nothing was written (--no-verify skips): {line}"
        )
    progress("verifying: the step of a state on a device", 0, 1)
    _check_resident_step(opened, threads)
    progress("verifying: the step of a state on a device", 1, 1)
    return found


def _command(bundle: Bundle) -> str:
    """Which command makes such a bundle, for messages."""
    return "export" if bundle.manifest.quantization is None else "quantize"


def _check_resident_step(bundle: Bundle, threads: int) -> None:
    """Compares the step of a state on a device with the reference; parity has compared only the one that the CPU runs.

    Raises:
        VerificationError: it computes something else.
    """
    # Rows that stop one after the other, before, at and beyond the window; of two such cases the one with more positions.
    fit = [case for case in bundle.manifest.golden.cases if not case.name.endswith(AT_ONCE)]
    case = max(fit, key=lambda case: (case.batch, case.length, case.columns))
    keys = ["input_ids", "lengths", "logit_positions", "logits", *(["columns"] if case.columns else [])]
    ids, lengths, positions, recorded, *columns = (
        np.asarray(bundle.golden().tensor(f"{case.name}/{key}")) for key in keys
    )
    rows = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
    graphs = bundle.model(threads=threads, resident=True, low_memory=True).graphs
    found = replay.by_steps(graphs, rows, columns[0] if columns else None, last=graphs.lags // 2 + _BEYOND)
    got, want = replay.recorded_there(found, positions, recorded)
    limit = tolerance_for("strict", bundle.manifest.precision, bundle.manifest.golden.rounding)
    failures = compare_logits(got, want, limit, whole_vocabulary=not case.columns).failures(limit)
    if failures:
        raise VerificationError(
            f"{_command(bundle)}: step_resident does not compute what the checkpoint does, nothing was written: on {case.name} "
            f"{'; '.join(failures)}"
        )
