"""A bundle's graphs as files: their weights elsewhere, what the manifest says of them, and whether they are valid ONNX."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
from caracal_runtimes.manifest import GraphSpec, TensorSpec

from caracal_export.errors import VerificationError
from caracal_export.weight_files import WeightFile


def refer_to_weights(graph: ir.Model, files: Sequence[WeightFile], folder: Path) -> None:
    """Makes every initializer of a graph a reference into the weight files (ONNX external data), in place.

    Raises:
        VerificationError: an initializer is none of the weights.
    """
    places = {name: (file.name, entry) for file in files for name, entry in file.tensors.items()}
    for name, value in graph.graph.initializers.items():
        if name not in places:
            raise VerificationError(f"weights: the graph has and the checkpoint has not: {name}")
        assert value.dtype is not None and value.shape is not None
        location, entry = places[name]
        value.const_value = ir.ExternalTensor(
            location, entry.offset, entry.bytes, value.dtype, shape=value.shape, name=name, base_dir=folder
        )


def describe_graph(graph: ir.Model, file: str, opset: int, mixing: str) -> GraphSpec:
    """What the manifest says of a graph."""

    def spec(value: ir.Value) -> TensorSpec:
        assert value.dtype is not None and value.shape is not None and value.name is not None
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        return TensorSpec(value.name, {"FLOAT": "float32", "INT64": "int64"}[value.dtype.name], shape)

    return GraphSpec(
        file=file,
        opset=opset,
        mixing=mixing,
        inputs=tuple(map(spec, graph.graph.inputs)),
        outputs=tuple(map(spec, graph.graph.outputs)),
        operators=dict(sorted(Counter(node.op_type for node in graph.graph).items())),
    )


def check_graph(path: Path) -> None:
    """ONNX's own checks on a written graph: the checker with full shape inference, strictly.

    Raises:
        VerificationError: with the checker's words.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
        graph = onnx.load(str(path), load_external_data=False)
        onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(f"the graph {path.name} is not valid ONNX: {error}") from error
