"""From the reference model to a clean ONNX graph in memory, weights still attached."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir
import torch
from caracal_runtimes.pass_lengths import ANY, AXIS, PassLengths

from caracal import CaracalConfig, CaracalModel
from caracal.config import MHF
from caracal_export import passes
from caracal_export.folding import fold_constants
from caracal_export.graph_model import (
    BlockGraph,
    ConvolveGraph,
    ExtendGraph,
    ForwardGraph,
    ResidentStepGraph,
    StepGraph,
    state_names,
)
from caracal_export.lowerings import translation_table
from caracal_export.opsets import IR_VERSIONS, TRACED_OPSET, retarget
from caracal_export.unrolling import few_layers, unroll

#: How many of the latest tokens a step mixes by itself; older ones come in blocks of half as many and more.
LAGS = 64


#: Graphs that passes over several tokens run, for which those may be bounded.
BOUNDED = ("forward", "extend")


def trace(
    model: CaracalModel, name: str, mixing: str, opset: int, *, lags: int = LAGS, lengths: PassLengths = ANY
) -> ir.Model:
    """Traces one of the graphs of a bundle.

    Args:
        model: float32, in eval mode; on the meta device, where weights have shapes and no values, it costs no memory.
        name: one of `GRAPHS`; `docs/bundle-format.md` has their inputs and outputs.
        mixing: `matmul` or `dft`.
        opset: within `opsets.OPSETS`.
        lags: M of the step graph, a power of two.
        lengths: what the graphs in `BOUNDED` need take. With a bound all that does not depend on inputs is a constant in them.

    Returns:
        A graph in which batch, length and positions are symbolic (the length not where it is static), named after the modules
        it came from.
    """
    lengths = lengths if name in BOUNDED else ANY
    whole, inputs, outputs = _TRACED[name](model, lags)
    few = few_layers(model.config.layer_types) if isinstance(whole, BlockGraph) else None
    if few is None or len(few) == len(model.config.layer_types):
        traced = _trace(whole, inputs, outputs, mixing, lengths)
    else:
        kinds = tuple(model.config.layer_types[index] for index in few)
        with torch.device("meta"):
            sample = CaracalModel(replace(model.config, num_hidden_layers=len(few), layer_types=kinds)).eval()
        traced = _trace(*_TRACED[name](sample.requires_grad_(False), lags), mixing, lengths)
        passes.untangle(traced)
        unroll(
            traced.graph,
            kinds,
            model.config.layer_types,
            dict(whole.named_parameters()),
            [tensor.name for tensor in _flat(inputs)],
            outputs,
        )
    passes.clean(traced)
    if lengths.most is not None:
        fold_constants(traced)
    traced.graph.name = name
    traced.ir_version = IR_VERSIONS[TRACED_OPSET]
    traced.producer_name, traced.producer_version = "caracal-onnx", None
    return retarget(traced, opset)


def _trace(module: torch.nn.Module, inputs: _Inputs, outputs: list[str], mixing: str, lengths: PassLengths) -> ir.Model:
    """What the tracer makes of a module."""
    inputs = [
        [tensor.sized(lengths) for tensor in entry] if isinstance(entry, list) else entry.sized(lengths)
        for entry in inputs
    ]
    arguments, shapes = [], []
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    for entry in inputs:
        tensors = [t.example(device) for t in entry] if isinstance(entry, list) else entry.example(device)
        axes = [tensor.axes() for tensor in entry] if isinstance(entry, list) else entry.axes()
        arguments.append(tensors)
        shapes.append(axes)
    with quiet_tracing():
        program = torch.onnx.export(
            module,
            tuple(arguments),
            input_names=[tensor.name for tensor in _flat(inputs)],
            output_names=outputs,
            dynamic_shapes=tuple(shapes),
            custom_translation_table=translation_table(mixing, lengths.most),
            opset_version=TRACED_OPSET,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    return program.model


@dataclass(frozen=True)
class _Input:
    """An input of a graph: a size per axis, those in `_EXAMPLES` symbolic."""

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32

    def sized(self, lengths: PassLengths) -> _Input:
        """The same with the length axis that such graphs have."""
        return replace(self, shape=tuple(lengths.axis if size == AXIS else size for size in self.shape))

    def example(self, device: torch.device) -> torch.Tensor:
        """Zeros of the example's sizes."""
        sizes = [size if isinstance(size, int) else _EXAMPLES[size] for size in self.shape]
        return torch.zeros(sizes, dtype=self.dtype, device=device)

    def axes(self) -> dict[int, str]:
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, str)}


# Sizes of the example that is traced; none of them may show in a graph.
_EXAMPLES = {"batch": 2, "length": 5, "positions": 3, "rows": 2, "block": 5, "lags": 7, "channels": 6}
_Inputs = list["_Input | list[_Input]"]


