"""Runtimes that load a graph for one set of input shapes: one loaded graph per set, and what the shapes have to be."""

from __future__ import annotations

import ast
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import GraphSpec, TensorSpec

Loaded = TypeVar("Loaded")

_OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


class FixedShapes(Generic[Loaded]):
    """Graphs loaded for the shapes that they were asked for, the latest of them kept.

    Args:
        load: loads the graph for inputs of these shapes, which it gets by name.
        keep: how many stay; the one that was not used for longest goes first.
    """

    def __init__(self, load: Callable[[Mapping[str, tuple[int, ...]]], Loaded], keep: int = 8) -> None:
        if keep < 1:
            raise InputError(f"keep: expected at least 1 loaded graph, found {keep}")
        self._load, self._keep = load, keep
        self._loaded: OrderedDict[tuple[tuple[str, tuple[int, ...]], ...], Loaded] = OrderedDict()
        # Two threads that ask for the same shapes must not both load them: that takes seconds, and memory.
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._loaded)

    def get(self, inputs: Mapping[str, NDArray[Any]]) -> Loaded:
        """The graph for the shapes of these inputs, loaded now if it is not there."""
        shapes = {name: value.shape for name, value in inputs.items()}
        key = tuple(sorted(shapes.items()))
        with self._lock:
            if key in self._loaded:
                self._loaded.move_to_end(key)
                return self._loaded[key]
            # Room first: two large graphs at once may not fit where one does.
            while len(self._loaded) >= self._keep:
                self._loaded.popitem(last=False)
            loaded = self._loaded[key] = self._load(shapes)
            return loaded


def dimensions(spec: GraphSpec, inputs: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    """Size of each symbolic axis of the graph's inputs.

    Raises:
        InputError: an input is missing or unknown, has another number of axes or another fixed size, or two inputs
            contradict each other.
    """
    wanted = {tensor.name: tensor for tensor in spec.inputs}
    for name in sorted(wanted.keys() ^ inputs.keys()):
        found = "it is missing" if name in wanted else "the graph has no such input"
        raise InputError(f"{spec.file}: input {name!r:.60}: {found}; it takes {', '.join(wanted)}")
    sizes: dict[str, int] = {}
    origin: dict[str, str] = {}
    for name, tensor in wanted.items():
        shape = inputs[name].shape
        if len(shape) != len(tensor.shape):
            raise _mismatch(spec, tensor, shape)
        for axis, size in zip(tensor.shape, shape, strict=True):
            if isinstance(axis, str) and axis.isidentifier() and sizes.setdefault(axis, size) != size:
                raise _mismatch(spec, tensor, shape, f": {axis} is {sizes[axis]} by {origin[axis]}")
            if isinstance(axis, str):
                origin.setdefault(axis, name)
    for name, tensor in wanted.items():
        shape = inputs[name].shape
        for axis, size in zip(tensor.shape, shape, strict=True):
            if axis_size(axis, sizes) not in (size, None):
                raise _mismatch(spec, tensor, shape)
    return sizes


def axis_size(axis: int | str, sizes: Mapping[str, int]) -> int | None:
    """Size of an axis that is a number, a name or simple arithmetic of names (`2*length`); None if it cannot be told."""
    if isinstance(axis, int):
        return axis
    try:
        return _evaluate(ast.parse(axis, mode="eval").body, sizes)
    except (SyntaxError, KeyError, ValueError, ZeroDivisionError, RecursionError):
        return None


def checked_inputs(
    spec: GraphSpec, inputs: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """The inputs in the graph's order and contiguous, and the sizes of their symbolic axes.

    Raises:
        InputError: names, number types or shapes are not those of the graph, or an index points outside of what it
            selects from. Native code may end the process over any of these.
    """
    for name, value in inputs.items():
        if not isinstance(value, np.ndarray):
            raise InputError(f"{spec.file}: input {name!r:.60}: expected a numpy array, found {type(value).__name__}")
    sizes = dimensions(spec, inputs)
    for tensor in spec.inputs:
        found = inputs[tensor.name].dtype
        if found != np.dtype(tensor.dtype):
            raise InputError(f"{spec.file}: input {tensor.name!r:.60}: expected {tensor.dtype}, found {found}")
    for name, (lowest, beyond) in _index_bounds(spec, sizes).items():
        values = inputs.get(name)
        if values is not None and values.size and not (lowest <= values.min() and values.max() < beyond):
            raise InputError(
                f"{spec.file}: input {name}: expected numbers from {lowest} to {beyond - 1}, found {values.min()} to "
                f"{values.max()}"
            )
    return {tensor.name: np.require(inputs[tensor.name], requirements=["C", "A"]) for tensor in spec.inputs}, sizes


def _index_bounds(spec: GraphSpec, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """For inputs that are indices, the lowest number that is one and the first beyond."""
    bounds: dict[str, tuple[int, int]] = {}
    vocabulary = next((tensor.shape[-1] for tensor in spec.outputs if tensor.name == "logits"), None)
    if isinstance(vocabulary, int):
        bounds["input_ids"] = (0, vocabulary)
    if "length" in sizes:
        bounds["logit_positions"], bounds["lengths"] = (0, sizes["length"]), (1, sizes["length"] + 1)
    return bounds


def _mismatch(spec: GraphSpec, tensor: TensorSpec, shape: tuple[int, ...], why: str = "") -> InputError:
    return InputError(
        f"{spec.file}: input {tensor.name!r:.60}: expected shape {list(tensor.shape)}, found {list(shape)}{why}"
    )


def _evaluate(node: ast.AST, sizes: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, sizes), _evaluate(node.right, sizes))
    raise ValueError(ast.dump(node))
