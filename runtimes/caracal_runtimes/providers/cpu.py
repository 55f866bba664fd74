"""ONNX Runtime's own CPU kernels: always there, and what every other provider falls back to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from caracal_runtimes.errors import InputError
from caracal_runtimes.machine import processor
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.providers.ort_provider import OrtProvider
from caracal_runtimes.providers.protocol import Settings
from caracal_runtimes.session import Session

#: How long a thread that has nothing to do looks for more before it sleeps. Most pauses inside a pass are shorter; see
#: docs/performance.md for what longer and shorter ones cost.
SPIN_MICROSECONDS = 50
_MOST_SPIN = 1_000_000


class Cpu(OrtProvider):
    """Runs everything; float32 throughout by itself.

    Options: `spin_us`, microseconds that an idle thread waits awake; `pack`, 1 for a packed copy of the weights for every
    graph, which is faster and takes the memory of another set of weights each.
    """

    name = "cpu"
    title = "ONNX Runtime, CPU"
    packages = ("onnxruntime",)
    extra = "cpu"
    ort_name = "CPUExecutionProvider"
    known_options = frozenset({"spin_us", "pack"})
    shares = True
    device_memory = "cpu"

    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph. See `Provider.open`."""
        self.check(settings)
        if settings.options.get("pack") == "1":  # and what is packed would be written into a cached graph
            settings = replace(settings, weights=(), cached_by="")
        return super().open(graph, spec, settings)

    def check(self, settings: Settings) -> None:
        """Refuses an option that the provider does not have, and a value that an option cannot have. Raises InputError."""
        super().check(settings)
        spin = settings.options.get("spin_us", "0")
        if not (spin.isascii() and spin.isdecimal() and len(spin) < 10 and int(spin) <= _MOST_SPIN):
            raise InputError(f"--ep-option: spin_us must be an integer from 0 to {_MOST_SPIN}, found {spin!r:.40}")
        pack = settings.options.get("pack", "0")
        if pack not in ("0", "1"):
            raise InputError(f"--ep-option: pack must be 0 or 1, found {pack!r:.40}")

    def state_memory(self, settings: Settings) -> None:
        """Main memory, which the host writes into without a copy. Sessions can keep arrays all the same, for tests."""
        return

    def _configure(self, options: Any, settings: Settings) -> list[Any]:
        super()._configure(options, settings)
        spin = int(settings.options.get("spin_us", SPIN_MICROSECONDS))
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
        if spin:
            options.add_session_config_entry("session.intra_op.spin_duration_us", str(spin))
        return [self.ort_name]  # our options are none of ONNX Runtime's

    def _builtin_devices(self, ort: Any) -> list[str]:
        return [f"cpu: {processor()}"]


PROVIDER = Cpu()
