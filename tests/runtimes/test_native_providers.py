"""Providers that are no ONNX Runtime: what detection says, graphs for fixed shapes, and each runtime where installed."""

from __future__ import annotations

import gc
import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from caracal_runtimes.errors import BundleError, InputError, NotRunError
from caracal_runtimes.manifest import GraphSpec, Manifest, TensorSpec
from caracal_runtimes.providers import native_session
from caracal_runtimes.providers.fixed_shapes import FixedShapes, axis_size, checked_inputs, dimensions
from caracal_runtimes.providers.protocol import Provider, Settings
from caracal_runtimes.safetensors_file import SafetensorsFile
from caracal_runtimes.session import Session
from caracal_runtimes.tolerances import tolerance_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODULES = {
    "openvino_native": "openvino",
    "reference": "onnx",
    "tract": "tract",
    "iree": "iree.compiler",
    "mnn": "MNN",
}
providers = pytest.mark.parametrize("module", MODULES)

SPEC = GraphSpec(
    "graph.onnx",
    18,
    "matmul",
    (
        TensorSpec("input_ids", "int64", ("batch", "length")),
        TensorSpec("state", "float32", (4, "batch", 3)),
        TensorSpec("doubled", "float32", ("2*length",)),
    ),
    (TensorSpec("logits", "float32", ("batch", "length", 10)), TensorSpec("rest", "float32", ("length + batch",))),
)


def feeds(batch: int = 2, length: int = 5) -> dict[str, NDArray[Any]]:
    return {
        "input_ids": np.ones((batch, length), np.int64),
        "state": np.ones((4, batch, 3), np.float32),
        "doubled": np.ones(2 * length, np.float32),
    }


def provider_of(module: str) -> Provider:
    found = importlib.import_module(f"caracal_runtimes.providers.{module}").PROVIDER
    assert isinstance(found, Provider)
    return found


# Detection


