"""What the graphs of a bundle take and give, by the model's sizes; docs/bundle-format.md states the same in words.

A manifest whose configuration does not fit its graphs would fail in the middle of a generation, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from caracal_runtimes.errors import BundleError
from caracal_runtimes.manifest import MHF, GraphSpec, ModelSpec, TensorSpec
from caracal_runtimes.pass_lengths import ANY, PassLengths

Shape = tuple[int | str, ...]
_AGAIN = "manifest and graphs do not belong together, export the checkpoint again"


def lags_of(spec: ModelSpec, step: GraphSpec) -> int:
    """M, from the shape of the step graph's own input; 2 for a model that has no layer of that kind."""
    mhf = spec.layers(MHF)
    if not mhf:
        return 2
    for tensor in step.inputs:
        if tensor.name == f"past.{mhf[0]}.recent_v":
            lags = tensor.shape[0]
            if isinstance(lags, int) and lags >= 2 and lags & (lags - 1) == 0:
                return lags
    raise BundleError(
        f"manifest.graphs.step.inputs: expected past.{mhf[0]}.recent_v with a power of two as its first size; {_AGAIN}"
    )


def expected_inputs(spec: ModelSpec, lags: int, lengths: PassLengths = ANY) -> dict[str, dict[str, Shape]]:
    """Inputs of the graphs that read weights, by graph and name; a symbolic axis is its name."""
    length = lengths.axis
    width, window, heads = spec.hidden_size, spec.sliding_window, spec.num_attention_heads
    reading: dict[str, Shape] = {
        "input_ids": ("batch", length),
        "lengths": ("batch",),
        "logit_positions": ("batch", "positions"),
    }
    extend: dict[str, Shape] = {**reading, "starts": ("batch",)}
    step: dict[str, Shape] = {"input_ids": ("batch",), "window_mask": ("batch", window)}
    resident: dict[str, Shape] = {"keep_g": ("batch", 1)}  # and what `step` takes
    for layer, kind in enumerate(spec.layer_types):
        past = f"past.{layer}."
        if kind == MHF:
            extend |= {f"{past}{name}": ("batch", length, width) for name in ("pending", "lag_v", "lag_g")}
            step |= {f"{past}{name}": ("batch", width) for name in ("pending", "first_v", "first_g")}
            recent = ("recent_v", "recent_g", "lag_v", "lag_g")
            step |= {f"{past}{name}": (lags, "batch", width) for name in recent}
            resident |= {f"{past}{name}": (lags - 1, "batch", width) for name in recent}
            if spec.conv_kernel > 1:
                extend[f"{past}conv"] = step[f"{past}conv"] = ("batch", spec.conv_kernel - 1, width)
        else:
            extend |= {f"{past}{name}": ("batch", window, width) for name in ("keys", "values")}
            step[f"{past}keys"] = ("batch", heads, width // heads, window)
            step[f"{past}values"] = ("batch", heads, window, width // heads)
    return {"forward": reading, "extend": extend, "step": step, "step_resident": step | resident}


def check_manifest(spec: ModelSpec, graphs: Mapping[str, GraphSpec], lengths: PassLengths = ANY) -> None:
    """Compares the configuration with what the manifest says of its graphs. Raises BundleError naming the first tensor."""
    lags = lags_of(spec, graphs["step"])
    if lengths.most is not None and lengths.most < lags:
        raise BundleError(
            f"manifest.max_length: expected at least {lags}, which the graph step mixes by itself, found {lengths.most}; {_AGAIN}"
        )
    for graph, wanted in expected_inputs(spec, lags, lengths).items():
        _compare(f"manifest.graphs.{graph}", wanted, {tensor.name: tensor.shape for tensor in graphs[graph].inputs})
        logits = next((tensor.shape for tensor in graphs[graph].outputs if tensor.name == "logits"), None)
        if logits is None or logits[-1] != spec.vocab_size:
            raise BundleError(
                f"manifest.graphs.{graph}: expected logits of {spec.vocab_size} columns, found {logits}; {_AGAIN}"
            )


def check_session(graph: GraphSpec, inputs: Mapping[str, Sequence[object]]) -> None:
    """Compares what the manifest says of a graph with the inputs that its file has. Raises BundleError."""
    found: dict[str, Shape] = {
        tensor: tuple(size if isinstance(size, int) else str(size) for size in shape)
        for tensor, shape in inputs.items()
    }
    _compare(graph.file, _shapes(graph.inputs), found)


def _shapes(tensors: Sequence[TensorSpec]) -> dict[str, Shape]:
    return {tensor.name: tensor.shape for tensor in tensors}


def _compare(where: str, wanted: Mapping[str, Shape], found: Mapping[str, Shape]) -> None:
    for name in sorted(wanted.keys() ^ found.keys()):
        state = "has no input" if name in wanted else "has an unexpected input"
        raise BundleError(f"{where} {state} {name!r:.60}; {_AGAIN}")
    for name, shape in wanted.items():
        other = found[name]
        same = len(shape) == len(other) and all(
            a == b or (isinstance(a, str) and isinstance(b, str)) for a, b in zip(shape, other, strict=True)
        )
        if not same:
            raise BundleError(f"{where}: {name} has the shape {list(other)}, expected {list(shape)}; {_AGAIN}")
