"""What a provider is: the one protocol that `--ep` names stand for. See docs/adding-a-provider.md."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.manifest import GraphSpec
from caracal_runtimes.session import Session, check_threads, default_threads

#: ready: installed, and a device is there; missing: `remedy` installs it; broken: installed, and something is wrong with
#: the installation; impossible: not on this machine, whatever is installed.
State = Literal["ready", "missing", "broken", "impossible"]


@dataclass(frozen=True)
class Detection:
    """What can be said of a provider on this machine without running anything.

    Args:
        state: see `State`.
        versions: of the packages and libraries that it consists of.
        devices: those that can be asked for, the default one first, as `name: description`; the name goes after
            `--ep NAME:`.
        reason: why it is not ready, in one line that names what is missing.
        remedy: what to do about it, as a command where there is one.
        died: looking for it ended the process that looked.
    """

    state: State
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    reason: str = ""
    remedy: str = ""
    died: bool = False


@dataclass(frozen=True)
class Settings:
    """How a provider is to be run.

    Args:
        device: one of the provider's devices, None for its default.
        threads: 0 for one per core that this process may use.
        fast: leave the provider's own defaults, which may trade accuracy for speed; False asks for float32 throughout.
        options: the user's own, which go before ours.
        weights: the bundle's weight files, to be read where they are mapped once for all sessions instead of making a
            copy for this one; none makes a copy, which is faster for several rows. Runtimes that cannot share ignore it.
        allow_fallback: accept a session in which another provider runs computing nodes; otherwise it is a finding.
        low_memory: give back what a pass over many tokens took, instead of keeping it for the next one; slower.
            Runtimes that cannot ignore it.
        cached_by: digest of the weights that the graph reads, or of their absence: the optimised graph may be taken from this
            user's cache. Empty: it is optimised anew. Runtimes that keep none ignore it.
    """

    device: str | None = None
    threads: int = 0
    fast: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    weights: tuple[Path, ...] = ()
    allow_fallback: bool = False
    low_memory: bool = False
    cached_by: str = ""


class Provider(ABC):
    """One way to run a graph.

    Class attributes:
        name: what `--ep` takes, lower case.
        aliases: other names for it.
        title: for people.
        packages: distributions that `pip` installs for it, the one that decides its version first.
        extra: the extra of this distribution that brings them; None where nothing can be installed.
        level: tolerance level that it is held to in its exact settings (`tolerances.py`).
        known_options: options that `--ep-option` may set; None where the provider's own check has to do.
    """

    name: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()
    title: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str | None] = None
    level: ClassVar[str] = "strict"
    known_options: ClassVar[frozenset[str] | None] = None

    @abstractmethod
    def detect(self) -> Detection:
        """Looks at what is installed and which devices are there. Runs no graph and raises nothing."""

    @abstractmethod
    def applied(self, settings: Settings) -> dict[str, str]:
        """The options that a session with these settings gets, for reports: what "exact" or "fast" means here."""

    def variables(self, settings: Settings) -> dict[str, str]:
        """Environment variables that a session with these settings needs, where a runtime has no option for it."""
        return {}

    @abstractmethod
    def open(self, graph: Path, spec: GraphSpec, settings: Settings) -> Session:
        """Loads a graph; its external weights lie beside it.

        Args:
            graph: the `.onnx` file.
            spec: what the manifest says of it: names, dtypes and shapes of inputs and outputs.
            settings: device, threads, options.

        Raises:
            InputError: an option or a device that this provider does not have.
            PlacementError: other providers run computing nodes of the graph, and `allow_fallback` is not set.
            NotRunError: it is not installed, or does not work here; the message says what to do.
            BundleError: the graph cannot be loaded although the provider works.
        """

    def level_for(self, device: str | None) -> str:
        """The level that a device is held to: most neural processors compute in half precision whatever they are asked."""
        return "half" if device is not None and device.upper().startswith("NPU") else self.level

    def check(self, settings: Settings) -> None:
        """Refuses an option that the provider does not have: most would ignore it. Raises InputError."""
        unknown = [key for key in settings.options if self.known_options is not None and key not in self.known_options]
        if unknown:
            takes = ", ".join(sorted(self.known_options or ())) or "none"
            raise InputError(f"--ep-option: the provider {self.name} takes {takes}, found {', '.join(unknown)}")

    def state_memory(self, settings: Settings) -> str | None:
        """The memory in which sessions can keep the decode state, in the runtime's words; None for main memory.

        Where it is not None, `open` gives sessions that are `caracal_runtimes.session.DeviceSession`s.
        """
        return None

    def ep(self, settings: Settings) -> str:
        """The provider's name, with the device where one was asked for."""
        return self.name if settings.device is None else f"{self.name}:{settings.device}"

    def ready(self, settings: Settings) -> tuple[int, str]:
        """Checks settings against what the provider has, and that it can be used.

        Returns:
            The number of threads, and the device's name as the provider spells it, its default where none is asked for;
            an empty name if it has but one.

        Raises:
            InputError: an unknown device or option, or a bad number of threads.
            NotRunError: it is not installed or broken.
        """
        check_threads(settings.threads)
        self.check(settings)
        os.environ.update(self.variables(settings))  # before its library is loaded, which may read them once
        found = self.detect()
        if found.state != "ready":
            remedy = f"; {found.remedy}" if found.remedy else ""
            raise NotRunError(f"provider {self.ep(settings)} does not work here: {found.reason}{remedy}")
        devices = [device.partition(":")[0] for device in found.devices]
        wanted = devices[0] if settings.device is None and devices else settings.device or ""
        for device in devices or [""]:
            if device.lower() == wanted.lower():
                return settings.threads or default_threads(), device
        has = f"has the devices {', '.join(devices)}" if devices else "has no devices to choose from"
        raise InputError(f"--ep: provider {self.name} {has}, found {wanted!r:.60}")

    def matrix_devices(self, detection: Detection) -> tuple[str, ...]:
        """Devices that a comparison of everything runs one by one, since each has kernels of its own; none: the default."""
        return ()

    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'caracal-onnx[{self.extra}]'" if self.extra else ""
