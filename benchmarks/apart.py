"""Calls in a process of their own, since what one measurement leaves behind in memory would be counted for the next."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def apart(function: Callable[..., Result], *arguments: object) -> Result:
    """A call in a fresh process, which may start others in turn."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
