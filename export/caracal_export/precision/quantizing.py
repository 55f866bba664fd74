"""A float32 bundle in fewer bits: the same goldens, other weights, graphs that read them, and the proof anew."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import MANIFEST_FILE, GraphSpec, Quantization
from caracal_runtimes.parity import Progress
from caracal_runtimes.parity_report import ParityReport
from caracal_runtimes.safetensors_file import SafetensorsFiles, TensorHead
from caracal_runtimes.session import check_threads
from caracal_runtimes.sizes import Bytes
from numpy.typing import NDArray

from caracal.config import CaracalConfig
from caracal_export.assembling import summary, with_files
from caracal_export.card import model_card
from caracal_export.errors import VerificationError
from caracal_export.graph_files import check_graph, describe_graph, refer_to_weights
from caracal_export.opsets import retarget
from caracal_export.precision.checking import Use, check_uses, uses_of
from caracal_export.precision.formats import SCALE, Floats
from caracal_export.precision.plan import Planned, Precision, plan, roles_of
from caracal_export.precision.rewriting import BLOCKED_OPSET, needs_blocks, rewrite
from caracal_export.proving import prove
from caracal_export.staging import QUANTIZED, check_target, staged_folder
from caracal_export.weight_files import check_shard_size, plan_files, write_files


@dataclass(frozen=True)
class Quantized:
    """A written bundle: its size before and after, what its verification found (None with `verify=False`)."""

    path: Path
    bytes_before: int
    bytes: int
    report: ParityReport | None


def quantize_bundle(
    bundle: Bundle,
    output: str | Path,
    precision: Precision,
    *,
    higher: Sequence[str] = (),
    overwrite: bool = False,
    verify: bool = True,
    threads: int = 0,
    max_shard_size: int | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Writes a float32 bundle in another precision, and proves that it is within that precision's level. Needs no torch.

    Args:
        bundle: the float32 bundle, which stays as it is.
        output: folder to write; written whole or not at all.
        precision: what was asked for.
        higher: weights that get the next higher precision.
        overwrite: replace an existing bundle at `output`.
        verify: compare every stored weight with the one it was made from and every golden with ONNX Runtime.
        threads: of the verification, 0 for one per core.
        max_shard_size: bytes that a weight file may have before another one is begun.
        progress: called with what is being done, done and total.

    Raises:
        InputError: bad arguments, a bundle that is quantized already, a target that must not be written, a failed write.
        BundleError: the bundle is damaged.
        VerificationError: the level is missed; nothing was written.
    """
    check_threads(threads)
    check_shard_size(max_shard_size)
    target = Path(output)
    check_target(QUANTIZED, target, overwrite=overwrite)
    with staged_folder(QUANTIZED, target, overwrite=overwrite) as stage:
        found = write_quantized(
            bundle,
            stage,
            precision,
            higher=higher,
            verify=verify,
            threads=threads,
            max_shard_size=max_shard_size,
            progress=progress,
        )
        before, after = (sum(path.stat().st_size for path in folder.iterdir()) for folder in (bundle.path, stage))
    return Quantized(target, before, after, found)


def write_quantized(
    bundle: Bundle,
    stage: Path,
    precision: Precision,
    *,
    higher: Sequence[str] = (),
    verify: bool = True,
    threads: int = 0,
    max_shard_size: int | None = None,
    progress: Progress | None = None,
) -> ParityReport | None:
    """Fills an empty folder with the bundle in another precision; see `quantize_bundle`."""
    report = progress or (lambda what, done, total: None)
    check_source(bundle, precision)
    manifest = bundle.manifest
    source = bundle.weights()
    models = {name: ir.load(bundle.file(graph.file)) for name, graph in manifest.graphs.items()}
    shapes = {name: file.entries[name].shape for name, file in source.holders.items()}
    planned = plan(precision, roles_of(models.values()), shapes, higher)
    stored = StoredWeights(source, planned)
    files = plan_files(stored.heads, max_shard_size)
    write_files(files, stored.read, stage, lambda done, total: report("writing the weights", Bytes(done), Bytes(total)))
    graphs: dict[str, GraphSpec] = {}
    uses: dict[Path, list[Use]] = {}
    for name, model in models.items():
        before = manifest.graphs[name]
        uses[stage / before.file] = uses_of(model, planned)
        model = rewritten(model, planned)
        opset = model.graph.opset_imports[""]
        if model.graph.initializers:
            refer_to_weights(model, files, stage)
        ir.save(model, stage / before.file)
        check_graph(stage / before.file)
        graphs[name] = describe_graph(model, before.file, opset, before.mixing)
    for name in filter(None, (manifest.golden.file, manifest.tokenizer)):
        shutil.copyfile(bundle.file(name), stage / name)
    quantized = replace(
        manifest,
        precision=precision.name,
        graphs=graphs,
        weights=tuple(file.name for file in files),
        files={},
        verification=None,
        quantization=Quantization(
            parameters=bundle.parameters(),
            weights={each.stored_as: each.format.name for each in planned},
            block_size=precision.block if precision.name == "int4" else None,
            source=bundle.id(),
        ),
    )
    quantized = with_files(quantized, stage)
    (stage / MANIFEST_FILE).write_text(quantized.to_json(), encoding="utf-8")
    proof = None
    if verify:
        report("comparing weights", 0, 1)
        opened = Bundle.open(stage)
        compare_stored(source, opened.weights(), planned)
        report("comparing products", 0, 1)
        check_uses(uses, opened.weights())
        proof = prove(opened, threads=threads, progress=report)
    card = model_card(CaracalConfig.from_dict(manifest.config), bundle.parameters(), quantized, proof)
    (stage / "README.md").write_text(card, encoding="utf-8")
    quantized = replace(quantized, verification=None if proof is None else summary(proof))
    (stage / MANIFEST_FILE).write_text(with_files(quantized, stage).to_json(), encoding="utf-8")
    return proof


