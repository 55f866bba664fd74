"""Each use of a stored weight, cut out of a written graph, run alone, and compared with what the stored numbers stand for.

A level says how far fewer bits may lead a model as a whole, which is far enough for a graph to be wrong in: a zero point that
is off by one hides in it. Nothing hides here, since the inputs are such that no format rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from caracal_runtimes.errors import NotRunError
from caracal_runtimes.providers.ort import CPU, import_onnxruntime
from caracal_runtimes.safetensors_file import SafetensorsFiles
from caracal_runtimes.session import first_line
from numpy.typing import NDArray
from onnx.external_data_helper import load_external_data_for_tensor

from caracal_export.errors import VerificationError
from caracal_export.precision.formats import Float16
from caracal_export.precision.plan import EMBEDDING, HEAD, Planned, weight_reads

_ROWS = (1.0, 2.0**-3, 2.0**-6)  # the largest value of each row: a factor that all of them share would not do
_MOST_CODE = 127  # inputs are whole parts of the row's largest value, which bytes and halves have
_LIMIT = 1e-4  # of a row's relative L2; only the order of float32 sums is free
_HALF_LIMIT = 2e-2  # sums and results in half precision


@dataclass(frozen=True)
class Use:
    """A node of a float32 graph that reads a planned weight.

    Args:
        planned: what is stored of the weight.
        given: name of the activations, or of the indices of rows.
        result: name of the output, which a rewritten graph has too.
    """

    planned: Planned
    given: str
    result: str


def uses_of(model: ir.Model, planned: Sequence[Planned]) -> list[Use]:
    """All uses of planned weights in a graph that is not rewritten yet."""
    chosen = {(each.weight, each.role): each for each in planned}
    found = []
    for node, place, name, role in weight_reads(model):
        if (name, role) in chosen:
            given = node.inputs[1 - place]
            assert given is not None
            found.append(Use(chosen[name, role], given.name or "", node.outputs[0].name or ""))
    return found


def check_uses(uses: Mapping[Path, Sequence[Use]], stored: SafetensorsFiles) -> None:
    """Runs every use alone with ONNX Runtime, and compares it with the same in float64.

    Args:
        uses: by the rewritten graph's file, from `uses_of`.
        stored: the weights that were written.

    Raises:
        VerificationError: a graph reads a weight otherwise than the plan says.
        NotRunError: ONNX Runtime does not run it.
    """
    graphs = {path: onnx.load(path, load_external_data=False) for path, some in uses.items() if some}
    by_weight: dict[Planned, list[tuple[Path, Use]]] = {}
    for path, some in uses.items():
        for use in some:
            by_weight.setdefault(use.planned, []).append((path, use))
    for planned, places in by_weight.items():
        tensors = {ending: stored.stored(planned.stored_as + ending) for ending in planned.format.heads(planned.shape)}
        dense = planned.format.dense(tensors, planned.shape)
        given = _inputs(planned)
        if planned.role == HEAD and not planned.turned:
            dense = dense.T
        expected = dense[given] if planned.role == EMBEDDING else np.matmul(given, dense, dtype=np.float64)
        limit = _HALF_LIMIT if isinstance(planned.format, Float16) else _LIMIT
        for path, use in places:
            got = _run(_cut(graphs[path], path, use), use, given)
            if got.shape != expected.shape:
                raise VerificationError(
                    f"{_what(path, use)} has shape {list(got.shape)}, expected {list(expected.shape)}"
                )
            # The norm of a row of zeros is that of what it should be.
            size = np.maximum(np.linalg.norm(expected, axis=-1), np.finfo(np.float32).tiny)
            off = float((np.linalg.norm(got - expected, axis=-1) / size).max(initial=0.0))
            if not off <= limit:
                raise VerificationError(
                    f"{_what(path, use)} is {off:.1e} from what the stored weight gives (relative L2, at most {limit:.0e})"
                )


def _what(path: Path, use: Use) -> str:
    return f"quantize: {path.name}: {use.result}, which reads {use.planned.stored_as} as {use.planned.format.name},"


def _inputs(planned: Planned) -> NDArray[Any]:
    """Indices of rows, or activations [3, in] ([heads, 3, in] for one matrix per head) that no format rounds."""
    rng = np.random.default_rng(0)
    if planned.role == EMBEDDING:
        rows = planned.shape[0]
        return np.unique(np.concatenate([[0, rows - 1], rng.integers(0, rows, 64)]))
    *heads, width, outputs = planned.shape
    if planned.role == HEAD and not planned.turned:
        width = outputs
    codes = rng.integers(-_MOST_CODE, _MOST_CODE + 1, (*heads, len(_ROWS), width))
    codes[..., 0] = _MOST_CODE
    return (codes * (np.array(_ROWS) / (_MOST_CODE + 1))[:, None]).astype(np.float32)


def _cut(graph: onnx.ModelProto, path: Path, use: Use) -> onnx.ModelProto:
    """The part of a graph that makes a use's result of what it is given, with its weights inside."""
    producers = {name: node for node in graph.graph.node for name in node.output}
    initializers = {tensor.name: tensor for tensor in graph.graph.initializer}
    needed: dict[str, onnx.NodeProto] = {}
    weights: dict[str, onnx.TensorProto] = {}
    waiting = [use.result]
    while waiting:
        name = waiting.pop()
        if name in ("", use.given):
            continue
        if name in initializers:
            weights[name] = initializers[name]
        elif name in producers:
            node = producers[name]
            if node.name not in needed:
                needed[node.name] = node
                waiting += node.input
        else:
            raise VerificationError(f"{_what(path, use)} depends on {name!r:.80} too")
    tensors = []
    for tensor in weights.values():
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        load_external_data_for_tensor(copy, str(path.parent))
        copy.data_location = onnx.TensorProto.DEFAULT
        del copy.external_data[:]
        tensors.append(copy)
    kind = onnx.TensorProto.INT64 if use.planned.role == EMBEDDING else onnx.TensorProto.FLOAT
    cut = onnx.helper.make_graph(
        [node for node in graph.graph.node if node.name in needed],
        "use",
        [onnx.helper.make_tensor_value_info(use.given, kind, None)],
        [onnx.helper.make_tensor_value_info(use.result, onnx.TensorProto.FLOAT, None)],
        tensors,
    )
    return onnx.helper.make_model(cut, opset_imports=graph.opset_import, ir_version=graph.ir_version)


def _run(model: onnx.ModelProto, use: Use, given: NDArray[Any]) -> NDArray[np.float64]:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    # Else activations that meet int4 weights are rounded to 8 bits.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=[CPU])
        (got,) = session.run([use.result], {use.given: given})
    except Exception as error:  # noqa: BLE001 - the library's own exception types are not public
        raise NotRunError(f"quantize: {use.result} of a graph does not run: {first_line(error)}") from None
    return np.asarray(got, np.float64)
