"""`caracal export --dry-run` as a function: what a bundle would be, from names and shapes alone."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from caracal_runtimes.errors import InputError
from caracal_runtimes.limits import check_forward, forward_bytes, state_bytes
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.parity import Progress
from caracal_runtimes.pass_lengths import ANY, PassLengths
from caracal_runtimes.sizes import format_bytes

from caracal import CaracalModel
from caracal.checkpoint.files import TOKENIZER_FILE
from caracal.checkpoint.opening import Checkpoint
from caracal.checkpoint.parameters import parameter_shapes
from caracal_export import goldens, weights
from caracal_export.bounds import bounded_lags, bounds
from caracal_export.exporter import GOLDEN_FILE, check_arguments, check_tokenizer
from caracal_export.folding import constant_bytes
from caracal_export.graph_files import describe_graph, refer_to_weights
from caracal_export.opsets import TRACED_OPSET
from caracal_export.precision.plan import Precision, plan, roles_of
from caracal_export.precision.quantizing import rewritten, stored_heads
from caracal_export.tracing import BOUNDED, GRAPHS, LAGS, trace
from caracal_export.weight_files import plan_files

_LOADED = 3  # graphs with weights that reading and writing text load: forward, extend, step
# Peak of an export over the bundle's weights, and what the packages take before it begins; benchmarks/export_memory.py.
_EXPORT_FACTOR, _EXPORT_BASE = 3.0, 700 << 20


@dataclass(frozen=True)
class DryRun:
    """What an export would write, and the memory that it and its use would take. Sizes in bytes.

    Args:
        precision: of the weights.
        parameters: numbers in the model, a tied head counted once.
        graphs: each with the size of its file.
        weights: the weight files and their sizes.
        others: the other files and their sizes; the goldens' is an estimate.
        in_memory: the weights while a bundle runs on a CPU: float32 ones are shared by all graphs.
        export: the most that exporting takes, at most three times the float32 weights and what the packages need.
        batch, length: of the pass below.
        prefill: one pass over [batch, length] tokens with the logits of the last ones, weights not counted.
        state: what decoding keeps after it.
        constants: of the graphs' sizes, the tables that they have because their passes are bounded.
        lengths: those bounds.
    """

    precision: str
    parameters: int
    graphs: dict[str, tuple[GraphSpec, int]]
    weights: dict[str, int]
    others: dict[str, int]
    in_memory: int
    export: int
    batch: int
    length: int
    prefill: int
    state: int
    constants: int = 0
    lengths: PassLengths = ANY

    @property
    def total(self) -> int:
        """Bytes of the whole bundle."""
        return sum((*(size for _, size in self.graphs.values()), *self.weights.values(), *self.others.values()))

    @property
    def running(self) -> int:
        """Bytes that one pass and its state take with the weights."""
        return self.in_memory + self.prefill + self.state


def dry_run(
    checkpoint: Checkpoint,
    *,
    mixing: str = "matmul",
    opset: int = TRACED_OPSET,
    lags: int = LAGS,
    max_length: int | None = None,
    static_length: bool = False,
    max_shard_size: int | None = None,
    precision: Precision | None = None,
    batch: int = 1,
    length: int = 1024,
    progress: Progress | None = None,
) -> DryRun:
    """Traces every graph on the meta device and reads no weight; nothing is written.

    Args:
        checkpoint: opened.
        mixing, opset, lags, max_length, static_length, max_shard_size, precision: as for `export_checkpoint`.
        batch, length: rows and tokens of the pass whose memory is wanted.
        progress: called with what is being done, done and total.

    Raises:
        InputError: bad arguments.
        LimitError: a pass of this size cannot be right or cannot fit.
    """
    check_arguments(mixing, opset, 0, lags, max_shard_size)
    lengths = bounds(max_length, static_length)
    lags = bounded_lags(lags, lengths)
    for name, value in (("--batch", batch), ("--length", length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}: expected an integer of at least 1, found {value!r:.40}")
    if lengths.capped(length) < length:
        raise InputError(
            f"--length: one pass reads at most --max-length {lengths.most} tokens, found {length}; lower it"
        )
    config = checkpoint.config
    spec = goldens.spec_of(config)
    check_forward(spec, batch, length, 1, mixing=mixing, lengths=lengths)
    if checkpoint.tokenizer is not None:
        check_tokenizer("export", checkpoint.tokenizer, config)
    lying = weights.graph_shapes(parameter_shapes(config), config)
    with torch.device("meta"):
        model = CaracalModel(config).eval().requires_grad_(False)
    traced = {}
    for index, name in enumerate(GRAPHS):
        if progress is not None:
            progress(f"tracing the graphs: {name}", index, len(GRAPHS))
        traced[name] = trace(model, name, mixing, opset, lags=lags, lengths=lengths)
    precision = precision or Precision("float32")
    planned = plan(precision, roles_of(traced.values()), lying)
    files = plan_files(stored_heads(lying, planned), max_shard_size)
    graphs: dict[str, tuple[GraphSpec, int]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, graph in traced.items():
            graph = rewritten(graph, planned)
            refer_to_weights(graph, files, Path(folder))
            size = ir.to_proto(graph).ByteSize()
            graphs[name] = (describe_graph(graph, f"{name}.onnx", graph.graph.opset_imports[""], mixing), size)
    recorded = goldens.extent(config, lags, lengths.most)
    others = {GOLDEN_FILE: recorded.bytes}
    if checkpoint.tokenizer is not None:
        others[TOKENIZER_FILE] = checkpoint.tokenizer.stat().st_size
    sizes = {file.name: file.bytes for file in files}
    whole = 4 * checkpoint.parameters()
    return DryRun(
        precision=precision.name,
        parameters=checkpoint.parameters(),
        graphs=graphs,
        weights=sizes,
        others=others,
        in_memory=_in_memory(precision, sum(sizes.values()), whole),
        export=int(_EXPORT_FACTOR * whole)
        + _EXPORT_BASE
        + forward_bytes(spec, 1, recorded.longest, recorded.positions, mixing),
        batch=batch,
        length=length,
        prefill=forward_bytes(spec, batch, length, 1, mixing, lengths),
        state=batch * state_bytes(spec, length),
        constants=0
        if lengths.most is None
        else sum(constant_bytes(graph) for name, graph in traced.items() if name in BOUNDED),
        lengths=lengths,
    )


def _in_memory(precision: Precision, stored: int, whole: int) -> int:
    """Bytes of the weights while ONNX Runtime's CPU kernels use them; all but float32 are copied by each graph that runs.

    Weights in 16 bits are widened when a graph is loaded.
    """
    if precision.name == "float32":
        return stored
    return stored + _LOADED * (whole if precision.name in ("float16", "bfloat16") else stored)


def dry_run_lines(found: DryRun, name: str) -> list[str]:
    """What was found, for people; the verdict is the last line."""
    rows = [["file", "size", "nodes", ""]]
    for graph, size in found.graphs.values():
        rows.append(
            [
                graph.file,
                format_bytes(size),
                f"{sum(graph.operators.values()):,}",
                f"opset {graph.opset}, {graph.mixing}",
            ]
        )
    rows += [[file, format_bytes(size), "", found.precision] for file, size in found.weights.items()]
    rows += [
        [file, ("about " if file == GOLDEN_FILE else "") + format_bytes(size), "", ""]
        for file, size in found.others.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    what = f"{found.batch} row{'s' if found.batch > 1 else ''} of {found.length:,} tokens"
    return [
        *lines,
        "",
        *_bound_lines(found),
        f"memory to export: at most about {format_bytes(found.export)}",
        f"memory to run {what}: about {format_bytes(found.running)} (weights {format_bytes(found.in_memory)}, "
        f"reading {format_bytes(found.prefill)}, state {format_bytes(found.state)})",
        "",
        f"DRY RUN  export {name}  {found.parameters:,} parameters, about {format_bytes(found.total)}  nothing was written",
    ]


def _bound_lines(found: DryRun) -> list[str]:
    """What bounded passes cost in the graphs; nothing without a bound."""
    if found.lengths.most is None:
        return []
    what = "exactly" if found.lengths.static else "at most"
    return [
        f"one pass reads {what} {found.lengths.most:,} tokens: {format_bytes(found.constants)} of the graphs are constants that they "
        f"would otherwise work out"
    ]
