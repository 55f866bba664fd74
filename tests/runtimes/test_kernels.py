"""What is said of providers' kernels: the list of the installed build is the build's own, the rest holds its shape."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnxruntime
import pytest
from caracal_runtimes import kernels
from caracal_runtimes.kernels import KernelList, Support, dtype_of, explain, judge, known, name_of, since
from caracal_runtimes.onnx_graph import DTYPES, Node, Value, infer, parse_model, read_model
from caracal_runtimes.placement_rules import shape_only

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_kernels.py"
DATA = Path(kernels.__file__).with_name("kernels.json")


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TestData:
    def test_the_list_of_the_installed_build_is_the_recorded_one(self, generator: Any) -> None:
        recorded = json.loads(DATA.read_text(encoding="utf-8"))["providers"]["cpu"]
        if recorded["version"] != f"onnxruntime {onnxruntime.__version__}":
            pytest.skip(f"recorded for {recorded['version']}: run scripts/generate_kernels.py in its environment")
        found = generator.builtin("cpu", sys.executable, False)
        assert found["kernels"] == recorded["kernels"]

    def test_operators_are_defined_when_the_standard_says(self, generator: Any) -> None:
        recorded = json.loads(DATA.read_text(encoding="utf-8"))["schemas"]
        latest = max(map(max, recorded.values()))
        current = generator.schemas(None)
        if onnx.defs.onnx_opset_version() < latest:
            pytest.skip("an older onnx than the recorded one is installed")
        assert recorded == {
            op: known for op, versions in current.items() if (known := [v for v in versions if v <= latest])
        }

    def test_the_file_is_as_the_script_writes_it(self, generator: Any) -> None:
        """Also what is kept by hand: one operator on a line, in order."""
        text = DATA.read_text(encoding="utf-8")
        assert text == generator.to_text(json.loads(text))

    @pytest.mark.parametrize("ep", known())
    def test_every_entry_is_whole(self, ep: str) -> None:
        entry = known()[ep]
        assert entry.version
        assert entry.source
        assert entry.method in ("generated", "documented", "measured")
        assert entry.method != "generated" or entry.complete
        schemas = json.loads(DATA.read_text(encoding="utf-8"))["schemas"]
        for op, rows in entry.kernels.items():
            assert rows
            assert entry.method == "generated" or ":" in op or op in schemas
            for first, last, types in rows:
                assert last is None or first <= last
                plain = {name for name in types.split() if not name.startswith(("seq(", "optional(", "sparse_tensor("))}
                assert plain <= set(DTYPES)
                if entry.method == "documented" and first and ":" not in op and last is None:
                    assert first in schemas[op] or op == "LayerNormalization"
        for op, (types, why) in entry.missing.items():
            assert why
            assert set(types.split()) <= set(DTYPES)
            stated = {name for row in entry.kernels.get(op, ()) for name in row[2].split()}
            assert not stated.intersection(types.split())
        for op, conditions in entry.conditions.items():
            assert op in entry.kernels
            assert all(each["why"] and each["from"] >= 0 for each in conditions)

    def test_the_script_reads_constraints(self, generator: Any) -> None:
        rows = [
            ("", "Add", 7, 12, {"T": ["tensor(float)"]}),
            ("", "Add", 7, 12, {"T": ["tensor(double)"]}),
            ("", "Add", 14, 2**31 - 1, {"T": ["tensor(int64)"]}),
            ("", "DFT", 17, 19, {"T2": ["tensor(int64)"], "T1": ["tensor(float)"]}),
            ("", "ConstantOfShape", 9, 9, {"T1": ["tensor(int64)"], "T2": ["tensor(bool)"]}),
            ("", "Shape", 1, 1, {}),
            ("com.microsoft", "Gelu", 1, 2**31 - 1, {"T": ["tensor(float16)"]}),
            ("ai.onnx.ml", "Scaler", 1, 1, {"T": ["tensor(float)"]}),
        ]
        assert generator.table(rows) == {
            "Add": [[7, 12, "float32 float64"], [14, None, "int64"]],
            "ConstantOfShape": [[9, 9, "bool"]],
            "DFT": [[17, 19, "float32"]],
            "Shape": [[1, 1, ""]],
            "com.microsoft:Gelu": [[1, None, "float16"]],
        }


class TestKnown:
    """What is true whatever the versions: the reasons for having two ways of mixing."""

    @pytest.mark.parametrize(
        "ep", ["cuda", "tensorrt", "nvtensorrtrtx", "qnn", "coreml", "migraphx", "webnn", "mnn", "iree"]
    )
    @pytest.mark.parametrize("opset", [17, 18, 20, 23])
    def test_no_dft(self, ep: str, opset: int) -> None:
        found = explain(ep, "DFT", "", opset, "float32")
        assert found.verdict == "missing"
        assert "no kernel" in found.why
        assert found.version == known()[ep].version

    @pytest.mark.parametrize("ep", ["cpu", "tract"])
    def test_dft(self, ep: str) -> None:
        assert explain(ep, "DFT", "", 18, "float32").verdict == "kernel"

    @pytest.mark.parametrize(
        ("ep", "opset", "word"),
        [("directml", 18, "dft_length"), ("directml", 20, "axis"), ("webgpu", 18, "slow"), ("openvino", 18, "one-sided"),
         ("openvino", 20, "silently wrong")],
    )  # fmt: skip
    def test_dft_with_a_condition(self, ep: str, opset: int, word: str) -> None:
        found = explain(ep, "DFT", "", opset, "float32")
        assert found.verdict == "conditional"
        assert word in found.why

    @pytest.mark.parametrize(
        "ep", ["cpu", "cuda", "directml", "openvino", "webgpu", "tensorrt", "qnn", "coreml", "migraphx"]
    )
    def test_products_run_everywhere(self, ep: str) -> None:
        assert explain(ep, "MatMul", "", 18, "float32") == Support("kernel", "", known()[ep].version)

    def test_directml_falls_behind_the_opset(self) -> None:
        for op in ("Reshape", "Transpose", "Cast", "Pad"):
            assert explain("directml", op, "", 21, "float32").verdict == "kernel"
            assert explain("directml", op, "", 23, "float32").verdict == "opset"
        assert explain("directml", "Conv", "", 21, "float32").verdict == "kernel"
        assert explain("directml", "Conv", "", 22, "float32").verdict == "opset"
        assert explain("directml", "Sin", "", 22, "float32").verdict == "opset"
        assert explain("directml", "Gelu", "", 20, "float32").verdict == "missing"

    def test_bundles_of_products(self, exported: Any) -> None:
        """Nothing that computes is missing where it was seen to run whole."""
        for path in sorted(exported.shipped.glob("*.onnx")):
            model = read_model(path)
            values, constants, sizes = infer(model.graph), model.graph.constants(), shape_only(model.graph)
            for node in model.graph.nodes:
                if node.name in sizes or node.op_type == "Constant":
                    continue
                for ep in ("cpu", "cuda", "directml"):
                    found = judge(ep, node, model.opsets, dtype_of(node, values), constants)
                    assert found.verdict == "kernel", (ep, node.op_type, found)


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three made-up providers, so that the rules show."""
    rows: dict[str, list[tuple[int, int | None, str]]] = {
        "Add": [(7, 12, "float32"), (14, None, "float32 int32")],
        "Neg": [(0, None, "")],
        "Slice": [(13, None, "float32")],
        "DFT": [(17, None, "float32"), (20, None, "float32")],
        "com.example:Thing": [(1, None, "float32")],
    }
    conditions = {
        "Slice": [{"from": 13, "to": None, "constant": [1, 2, 3], "why": "bounds must be constants"}],
        "DFT": [
            {"from": 17, "to": 19, "attributes": {"axis": 1, "onesided": 0}, "why": "along axis 1"},
            {"from": 20, "to": None, "why": "wrong"},
        ],
    }
    missing = {"Pad": ("", "it fails"), "Mod": ("int32 int64", "left out")}
    made = {
        name: KernelList(f"{name} 1", method, "made up", complete, (), rows, missing, conditions)
        for name, method, complete in [
            ("whole", "generated", True),
            ("part", "documented", False),
            ("tried", "measured", False),
        ]
    }
    monkeypatch.setattr(kernels, "_lists", lambda: made)
    explain.cache_clear()
    yield
    explain.cache_clear()