@providers
def test_importing_a_provider_needs_numpy_only(module: str) -> None:
    code = (
        f"import sys; import caracal_runtimes.providers.{module} as m; m.PROVIDER.install();"
        "bad = {'onnx', 'onnxruntime', 'openvino', 'tract', 'iree', 'MNN', '_tools', 'torch'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@providers
def test_a_provider_that_is_not_installed_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    provider = provider_of(module)
    found = provider.detect()
    assert (found.state, found.devices) == ("missing", ())
    assert provider.packages[0] in found.reason
    assert found.remedy == f"pip install 'caracal-onnx[{provider.name}]'"
    with pytest.raises(NotRunError, match=r"pip install 'caracal-onnx"):
        provider.open(Path("graph.onnx"), SPEC, Settings())


@providers
def test_a_provider_that_cannot_be_imported_names_the_cause(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        raise OSError("libruntime.so.7: cannot open shared object file\nand more")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setattr(native_session, "load_module", fails)
    found = provider_of(module).detect()
    assert found.state == "broken"
    assert found.versions[provider_of(module).packages[0]] == "9.9"
    assert "libruntime.so.7: cannot open shared object file" in found.reason
    assert "\n" not in found.reason
    assert found.remedy.startswith("pip install --force-reinstall")


@providers
def test_names_and_settings(module: str) -> None:
    provider = provider_of(module)
    assert provider.extra == provider.name == module.replace("_", "-")
    for settings in (Settings(threads=1), Settings(fast=True, device="nope")):
        assert all(isinstance(text, str) for pair in provider.applied(settings).items() for text in pair)
    with pytest.raises(InputError, match="--threads"):
        provider.open(Path("graph.onnx"), SPEC, Settings(threads=-1))


# Shapes


def test_dimensions_are_read_from_the_inputs() -> None:
    assert dimensions(SPEC, feeds(3, 7)) == {"batch": 3, "length": 7}
    assert dimensions(SPEC, feeds(0, 1)) == {"batch": 0, "length": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": np.ones((4, 3, 3), np.float32)}, r"'state'.*found \[4, 3, 3\]: batch is 2 by input_ids"),
        ({"state": np.ones((5, 2, 3), np.float32)}, r"'state'.*expected shape \[4, 'batch', 3\]"),
        ({"state": np.ones((4, 2), np.float32)}, r"'state'.*found \[4, 2\]"),
        ({"doubled": np.ones(11, np.float32)}, r"'doubled'.*found \[11\]"),
        ({"other": np.ones(1)}, "'other': the graph has no such input"),
    ],
)
def test_inputs_that_contradict_the_graph_are_refused(change: dict[str, NDArray[Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dimensions(SPEC, feeds() | change)


def test_a_missing_input_is_named() -> None:
    found = feeds()
    del found["state"]
    with pytest.raises(InputError, match="'state': it is missing"):
        dimensions(SPEC, found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": np.ones((2, 5), np.int32)}, "'input_ids': expected int64, found int32"),
        ({"state": np.ones((4, 2, 3), np.float32).astype(">f4")}, "'state': expected float32"),
        ({"state": [1.0]}, "'state': expected a numpy array, found list"),
        ({"input_ids": np.full((2, 5), 10)}, "input_ids: expected numbers from 0 to 9, found 10 to 10"),
        ({"input_ids": np.full((2, 5), -1)}, "input_ids: expected numbers from 0 to 9, found -1 to -1"),
    ],
)
def test_inputs_that_native_code_could_crash_on_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        checked_inputs(SPEC, feeds() | change)


def test_checked_inputs_are_contiguous_and_in_order() -> None:
    found = {"doubled": np.ones(20, np.float32)[::2], "state": feeds()["state"], "input_ids": feeds()["input_ids"]}
    checked, sizes = checked_inputs(SPEC, found)
    assert list(checked) == ["input_ids", "state", "doubled"]
    assert all(value.flags.c_contiguous for value in checked.values())
    assert sizes == {"batch": 2, "length": 5}


@pytest.mark.parametrize(
    ("axis", "size"),
    [(7, 7), ("length", 5), ("2*length", 10), ("lags + length - 1", 7), ("(length + 1)//2", 3), ("", None),
     ("unknown", None), ("__import__('os')", None), ("1/2", None), ("length//0", None), ("2 *", None)],
)  # fmt: skip
def test_sizes_of_axes(axis: int | str, size: int | None) -> None:
    assert axis_size(axis, {"length": 5, "lags": 3}) == size


def test_graphs_are_loaded_once_per_shapes_and_the_oldest_goes() -> None:
    loaded = []

    def load(shapes: Mapping[str, tuple[int, ...]]) -> str:
        loaded.append(dict(shapes))
        return str(shapes["input_ids"])

    graphs = FixedShapes(load, keep=2)
    one, two, three = (feeds(length=length) for length in (1, 2, 3))
    assert [graphs.get(x) for x in (one, two, one, three, one)] == ["(2, 1)", "(2, 2)", "(2, 1)", "(2, 3)", "(2, 1)"]
    assert len(loaded) == 3
    assert len(graphs) == 2
    assert loaded[0] == {"input_ids": (2, 1), "state": (4, 2, 3), "doubled": (2,)}
    graphs.get(two)  # it was the one that had not been used for longest
    assert len(loaded) == 4


def test_a_graph_that_does_not_load_is_tried_again() -> None:
    fails = [True, False]

    def load(shapes: Mapping[str, tuple[int, ...]]) -> str:
        if fails.pop(0):
            raise NotRunError("no")
        return "yes"

    graphs = FixedShapes(load)
    with pytest.raises(NotRunError):
        graphs.get(feeds())
    assert graphs.get(feeds()) == "yes"


# Rewriting


def toy() -> Any:
    """y = reshape(x, [B*L, -1]) * w, with sizes worked out from two shapes, one of them of an intermediate tensor."""
    onnx: Any = pytest.importorskip("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("Shape", ["t"], ["rows"], start=0, end=2),
        helper.make_node("ReduceProd", ["rows"], ["count"], keepdims=1),
        helper.make_node("Concat", ["count", "rest"], ["size"], axis=0),
        helper.make_node("Reshape", ["t", "size"], ["r"]),
        helper.make_node("Shape", ["r"], ["again"], start=1),
        helper.make_node("Concat", ["again", "count"], ["turned"], axis=0),
        helper.make_node("Mul", ["r", "w"], ["y"]),
        helper.make_node("Reshape", ["y", "turned"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes,
        "toy",
        [helper.make_tensor_value_info("x", kinds.FLOAT, ["batch", "length", 3])],
        [helper.make_tensor_value_info("z", kinds.FLOAT, [3, "batch*length"])],
        [onnx.numpy_helper.from_array(np.asarray([-1], np.int64), "rest")],
        value_info=[helper.make_tensor_value_info("t", kinds.FLOAT, ["length", "batch", 3])],
    )
    weight = onnx.numpy_helper.from_array(np.asarray([1, 2, 3], np.float32), "w")
    graph.initializer.append(weight)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def external_toy(folder: Path) -> Any:
    onnx: Any = pytest.importorskip("onnx")
    model = toy()
    onnx.external_data_helper.set_external_data(model.graph.initializer[1], location="w.bin")
    onnx.save(model, str(folder / "toy.onnx"))
    return onnx.load(str(folder / "toy.onnx"), load_external_data=False)


def test_sizes_become_constants(tmp_path: Path) -> None:
    model = external_toy(tmp_path)
    (tmp_path / "second").hardlink_to(tmp_path / "w.bin")
    from caracal_runtimes.providers import rewrite
    from onnx.reference import ReferenceEvaluator

    fixed = rewrite.fix_shapes(model, {"x": (2, 5, 3)})
    assert [node.op_type for node in fixed.graph.node] == ["Transpose", "Reshape", "Mul", "Reshape"]
    assert rewrite.input_shapes(fixed) == {"x": [2, 5, 3]}
    assert rewrite.input_shapes(model) == {"x": ["batch", "length", 3]}, "the given graph stays as it is"
    assert [dim.dim_value for dim in fixed.graph.output[0].type.tensor_type.shape.dim] == [3, 10]
    assert not fixed.graph.value_info
    x = np.random.default_rng(1).standard_normal((2, 5, 3)).astype(np.float32)
    with rewrite.RewrittenFile(fixed, tmp_path, "toy.onnx") as file:
        (tmp_path / "w.bin").unlink()  # the weights are inside
        evaluator: Any = ReferenceEvaluator(str(file.path))
    found = evaluator.run(None, {"x": x})[0]
    expected = (x.transpose(1, 0, 2).reshape(10, 3) * [1, 2, 3]).reshape(3, 10)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_inputs_are_narrowed_at_the_door() -> None:
    onnx: Any = pytest.importorskip("onnx")
    from caracal_runtimes.providers import rewrite
    from onnx.reference import ReferenceEvaluator

    helper, kinds = onnx.helper, onnx.TensorProto
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "ids"], ["picked"]), helper.make_node("Add", ["picked", "x"], ["y"])],
        "pick",
        [
            helper.make_tensor_value_info("ids", kinds.INT64, ["n"]),
            helper.make_tensor_value_info("x", kinds.FLOAT, [1]),
        ],
        [helper.make_tensor_value_info("y", kinds.FLOAT, ["n"])],
        [onnx.numpy_helper.from_array(np.arange(5, dtype=np.float32), "table")],
    )
    narrow = rewrite.narrow_inputs(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    assert [value.type.tensor_type.elem_type for value in narrow.graph.input] == [kinds.INT32, kinds.FLOAT]
    given = {"ids": np.asarray([3, 1], np.int32), "x": np.ones(1, np.float32)}
    evaluator: Any = ReferenceEvaluator(narrow)
    assert evaluator.run(None, given)[0].tolist() == [4, 2]
    onnx.checker.check_model(narrow)


def test_a_rewritten_file_goes_with_its_object(tmp_path: Path) -> None:
    model = external_toy(tmp_path)
    from caracal_runtimes.providers import rewrite

    file = rewrite.RewrittenFile(model, tmp_path, "toy.onnx")
    folder = file.folder
    assert file.path.is_file()
    del file
    gc.collect()
    assert not folder.exists()


def test_weights_that_cannot_be_inlined_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = external_toy(tmp_path)
    from caracal_runtimes.providers import rewrite

    monkeypatch.setattr(rewrite, "_MAX_FILE", 8)
    with pytest.raises(BundleError, match="less than 2 GiB"):
        rewrite.RewrittenFile(model, tmp_path, "toy.onnx")
    (tmp_path / "w.bin").write_bytes(b"short")
    with pytest.raises(BundleError, match=r"w: w\.bin is cut short"):
        rewrite.RewrittenFile(model, tmp_path, "toy.onnx")
    (tmp_path / "w.bin").unlink()
    with pytest.raises(BundleError, match="w: this weight cannot be read"):
        rewrite.RewrittenFile(model, tmp_path, "toy.onnx")


@pytest.mark.skipif(sys.platform == "win32", reason="a file with a hole in it takes its whole size there")
def test_weights_are_inlined_from_several_files_and_behind_2_gib(tmp_path: Path) -> None:
    onnx: Any = pytest.importorskip("onnx")
    from caracal_runtimes.providers import rewrite

    model = external_toy(tmp_path)
    other = model.graph.initializer.add()
    other.CopyFrom(onnx.numpy_helper.from_array(np.float32([4, 5]), "other"))
    onnx.external_data_helper.set_external_data(other, location="second.bin", offset=2**31 + 12, length=8)
    other.ClearField("raw_data")
    with (tmp_path / "second.bin").open("wb") as file:
        file.seek(2**31 + 12)  # what is before is a hole
        file.write(np.float32([4, 5, 6]).tobytes())
    whole = rewrite.inline_weights(model, tmp_path)
    found = {tensor.name: onnx.numpy_helper.to_array(tensor).tolist() for tensor in whole.graph.initializer}
    assert found == {"rest": [-1], "w": [1, 2, 3], "other": [4, 5]}


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from caracal_runtimes.providers import rewrite

    (tmp_path / "graph.onnx").write_bytes(b"\xff not a graph")
    with pytest.raises(BundleError, match=r"graph\.onnx cannot be read as ONNX"):
        rewrite.load(tmp_path / "graph.onnx")


# The runtimes themselves, where they are installed


class Opened:
    """The tiny bundle, by one provider on one thread."""

    def __init__(self, provider: Provider, bundle: Path) -> None:
        self.provider, self.bundle = provider, bundle
        self.manifest = Manifest.from_json((bundle / "manifest.json").read_text(encoding="utf-8"))
        self.golden = SafetensorsFile.open(bundle / self.manifest.golden.file)
        self._sessions: dict[str, Session] = {}

    def open(self, graph: str, **settings: Any) -> Session:
        spec = self.manifest.graphs[graph]
        return self.provider.open(self.bundle / spec.file, spec, Settings(threads=1, **settings))

    def session(self, graph: str) -> Session:
        """Opened once: some compile for seconds."""
        if graph not in self._sessions:
            self._sessions[graph] = self.open(graph)
        return self._sessions[graph]

    def case(self, name: str) -> tuple[dict[str, NDArray[Any]], NDArray[Any]]:
        names = ("input_ids", "lengths", "logit_positions")
        return {key: np.asarray(self.golden.tensor(f"{name}/{key}")) for key in names}, np.asarray(
            self.golden.tensor(f"{name}/logits")
        )


@pytest.fixture(params=list(MODULES), scope="module")
def opened(request: pytest.FixtureRequest) -> Opened:
    pytest.importorskip(MODULES[request.param], reason=f"{MODULES[request.param]} is not installed")
    provider = provider_of(request.param)
    found = provider.detect()
    if found.state == "missing":  # IREE is two packages
        pytest.skip(found.reason)
    assert found.state == "ready", found.reason
    assert set(found.versions) == set(provider.packages)
    bundle: Path = request.getfixturevalue("exported").bundle
    return Opened(provider, bundle)


def relative(got: NDArray[Any], reference: NDArray[Any]) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - reference) / np.linalg.norm(reference))


