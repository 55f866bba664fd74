"""The graphs that decoding runs, behind plain functions of arrays, and the sizes that they have in common.

Symbols: B rows, L tokens, N layers of the kind MHF, S layers of sliding-window attention, D channels, K taps, W window,
M lags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from caracal_runtimes.graph_interface import check_manifest, lags_of
from caracal_runtimes.manifest import GRAPHS, MHF, SWA, GraphSpec, ModelSpec
from caracal_runtimes.pass_lengths import ANY, PassLengths
from caracal_runtimes.session import DeviceSession, Session

#: Tokens of a block from which on `convolve_long` is the faster of the two.
LONG_BLOCK = 2048

Array = NDArray[np.float32]
Ids = NDArray[np.int64]


class OpenSession(Protocol):
    """Loads one of a bundle's graphs; `packed` gives it a copy of the weights of its own, for speed with several rows."""

    def __call__(self, graph: str, *, packed: bool = False) -> Session:  # noqa: D102
        ...


@dataclass(frozen=True)
class Carried:
    """What one row hands from one pass to the next: the convolution's last inputs, the attention's last rows.

    `conv` [N, K-1, D]; `keys` and `values` [S, W, D], oldest first, unused rows in front.
    """

    conv: Array
    keys: Array
    values: Array

    def copy(self) -> Carried:
        """An independent copy."""
        return Carried(self.conv.copy(), self.keys.copy(), self.values.copy())


@dataclass(frozen=True)
class Read:
    """What a pass over one row gave; arrays are views of the pass's outputs.

    `logits` [V] of its last token; of each MHF layer `streams`, v and g [L, D], and `mixed` [2L, D].
    """

    logits: Array
    streams: tuple[tuple[Array, Array], ...]
    mixed: tuple[Array, ...]
    carried: Carried


