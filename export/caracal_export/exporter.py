"""`caracal export` as a function: checkpoint in, proven bundle out."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import safetensors.numpy
import torch
from caracal_runtimes.bundle import Bundle, sha256_of
from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import MANIFEST_FILE, Golden, GraphSpec, Manifest
from caracal_runtimes.parity import Progress
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.pass_lengths import PassLengths
from caracal_runtimes.session import check_threads
from caracal_runtimes.sizes import Bytes
from caracal_runtimes.text import read_tokenizer
from safetensors import SafetensorError

from caracal import CaracalConfig, CaracalModel
from caracal.checkpoint.files import TOKENIZER_FILE
from caracal.checkpoint.opening import Checkpoint, open_checkpoint
from caracal.checkpoint.parameters import parameter_shapes
from caracal_export import goldens, verification, weights
from caracal_export.assembling import summary, versions, with_files
from caracal_export.bounds import bounded_lags, bounds, table_bytes
from caracal_export.card import model_card
from caracal_export.dtypes import recorded_dtypes
from caracal_export.graph_files import check_graph, describe_graph, refer_to_weights
from caracal_export.lowerings import MIXINGS
from caracal_export.opsets import OPSETS, TRACED_OPSET
from caracal_export.precision.calibration import calibration_ids, check_calibration
from caracal_export.precision.mixing_precisions import Mixed, choose_higher
from caracal_export.precision.plan import Precision, check_bound, plan, roles_of
from caracal_export.precision.quantizing import write_quantized
from caracal_export.staging import BUNDLE, check_target, staged_folder
from caracal_export.tracing import BOUNDED, GRAPHS, LAGS, trace
from caracal_export.weight_files import WeightFile, check_shard_size, float32, plan_files, write_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GOLDEN_FILE = "golden.safetensors"
_WHOLE = "float32"  # the bundle that one in fewer bits is made from
_GRAPH_BYTES = 16 << 20  # more than any model's graphs take


@dataclass(frozen=True)
class Exported:
    """A written bundle, what its verification found (None with `verify=False`), and what was measured for `max_kl`."""

    path: Path
    parameters: int
    bytes: int
    report: ParityReport | None
    mixed: Mixed | None = None


def export_checkpoint(
    checkpoint: str | Path | Checkpoint,
    output: str | Path,
    *,
    mixing: str = "matmul",
    opset: int = TRACED_OPSET,
    overwrite: bool = False,
    verify: bool = True,
    threads: int = 0,
    lags: int = LAGS,
    max_length: int | None = None,
    static_length: bool = False,
    max_shard_size: int | None = None,
    precision: Precision | None = None,
    max_kl: float | None = None,
    calibration: str | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Exports a checkpoint to a bundle, and proves that the bundle computes the same.

    The weights are read, written and compared one tensor at a time; all of them are in memory only while the reference
    computes the goldens, and once more while ONNX Runtime is compared with them.

    Args:
        checkpoint: path of any form that `caracal.open_checkpoint` reads, or what it returned.
        output: folder to write; written whole or not at all.
        mixing: `matmul` (runs on every provider) or `dft` (the ONNX DFT operator).
        opset: ONNX opset of the graphs, within `opsets.OPSETS`.
        overwrite: replace an existing bundle at `output`.
        verify: compare every weight with the checkpoint and every golden with ONNX Runtime before the bundle appears.
        threads: for the verification, 0 for one per core.
        lags: how many of the latest tokens the step graph mixes by itself, a power of two; more of them make a step
            slower and the work beside it less. Not more than a pass can read.
        max_length: tokens that one pass over a row may read, for which the transform's tables are then worked out; any when
            None. Longer texts are read in several passes.
        static_length: every pass has exactly `max_length` tokens, so that all sizes but the batch, and the number of positions
            that get logits, are known when a graph is loaded.
        max_shard_size: bytes that a weight file may have before another one is begun; None puts all weights into one.
        precision: of the weights; float32 when None. In fewer bits, the float32 bundle is made and verified first, and the other
            one from it, as `caracal quantize` does.
        max_kl: nats from float32 on the calibration text, for which as many weights as needed keep a higher precision.
        calibration: that text; the recorded passage when None.
        progress: called with what is being done, done and total.

    Raises:
        InputError, CaracalError: bad arguments, a bad checkpoint, a target that must not be written, a failed write.
        VerificationError: the exported graph does not compute what the checkpoint computes; nothing was written.
    """
    check_arguments(mixing, opset, threads, lags, max_shard_size)
    lengths = bounds(max_length, static_length)
    lags = bounded_lags(lags, lengths)
    if max_kl is not None:
        check_bound(max_kl)
    target = Path(output)
    check_target(BUNDLE, target, overwrite=overwrite)
    report = progress or (lambda what, done, total: None)
    precision = precision or Precision("float32")
    rounded = precision.name != "float32"

    report("reading the checkpoint", 0, 1)
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    # What is wrong with any of it is said before anything is written.
    tokenizer = None if opened.tokenizer is None else check_tokenizer("export", opened.tokenizer, opened.config)
    if rounded and max_kl is not None:
        check_calibration(tokenizer, calibration)
    if rounded and precision.keep:
        report("looking for the weights to keep", 0, 1)
        _check_keep(opened.config, precision, mixing, opset, lags)
    _check_room(target, opened, mixing, lags, lengths, copies=2 if rounded else 1)
    try:
        with staged_folder(BUNDLE, target, overwrite=overwrite) as stage:
            settings = _Settings(
                mixing, opset, lags, lengths, verify, threads, None if rounded else max_shard_size, report
            )
            if not rounded:
                found, mixed = _write_bundle(opened, stage, settings), None
            else:
                # Inside of the stage, so that it goes with it whatever happens.
                whole = stage / _WHOLE
                whole.mkdir()
                _write_bundle(opened, whole, settings)
                bundle = Bundle.open(whole, check_hashes=False)
                mixed = None
                if max_kl is not None:
                    ids = calibration_ids(bundle, calibration)
                    mixed = choose_higher(bundle, precision, max_kl, ids, threads=threads, progress=report)
                found = write_quantized(
                    bundle,
                    stage,
                    precision,
                    higher=() if mixed is None else mixed.higher,
                    verify=verify,
                    threads=threads,
                    max_shard_size=max_shard_size,
                    progress=report,
                )
                shutil.rmtree(whole)
            size = sum(path.stat().st_size for path in stage.iterdir())
    except SafetensorError as error:
        raise InputError(f"export: cannot write {target} ({error}); nothing was changed") from error
    return Exported(target, opened.parameters(), size, found, mixed)