def test_forward_is_the_golden(opened: Opened) -> None:
    session = opened.session("forward")
    limit = tolerance_for(opened.provider.level, "float32").relative_l2
    cases = [case for case in opened.manifest.golden.cases if not case.columns]
    for case in sorted(cases, key=lambda case: case.batch)[-2:]:
        given, logits = opened.case(case.name)
        (got,) = session.run(given, ["logits"])
        assert got.dtype == np.float32
        assert got.shape == logits.shape
        assert relative(got, logits) < limit, case.name
    assert session.inputs() == {
        "input_ids": ["batch", "length"],
        "lengths": ["batch"],
        "logit_positions": ["batch", "positions"],
    }
    assert session.threads == 1
    placement = session.placement()
    assert placement is None or sum(placement.nodes.values()) > 0


def test_step_and_convolve_agree_with_numpy(opened: Opened) -> None:
    rng = np.random.default_rng(4)
    v, g = rng.standard_normal((2, 2, 6, 3)).astype(np.float32)
    lag_v, lag_g = rng.standard_normal((2, 2, 4, 3)).astype(np.float32)
    session = opened.session("convolve")
    given = {"v_block": v, "g_block": g, "v_lags": lag_v, "g_lags": lag_g}
    expected = np.zeros((2, 10, 3))
    for lag in range(4):
        expected[:, lag : lag + 6] += v * lag_g[:, lag, None] + g * lag_v[:, lag, None]
    (got,) = session.run(given)
    assert relative(got, expected) < 1e-5
    # Bound arrays, and inputs that are not contiguous.
    binding = session.binding()
    result = np.zeros((2, 10, 3), np.float32)
    for name, value in given.items():
        binding.input(name, np.repeat(value, 2, axis=2)[:, :, ::2])
    binding.output("mixed", result)
    binding.run()
    np.testing.assert_array_equal(result, got)