class DecodeGraphs:
    """The graphs of a bundle for decoding.

    Args:
        spec: the model's sizes.
        graphs: the manifest's graphs.
        open_session: loads one of them; called when it is first needed.
        resident: the sessions can keep the decode state in the memory in which they compute, which is not the host's.
        keeps_memory: what a pass took stays with its session, for the next one, and sessions may have weights of their own.
        lengths: what a pass over tokens can take.

    Raises:
        BundleError: the graphs' inputs are not those of a model of these sizes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        graphs: Mapping[str, GraphSpec],
        open_session: OpenSession,
        *,
        resident: bool = False,
        keeps_memory: bool = True,
        lengths: PassLengths = ANY,
    ) -> None:
        self.lengths = lengths
        self.spec, self.resident, self.keeps_memory = spec, resident, keeps_memory
        self.mhf, self.swa = spec.layers(MHF), spec.layers(SWA)
        check_manifest(spec, graphs, lengths)
        self.lags = lags_of(spec, graphs["step"])
        self.granted = 0  # bytes that passes over prompts have taken; the sessions' arenas keep them
        self._open = open_session
        self._sessions: dict[tuple[str, bool], Session] = {}

    def grant(self, taken: int) -> None:
        """Notes bytes that a pass over a prompt took, where they are still there for the next."""
        if self.keeps_memory:
            self.granted = max(self.granted, taken)

    def session(self, graph: str, *, packed: bool = False) -> Session:
        """The session of a graph, loaded once.

        Args:
            graph: its name.
            packed: with a copy of the weights of its own, which is faster for several rows; not where memory matters more.
        """
        packed = packed and self.keeps_memory
        key = (graph, packed)
        if key not in self._sessions:
            self._sessions[key] = self._open(graph, packed=packed)
        return self._sessions[key]

    def device_session(self, graph: str) -> DeviceSession:
        """The same, of sessions that can keep arrays."""
        session = self.session(graph)
        assert isinstance(session, DeviceSession)
        return session

    @property
    def used(self) -> tuple[str, ...]:
        """The graphs that run: one of the two kinds of step does not."""
        idle = "step" if self.resident else "step_resident"
        return tuple(graph for graph in GRAPHS if graph != idle)

    @cached_property
    def parameters(self) -> int:
        """Weights that a step multiplies by, about: what sets its time."""
        spec, width = self.spec, self.spec.hidden_size
        return len(spec.layer_types) * (4 * width + 3 * spec.intermediate_size) * width + spec.vocab_size * width

    def forward(self, input_ids: Ids, lengths: Ids) -> list[Read]:
        """Reads whole sequences [B, L], padded on the right to the longest of `lengths` [B]."""
        feeds = {"input_ids": input_ids, "lengths": lengths, "logit_positions": lengths[:, None] - 1}
        return self._read("forward", feeds, lengths)

    def extend(self, input_ids: Ids, start: int, pending: Array, lags: Array, carried: Carried, length: int) -> Read:
        """Reads tokens that continue a sequence.

        Args:
            input_ids: [L]; the first `length` are real. The sequence has at least L tokens.
            start: how many tokens come before.
            pending: [N, L, D], what these add to the positions of the new ones.
            lags: [N, 2, L, D], v and g of the sequence's first L tokens.
            carried: from the pass before.
            length: real tokens.
        """
        feeds: dict[str, NDArray[np.generic]] = {
            "input_ids": input_ids[None],
            "lengths": np.asarray([length]),
            "logit_positions": np.asarray([[length - 1]]),
            "starts": np.asarray([start]),
        }
        for index, layer in enumerate(self.mhf):
            feeds[f"past.{layer}.pending"] = pending[index][None]
            feeds[f"past.{layer}.lag_v"], feeds[f"past.{layer}.lag_g"] = lags[index, 0][None], lags[index, 1][None]
            if self.spec.conv_kernel > 1:
                feeds[f"past.{layer}.conv"] = carried.conv[index][None]
        for index, layer in enumerate(self.swa):
            feeds[f"past.{layer}.keys"], feeds[f"past.{layer}.values"] = (
                carried.keys[index][None],
                carried.values[index][None],
            )
        return self._read("extend", feeds, feeds["lengths"])[0]

    def convolve(self, v_block: Array, g_block: Array, v_lags: Array, g_lags: Array) -> Array:
        """v_block * g_lags + g_block * v_lags: [R, U, D'] with [R, K, D'] -> [R, U + K, D']."""
        feeds = {"v_block": v_block, "g_block": g_block, "v_lags": v_lags, "g_lags": g_lags}
        graph = "convolve_long" if v_block.shape[1] >= LONG_BLOCK else "convolve"
        result: Array = self.session(graph).run(feeds, ["mixed"])[0]
        return result

    def _read(self, graph: str, feeds: Mapping[str, NDArray[np.generic]], lengths: NDArray[np.generic]) -> list[Read]:
        spec, width = self.spec, self.spec.hidden_size
        length = feeds["input_ids"].shape[1]
        self.lengths.check(length)
        parts = ["v", "g", "mixed", *(["conv"] if spec.conv_kernel > 1 else [])]
        names = [f"present.{layer}.{part}" for layer in self.mhf for part in parts]
        names += [f"present.{layer}.{part}" for layer in self.swa for part in ("keys", "values")]
        logits, *found = self.session(graph).run(self.lengths.padded(feeds), ["logits", *names])
        state = dict(zip(names, found, strict=True))
        reads = []
        for row, count in enumerate(lengths.tolist()):
            streams = tuple(
                (state[f"present.{layer}.v"][row, :count], state[f"present.{layer}.g"][row, :count])
                for layer in self.mhf
            )
            # What a padded pass has behind is the rounding of zeros.
            mixed = tuple(state[f"present.{layer}.mixed"][row, : 2 * length] for layer in self.mhf)
            conv = np.zeros((len(self.mhf), spec.conv_kernel - 1, width), np.float32)
            keys = np.empty((len(self.swa), spec.sliding_window, width), np.float32)
            values = np.empty_like(keys)
            if spec.conv_kernel > 1:
                for index, layer in enumerate(self.mhf):
                    conv[index] = state[f"present.{layer}.conv"][row]
            for index, layer in enumerate(self.swa):
                keys[index], values[index] = (
                    state[f"present.{layer}.keys"][row],
                    state[f"present.{layer}.values"][row],
                )
            reads.append(Read(logits[row, 0], streams, mixed, Carried(conv, keys, values)))
        return reads
