"""What one would write without the schedule: a cache of v and g that grows by Concat, flipped and summed per token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from caracal_export import graph_model, passes
from caracal_export.lowerings import translation_table
from caracal_export.tracing import quiet_tracing
from torch import Tensor

from caracal import CaracalModel


class NaiveStep(graph_model.BlockGraph):
    """One token [1] with past v and g [1, T, D] of each MHF layer, past keys and values [1, W, D] of the others."""

    def forward(self, input_ids: Tensor, past: Sequence[Tensor]) -> tuple[Tensor, ...]:
        x = self.embed_tokens(input_ids)
        tensors, present = iter(past), []
        block: Any
        for block in self.blocks:
            if block.mhf is not None:
                v_past, g_past, conv = next(tensors), next(tensors), next(tensors)
                padded = torch.cat((conv, x[:, None]), dim=1)
                v, g = block.mhf._streams((padded * block.mhf.pre_conv.weight).sum(1))
                v, g = torch.cat((v_past, v[:, None]), dim=1), torch.cat((g_past, g[:, None]), dim=1)
                x = x + block.mhf.out_proj((v * g.flip(1)).sum(1))
                present += [v, g, padded[:, 1:]]
            else:
                swa, keys, values = block.swa, next(tensors), next(tensors)
                n = swa.norm(x)
                keys = torch.cat((keys, swa.k_proj(n)[:, None]), dim=1)[:, 1:]
                values = torch.cat((values, swa.v_proj(n)[:, None]), dim=1)[:, 1:]
                q, k, w = (t.unflatten(-1, (swa.heads, -1)) for t in (swa.q_proj(n), keys, values))
                scores = torch.einsum("bhd,bkhd->bhk", q, k) / q.shape[-1] ** 0.5
                x = x + swa.out_proj(torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), w).flatten(1))
                present += [keys, values]
            x = x + block.ffn(x)
        return (self._logits(x), *present)


def past_shapes(model: CaracalModel, length: int) -> list[tuple[int, ...]]:
    """Shapes of the cache after `length` tokens, in the order of `NaiveStep`."""
    config = model.config
    shapes: list[tuple[int, ...]] = []
    for kind in config.layer_types:
        if kind == "mhf":
            shapes += [(1, length, config.hidden_size)] * 2 + [(1, config.conv_kernel - 1, config.hidden_size)]
        else:
            shapes += [(1, config.sliding_window, config.hidden_size)] * 2
    return shapes


def export(model: CaracalModel, file: Path) -> None:
    """Writes the naive step as an ONNX graph, weights beside it."""
    step = NaiveStep.from_reference(model, model.config)
    example = [torch.zeros(shape) for shape in past_shapes(model, 7)]
    axes: list[dict[int, str]] = [{1: "length"} if tensor.shape[1] == 7 else {} for tensor in example]
    names = [f"past.{index}" for index in range(len(example))]
    with quiet_tracing():
        program = torch.onnx.export(
            step,
            (torch.zeros(1, dtype=torch.int64), example),
            input_names=["input_ids", *names],
            output_names=["logits", *(f"present.{index}" for index in range(len(example)))],
            dynamic_shapes=({}, axes),
            custom_translation_table=translation_table("matmul"),
            opset_version=18,
            dynamo=True,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    passes.clean(program.model)
    ir.save(program.model, file, external_data=f"{file.stem}.data")


class OnnxNaive:
    """The naive step in ONNX Runtime; caches stay in OrtValues and are never copied to numpy."""

    def __init__(self, model: CaracalModel, file: Path, length: int, threads: int) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self._session = ort.InferenceSession(str(file), options)
        rng = np.random.default_rng(0)
        self._past = [
            ort.OrtValue.ortvalue_from_numpy(rng.standard_normal(shape, dtype=np.float32))
            for shape in past_shapes(model, length)
        ]

    def step(self, token: int) -> None:
        binding = self._session.io_binding()
        binding.bind_cpu_input("input_ids", np.asarray([token]))
        for index, value in enumerate(self._past):
            binding.bind_ortvalue_input(f"past.{index}", value)
        binding.bind_output("logits", "cpu")
        for index in range(len(self._past)):
            binding.bind_output(f"present.{index}", "cpu")
        self._session.run_with_iobinding(binding)
        self._past = binding.get_outputs()[1:]


class TorchNaive:
    """The naive step in PyTorch eager."""

    def __init__(self, model: CaracalModel, length: int) -> None:
        self._step = NaiveStep.from_reference(model, model.config)
        self._past = [torch.randn(shape) for shape in past_shapes(model, length)]

    @torch.no_grad()
    def step(self, token: int) -> None:
        _, *self._past = self._step(torch.tensor([token]), self._past)


class TorchWhole:
    """PyTorch eager without a cache: the whole sequence for every token."""

    def __init__(self, model: CaracalModel, length: int) -> None:
        self._model, self._ids = model, torch.zeros(1, length, dtype=torch.int64)

    @torch.no_grad()
    def step(self, token: int) -> None:
        self._model(self._ids, torch.tensor([[self._ids.shape[1] - 1]]))


def flip_and_sum(width: int) -> bytes:
    """One layer's naive mixing as a graph: v, g [1, T, D] -> [1, D]."""
    from onnx import TensorProto, helper

    def info(name: str, shape: list[int | str]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    def ints(name: str, value: int) -> Any:
        return helper.make_node("Constant", [], [name], value_ints=[value])

    graph = helper.make_graph(
        [
            ints("start", -1),
            ints("end", -(2**63) + 1),
            ints("axis", 1),
            ints("back", -1),
            helper.make_node("Slice", ["g", "start", "end", "axis", "back"], ["flipped"]),
            helper.make_node("Mul", ["v", "flipped"], ["product"]),
            helper.make_node("ReduceSum", ["product", "axis"], ["y"], keepdims=0),
        ],
        "flip_and_sum",
        [info("v", [1, "length", width]), info("g", [1, "length", width])],
        [info("y", [1, width])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 8
    return bytes(proto.SerializeToString())


def recent_and_lags(width: int, lags: int, layers: int) -> bytes:
    """All layers' mixing inside a step, as the step graph has it: everything but the block products."""
    from onnx import TensorProto, helper

    def info(name: str, shape: list[int]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    nodes, inputs, outputs = [helper.make_node("Constant", [], ["axis"], value_ints=[0])], [], []
    for layer in range(layers):

        def name(tensor: str, layer: int = layer) -> str:
            return f"{tensor}.{layer}"

        pairs = [("recent_v", "lag_g"), ("recent_g", "lag_v"), ("v", "first_g"), ("g", "first_v")]
        nodes += [helper.make_node("Mul", [name(a), name(b)], [name(f"p{i}")]) for i, (a, b) in enumerate(pairs)]
        nodes += [
            helper.make_node("Add", [name("p0"), name("p1")], [name("both")]),
            helper.make_node("ReduceSum", [name("both"), "axis"], [name("recent")], keepdims=0),
            helper.make_node("Add", [name("pending"), name("recent")], [name("a")]),
            helper.make_node("Add", [name("a"), name("p2")], [name("b")]),
            helper.make_node("Add", [name("b"), name("p3")], [name("y")]),
        ]
        inputs += [info(name(t), [lags, 1, width]) for t in ("recent_v", "recent_g", "lag_v", "lag_g")]
        inputs += [info(name(t), [1, width]) for t in ("pending", "v", "g", "first_v", "first_g")]
        outputs.append(info(name("y"), [1, width]))
    graph = helper.make_graph(nodes, "recent_and_lags", inputs, outputs)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    proto.ir_version = 8
    return bytes(proto.SerializeToString())
