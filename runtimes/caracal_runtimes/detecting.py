"""Asking providers what they find on this machine, in processes of their own: foreign libraries are loaded for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from caracal_runtimes.isolation import Emit, Ended, run_isolated
from caracal_runtimes.providers import NAMES, Detection, Provider, all_providers, parse
from caracal_runtimes.providers.ort_provider import importable
from caracal_runtimes.records import build, jsonable

TIME_LIMIT = 60.0
_AT_ONCE = 4  # processes: each mostly waits for the disk
_HARMLESS = ("onnxruntime", "onnx")  # the former's own build has its CPU provider alone


def detect_all(time_limit: float = TIME_LIMIT) -> list[tuple[Provider, Detection]]:
    """What every known provider says of this machine."""
    providers = all_providers()
    return list(zip(providers, detect_each(providers, time_limit), strict=True))


def detect_each(providers: Sequence[Provider], time_limit: float = TIME_LIMIT) -> list[Detection]:
    """What some providers say of this machine, in their order.

    Those of which nothing is installed share one process, where most have nothing to load; were it to end, each of those
    that had not answered gets one of its own, as every other provider does.
    """
    quiet = [provider for provider in providers if _nothing_installed(provider)]
    found: dict[str, Detection] = {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        together = pool.submit(_ask, quiet, time_limit)
        apart = [provider for provider in providers if provider not in quiet]
        found.update(
            zip([each.name for each in apart], pool.map(lambda each: detect(each, time_limit), apart), strict=True)
        )
        found.update(together.result()[0])
        rest = [provider for provider in quiet if provider.name not in found]
        found.update(
            zip([each.name for each in rest], pool.map(lambda each: detect(each, time_limit), rest), strict=True)
        )
    return [found[provider.name] for provider in providers]


def detect(provider: Provider, time_limit: float = TIME_LIMIT) -> Detection:
    """What one provider says of this machine, in a process of its own."""
    found, ended = _ask([provider], time_limit)
    if provider.name in found:
        return found[provider.name]
    return Detection("broken", {}, (), f"looking for it {how(ended)}", provider.install(), died=True)


def how(ended: Ended) -> str:
    """How a process ended, in words that follow its name."""
    if ended.outcome == "done":
        return "ended without a result"
    return ended.reason if ended.outcome != "raised" else f"failed: {ended.reason}"


def detect_in_process(arguments: Mapping[str, Any], emit: Emit) -> None:
    """The other side: one answer for each name, as it comes."""
    for name in arguments["eps"]:
        provider, _ = parse(name)
        emit({"name": name, "detection": jsonable(asdict(provider.detect()))})


def _ask(providers: Iterable[Provider], time_limit: float) -> tuple[dict[str, Detection], Ended]:
    found: dict[str, Detection] = {}

    def hear(event: Mapping[str, Any]) -> None:
        found[event["name"]] = build(Detection, event["detection"], event["name"])

    names = [provider.name for provider in providers]
    if not names:
        return found, Ended("done", "", 0, 0.0, None)
    target = "caracal_runtimes.detecting:detect_in_process"
    return found, run_isolated(target, {"eps": names}, hear, time_limit=time_limit)


def _nothing_installed(provider: Provider) -> bool:
    """Whether a provider is one of ours, and no library would be loaded for it but ONNX Runtime and the system's."""
    if provider.name not in NAMES:
        return False
    for package in provider.packages:
        with contextlib.suppress(PackageNotFoundError):
            if package not in _HARMLESS and version(package):
                return False
    plugin: str | None = getattr(provider, "plugin", None)
    return plugin is None or not importable(plugin)
