"""Every known way to run a graph, by the name that `--ep` takes. To add one: a module, and a row here.

Another distribution adds one by an entry point of the group `caracal.providers` that names its `Provider` object.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import entry_points
from typing import cast

from caracal_runtimes.errors import InputError
from caracal_runtimes.providers.protocol import Detection, Provider, Settings, State

#: Name and module of each provider; the modules import what they need only when they are used.
MODULES = {
    "cpu": "cpu",
    "cuda": "cuda",
    "tensorrt": "tensorrt",
    "nvtensorrtrtx": "nvtensorrtrtx",
    "directml": "directml",
    "openvino": "openvino",
    "webgpu": "webgpu",
    "coreml": "coreml",
    "migraphx": "migraphx",
    "rocm": "rocm",
    "qnn": "qnn",
    "ggml": "ggml",
    "reference": "reference",
    "openvino-native": "openvino_native",
    "tract": "tract",
    "iree": "iree",
    "mnn": "mnn",
}
NAMES = tuple(MODULES)
GROUP = "caracal.providers"
__all__ = [
    "GROUP",
    "MODULES",
    "NAMES",
    "Detection",
    "Provider",
    "Settings",
    "State",
    "all_providers",
    "our_providers",
    "parse",
    "provider",
]


def provider(name: str) -> Provider:
    """The provider of a name or an alias, in any case. Raises InputError that lists the names."""
    wanted = name.strip().lower()
    if wanted in MODULES:
        return _load(wanted)
    for each in our_providers():
        if wanted in each.aliases:
            return each
    for each in _foreign():
        if wanted == each.name or wanted in each.aliases:
            return each
    names = ", ".join(each.name for each in all_providers())
    raise InputError(f"--ep must be one of {names}, found {name!r:.40}")


def parse(ep: str) -> tuple[Provider, str | None]:
    """`NAME` or `NAME:DEVICE` as a provider and a device. Raises InputError."""
    name, colon, device = ep.partition(":")
    if colon and not device.strip():
        raise InputError(f"--ep: expected a device after the colon, found {ep!r:.40}")
    return provider(name), device.strip() or None


def our_providers() -> list[Provider]:
    """Those that this distribution has, in the order of `NAMES`."""
    return [_load(name) for name in NAMES]


def all_providers() -> list[Provider]:
    """All of them: ours in the order of `NAMES`, then those of other distributions."""
    return [*our_providers(), *_foreign()]


def _load(name: str) -> Provider:
    return cast(Provider, importlib.import_module(f"{__name__}.{MODULES[name]}").PROVIDER)


@lru_cache(maxsize=1)
def _foreign() -> tuple[Provider, ...]:
    found: dict[str, Provider] = {}
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign package does while it loads
            home = getattr(entry, "dist", None)
            package = f" {home.name}" if home is not None else ""
            raise InputError(
                f"the provider {entry.name} of another package does not load: {error or type(error).__name__}; remove the "
                f"package{package}, or mend it"
            ) from None
        if not isinstance(loaded, Provider) or loaded.name in MODULES or loaded.name in found:
            raise InputError(f"the provider {entry.name} of another package must be a Provider with a name of its own")
        found[loaded.name] = loaded
    return tuple(found.values())