def _flat(inputs: _Inputs) -> list[_Input]:
    """Inputs one after the other, as a graph has them."""
    return [tensor for entry in inputs for tensor in (entry if isinstance(entry, list) else [entry])]


def _reading(config: CaracalConfig) -> _Inputs:
    return [
        _Input("input_ids", ("batch", "length"), torch.int64),
        _Input("lengths", ("batch",), torch.int64),
        _Input("logit_positions", ("batch", "positions"), torch.int64),
    ]


def _forward(model: CaracalModel, lags: int) -> tuple[torch.nn.Module, _Inputs, list[str]]:
    config = model.config
    outputs = ["logits", *(f"present.{name}" for name in state_names(config, "forward"))]
    return ForwardGraph.from_reference(model, config), _reading(config), outputs


def _extend(model: CaracalModel, lags: int) -> tuple[torch.nn.Module, _Inputs, list[str]]:
    config = model.config
    shapes = _carried(config) | dict.fromkeys(("pending", "lag_v", "lag_g"), ("batch", "length", config.hidden_size))
    inputs = [*_reading(config), _Input("starts", ("batch",), torch.int64), _past(config, "extend", shapes)]
    outputs = ["logits", *(f"present.{name}" for name in state_names(config, "forward"))]
    return ExtendGraph.from_reference(model, config), inputs, outputs


def _step(model: CaracalModel, lags: int) -> tuple[torch.nn.Module, _Inputs, list[str]]:
    config = model.config
    inputs = [*_stepping(config), _past(config, "step", _stepped(config, lags))]
    outputs = ["logits", *(f"present.{name}" for name in state_names(config, "step gives"))]
    return StepGraph.from_reference(model, config), inputs, outputs


def _step_resident(model: CaracalModel, lags: int) -> tuple[torch.nn.Module, _Inputs, list[str]]:
    config = model.config
    # A token that is M old is no longer needed; in `step` its slot is the one to be written.
    shapes = _stepped(config, lags - 1)
    inputs = [*_stepping(config), _Input("keep_g", ("batch", 1)), _past(config, "step", shapes)]
    streams = ["streams"] if MHF in config.layer_types else []
    outputs = ["logits", *streams, *(f"present.{name}" for name in state_names(config, "step_resident gives"))]
    return ResidentStepGraph.from_reference(model, config), inputs, outputs


def _stepping(config: CaracalConfig) -> _Inputs:
    return [_Input("input_ids", ("batch",), torch.int64), _Input("window_mask", ("batch", config.sliding_window))]


def _stepped(config: CaracalConfig, slots: int) -> dict[str, tuple[int | str, ...]]:
    """Shapes of the state that a step takes, with this many recent tokens."""
    width, heads, window = config.hidden_size, config.num_attention_heads, config.sliding_window
    shapes = _carried(config)
    shapes |= dict.fromkeys(("pending", "first_v", "first_g"), ("batch", width))
    shapes |= dict.fromkeys(("recent_v", "recent_g", "lag_v", "lag_g"), (slots, "batch", width))
    keys, values = ("batch", heads, config.head_dim, window), ("batch", heads, window, config.head_dim)
    return {**shapes, "keys": keys, "values": values}


def _convolve(model: CaracalModel, lags: int, *, long: bool = False) -> tuple[torch.nn.Module, _Inputs, list[str]]:
    block, lag = ("rows", "block", "channels"), ("rows", "lags", "channels")
    inputs: _Inputs = [
        _Input("v_block", block),
        _Input("g_block", block),
        _Input("v_lags", lag),
        _Input("g_lags", lag),
    ]
    return ConvolveGraph(long).eval(), inputs, ["mixed"]


def _carried(config: CaracalConfig) -> dict[str, tuple[int | str, ...]]:
    """Shapes of what every graph hands on as it lies: the convolution's last inputs, the attention's last rows."""
    rows = dict.fromkeys(("keys", "values"), ("batch", config.sliding_window, config.hidden_size))
    return {"conv": ("batch", config.conv_kernel - 1, config.hidden_size), **rows}


def _past(config: CaracalConfig, graph: str, shapes: dict[str, tuple[int | str, ...]]) -> list[_Input]:
    return [_Input(f"past.{name}", shapes[name.partition(".")[2]]) for name in state_names(config, graph)]


_TRACED: dict[str, Callable[[CaracalModel, int], tuple[torch.nn.Module, _Inputs, list[str]]]] = {
    "forward": _forward,
    "extend": _extend,
    "step": _step,
    "step_resident": _step_resident,
    "convolve": _convolve,
    "convolve_long": partial(_convolve, long=True),
}
#: The graphs of a bundle.
GRAPHS = tuple(_TRACED)


@contextmanager
def quiet_tracing() -> Iterator[None]:
    """Keeps the tracer's remarks about its own internals away from users; errors still come through."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
