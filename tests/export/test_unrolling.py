"""Graphs of many layers made from the trace of a few, against traces of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import pytest
from caracal_export import passes, tracing
from caracal_export.unrolling import UnrollingError, few_layers, unroll
from caracal_runtimes.pass_lengths import ANY, PassLengths

from caracal import CaracalModel
from caracal.config import MHF, SWA

PATTERNS = {
    "published": (MHF, MHF, SWA, MHF, MHF, SWA),
    "no MHF": (SWA, SWA, SWA),
    "no attention": (MHF, MHF, MHF),
    "late MHF": (SWA, SWA, MHF, SWA),
    "last kind once": (MHF, MHF, MHF, SWA),
}
SETTINGS = {
    "plain": {},
    "every option": {"norm_before_conv": True, "tie_word_embeddings": False, "hidden_act": "gelu"},
    "bare": {"use_bias": False, "conv_kernel": 1},
}


@pytest.mark.parametrize(
    ("kinds", "few"),
    [
        ([MHF], [0]),
        ([MHF, MHF], [0, 1]),
        ([MHF, SWA, MHF], [0, 1, 2]),
        ([MHF, MHF, SWA] * 4, [0, 1, 2]),
        ([MHF, MHF, MHF, SWA], [0, 1, 3]),
        ([SWA] * 5, [0, 1]),
    ],
)
def test_few_layers_are_the_first_and_one_of_each_kind_behind_it(kinds: list[str], few: list[int]) -> None:
    assert few_layers(kinds) == few


def _every_layer(kinds: Sequence[str]) -> list[int]:
    return list(range(len(kinds)))


def _compare(
    monkeypatch: pytest.MonkeyPatch, model: CaracalModel, name: str, mixing: str = "matmul", lengths: PassLengths = ANY
) -> None:
    unrolled = ir.to_proto(tracing.trace(model, name, mixing, 21, lags=4, lengths=lengths))
    with monkeypatch.context() as patched:
        patched.setattr(tracing, "few_layers", _every_layer)
        traced = ir.to_proto(tracing.trace(model, name, mixing, 21, lags=4, lengths=lengths))
    assert len(traced.graph.node) > 50
    assert unrolled.SerializeToString(deterministic=True) == traced.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", ["forward", "extend", "step", "step_resident"])
def test_it_is_what_tracing_every_layer_gives(
    monkeypatch: pytest.MonkeyPatch, random_model: Callable[..., CaracalModel], name: str
) -> None:
    """To the byte, weights included: here they are few enough to lie in the graph."""
    _compare(monkeypatch, random_model(num_hidden_layers=6, layer_types=PATTERNS["published"]), name)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", ["forward", "extend", "step", "step_resident"])
def test_it_is_what_tracing_every_layer_gives_whatever_the_layers_are(
    monkeypatch: pytest.MonkeyPatch, random_model: Callable[..., CaracalModel], name: str, pattern: str
) -> None:
    """Each pattern with each graph, and over these every set of options with every graph and both ways to mix."""
    kinds = PATTERNS[pattern]
    turn = list(PATTERNS).index(pattern)
    settings = SETTINGS[list(SETTINGS)[turn % len(SETTINGS)]]
    model = random_model(num_hidden_layers=len(kinds), layer_types=kinds, **settings)
    _compare(monkeypatch, model, name, "dft" if turn % 2 else "matmul")


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", ["forward", "extend"])
def test_it_is_what_tracing_every_layer_gives_where_passes_are_bounded(
    monkeypatch: pytest.MonkeyPatch, random_model: Callable[..., CaracalModel], name: str, static: bool
) -> None:
    model = random_model(num_hidden_layers=6, layer_types=PATTERNS["published"])
    _compare(monkeypatch, model, name, lengths=PassLengths(48, static))


# Graphs that are connected in another way: an exporter that changes is to fail here, not in a bundle


@pytest.fixture
def sample(random_model: Callable[..., CaracalModel], monkeypatch: pytest.MonkeyPatch) -> ir.Graph:
    """The step of three layers as `unroll` gets it."""
    kept: list[ir.Model] = []
    with monkeypatch.context() as patched:
        patched.setattr(passes, "clean", kept.append)
        patched.setattr(tracing, "retarget", lambda traced, opset: traced)
        tracing.trace(random_model(num_hidden_layers=3), "step", "matmul", 21, lags=4)
    return kept[0].graph


def _unroll(graph: ir.Graph) -> None:
    """To four layers; no weight is reached."""
    unroll(graph, [MHF, MHF, SWA], [MHF, MHF, SWA, MHF], {}, [], [])


def _node(graph: ir.Graph, weight: str) -> ir.Node:
    return next(node for node in graph if any(value is not None and value.name == weight for value in node.inputs))


def test_a_layer_that_reads_within_another_one_is_refused(sample: ir.Graph) -> None:
    inner = _node(sample, "blocks.0.ffn.down_proj.weight").inputs[0]
    _node(sample, "blocks.2.ffn.up_proj.weight").replace_input_with(0, inner)
    with pytest.raises(UnrollingError, match="layer 2 of the traced graph reads"):
        _unroll(sample)


def test_a_layer_that_reads_the_state_of_another_one_is_refused(sample: ir.Graph) -> None:
    state = {str(value.name): value for value in sample.inputs}
    node = _node(sample, "past.1.pending")
    node.replace_input_with(list(node.inputs).index(state["past.1.pending"]), state["past.0.pending"])
    with pytest.raises(UnrollingError, match=r"layer 1 of the traced graph reads past\.0\.pending"):
        _unroll(sample)


def test_a_layer_that_skips_the_one_before_it_is_refused(sample: ir.Graph) -> None:
    first, third = (_node(sample, f"blocks.{index}.ffn.norm.weight").inputs[0] for index in (0, 2))
    assert first is not None
    assert third is not None
    producer = third.producer()
    assert producer is not None
    producer.replace_input_with(0, first)
    with pytest.raises(UnrollingError, match="layer 2 of the traced graph reads"):
        _unroll(sample)


def test_an_end_that_reads_within_a_layer_is_refused(sample: ir.Graph) -> None:
    inner = _node(sample, "blocks.2.ffn.down_proj.weight").inputs[0]
    (logits,) = (value.producer() for value in sample.outputs if value.name == "logits")
    assert logits is not None
    logits.replace_input_with(0, inner)
    with pytest.raises(UnrollingError, match="behind the layers"):
        _unroll(sample)


def test_a_layer_without_nodes_is_refused(sample: ir.Graph) -> None:
    with pytest.raises(UnrollingError, match="layer 3 of the traced graph has no nodes"):
        unroll(sample, [MHF, MHF, SWA, SWA], [MHF, MHF, SWA, SWA], {}, [], [])
