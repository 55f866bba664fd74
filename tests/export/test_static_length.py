"""`--max-length` and `--static-length`: the same numbers from graphs that are made for passes of N tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from caracal_export import dry_run as dry_runs
from caracal_export import export_checkpoint, exporter, goldens, tracing
from caracal_export.bounds import MOST, bounded_lags, bounds, table_bytes
from caracal_export.dry_run import dry_run, dry_run_lines
from caracal_export.folding import constant_bytes, fold_constants
from caracal_export.precision.calibration import calibration_ids
from caracal_export.precision.plan import Precision
from caracal_export.precision.quantizing import quantize_bundle
from caracal_export.precision.sensitivity import divergence
from caracal_runtimes import replay
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.model import CausalLM
from caracal_runtimes.parity import run_parity
from caracal_runtimes.pass_lengths import ANY, PassLengths
from caracal_runtimes.sampling import SamplingOptions
from numpy.typing import NDArray
from running import Ran

from caracal import CaracalModel, open_checkpoint

LAGS = 8  # of the tiny bundles
N = 21  # odd, no multiple of the transform's factors, and a chunk of a prompt (16) is shorter
FORMS = {"bounded": PassLengths(N), "static": PassLengths(N, static=True)}
LIMIT = 1e-6  # relative L2 of a graph in float32 from the reference in float64


@pytest.fixture(scope="module")
def bounded(
    checkpoint: Path, bundle: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """`bounded(form)`: the bundle of `checkpoint` in one of `FORMS`, verified. Read only.

    The graphs that a bound does not touch come from the unbounded bundle: tracing them again would show nothing.
    """
    unbounded, made = bundle("matmul"), {}

    def export(form: str) -> Path:
        if form not in made:
            lengths = FORMS[form]

            def trace(model: CaracalModel, name: str, *rest: Any, **named: Any) -> ir.Model:
                if name in tracing.BOUNDED:
                    return tracing.trace(model, name, *rest, **named)
                return ir.load(unbounded / f"{name}.onnx")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(exporter, "trace", trace)
                made[form] = export_checkpoint(
                    checkpoint,
                    tmp_path_factory.mktemp("bounded") / form,
                    threads=1,
                    lags=LAGS,
                    max_length=lengths.most,
                    static_length=lengths.static,
                ).path
        return made[form]

    return export


@pytest.fixture(scope="module")
def exact(model: CaracalModel) -> CaracalModel:
    """The reference in float64."""
    double = CaracalModel(model.config).double()
    double.load_state_dict(model.state_dict())
    return double.eval().requires_grad_(False)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loaded(bounded: Callable[[str], Path], form: str) -> CausalLM:
    return Bundle.open(bounded(form)).model(threads=1)


def _ids(*shape: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(0, 97, shape)


def _graph(folder: Path, name: str) -> onnx.ModelProto:
    return onnx.load(folder / f"{name}.onnx", load_external_data=False)


# Numbers


@pytest.mark.parametrize("length", [1, 2, 7, 16, N - 1, N])
def test_one_pass_is_the_references(
    loaded: CausalLM, exact: CaracalModel, length: int, relative_l2: Callable[..., float]
) -> None:
    ids = _ids(2, length, seed=length)
    want = exact(torch.from_numpy(ids)).numpy()
    assert relative_l2(loaded.forward(ids), want) < LIMIT


def test_rows_of_a_batch_keep_their_own_lengths(
    loaded: CausalLM, exact: CaracalModel, relative_l2: Callable[..., float]
) -> None:
    rows = [_ids(length, seed=length).tolist() for length in (1, N, 2, N - 1, 9)]
    got = loaded.forward(rows)
    assert got.shape == (len(rows), N, 97)  # what was asked for, not what the graph computes inside
    for row, logits in zip(rows, got, strict=True):
        assert relative_l2(logits[: len(row)], exact(torch.tensor([row]))[0].numpy()) < LIMIT


def test_a_batch_is_as_long_as_its_longest_row(loaded: CausalLM) -> None:
    assert loaded.forward([[1, 2, 3], [4]]).shape == (2, 3, 97)


@pytest.mark.parametrize("length", [2 * N, 5 * N + 3])
def test_longer_texts_are_read_in_pieces(
    loaded: CausalLM, exact: CaracalModel, length: int, relative_l2: Callable[..., float]
) -> None:
    row = _ids(length, seed=length).tolist()
    want = exact(torch.tensor([row]))[0].numpy()
    for read in (replay.by_chunks, replay.by_steps):
        for (_, position), logits in read(loaded.graphs, [row]).items():
            assert relative_l2(logits, want[position]) < 4 * LIMIT, (read.__name__, position)


def test_several_long_prompts_give_what_the_unbounded_bundle_gives(
    loaded: CausalLM, bundle: Callable[[str], Path]
) -> None:
    prompts = [_ids(length, seed=length).tolist() for length in (1, 3 * N, N + 1, 8, 2)]
    others = Bundle.open(bundle("matmul")).model(threads=1)
    greedy = SamplingOptions(temperature=0)
    got, want = (each.generate(prompts, max_new_tokens=3 * N, options=greedy) for each in (loaded, others))
    assert [each.ids for each in got] == [each.ids for each in want]


def test_what_is_longer_is_refused(loaded: CausalLM) -> None:
    with pytest.raises(InputError, match=rf"at most {N} tokens .*--max-length {N}\), found {N + 1};"):
        loaded.forward(_ids(1, N + 1))


def test_a_graph_itself_does_not_take_more(bounded: Callable[[str], Path]) -> None:
    """What the refusal is there for: a runtime's own error says nothing of bounds, and with the operator DFT there is none."""
    loaded = Bundle.open(bounded("bounded")).model(threads=1)
    loaded.lengths = ANY
    with pytest.raises(NotRunError):
        loaded.forward(_ids(1, 2 * N))


