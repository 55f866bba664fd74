"""Proof that a staged bundle computes what its goldens say; needs no torch."""

from __future__ import annotations

import numpy as np
from caracal_runtimes import replay
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import NotRunError
from caracal_runtimes.parity import Progress, run_parity
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.report import verdict_line
from caracal_runtimes.tolerances import tolerance_for

from caracal_export.errors import VerificationError

_COLUMNS = 2048  # of a vocabulary that are compared where every position is


def prove(opened: Bundle, *, threads: int, progress: Progress) -> ParityReport:
    """Runs every golden with ONNX Runtime's own kernels, and compares the two kinds of step.

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
    """Compares the two kinds of step, of which parity has compared only the one that the CPU runs.

    Raises:
        VerificationError: they differ.
    """
    case = max(bundle.manifest.golden.cases, key=lambda case: case.batch)  # rows that stop one after the other
    ids, lengths = (np.asarray(bundle.golden().tensor(f"{case.name}/{name}")) for name in ("input_ids", "lengths"))
    rows = [row[:length].tolist() for row, length in zip(ids, lengths.tolist(), strict=True)]
    vocabulary = bundle.manifest.model.vocab_size
    columns = np.arange(0, vocabulary, -(-vocabulary // _COLUMNS))
    want, got = (
        replay.by_steps(bundle.model(threads=threads, resident=resident, low_memory=True).graphs, rows, columns)
        for resident in (False, True)
    )
    a, b = (np.stack([logits[key] for key in want]).astype(np.float64) for logits in (got, want))
    error, limit = (
        float(np.linalg.norm(a - b) / np.linalg.norm(b)),
        tolerance_for("strict", bundle.manifest.precision, bundle.manifest.golden.rounding).relative_l2,
    )
    if not error <= limit:
        raise VerificationError(
            f"{_command(bundle)}: step_resident does not compute what step does, nothing was written: relative L2 {error:.1e} on "
            f"{case.name}, at most {limit:.0e} is right"
        )
