"""ONNX graphs rewritten for runtimes that read less of the format: fixed sizes, no shape arithmetic, weights inside.

A graph of a bundle takes any batch and any length, so it works its sizes out while it runs. A runtime that wants to know
every shape before gets the same graph for one set of input shapes, in which all that arithmetic is a constant.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import BundleError, NotRunError
from caracal_runtimes.manifest import safe_name
from caracal_runtimes.session import first_line

#: onnx.ModelProto and its parts. The package is looked up by name: only those providers that rewrite graphs need it.
Proto = Any
Shapes = Mapping[str, tuple[int, ...]]

_MAX_FILE = 2**31 - 2**20  # protobuf's limit, with room for the nodes


def load(graph: Path) -> Proto:
    """A graph without its weights. Raises NotRunError without the package `onnx`, BundleError for an unreadable file."""
    onnx = _import_onnx()
    try:
        model: Proto = onnx.load(str(graph), load_external_data=False)
    except Exception as error:  # noqa: BLE001 - protobuf's errors are no part of an interface
        raise BundleError(
            f"{graph.name} cannot be read as ONNX ({first_line(error)}); export the checkpoint again"
        ) from None
    return model


def input_shapes(model: Proto) -> dict[str, list[int | str | None]]:
    """Inputs of a graph and their shapes, as the graph has them."""
    return {
        value.name: [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
            for dim in value.type.tensor_type.shape.dim
        ]
        for value in model.graph.input
    }


def fix_shapes(model: Proto, shapes: Shapes) -> Proto:
    """A copy for inputs of these shapes, in which whatever follows from the shapes alone is a constant.

    Weights stay what they are: references to their file, which nothing here reads.

    Args:
        model: a graph whose inputs may have symbolic axes.
        shapes: of every input.
    """
    fixed: Proto = _import_onnx().ModelProto()
    fixed.CopyFrom(model)
    graph = fixed.graph
    # Shapes that the exporter noted hold names of axes, which runtimes find to contradict the sizes.
    del graph.value_info[:]
    for value in graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    for value in graph.input:
        _set_shape(value, shapes[value.name])
    # A Reshape to a size that has just become known gives the next shape, from which more follows.
    while _fold(fixed, known := _static_shapes(fixed)):
        pass
    for value in graph.output:
        if value.name in known:
            _set_shape(value, known[value.name])
    return fixed


def narrow_inputs(model: Proto) -> Proto:
    """A copy that takes its int64 inputs as int32 and widens them itself."""
    onnx = _import_onnx()
    kinds = onnx.TensorProto
    narrow: Proto = onnx.ModelProto()
    narrow.CopyFrom(model)
    graph = narrow.graph
    widened = {}
    for value in graph.input:
        if value.type.tensor_type.elem_type == kinds.INT64:
            value.type.tensor_type.elem_type = kinds.INT32
            widened[value.name] = f"{value.name}/int64"
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = widened.get(name, name)
    casts = [onnx.helper.make_node("Cast", [name], [wide], to=kinds.INT64) for name, wide in widened.items()]
    nodes = [*casts, *graph.node]
    graph.CopyFrom(onnx.helper.make_graph(nodes, graph.name, graph.input, graph.output, graph.initializer))
    return narrow


def inline_weights(model: Proto, folder: Path) -> Proto:
    """A copy with its weights inside. Raises BundleError when they cannot be read.

    Read here, because the package's own function refuses files with several links, which copies of bundles often are.

    Args:
        model: the graph.
        folder: of the file that its weights refer to.
    """
    onnx = _import_onnx()
    whole: Proto = onnx.ModelProto()
    whole.CopyFrom(model)
    for tensor in whole.graph.initializer:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        try:
            with (folder / safe_name(place["location"], tensor.name)).open("rb") as file:
                file.seek(int(place.get("offset", 0)))
                size = int(place.get("length", -1))
                data = file.read(size)
        except (OSError, KeyError, ValueError, OverflowError) as error:
            raise BundleError(f"{tensor.name}: this weight cannot be read ({error})") from None
        if 0 <= size != len(data):
            raise BundleError(f"{tensor.name}: {place['location']} is cut short; export the checkpoint again")
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        tensor.raw_data = data
    return whole


class RewrittenFile:
    """A graph with its weights inside, in a temporary folder that goes with this object.

    Args:
        model: the graph.
        weights: folder of the file that its weights refer to.
        name: of the file to write.

    Raises:
        BundleError: the weights cannot be read, or do not fit into one ONNX file.
    """

    def __init__(self, model: Proto, weights: Path, name: str) -> None:
        whole = inline_weights(model, weights)
        size = sum(len(tensor.raw_data) for tensor in whole.graph.initializer)
        if size >= _MAX_FILE:
            raise BundleError(
                f"{name}: this runtime needs the weights inside the ONNX file, which holds less than 2 GiB; they are "
                f"{size / 2**30:.1f} GiB: use a provider that reads them where they lie, as openvino-native does"
            )
        self.folder = Path(tempfile.mkdtemp(prefix="caracal-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.path = self.folder / name
        self.path.write_bytes(whole.SerializeToString())

    def close(self) -> None:
        """Removes the folder."""
        self._remove()

    def __enter__(self) -> RewrittenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _import_onnx(module: str = "onnx") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotRunError(f"rewriting a graph needs the package onnx ({error}): pip install onnx") from None


def _set_shape(value: Proto, shape: tuple[int, ...]) -> None:
    tensor = value.type.tensor_type
    tensor.ClearField("shape")
    tensor.shape.SetInParent()  # a scalar has a shape too
    for size in shape:
        tensor.shape.dim.add().dim_value = size


def _static_shapes(model: Proto) -> dict[str, tuple[int, ...]]:
    graph = _import_onnx("onnx.shape_inference").infer_shapes(model, data_prop=True).graph
    shapes = {}
    for value in [*graph.input, *graph.value_info, *graph.output]:
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    return shapes


def _fold(model: Proto, known: Shapes) -> bool:
    """Computes the nodes that depend on neither inputs nor weights, and says whether there were any.

    Args:
        model: its nodes and initializers are altered.
        known: shapes; the Shape of one of these is a constant too.
    """
    helper, numpy_helper = _import_onnx("onnx.helper"), _import_onnx("onnx.numpy_helper")
    external = _import_onnx().TensorProto.EXTERNAL
    graph = model.graph
    values: dict[str, NDArray[Any]] = {
        tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.data_location != external
    }
    given = set(values)
    outputs = {value.name for value in graph.output}
    constant = {"", *values}  # an optional input that is left out has the empty name
    folded, left = [], []
    for node in graph.node:
        if node.op_type == "Shape" and node.input[0] in known:
            bounds = {attribute.name: attribute.i for attribute in node.attribute}
            shape = known[node.input[0]][bounds.get("start", 0) : bounds.get("end")]
            values[node.output[0]] = np.asarray(shape, np.int64)
        elif not constant.issuperset(node.input) or not outputs.isdisjoint(node.output):
            left.append(node)
            continue
        else:
            folded.append(node)
        constant.update(node.output)
    if len(left) == len(graph.node):
        return False
    wanted = [name for node in folded for name in node.output if name]
    if wanted:
        arithmetic = helper.make_graph(
            folded,
            "arithmetic",
            [helper.make_empty_tensor_value_info(name) for name in values],
            [helper.make_empty_tensor_value_info(name) for name in wanted],
        )
        evaluator = _import_onnx("onnx.reference").ReferenceEvaluator(
            helper.make_model(arithmetic, opset_imports=model.opset_import)
        )
        values |= zip(wanted, map(np.asarray, evaluator.run(None, values)), strict=True)
    read = {name for node in left for name in node.input} | outputs
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    kept += [numpy_helper.from_array(value, name) for name, value in values.items() if name in read - given]
    rest = helper.make_graph(left, graph.name, graph.input, graph.output, kept)
    graph.CopyFrom(rest)
    return True