# The proof that travels with a bundle


def test_goldens_end_where_a_pass_ends(bounded: Callable[[str], Path], form: str) -> None:
    found = Bundle.open(bounded(form))
    golden, tensors = found.manifest.golden, found.golden()
    assert max(case.length for case in golden.cases) == N
    assert {"longest", "longest_minus_1"} <= {case.name for case in golden.cases}
    assert max(case.prompt_length + case.new_tokens for case in golden.greedy) > N
    read: set[int] = set()
    for case in golden.cases:
        for row, length in zip(
            np.asarray(tensors.tensor(f"{case.name}/input_ids")),
            np.asarray(tensors.tensor(f"{case.name}/lengths")).tolist(),
            strict=True,
        ):
            read.update(row[:length].tolist())
    assert read == set(range(97))


@pytest.mark.parametrize(
    ("bound", "lengths"),
    [
        (2, {"one", "two", "longest", "longest_minus_1", "ragged"}),
        (8, {"one", "two", "three", "window_minus_1", "window", "longest", "longest_minus_1", "ragged"}),
    ],
)
def test_goldens_of_small_bounds(model: CaracalModel, bound: int, lengths: set[str]) -> None:
    recorded = goldens.record(model, 2, longest=bound)
    assert {case.name for case in recorded.cases if not case.columns} == lengths
    assert all(case.length <= bound for case in recorded.cases)


def test_a_pass_far_beyond_the_window_is_recorded_once_and_not_in_pieces(model: CaracalModel) -> None:
    recorded = goldens.record(model, 2, longest=200)
    assert {case.name: case.length for case in recorded.cases}["longest_at_once"] == 200
    assert "longest_minus_1" not in {case.name for case in recorded.cases}


@pytest.mark.parametrize("graph", tracing.BOUNDED)
@pytest.mark.parametrize("table", range(4))
def test_a_broken_table_is_found(
    bounded: Callable[[str], Path],
    copy_bundle: Callable[[Path], Path],
    rehash: Callable[[Path], None],
    graph: str,
    table: int,
) -> None:
    folder = copy_bundle(bounded("static"))
    model = _graph(folder, graph)
    tables = [
        attribute.t
        for node in model.graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.name == "value" and attribute.t.data_type == onnx.TensorProto.FLOAT and attribute.t.dims
    ]
    tables.sort(key=lambda each: -int(np.prod(each.dims)))
    chosen = tables[table]
    values = onnx.numpy_helper.to_array(chosen).copy()
    place = np.unravel_index(int(np.abs(values).argmax()), values.shape)
    values[place] = -values[place] if abs(values[place]) < 10 else 0.0  # of a mask: what must not be seen is
    chosen.CopyFrom(onnx.numpy_helper.from_array(values, chosen.name))
    onnx.save(model, folder / f"{graph}.onnx")
    rehash(folder)
    report = run_parity(Bundle.open(folder), threads=1)
    assert report.verdict == "FAILED"
    wrong = {case.name for case in report.providers[0].cases if case.verdict == "FAILED"}
    # What reads whole sequences shows in them, what reads chunks in them alone.
    assert ("longest" in wrong) == (graph == "forward")