@dataclass(frozen=True)
class _Settings:
    """Arguments of `export_checkpoint` that say how a bundle is made."""

    mixing: str
    opset: int
    lags: int
    lengths: PassLengths
    verify: bool
    threads: int
    max_shard_size: int | None
    report: Progress


def _write_bundle(opened: Checkpoint, stage: Path, settings: _Settings) -> ParityReport | None:
    """Fills an empty folder with the float32 bundle of a checkpoint, and says what its verification found."""
    config, report = opened.config, settings.report
    tokenizer = None if opened.tokenizer is None else check_tokenizer("export", opened.tokenizer, config)
    files = _write_weights(opened, stage, settings.max_shard_size, report)
    graphs: dict[str, GraphSpec] = {}
    with torch.device("meta"):  # graphs need no values
        shapes = CaracalModel(config).eval().requires_grad_(False)
    for index, name in enumerate(GRAPHS):
        report(f"tracing the graphs: {name}", index, len(GRAPHS))
        graph = trace(shapes, name, settings.mixing, settings.opset, lags=settings.lags, lengths=settings.lengths)
        refer_to_weights(graph, files, stage)
        file = f"{name}.onnx"
        ir.save(graph, stage / file)
        check_graph(stage / file)
        graphs[name] = describe_graph(graph, file, settings.opset, settings.mixing)
    recorded = _record_goldens(opened, settings.lags, settings.lengths, tokenizer, report)
    safetensors.numpy.save_file(recorded.tensors, stage / GOLDEN_FILE)
    if opened.tokenizer is not None:
        shutil.copyfile(opened.tokenizer, stage / TOKENIZER_FILE)
    manifest = Manifest(
        config=config.to_dict(),
        precision="float32",
        graphs=graphs,
        weights=tuple(file.name for file in files),
        golden=Golden(
            GOLDEN_FILE,
            f"PyTorch {torch.__version__} float32",
            tuple(recorded.cases),
            tuple(recorded.greedy),
            recorded.text,
            recorded.rounding,
        ),
        files={},
        tokenizer=None if tokenizer is None else TOKENIZER_FILE,
        producer=versions(),
        source=_source(opened),
        max_length=settings.lengths.most,
        static_length=settings.lengths.static,
    )
    manifest = with_files(manifest, stage)
    (stage / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
    found = verification.verify(opened, stage, threads=settings.threads, progress=report) if settings.verify else None
    card = model_card(config, opened.parameters(), manifest, found)
    (stage / "README.md").write_text(card, encoding="utf-8")
    manifest = replace(manifest, verification=None if found is None else summary(found))
    (stage / MANIFEST_FILE).write_text(with_files(manifest, stage).to_json(), encoding="utf-8")
    return found


def check_arguments(mixing: str, opset: int, threads: int, lags: int, max_shard_size: int | None) -> None:
    """Refuses arguments of `export_checkpoint` that cannot be. Raises InputError."""
    if mixing not in MIXINGS:
        raise InputError(f"--mixing must be one of {', '.join(MIXINGS)}, found {mixing!r}")
    if opset not in OPSETS:
        raise InputError(f"--opset must be from {OPSETS.start} to {OPSETS.stop - 1}, found {opset}")
    check_threads(threads)
    if isinstance(lags, bool) or not isinstance(lags, int) or lags < 2 or lags & (lags - 1):
        raise InputError(f"export: lags must be a power of two of at least 2, found {lags!r}")
    check_shard_size(max_shard_size)


def _check_keep(config: CaracalConfig, precision: Precision, mixing: str, opset: int, lags: int) -> None:
    """Refuses patterns that keep no weight, or all of them. Raises InputError."""
    with torch.device("meta"):
        model = CaracalModel(config).eval().requires_grad_(False)
    # The smallest graph with weights: each graph does the same with a weight.
    roles = roles_of([trace(model, "step", mixing, opset, lags=lags)])
    plan(precision, roles, weights.graph_shapes(parameter_shapes(config), config))


def _write_weights(
    checkpoint: Checkpoint, stage: Path, max_shard_size: int | None, report: Progress
) -> list[WeightFile]:
    """Writes the weights, and says where they are."""
    config = checkpoint.config
    files = plan_files(float32(weights.graph_shapes(parameter_shapes(config), config)), max_shard_size)
    write_files(
        files,
        lambda name: weights.graph_weight(name, checkpoint.tensor(name), config),
        stage,
        lambda done, total: report("writing the weights", Bytes(done), Bytes(total)),
    )
    return files


def _record_goldens(
    checkpoint: Checkpoint, lags: int, lengths: PassLengths, tokenizer: Tokenizer | None, report: Progress
) -> goldens.Recorded:
    """The reference's outputs; the model is gone from memory when they are there."""
    recorded = goldens.record(
        checkpoint.model(),
        lags,
        lambda what, done, total: report(f"recording goldens: {what}", done, total),
        tokenizer,
        lengths.most,
    )
    checkpoint.release()
    return recorded


def check_tokenizer(command: str, path: Path, config: CaracalConfig) -> Tokenizer:
    """The checkpoint's tokenizer. Raises InputError, of this command, for one that does not fit."""
    try:
        return read_tokenizer(path, config.vocab_size)
    except ValueError as error:
        raise InputError(f"{command}: {path} {error}; put the model's own there, or remove it") from None


def _check_room(
    target: Path, checkpoint: Checkpoint, mixing: str, lags: int, lengths: PassLengths, copies: int
) -> None:
    """Refuses to start an export that the disk cannot hold; weights, goldens and a bounded graph's tables are all that is large."""
    config = checkpoint.config
    graphs = _GRAPH_BYTES + len(BOUNDED) * table_bytes(lengths, mixing, config.sliding_window)
    needed = copies * (4 * checkpoint.parameters() + goldens.extent(config, lags, lengths.most).bytes + graphs)
    free = shutil.disk_usage(target.absolute().parent).free
    if free < needed:
        raise InputError(
            f"export: {target} needs about {needed / 1e6:,.0f} MB, the disk has {free / 1e6:,.0f} MB free; make room or "
            f"choose another place"
        )


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where the weights come from: the hashes of all files that were read, and how they were read."""
    files = {path.name: sha256_of(path) for path in sorted(checkpoint.files)}
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return {
        "name": checkpoint.path.absolute().name,
        "sha256": digest,
        "files": files,
        **checkpoint.record,
        **recorded_dtypes(checkpoint),
    }
