"""What providers that are no ONNX Runtime have in common: looking for their packages, checking what goes in and out."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.errors import InputError, NotRunError, RuntimeToolError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers.fixed_shapes import axis_size, checked_inputs
from caracal_runtimes.providers.protocol import Detection, Provider
from caracal_runtimes.session import Binding, CopyBinding, Placement, first_line

Array = NDArray[Any]


class NativeSession(ABC):
    """A session that checks shapes and number types before native code sees them, and results after.

    Args:
        graph: the `.onnx` file.
        spec: what the manifest says of it.
        ep: the provider, with its device where one was asked for.
        threads: as in the protocol.
        shapes: inputs of the file and their shapes, where it was read; the manifest's otherwise.
    """

    def __init__(
        self,
        graph: Path,
        spec: GraphSpec,
        ep: str,
        threads: int,
        shapes: Mapping[str, Sequence[int | str | None]] | None = None,
    ) -> None:
        self.name, self.ep, self.threads = graph.name, ep, threads
        self._spec = spec
        self._outputs = {tensor.name: tensor for tensor in spec.outputs}
        self._shapes = shapes or {tensor.name: tensor.shape for tensor in spec.inputs}

    @abstractmethod
    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Runs the graph on checked, contiguous inputs in the graph's order."""

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str] | None = None) -> list[Array]:
        """Runs the graph; `outputs` are names, all in the graph's order when None.

        Raises:
            InputError: names, shapes or number types are not the graph's.
            NotRunError: with the runtime's own words when it fails.
        """
        names = list(self._outputs if outputs is None else outputs)
        for name in names:
            if name not in self._outputs:
                raise InputError(f"{self.name}: no output {name!r:.60}; it gives {', '.join(self._outputs)}")
        feeds, sizes = checked_inputs(self._spec, inputs)
        shapes = [tuple(axis_size(axis, sizes) for axis in self._outputs[name].shape) for name in names]
        try:
            # Not every runtime takes arrays of no elements, and there is nothing to compute.
            known = [tuple(size for size in shape if size is not None) for shape in shapes]
            if known == shapes and all(0 in shape for shape in known):
                values: list[Array] = [np.empty(shape) for shape in known]
            else:
                values = self._run(feeds, names)
        except (MemoryError, RuntimeToolError):
            raise
        except Exception as error:  # noqa: BLE001 - each library has its own, and native code any
            raise NotRunError(f"provider {self.ep}: running {self.name} failed: {first_line(error)}") from None
        return [self._result(*found) for found in zip(names, shapes, values, strict=True)]

    def binding(self) -> Binding:
        """For calls that read and write the same arrays again and again."""
        return CopyBinding(self)

    def inputs(self) -> dict[str, list[int | str | None]]:
        """The graph's inputs and their shapes."""
        return {name: list(shape) for name, shape in self._shapes.items()}

    def placement(self) -> Placement | None:
        """None: most of these runtimes do not tell, and have but one device."""
        return None

    def _result(self, name: str, shape: tuple[int | None, ...], value: Array) -> Array:
        if len(value.shape) != len(shape) or any(a not in (b, None) for a, b in zip(shape, value.shape, strict=True)):
            expected = self._outputs[name].shape
            raise NotRunError(
                f"provider {self.ep}: {self.name}: output {name} has shape {list(value.shape)}, by the manifest it has "
                f"{list(expected)}: the runtime computed something else"
            )
        return value.astype(self._outputs[name].dtype, copy=False)


def look_for(provider: Provider, *modules: str) -> Detection:
    """Whether a provider's packages are there and can be imported, with their versions. Raises nothing."""
    versions: dict[str, str] = {}
    for package in provider.packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except Exception:  # noqa: BLE001 - not found, or metadata that cannot be read
            return Detection("missing", versions, reason=f"{package} is not installed", remedy=provider.install())
    for module in modules:
        try:
            load_module(module)
        except Exception as error:  # noqa: BLE001 - a native library may fail in any way
            found = ", ".join(f"{package} {version}" for package, version in versions.items())
            return Detection(
                "broken",
                versions,
                reason=f"{found}: importing {module} fails: {first_line(error)}",
                remedy=f"pip install --force-reinstall --no-cache-dir {' '.join(provider.packages)}",
            )
    return Detection("ready", versions)


def load_module(name: str) -> Any:
    """A module of a runtime; by name, so that nothing needs it, or its types, before it is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, about their own dependencies
        return importlib.import_module(name)


def narrow_integers(ep: str, name: str, value: Array) -> Array:
    """An input for a runtime whose integers have 32 bits. Raises NotRunError where that would change them."""
    if value.dtype != np.int64:
        return value
    narrow = value.astype(np.int32)
    if not np.array_equal(narrow, value):
        raise NotRunError(f"provider {ep}: it computes with integers of 32 bits, found larger ones in {name}")
    return narrow
