"""What ONNX Runtime's optimizer makes of the graphs: nodes by kind, so that a pass over the data that need not be shows here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

_Kinds = dict[str, int]
_FREE = {"Reshape", "Unsqueeze", "Squeeze", "Shape", "Constant"}  # move no data; there may be any number

_FFN: _Kinds = {
    "LayerNormalization": 1,
    "MatMul": 3,
    "Add": 3,  # biases: a Gemm that adds its own is slower than the two nodes
    "QuickGelu": 1,  # SiLU in one
    "Mul": 1,
}
_FORWARD_MHF: _Kinds = {
    "Pad": 1 + 2,  # zeros before the sequence; both streams to whole rows of the transform
    "Slice": 3 + 2,  # one for each tap; the outputs of the transform, and the first L of them
    "Mul": 3 + 2 + 1,  # taps; both streams where tokens are; the product of the spectra
    "Add": 2 + 4 + 1,  # taps; biases; where the last rows lie in a batch
    "LayerNormalization": 1,
    "MatMul": 4 + 8,  # projections and the heads' own mixing; the transforms, but for one stage
    "FusedMatMul": 1,  # the middle stage back: its matrix's transpose is taken into the product
    "QuickGelu": 1,
    "Transpose": 2,  # heads in front for their own mixing, and back
    "Gather": 1,  # the last rows
}
_EXTEND_MHF = _FORWARD_MHF | {
    "Pad": 4,  # four streams; the rows before the chunk are given
    "Concat": 1,
    "Mul": 3 + 2 + 2,
    "Add": 2 + 4 + 1 + 2,  # the sum of both products; what is pending
    "MatMul": 4 + 14,
}
_FORWARD_SWA: _Kinds = {
    "LayerNormalization": 1,
    "MatMul": 4 + 1,  # projections; weights times values
    "FusedMatMul": 1,  # queries times keys, the keys' transpose and the scale taken into it
    "Add": 4 + 1 + 3,  # biases; the mask; where the last rows lie, in a row and of keys and values in the batch
    "Pad": 3 + 2,  # to whole blocks; zeros before the last rows
    "Transpose": 3 + 1,  # heads in front, and back
    "Slice": 2 * 3 + 1,  # keys and values of a block and of those before it; what is behind the last token
    "Concat": 2,
    "Gather": 2,  # the last rows
    "Softmax": 1,
}
_STEP_MHF: _Kinds = {
    "Concat": 1,  # the short convolution's rows
    "Slice": 1,
    "Mul": 1 + 2 + 2,  # taps; the recent tokens with the first lags; the token itself
    "ReduceSum": 2,
    "Add": 1 + 4,  # the bias of the heads' own mixing; what is pending, recent and the token's own two
    "LayerNormalization": 1,
    "Gemm": 3,
    "MatMul": 1,
    "QuickGelu": 1,
}


@pytest.fixture(scope="module")
def optimized(
    bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], onnx.GraphProto]:
    """A graph after all optimizations that do not depend on the processor."""
    folder = tmp_path_factory.mktemp("optimized")

    def graph(name: str) -> onnx.GraphProto:
        file = folder / f"{name}.onnx"
        if not file.exists():
            options = onnxruntime.SessionOptions()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
            options.optimized_model_filepath = str(file)
            onnxruntime.InferenceSession(bundle("matmul") / f"{name}.onnx", options, providers=["CPUExecutionProvider"])
        return onnx.load(file, load_external_data=False).graph

    return graph


def _kinds(graph: onnx.GraphProto, scope: str) -> Counter[str]:
    nodes = (node for node in graph.node if node.name.partition("/")[0].startswith(scope))
    return Counter(node.op_type for node in nodes if node.op_type not in _FREE)


@pytest.mark.parametrize(
    ("name", "scope", "wanted"),
    [
        ("forward", "blocks.1.mhf", _FORWARD_MHF),
        ("forward", "blocks.2.swa", _FORWARD_SWA),
        ("forward", "blocks.0.ffn", _FFN),
        ("forward", "blocks.2.ffn", _FFN),
        ("extend", "blocks.1.mhf", _EXTEND_MHF),
        ("extend", "blocks.1.ffn", _FFN),
        ("step", "blocks.1.mhf", _STEP_MHF),
        ("step", "blocks.1.ffn", {"LayerNormalization": 1, "Gemm": 3, "QuickGelu": 1, "Mul": 1}),
    ],
)
def test_a_layer_has_no_node_that_need_not_be(
    optimized: Callable[[str], onnx.GraphProto], name: str, scope: str, wanted: _Kinds
) -> None:
    assert _kinds(optimized(name), scope) == wanted


@pytest.mark.parametrize("name", ["forward", "extend"])
def test_no_data_are_moved_number_by_number(optimized: Callable[[str], onnx.GraphProto], name: str) -> None:
    """A Transpose that leaves the last axis where it is copies rows; another one takes some fifteen times as long."""
    moved = [
        node.name
        for node in optimized(name).node
        if node.op_type == "Transpose"
        and node.name.startswith("blocks.")
        and _permutation(node)[-1] != len(_permutation(node)) - 1
    ]
    assert moved == []


def _permutation(node: onnx.NodeProto) -> list[int]:
    (perm,) = (attribute for attribute in node.attribute if attribute.name == "perm")
    return list(perm.ints)


@pytest.mark.parametrize("name", ["forward", "extend"])
def test_what_depends_on_lengths_alone_is_there_once(optimized: Callable[[str], onnx.GraphProto], name: str) -> None:
    """More layers make no more of it: the tables of the transform and the mask are shared."""
    kinds = _kinds(optimized(name), "lengths")
    assert kinds["Range"] <= 12
    assert kinds["Gather"] == 3 + 2 + 2 * 3 + 1 if name == "forward" else kinds["Gather"] >= 1


@pytest.mark.parametrize("name", ["forward", "extend", "step"])
def test_logits_are_one_product_of_the_rows_that_were_asked_for(
    optimized: Callable[[str], onnx.GraphProto], name: str
) -> None:
    graph = optimized(name)
    (head,) = (node for node in graph.node if "embed_tokens.weight" in node.input and node.op_type != "Gather")
    assert head.op_type == "Gemm"
    producer = {output: node for node in graph.node for output in node.output}
    node, found = producer[head.input[0]], []
    while node.op_type in (*_FREE, "LayerNormalization"):
        found.append(node.op_type)
        node = producer[node.input[0]]
    assert found.count("LayerNormalization") == 1  # of those rows alone
    assert node.op_type == ("Add" if name == "step" else "Gather")