@pytest.mark.usefixtures("lists")
class TestRules:
    @pytest.mark.parametrize(
        ("ep", "op", "opset", "dtype", "verdict", "why"),
        [
            ("whole", "Add", 18, "float32", "kernel", ""),
            ("whole", "Add", 14, "int32", "kernel", ""),
            ("whole", "Add", 7, "float32", "kernel", ""),
            ("whole", "Add", 9, "float32", "kernel", ""),
            ("whole", "Add", 13, "float32", "opset", "kernels for version 7 to 12, 14 of the operator, not 13"),
            ("whole", "Add", 6, "float32", "opset", "not 6"),
            ("whole", "Add", 18, "int64", "dtype", "kernels for float32, int32, not int64"),
            ("whole", "Add", 12, "int32", "dtype", "kernels for float32, not int32"),
            ("whole", "Add", 18, "unknown", "unknown", "cannot be told"),
            ("whole", "Add", 0, "float32", "unknown", "which version"),
            ("whole", "Neg", 6, "float64", "kernel", ""),
            ("whole", "Neg", 18, "unknown", "kernel", ""),
            ("whole", "Sub", 18, "float32", "missing", "no kernel"),
            ("whole", "Pad", 18, "float32", "missing", r"no kernel \(it fails\)"),
            ("whole", "Mod", 18, "int32", "missing", r"no kernel for int32 \(left out\)"),
            ("whole", "Mod", 18, "float32", "missing", "no kernel"),
            ("whole", "Slice", 18, "float32", "conditional", "bounds must be constants"),
            ("whole", "Slice", 18, "int8", "dtype", "not int8"),
            ("whole", "Nonsense", 18, "float32", "missing", "no kernel"),
            ("part", "Sub", 18, "float32", "unknown", "not listed"),
            ("part", "Add", 13, "float32", "opset", "not 13"),
            ("part", "Mod", 18, "float32", "unknown", "not listed"),
            ("tried", "Add", 13, "float32", "unknown", "not among what was tried"),
            ("tried", "Add", 18, "int64", "unknown", "not among what was tried"),
            ("tried", "Mod", 18, "int64", "missing", "no kernel for int64"),
            ("tried", "DFT", 18, "float32", "conditional", "along axis 1"),
            ("tried", "DFT", 20, "float32", "conditional", "wrong"),
            (
                "nobody",
                "Add",
                18,
                "float32",
                "unknown",
                "nothing is known of its kernels; there are lists for whole, part",
            ),
            ("WHOLE:0", "Add", 18, "float32", "kernel", ""),
        ],
    )
    def test_explain(self, ep: str, op: str, opset: int, dtype: str, verdict: str, why: str) -> None:
        found = explain(ep, op, "", opset, dtype)
        assert found.verdict == verdict
        assert re.search(why, found.why)
        assert (found.why == "") == (verdict == "kernel")

    def test_domains(self) -> None:
        assert explain("whole", "Add", "ai.onnx", 18, "float32").verdict == "kernel"
        assert explain("whole", "Thing", "com.example", 3, "float32").verdict == "kernel"
        assert explain("whole", "Thing", "", 18, "float32").verdict == "missing"
        assert explain("whole", "Add", "com.example", 18, "float32").verdict == "missing"

    def test_conditions_that_the_graph_tells(self) -> None:
        def slice_(*inputs: str) -> Support:
            return judge("whole", Node("s", "Slice", "", inputs, ("y",)), {"": 18}, "float32", {"a": 0, "b": 0, "c": 0})

        assert slice_("x", "a", "b", "c").verdict == "kernel"
        assert slice_("x", "a", "b", "c", "n").verdict == "kernel"  # steps may be computed
        assert slice_("x", "a", "b").verdict == "kernel"
        assert slice_("x", "a", "b", "").verdict == "kernel"
        assert slice_("x", "a", "n", "c") == Support(
            "conditional", "bounds must be constants; here it is computed", "whole 1", (1, 2, 3)
        )

        def dft(opset: int, **attributes: int) -> str:
            return judge("whole", Node("d", "DFT", "", ("x",), ("y",), attributes), {"": opset}, "float32", ()).verdict

        assert dft(18) == dft(18, axis=1, inverse=1) == dft(18, onesided=0) == "kernel"
        assert dft(18, axis=2) == dft(18, onesided=1) == dft(20) == "conditional"


def test_names_of_providers() -> None:
    assert [name_of(ep) for ep in ("CUDA", "dml", "DML:0", " trt ", "openvino:GPU.0")] == [
        "cuda", "directml", "directml", "tensorrt", "openvino",
    ]  # fmt: skip


def test_when_operators_were_defined() -> None:
    assert [since("Add", "", opset) for opset in (7, 12, 13, 14, 18)] == [7, 7, 13, 14, 14]
    assert since("DFT", "", 18) == 17
    assert since("Gelu", "com.microsoft", 1) == 1
    assert since("NoSuchOperator", "", 18) == 1


def test_the_type_that_a_node_computes_in() -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x, bool[2] c, int64[1] n) => (y)'
        "{ w = Where(c, x, x) s = ConstantOfShape(n) k = Constant<value_int = 1>() y = Add(x, x) }"
    )
    graph = parse_model(onnx.parser.parse_model(text).SerializeToString()).graph
    values = infer(graph)
    assert [dtype_of(node, values) for node in graph.nodes] == ["float32", "float32", "int64", "float32"]
    assert dtype_of(Node("n", "Add"), values) == "unknown"
    assert dtype_of(Node("n", "Add", "", ("q",)), {"q": Value("q")}) == "unknown"