# The graphs


@pytest.mark.parametrize("graph", tracing.BOUNDED)
def test_nothing_is_worked_out_of_constants(
    bounded: Callable[[str], Path], bundle: Callable[[str], Path], form: str, graph: str
) -> None:
    assert _computed_from_constants(_graph(bounded(form), graph)) == []
    assert _computed_from_constants(_graph(bundle("matmul"), graph)) != []
    assert _lookups(_graph(bounded(form), graph)) == []
    assert len(_lookups(_graph(bundle("matmul"), graph))) > 8


def _computed_from_constants(model: onnx.ModelProto) -> list[str]:
    """Nodes that need no input."""
    constant = {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    return [node.name for node in model.graph.node if node.op_type != "Constant" and set(node.input) <= constant | {""}]


def _lookups(model: onnx.ModelProto) -> list[str]:
    """Nodes that take a table's entries at places which depend on lengths alone."""
    return [node.name for node in model.graph.node if node.op_type == "Gather" and node.name.startswith("lengths/")]


@pytest.mark.parametrize("graph", tracing.BOUNDED)
def test_all_sizes_but_the_batch_are_known(bounded: Callable[[str], Path], graph: str) -> None:
    sizes = _sizes(_graph(bounded("static"), graph))
    # The first axis is the batch, or the batch times something, or a count of its rows.
    unknown = {name: shape for name, shape in sizes.items() if not all(size in ("", "positions") for size in shape[1:])}
    assert unknown == {}
    # And what this looks for is there where lengths are not static.
    others = _sizes(_graph(bounded("bounded"), graph))
    assert any("length" in shape[1:] for shape in others.values())


def _sizes(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Symbols of each value's axes that ONNX's own shape inference finds, empty for a number."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    return {
        value.name: [
            "" if size.HasField("dim_value") else size.dim_param or "unknown"
            for size in value.type.tensor_type.shape.dim
        ]
        for value in (*inferred.input, *inferred.value_info, *inferred.output)
    }


def test_weights_are_the_same_and_lie_outside(
    bounded: Callable[[str], Path], bundle: Callable[[str], Path], form: str
) -> None:
    weights = "weights.safetensors"
    assert (bounded(form) / weights).read_bytes() == (bundle("matmul") / weights).read_bytes()
    for name in tracing.BOUNDED:
        initializers = _graph(bounded(form), name).graph.initializer
        assert initializers
        assert all(each.data_location == onnx.TensorProto.EXTERNAL for each in initializers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "static", "name"), [(33, False, "forward"), (64, True, "extend"), (12, True, "forward")]
)
def test_the_operator_dft_has_one_size_too(model: CaracalModel, bound: int, static: bool, name: str) -> None:
    graph = tracing.trace(model, name, "dft", 18, lags=LAGS, lengths=PassLengths(bound, static))
    proto = ir.to_proto(graph)
    assert _computed_from_constants(proto) == []
    assert {node.op_type for node in proto.graph.node} >= {"DFT"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixing", "opset", "static"), [("dft", 20, True), ("matmul", 17, False), ("matmul", 23, True)]
)
def test_every_lowering_and_opset_is_verified(
    checkpoint: Path, tmp_path: Path, mixing: str, opset: int, static: bool
) -> None:
    made = export_checkpoint(
        checkpoint,
        tmp_path / "out",
        mixing=mixing,
        opset=opset,
        lags=LAGS,
        max_length=12,
        static_length=static,
        threads=1,
    )
    assert made.report is not None
    assert made.report.verdict == "PASSED"
    assert constant_bytes(ir.load(made.path / "forward.onnx")) > 0 or mixing == "dft"


