"""Proof that a staged bundle computes what the checkpoint computes: every weight, every golden."""

from __future__ import annotations

from pathlib import Path

from caracal_runtimes.bundle import Bundle
from caracal_runtimes.manifest import WEIGHTLESS
from caracal_runtimes.parity import Progress
from caracal_runtimes.parity_report import ParityReport

from caracal.checkpoint.opening import Checkpoint
from caracal_export import weights
from caracal_export.proving import prove


def verify(checkpoint: Checkpoint, bundle: Path, *, threads: int, progress: Progress) -> ParityReport:
    """Compares a written bundle with the checkpoint it was made from.

    Args:
        checkpoint: the reference, read one tensor at a time.
        bundle: folder with everything but its README.
        threads: of ONNX Runtime, 0 for one per core.
        progress: called with what is being done, done and total.

    Raises:
        VerificationError: a weight or an output differs.
        NotRunError: the comparison could not be made at all.
    """
    progress("comparing weights", 0, 1)
    opened = Bundle.open(bundle)
    weights.compare_weights(
        [opened.file(graph.file) for name, graph in opened.manifest.graphs.items() if name not in WEIGHTLESS],
        opened.manifest.weights,
        checkpoint.names,
        checkpoint.tensor,
        checkpoint.config,
    )
    checkpoint.release()
    return prove(opened, threads=threads, progress=progress)
