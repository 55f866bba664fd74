"""Weights in the bundle: in their place, in a layout that can be undone, and no change of one goes unnoticed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from caracal_export.errors import VerificationError
from caracal_export.graph_model import ExtendGraph, ForwardGraph, StepGraph, graph_state, layout_of
from caracal_export.weights import compare_weights
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import BundleError
from caracal_runtimes.parity import run_parity
from numpy.typing import NDArray

from caracal import CaracalModel, load_checkpoint

WEIGHTS = "weights.safetensors"
GRAPHS = ("forward.onnx", "extend.onnx", "step.onnx", "step_resident.onnx")  # those that read it
# One parameter of each kind. Not among them: a bias of the keys, which moves all scores of a query alike, so that no
# output can show it; the comparison of weights must (see the test below).
KINDS = (
    "embed_tokens.weight",
    "norm.weight",
    "norm.bias",
    *(
        f"blocks.1.mhf.{name}.weight"
        for name in ("pre_conv", "norm", "value_proj", "gate_proj", "gate_conv", "out_proj")
    ),
    *(f"blocks.1.mhf.{name}.bias" for name in ("norm", "value_proj", "gate_proj", "gate_conv", "out_proj")),
    *(f"blocks.2.swa.{name}.weight" for name in ("norm", "q_proj", "k_proj", "v_proj", "out_proj")),
    *(f"blocks.2.swa.{name}.bias" for name in ("norm", "q_proj", "v_proj", "out_proj")),
    *(f"blocks.2.ffn.{name}.weight" for name in ("norm", "gate_proj", "up_proj", "down_proj")),
    *(f"blocks.2.ffn.{name}.bias" for name in ("norm", "gate_proj", "up_proj", "down_proj")),
)
KEY_BIAS = "blocks.2.swa.k_proj.bias"
# Two tensors of one shape each, so that names, shapes and sizes stay right when they change places.
SWAPS = (
    ("blocks.0.mhf.value_proj.weight", "blocks.0.mhf.gate_proj.weight"),
    ("blocks.0.mhf.out_proj.weight", "blocks.1.mhf.out_proj.weight"),
    ("blocks.0.mhf.pre_conv.weight", "blocks.1.mhf.pre_conv.weight"),
    ("blocks.0.mhf.gate_conv.weight", "blocks.1.mhf.gate_conv.weight"),
    ("blocks.0.mhf.norm.weight", "blocks.0.mhf.norm.bias"),
    ("blocks.2.swa.q_proj.weight", "blocks.2.swa.k_proj.weight"),
    ("blocks.2.ffn.gate_proj.weight", "blocks.2.ffn.up_proj.weight"),
    ("norm.weight", "norm.bias"),
)

Stored = Callable[[Path, str], NDArray[Any]]


@pytest.fixture
def altered(bundle: Callable[[str], Path], copy_bundle: Callable[[Path], Path]) -> Path:
    """A copy of the tied `matmul` bundle, to be altered."""
    return copy_bundle(bundle("matmul"))


def _verdict(folder: Path) -> str:
    return run_parity(Bundle.open(folder), threads=1).verdict


# Layouts


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("mixing", ["matmul", "dft"])
def test_fresh_bundle_has_every_weight(
    bundle: Callable[[str], Path], model: CaracalModel, mixing: str, graph: str
) -> None:
    assert compare_weights(model, bundle(mixing) / graph) == len(dict(model.named_parameters())) == 59


@pytest.mark.parametrize("graph", GRAPHS)
def test_fresh_untied_bundle_has_every_weight(untied_bundle: Path, untied_checkpoint: Path, graph: str) -> None:
    assert compare_weights(load_checkpoint(untied_checkpoint), untied_bundle / graph) == 60


@pytest.mark.parametrize("kernel", [1, 3])
def test_every_layout_can_be_undone(random_model: Callable[..., CaracalModel], kernel: int) -> None:
    model = random_model(conv_kernel=kernel, tie_word_embeddings=False, norm_before_conv=True)
    for name, weight in model.named_parameters():
        layout = layout_of(name)
        assert torch.equal(layout.from_graph(layout.to_graph(weight, model.config), model.config), weight), name


def test_layouts_are_those_of_the_maths(random_model: Callable[..., CaracalModel]) -> None:
    """Each graph weight, used by the graph's plain product in numpy, does what PyTorch's module does."""
    model = random_model(tie_word_embeddings=False)
    mhf, config = model.blocks[0].mhf, model.config
    state = {name: weight.numpy() for name, weight in graph_state(model, config)}
    x = np.random.default_rng(0).standard_normal((2, 9, config.hidden_size)).astype(np.float32)
    t = torch.from_numpy(x)

    def close(got: NDArray[Any], want: torch.Tensor) -> None:
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-5, atol=1e-5)

    close(x @ state["blocks.0.mhf.value_proj.weight"] + state["blocks.0.mhf.value_proj.bias"], mhf.value_proj(t))
    close(x @ state["lm_head.weight"], model.lm_head(t))
    close(x @ state["blocks.0.ffn.up_proj.weight"] + state["blocks.0.ffn.up_proj.bias"], model.blocks[0].ffn.up_proj(t))

    taps = state["blocks.0.mhf.pre_conv.weight"]
    padded = np.concatenate((np.zeros_like(x[:, :2]), x), axis=1)
    want = mhf.pre_conv(torch.from_numpy(padded).transpose(1, 2)).transpose(1, 2)
    close(sum(padded[:, k : k + 9] * taps[k] for k in range(3)), want)

    heads = x.reshape(2, 9, config.num_attention_heads, config.head_dim)
    got = np.einsum("blhi,hio->blho", heads, state["blocks.0.mhf.gate_conv.weight"]).reshape(x.shape)
    close(got + state["blocks.0.mhf.gate_conv.bias"], mhf.gate_conv(t.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("graph", [ForwardGraph, ExtendGraph, StepGraph])
@pytest.mark.parametrize("missing", ["blocks.1.mhf.value_proj.bias", "norm.weight"])
def test_graph_module_refuses_a_model_that_lacks_a_weight(
    random_model: Callable[..., CaracalModel], missing: str, graph: Any
) -> None:
    model = random_model()
    owner, _, name = missing.rpartition(".")
    setattr(model.get_submodule(owner), name, None)
    with pytest.raises(RuntimeError, match=re.escape(missing)):
        graph.from_reference(model, model.config)


# Sabotage


def _flip_a_byte(file: Path, stored_tensor: Stored, name: str) -> None:
    tensor = stored_tensor(file, name)
    assert tensor.flat[7] != 0
    tensor.view(np.uint8).reshape(-1)[4 * 7] ^= 1  # the last bit of one value
    tensor.flush()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "file", [WEIGHTS, *GRAPHS, "convolve.onnx", "convolve_long.onnx", "golden.safetensors", "tokenizer.json"]
)
def test_a_changed_byte_names_the_file(altered: Path, file: str) -> None:
    data = bytearray((altered / file).read_bytes())
    data[len(data) // 2] ^= 1
    (altered / file).write_bytes(data)
    with pytest.raises(BundleError, match=f"{file} was altered"):
        Bundle.open(altered)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "blocks.1.mhf.gate_conv.weight", KEY_BIAS])
def test_a_flipped_bit_behind_right_hashes_is_found(
    altered: Path, model: CaracalModel, stored_tensor: Stored, rehash: Callable[[Path], None], name: str
) -> None:
    """The smallest change there is, far below what any output could show."""
    _flip_a_byte(altered / WEIGHTS, stored_tensor, name)
    rehash(altered)
    Bundle.open(altered)
    with pytest.raises(VerificationError, match=f"{re.escape(name)} differs"):
        compare_weights(model, altered / "forward.onnx")


@pytest.mark.parametrize("name", KINDS)
def test_one_zeroed_element_fails_parity(
    altered: Path, stored_tensor: Stored, rehash: Callable[[Path], None], name: str
) -> None:
    tensor = stored_tensor(altered / WEIGHTS, name)
    index = np.unravel_index(np.abs(tensor - np.median(tensor)).argmax(), tensor.shape)
    assert tensor[index] != 0
    tensor[index] = 0
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "FAILED"


def test_a_key_bias_shows_in_no_output_but_in_the_comparison_of_weights(
    altered: Path, model: CaracalModel, stored_tensor: Stored, rehash: Callable[[Path], None]
) -> None:
    tensor = stored_tensor(altered / WEIGHTS, KEY_BIAS)
    tensor[:] = 0
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "PASSED"
    with pytest.raises(VerificationError, match=re.escape(KEY_BIAS)):
        compare_weights(model, altered / "forward.onnx")


@pytest.mark.parametrize(("first", "second"), SWAPS)
def test_two_weights_in_each_others_place_are_found(
    altered: Path,
    model: CaracalModel,
    stored_tensor: Stored,
    rehash: Callable[[Path], None],
    first: str,
    second: str,
) -> None:
    a, b = stored_tensor(altered / WEIGHTS, first), stored_tensor(altered / WEIGHTS, second)
    kept = np.array(a)
    a[:], b[:] = b, kept
    a.flush()  # type: ignore[attr-defined]
    b.flush()  # type: ignore[attr-defined]
    rehash(altered)
    with pytest.raises(VerificationError, match=re.escape(first) + "|" + re.escape(second)):
        compare_weights(model, altered / "forward.onnx")
    assert _verdict(altered) == "FAILED"


@pytest.mark.parametrize("row", [0, 1, 50, 96])
def test_one_changed_embedding_row_of_an_untied_model_fails_parity(
    untied_bundle: Path,
    copy_bundle: Callable[[Path], Path],
    stored_tensor: Stored,
    rehash: Callable[[Path], None],
    row: int,
) -> None:
    """No column of the logits shows it: some golden must read that very row."""
    altered = copy_bundle(untied_bundle)
    tensor = stored_tensor(altered / WEIGHTS, "embed_tokens.weight")
    tensor[row, 3] += 0.01
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "FAILED"


def test_one_changed_column_of_an_untied_head_fails_parity(
    untied_bundle: Path, copy_bundle: Callable[[Path], Path], stored_tensor: Stored, rehash: Callable[[Path], None]
) -> None:
    altered = copy_bundle(untied_bundle)
    tensor = stored_tensor(altered / WEIGHTS, "lm_head.weight")
    tensor[:, 41] *= 1.01
    tensor.flush()  # type: ignore[attr-defined]
    rehash(altered)
    assert _verdict(altered) == "FAILED"


# Graphs that read another place than they should


def _edit_graph(file: Path, edit: Callable[[dict[str, onnx.TensorProto]], None]) -> None:
    graph = onnx.load(file, load_external_data=False)
    edit({tensor.name: tensor for tensor in graph.graph.initializer})
    file.write_bytes(graph.SerializeToString())


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_graph_that_reads_two_weights_crosswise_is_found(altered: Path, model: CaracalModel, graph: str) -> None:
    def swap(tensors: dict[str, onnx.TensorProto]) -> None:
        first, second = (tensors[name].external_data for name in SWAPS[0])
        kept = [entry.value for entry in first]
        for entry, other in zip(first, second, strict=True):
            entry.value = other.value
        for entry, value in zip(second, kept, strict=True):
            entry.value = value

    _edit_graph(altered / graph, swap)
    with pytest.raises(VerificationError, match="from another place"):
        compare_weights(model, altered / graph)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_weight_inside_the_graph_is_found(altered: Path, model: CaracalModel, graph: str) -> None:
    def embed(tensors: dict[str, onnx.TensorProto]) -> None:
        tensor = tensors["norm.weight"]
        tensor.CopyFrom(onnx.numpy_helper.from_array(model.norm.weight.numpy(), "norm.weight"))

    _edit_graph(altered / graph, embed)
    with pytest.raises(VerificationError, match=r"norm\.weight lies inside the graph"):
        compare_weights(model, altered / graph)


@pytest.mark.parametrize("graph", GRAPHS)
def test_a_weight_the_graph_lacks_is_named(altered: Path, model: CaracalModel, graph: str) -> None:
    def rename(tensors: dict[str, onnx.TensorProto]) -> None:
        tensors["norm.bias"].name = "norm.biased"

    _edit_graph(altered / graph, rename)
    with pytest.raises(VerificationError, match=r"norm\.bias .*2 such"):
        compare_weights(model, altered / graph)


def test_weights_of_another_checkpoint_are_found(
    bundle: Callable[[str], Path], random_model: Callable[..., CaracalModel]
) -> None:
    with pytest.raises(VerificationError, match="differs from the checkpoint"):
        compare_weights(random_model(seed=5), bundle("matmul") / "forward.onnx")