@pytest.mark.slow
def test_a_pass_shorter_than_the_steps_own_tokens(checkpoint: Path, tmp_path: Path) -> None:
    made = export_checkpoint(checkpoint, tmp_path / "out", max_length=3, static_length=True, threads=1)
    model = Bundle.open(made.path).model(threads=1)
    assert model.graphs.lags == 2
    assert len(model.generate([1] * 50, max_new_tokens=20)[0].ids) == 20


# Folding


def _folded(body: str, *, axes: str = "B") -> ir.Model:
    """A graph with the input x [axes] and the output y, after folding."""
    text = f"""<ir_version: 8, opset_import: ["": 18]>
        tested (float[{axes}] x) => (float[C] y) {{ {body} }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    fold_constants(model)
    onnx.checker.check_model(ir.to_proto(model))
    return model


def _operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_what_follows_from_constants_is_one() -> None:
    model = _folded(
        "a = Constant <value_floats = [1.0, 2.0]> () b = Add(a, a) c = Mul(b, a) unused = Neg(c) y = Add(x, c)"
    )
    assert _operators(model) == ["Constant", "Add"]
    (constant, add) = model.graph
    assert np.array_equal(constant.attributes["value"].as_tensor().numpy(), np.asarray([2.0, 8.0], np.float32))
    assert [value.name for value in add.inputs] == ["x", "c"]


def test_what_needs_an_input_stays() -> None:
    model = _folded(
        "a = Constant <value_floats = [1.0, 2.0]> () b = Add(x, a) c = Shape(x) d = Cast <to = 1> (c) y = Add(b, d)"
    )
    assert sorted(_operators(model)) == ["Add", "Add", "Cast", "Constant", "Shape"]


def test_a_known_axis_is_a_constant() -> None:
    model = _folded("c = Shape <start = 1, end = 2> (x) d = Cast <to = 1> (c) y = ReduceSum(d)", axes="B, 7")
    assert _operators(model) == ["Constant"]
    assert [value.name for value in model.graph.outputs] == ["y"]
    assert next(iter(model.graph)).attributes["value"].as_tensor().numpy().tolist() == [7.0]


@pytest.mark.parametrize(("rows", "kept"), [(600, True), (8, False)])
def test_a_sum_that_would_be_many_times_as_large_is_left(rows: int, kept: bool) -> None:
    """[rows, 1] + [1, 600]: the sum is not stored where it is large, what it is made of is."""
    model = _folded(
        f"""n = Constant <value_ints = [{rows}, 1]> () m = Constant <value_ints = [1, 600]> ()
        a = ConstantOfShape(n) b = ConstantOfShape(m) c = Add(a, b) d = Neg(c) y = Add(x, d)"""
    )
    assert _operators(model) == (["Constant", "Constant", "Add", "Neg", "Add"] if kept else ["Constant", "Add"])
    assert constant_bytes(model) == 4 * ((rows + 600) if kept else rows * 600)


# What may be asked for, and what it costs


@pytest.mark.parametrize("bound", [1, 0, -5, MOST + 1, 2**24, 2**70, 2.0, "32", True])
def test_a_bound_out_of_range(bound: object) -> None:
    with pytest.raises(InputError, match=r"--max-length must be an integer from 2 to 65,536, found"):
        bounds(bound, False)


def test_lags_fit_into_a_pass() -> None:
    assert [bounded_lags(64, PassLengths(n)) for n in (2, 3, 4, 63, 64, 1000)] == [2, 2, 4, 32, 64, 64]
    assert bounded_lags(64, ANY) == 64


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--static-length"], "--static-length makes every pass as long as --max-length says, which is missing"),
        (["--max-length", "1"], "--max-length must be an integer from 2 to 65,536, found 1"),
        (["--max-length", "100000"], "--max-length must be an integer from 2 to 65,536, found 100000"),
        (["--dry-run", "--max-length", "1"], "--max-length must be an integer"),
        (["--dry-run", "--static-length"], "add --max-length N"),
        (
            ["--dry-run", "--max-length", "64", "--length", "65"],
            "--length: one pass reads at most --max-length 64 tokens",
        ),
    ],
)
def test_mistakes_are_one_line(
    caracal: Callable[..., Ran], checkpoint: Path, tmp_path: Path, arguments: list[str], words: str
) -> None:
    output = [] if "--dry-run" in arguments else ["-o", tmp_path / "out"]
    ran = caracal("export", checkpoint, *output, *arguments)
    assert (ran.code, ran.out) == (2, "")
    (message,) = [line for line in ran.err.splitlines() if not line.endswith(" ...")]
    assert message.startswith("caracal: ")
    assert words in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_says_what_it_costs(
    checkpoint: Path, bounded: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = bounded("static")
    monkeypatch.setattr(dry_runs, "GRAPHS", tracing.BOUNDED)
    found = dry_run(open_checkpoint(checkpoint), lags=LAGS, max_length=N, static_length=True, length=N)
    for graph, size in found.graphs.values():
        assert size == (folder / graph.file).stat().st_size
    assert found.constants == sum(constant_bytes(ir.load(folder / f"{name}.onnx")) for name in tracing.BOUNDED)
    assert 0 < found.constants < 2 * table_bytes(PassLengths(N, static=True), "matmul", 8)
    line = f"one pass reads exactly {N} tokens: "
    assert any(each.startswith(line) for each in dry_run_lines(found, "tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [64, 2048])
@pytest.mark.parametrize("static", [False, True])
def test_tables_take_what_is_reckoned(model: CaracalModel, bound: int, static: bool) -> None:
    lengths = PassLengths(bound, static)
    graph = tracing.trace(model, "forward", "matmul", 18, lags=LAGS, lengths=lengths)
    reckoned = table_bytes(lengths, "matmul", model.config.sliding_window)
    assert 0.4 * reckoned < constant_bytes(graph) <= reckoned


def test_a_bundle_in_fewer_bits_keeps_it(bounded: Callable[[str], Path], tmp_path: Path) -> None:
    made = quantize_bundle(Bundle.open(bounded("static")), tmp_path / "int4", Precision("int4"), threads=1)
    assert made.report is not None
    assert made.report.verdict == "PASSED"
    found = Bundle.open(made.path)
    assert found.manifest.lengths == FORMS["static"]
    assert _computed_from_constants(_graph(made.path, "forward")) == []
    assert found.model(threads=1).forward([[1, 2, 3]]).shape == (1, 3, 97)


@pytest.mark.parametrize(
    ("form", "line"),
    [
        (
            "static",
            f"passes: exactly {N} tokens, shorter ones padded (--max-length {N} --static-length); longer texts in several",
        ),
        ("bounded", f"passes: at most {N} tokens (--max-length {N}); longer texts in several"),
        (None, "passes: any length"),
    ],
)
def test_info_tells_it(
    caracal: Callable[..., Ran],
    bounded: Callable[[str], Path],
    bundle: Callable[[str], Path],
    form: str | None,
    line: str,
) -> None:
    folder = bundle("matmul") if form is None else bounded(form)
    assert line in caracal("info", folder, "--ep", "cpu").out.splitlines()
    told = json.loads(caracal("info", folder, "--ep", "cpu", "--format", "json").out)
    lengths = ANY if form is None else FORMS[form]
    assert (told["max_length"], told["static_length"]) == (lengths.most, lengths.static)


def test_the_card_tells_it(bounded: Callable[[str], Path], bundle: Callable[[str], Path]) -> None:
    def card(folder: Path) -> str:
        return (folder / "README.md").read_text(encoding="utf-8")

    assert f"One pass reads exactly {N} tokens, padded where there are fewer; longer texts" in card(bounded("static"))
    assert f"One pass reads at most {N} tokens; longer texts" in card(bounded("bounded"))
    assert "One pass" not in card(bundle("matmul"))


def test_a_calibration_text_is_cut_to_one_pass(
    bounded: Callable[[str], Path],
    copy_bundle: Callable[[Path], Path],
    rehash: Callable[[Path], None],
    form: str,
) -> None:
    folder = copy_bundle(bounded(form))
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = {"type": "Whitespace"}  # the tiny one's takes any text for one word
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    rehash(folder)
    found = Bundle.open(folder)
    ids = calibration_ids(found, " ".join(f"w{i % 97}" for i in range(3 * N)))
    assert len(ids) == N
    assert divergence(found, found, ids[: N - 4], threads=1) == 0.0