def test_step_gives_what_the_manifest_says(opened: Opened) -> None:
    spec = opened.manifest.graphs["step"]
    rng = np.random.default_rng(5)
    given: dict[str, NDArray[Any]] = {}
    for tensor in spec.inputs:
        shape = tuple(size if isinstance(size, int) else 2 for size in tensor.shape)
        ids = tensor.dtype == "int64"
        given[tensor.name] = rng.integers(0, 300, shape) if ids else rng.standard_normal(shape).astype(np.float32)
    found = opened.session("step").run(given)
    for tensor, value in zip(spec.outputs, found, strict=True):
        assert value.shape == tuple(size if isinstance(size, int) else 2 for size in tensor.shape)
        assert value.dtype == tensor.dtype
        assert np.isfinite(value).all()


def test_wrong_inputs_are_refused_before_native_code_sees_them(opened: Opened) -> None:
    session = opened.session("forward")
    given, _ = opened.case("two")
    for change in (
        {"input_ids": given["input_ids"].astype(np.int32)},
        {"input_ids": given["input_ids"].astype(np.float32)},
        {"input_ids": given["input_ids"][0]},
        {"input_ids": given["input_ids"] + 100_000},
        {"lengths": given["lengths"][:1]},
        {"lengths": given["lengths"] + 100_000},
    ):
        with pytest.raises(InputError, match=r"forward\.onnx: input"):
            session.run(given | change)
    with pytest.raises(InputError, match="no output 'nope'"):
        session.run(given, ["nope"])


def test_results_without_elements(opened: Opened) -> None:
    given, _ = opened.case("two")
    nowhere = np.zeros((2, 0), np.int64)
    (got,) = opened.session("forward").run(given | {"logit_positions": nowhere}, ["logits"])
    assert got.shape == (2, 0, opened.manifest.model.vocab_size)
    assert got.dtype == np.float32


def test_settings_that_it_does_not_have_are_refused(opened: Opened) -> None:
    with pytest.raises(InputError, match="--ep: provider"):
        opened.open("step", device="nope")
    with pytest.raises(InputError, match="--ep-option"):
        opened.open("step", options={"NOPE": "1"})


def test_nothing_is_printed_where_results_go(opened: Opened, capfd: pytest.CaptureFixture[str]) -> None:
    opened.provider.detect()
    convolve = opened.manifest.graphs["convolve"]
    given = {tensor.name: np.ones((1, 2, 3), np.float32) for tensor in convolve.inputs}
    opened.open("convolve").run(given)
    assert not capfd.readouterr().out