def rewritten(model: ir.Model, planned: Sequence[Planned]) -> ir.Model:
    """A graph that reads planned weights, of a later opset where they need one; without weights it stays what it is."""
    if not model.graph.initializers:
        return model
    if needs_blocks(planned) and model.graph.opset_imports[""] < BLOCKED_OPSET:
        model = retarget(model, BLOCKED_OPSET)
    rewrite(model, planned)
    return model


def check_source(bundle: Bundle, precision: Precision) -> None:
    """Refuses a bundle that is no float32 one, and a precision that it has already. Raises InputError."""
    if bundle.manifest.precision != "float32":
        raise InputError(
            f"quantize: expected a float32 bundle, found {bundle.manifest.precision}; what was rounded once must not be rounded "
            f"again, take the bundle that it was made from"
        )
    if precision.name == "float32":
        raise InputError(
            "quantize: the bundle is float32 already; expected --precision float16, bfloat16, int8 or int4"
        )


class StoredWeights:
    """The tensors of a quantized bundle, made one at a time from those of a float32 bundle.

    Args:
        source: the float32 weights.
        planned: which of them are stored otherwise; the others are copied.
    """

    def __init__(self, source: SafetensorsFiles, planned: Sequence[Planned]) -> None:
        self._source = source
        self.heads = stored_heads({name: file.entries[name].shape for name, file in source.holders.items()}, planned)
        self._made = {
            each.stored_as + ending: (each, ending) for each in planned for ending in each.format.heads(each.shape)
        }
        self.copied = tuple(name for name in self.heads if name not in self._made)
        self._scales: dict[str, Floats | None] = {}

    def read(self, name: str) -> NDArray[Any]:
        """One tensor as it is stored. Raises InputError for values that its format does not have."""
        if name not in self._made:
            return np.asarray(self._source.tensor(name))
        planned, ending = self._made[name]
        weight = matrix(self._source, planned)
        if planned.stored_as not in self._scales:  # small, and the search for them is the most of the work
            try:
                self._scales[planned.stored_as] = planned.format.scales(weight)
            except InputError as error:
                raise InputError(f"quantize: {planned.weight}: {error}") from None
        scales = self._scales[planned.stored_as]
        if ending:
            assert scales is not None
            return scales
        return planned.format.codes(weight, scales)


def stored_heads(shapes: Mapping[str, tuple[int, ...]], planned: Sequence[Planned]) -> dict[str, TensorHead]:
    """Dtype and shape of every tensor that is stored, by name.

    Args:
        shapes: of the float32 weights.
        planned: what of them is stored otherwise.
    """
    changed = {each.weight for each in planned}
    heads: dict[str, TensorHead] = {name: ("F32", shape) for name, shape in shapes.items() if name not in changed}
    for each in planned:
        heads |= {each.stored_as + ending: head for ending, head in each.format.heads(each.shape).items()}
    return heads


def matrix(source: SafetensorsFiles, planned: Planned) -> Floats:
    """The float32 matrix that a planned tensor stands for."""
    weight = np.asarray(source.tensor(planned.weight))
    return np.ascontiguousarray(weight.T) if planned.turned else weight


def compare_stored(source: SafetensorsFiles, stored: SafetensorsFiles, planned: Sequence[Planned]) -> None:
    """Checks that written weights are the nearest their format has to the float32 ones, and the others their equals.

    Args:
        source: the float32 weights.
        stored: those that were written.
        planned: what is stored otherwise.

    Raises:
        VerificationError: naming the first tensor that is missing, unknown, or differs.
    """
    expected = StoredWeights(source, planned)
    if odd := sorted(expected.heads.keys() ^ stored.holders.keys()):
        raise VerificationError(f"quantize: {odd[0]} is in one of the plan and the files only ({len(odd)} such)")
    for each in planned:
        weight = matrix(source, each)
        tensors = {ending: stored.stored(each.stored_as + ending) for ending in each.format.heads(each.shape)}
        scales = each.format.scales(weight)
        right = {"": each.format.codes(weight, scales), **({} if scales is None else {SCALE: scales})}
        for ending, tensor in right.items():
            if not np.array_equal(tensors[ending], tensor):
                raise VerificationError(
                    f"quantize: {each.stored_as}{ending} is not what {each.weight} has as {each.format.name}"
                )
        dense = each.format.dense(tensors, each.shape)
        off = float(np.linalg.norm(dense - weight)) / (float(np.linalg.norm(weight)) or 1.0)
        if not off <= each.format.most_error:
            raise VerificationError(
                f"quantize: {each.weight} as {each.format.name} is {off:.1e} from itself (relative L2, at most "
                f"{each.format.most_error:.0e}): its values differ too much in size, or are too small; keep it in float32: --keep "
                f"{each.weight}"
            )
    for name in expected.copied:
        if not np.array_equal(stored.stored(name), source.stored(name)):
            raise VerificationError(f"quantize: {name} differs from the float32 bundle's")
