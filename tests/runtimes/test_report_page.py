"""The report for people: complete, escaped, without anything from outside, and never kinder than the figures."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.case_graphs import GENERATION, graphs_of
from caracal_runtimes.decode_graphs import LONG_BLOCK
from caracal_runtimes.errors import InputError
from caracal_runtimes.metrics import Metrics
from caracal_runtimes.parity import run_parity
from caracal_runtimes.parity_report import (
    CaseResult,
    GreedyResult,
    ParityReport,
    ProviderReport,
    TextResult,
    Timings,
    Verdict,
)
from caracal_runtimes.report_page import FILES, to_html, to_markdown, write_report, writing
from caracal_runtimes.session import Misplaced, Placement
from caracal_runtimes.tolerances import TOLERANCES

SCRIPT = Path(__file__).parents[2] / "scripts" / "generate_schema.py"
SCHEMA = Path(__file__).parents[2] / "docs" / "parity.schema.json"
STRICT = TOLERANCES["strict", "float32"]
EVIL = '<script>alert("1")</script><img src=x onerror=alert(1)>&amp;\'"|`*@somebody\n# head'
CASES = (
    ("one", 1, 1),
    ("odd", 2, 37),
    ("ragged_everywhere", 3, 259),
    ("odd_by_steps", 2, 37),
    ("ragged_everywhere_by_chunks", 3, 259),
    ("convolve_block_129", 2, 129),
    ("convolve_block_2048", 2, 2048),
)
VOID = {"meta", "br", "wbr", "hr", "col"}


@dataclass
class Layer:
    label: str
    tensor: str
    relative_l2: float
    own_relative_l2: float | None


class Node:
    """An element of a page, for looking things up."""

    def __init__(self, tag: str, attributes: dict[str, str | None], parent: Node | None) -> None:
        self.tag, self.attributes, self.parent = tag, attributes, parent
        self.children: list[Node | str] = []

    def all(self, tag: str = "", kind: str = "") -> Iterator[Node]:
        for child in self.children:
            if isinstance(child, Node):
                if tag in ("", child.tag) and (not kind or kind in child.classes):
                    yield child
                yield from child.all(tag, kind)

    def one(self, key: str) -> Node:
        (found,) = [node for node in self.all() if node.attributes.get("id") == key]
        return found

    def has(self, key: str) -> bool:
        return any(node.attributes.get("id") == key for node in self.all())

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class Reader(HTMLParser):
    """Reads a page and refuses one whose elements are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.at = Node("", {}, None)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        node = Node(tag, dict(attrs), self.at)
        self.at.children.append(node)
        if tag not in VOID:
            self.at = node

    def handle_endtag(self, tag: str) -> None:
        assert self.at.tag == tag
        assert self.at.parent is not None
        self.at = self.at.parent

    def handle_data(self, data: str) -> None:
        self.at.children.append(data)


def read(html: str) -> Node:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.at is reader.root
    return reader.root


def metrics(error: float = 3e-7, **others: Any) -> Metrics:
    figures: dict[str, Any] = {
        "elements": 9830,
        "positions": 96,
        "not_finite": 0,
        "max_abs": 7.25e-6,
        "relative_l2": error,
        "worst_position_l2": 8.5e-7,
        "outliers": 0,
        "first_outlier": None,
        "needed_scale": 0.5,
        "kl_mean": 1.5e-12,
        "kl_max": 6.5e-11,
        "top1_disagreements": 0,
        "near_ties": 0,
    }
    return Metrics(**{**figures, **others})


def case(at: int, verdict: Verdict = "PASSED", figures: Metrics | None = None, reason: str = "") -> CaseResult:
    name, batch, length = CASES[at]
    if figures is None and verdict == "PASSED":
        figures = metrics()
    return CaseResult(name, batch, length, verdict, figures, 0.25, reason)


GREEDY = GreedyResult("greedy_from_start", 1, 128, 128, "PASSED", 1.5)
TEXT = TextResult("text", 394, 1.482113, -3.5e-9, "PASSED", 0.5)
NOTHING: dict[str, Any] = {
    "cases": (),
    "greedy": (),
    "text": None,
    "timings": Timings(),
    "peak_bytes": None,
    "placement": None,
}


def row(ep: str, **others: Any) -> ProviderReport:
    fields: dict[str, Any] = {
        "threads": 2,
        "level": "strict",
        "tolerance": STRICT,
        "placement": {"forward": Placement({"XExecutionProvider": 96, "CPUExecutionProvider": 4}, {}, (), 4)},
        "cases": tuple(case(at) for at in range(len(CASES))),
        "greedy": (GREEDY,),
        "text": TEXT,
        "title": f"Title of {ep}",
        "settings": {"precision": "f32"},
        "versions": {"onnxruntime": "1.30.1"},
        "timings": Timings(0.5, 389, 12.5, 3.5),
        "seconds": 21.0,
        "peak_bytes": 512_000_000,
    }
    return ProviderReport(ep=ep, **{**fields, **others})


def report(*rows: ProviderReport, machines: int = 1) -> ParityReport:
    return ParityReport(
        bundle="/somewhere/private/my-bundle",
        bundle_id="258cad880ad661ef",
        reference="PyTorch 2.13.0 float32",
        mixing="matmul",
        precision="float32",
        providers=rows,
        machines=tuple({"processor": f"Processor {n}", "os": f"OS {n}", "numpy": "2.4"} for n in range(machines)),
    )


BAD = metrics(
    3.5e-3,
    outliers=1234,
    first_outlier=(0, 3, 17),
    needed_scale=41.0,
    kl_max=7.5e-4,
    top1_disagreements=2,
    near_ties=5,
    worst_position_l2=9.5e-3,
    max_abs=0.75,
)
NAN = Metrics(9830, 96, 12, math.inf, math.inf, math.inf, 12, (0, 1, 5), math.inf, None, None, None, None)
PASSED = row("cpu")
FAILED = row(
    "openvino:GPU.0",
    cases=(
        case(0),
        case(1, "FAILED", BAD, "relative L2 3.50e-03 > 1e-05"),
        case(2, "FAILED", metrics(6e-6, top1_disagreements=1), "1 of 96 positions have another best token"),
    ),
    greedy=(replace(GREEDY, agreeing=41, verdict="FAILED", reason="parts from the reference at token 41"),),
)
NOT_FINITE = row("cuda", cases=(case(0), case(1, "FAILED", NAN, "12 of 9830 values are NaN or infinite")))
DIED = row(
    "webgpu",
    **{**NOTHING, "cases": (case(0),)},
    died=True,
    reason="the process ended by signal 11 (SIGSEGV) during: ragged_everywhere",
)
ABSENT = row("coreml", **NOTHING, absent=True, reason="exists for darwin only; pip install something")
REFUSED = row("tract", **NOTHING, reason="provider tract does not work here: it is not installed")
PARTLY = row("reference", cases=(case(0), case(1, "NOT RUN", None, "needs more memory than is free")))
FAST = row("cpu", mode="fast", cases=(case(0), case(1, "FAILED", metrics(4.5e-3), "relative L2 4.50e-03 > 1e-05")))
MISPLACED = row(
    "directml",
    placement={
        "step": Placement(
            {"DmlExecutionProvider": 80, "CPUExecutionProvider": 7},
            {"CPUExecutionProvider": {"DFT": 2, "Shape": 5}},
            (
                Misplaced("step", "/blocks.0/DFT", "DFT", "CPUExecutionProvider", "no kernel for float32"),
                Misplaced("step", "/blocks.1/DFT", "DFT", "CPUExecutionProvider", "no kernel for float32"),
            ),
            5,
        )
    },
    misplaced=True,
    reason="asked for directml, but 2 nodes ran elsewhere",
)
EVERYTHING = (PASSED, FAST, FAILED, NOT_FINITE, DIED, PARTLY, REFUSED, MISPLACED, ABSENT)


def cells(page: Node, name: str) -> list[Node]:
    """The cells of a case in the matrix, without its size."""
    (line,) = [line for line in page.one("matrix").all("tr") if any(th.text == name for th in line.all("th"))]
    return [td for td in line.all("td") if "size" not in td.classes]


def pills(page: Node) -> list[tuple[str, str]]:
    """Name and verdict of each row in the list that comes first."""
    found = []
    for item in page.one("verdicts").all("li"):
        (name,) = [node.text for node in item.all("a", "name")]
        (pill,) = [node.text for node in item.all("span", "pill")]
        found.append((name, pill))
    return found


class TestGraphsOfACase:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("one", ("forward",)),
            ("ragged_everywhere", ("forward",)),
            ("odd_by_steps", ("step", "forward")),
            ("beyond_window_everywhere_by_chunks", ("extend", "step")),
            ("convolve_block_129", ("convolve",)),
            (f"convolve_block_{LONG_BLOCK - 1}", ("convolve",)),
            (f"convolve_block_{LONG_BLOCK}", ("convolve_long",)),
            ("convolve_block_x", ("forward",)),
            ("convolve_block_" + "9" * 5000, ("forward",)),
            ("greedy_from_start", (GENERATION,)),
        ],
    )
    def test_by_name(self, name: str, expected: tuple[str, ...]) -> None:
        assert graphs_of(name) == expected


class TestPage:
    def test_nothing_comes_from_outside(self) -> None:
        html = to_html(report(*EVERYTHING), {"cpu": [Layer("0 mhf", "t", 1e-6, None)]})
        page = read(html)
        for node in page.all():
            assert node.tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "image", "use", "video")
            assert not {"src", "srcset", "data", "action", "background", "xlink:href"} & set(node.attributes)
            assert (node.attributes.get("href") or "#").startswith("#")
            assert not [name for name in node.attributes if name.startswith("on")]
            assert "url(" not in (node.attributes.get("style") or "")
        (style,) = page.all("style")
        assert not re.search(r"url\(|@import|@font-face", style.text)
        (script,) = page.all("script")
        assert not re.search(r"fetch|XMLHttp|import|https?:", script.text)
        assert "http" not in re.sub("http-equiv", "", html)
        policy = next(node for node in page.all("meta") if node.attributes.get("http-equiv"))
        assert (policy.attributes["content"] or "").startswith("default-src 'none'")

    def test_the_script_is_the_one_that_the_policy_lets_run(self) -> None:
        from base64 import b64encode
        from hashlib import sha256

        page = read(to_html(report(PASSED)))
        (script,) = page.all("script")
        policy = next(node for node in page.all("meta") if node.attributes.get("http-equiv"))
        assert b64encode(sha256(script.text.encode()).digest()).decode() in (policy.attributes["content"] or "")

    def test_every_link_has_its_place_and_no_place_is_there_twice(self) -> None:
        page = read(to_html(report(*EVERYTHING)))
        ids = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
        assert len(ids) == len(set(ids))
        links = [(node.attributes["href"] or "")[1:] for node in page.all("a")]
        assert links
        assert set(links) <= set(ids)

    def test_the_verdict_comes_first(self) -> None:
        page = read(to_html(report(*EVERYTHING)))
        (title,) = page.all("h1")
        assert title.text == "✗ FAILED"
        assert page.text.index("FAILED") < page.text.index("cpu")
        assert pills(page) == [
            ("cpu", "✓ PASSED"),
            ("cpu · fast", "○ NOT JUDGED"),
            ("openvino:GPU.0", "✗ FAILED"),
            ("cuda", "✗ FAILED"),
            ("webgpu", "✗ FAILED"),
            ("reference", "○ NOT RUN"),
            ("tract", "○ NOT RUN"),
            ("directml", "✗ FAILED"),
        ]
        lead = next(page.all("p", "lead")).text
        assert "Of 7 providers, 4 failed, 1 passed, 2 not run, or not in full. 1 more is not installed" in lead

    @pytest.mark.parametrize(
        ("rows", "verdict"),
        [
            ((PASSED,), "PASSED"),
            ((PASSED, FAST), "PASSED"),
            ((PASSED, ABSENT), "PASSED"),
            ((PASSED, PARTLY), "NOT RUN"),
            ((ABSENT,), "NOT RUN"),
            ((), "NOT RUN"),
            ((PASSED, DIED), "FAILED"),
        ],
    )
    def test_its_verdict_is_the_reports(self, rows: tuple[ProviderReport, ...], verdict: str) -> None:
        whole = report(*rows)
        assert whole.verdict == verdict
        (title,) = read(to_html(whole)).all("h1")
        assert title.text.endswith(verdict)
        assert to_markdown(whole).splitlines()[0].partition(":")[0].endswith(verdict)

    def test_a_cell_for_every_case_and_provider(self) -> None:
        page = read(to_html(report(*EVERYTHING)))
        for name, batch, length in CASES:
            assert len(cells(page, name)) == len(EVERYTHING) - 1  # the absent one has no column
            assert f"{batch} \N{MULTIPLICATION SIGN} {length:,}" in page.one("matrix").text
        assert [cell.text for cell in cells(page, "one")] == [
            "✓ 3.0e-07",
            "≤ 3.0e-07",
            *["✓ 3.0e-07"] * 4,
            "\N{EN DASH} not run",
            "✓ 3.0e-07",
        ]
        odd = cells(page, "odd")
        assert [cell.text for cell in odd[1:7]] == [
            "> 4.5e-03",
            "✗ 3.5e-03",
            "✗ NaN or Inf",
            "\N{EN DASH} not reached",
            "○ not run",
            "\N{EN DASH} not run",
        ]
        assert [set(cell.classes) for cell in odd[:4]] == [
            {"s-passed", "p2"},
            {"s-failed", "f1", "unjudged"},
            {"s-failed", "f1"},
            {"s-failed", "f2"},
        ]
        # Failed although relative L2 is within the limit: what failed is named.
        assert cells(page, "ragged_everywhere")[2].text == "✗ 6.0e-06top-1"

    def test_cases_stand_under_their_graph(self) -> None:
        page = read(to_html(report(PASSED)))
        parts: dict[str, list[str]] = {}
        for body in page.one("matrix").all("tbody"):
            heading, *names = [th.text for th in body.all("th")]
            parts[heading.partition(":")[0]] = names
        assert parts == {
            "forward": ["one", "odd", "ragged_everywhere"],
            "step": ["odd_by_steps"],
            "extend and step": ["ragged_everywhere_by_chunks"],
            "convolve": ["convolve_block_129"],
            "convolve_long": ["convolve_block_2048"],
            "whole generation": ["greedy_from_start"],
            "bits per byte of a text": ["text"],
        }

    @pytest.mark.parametrize(
        ("share", "shade"),
        [(1e-9, "p0"), (5e-3, "p1"), (0.05, "p2"), (0.5, "p3"), (1.0, "p3"), (1.5, "f0"), (50.0, "f1"), (5e3, "f2")],
    )
    def test_colour_by_share_of_the_limit(self, share: float, shade: str) -> None:
        verdict: Verdict = "PASSED" if share <= 1 else "FAILED"
        one = row("cpu", cases=(case(0, verdict, metrics(share * STRICT.relative_l2)),))
        (cell,) = cells(read(to_html(report(one))), "one")
        assert shade in cell.classes

    def test_every_figure_of_a_cell_can_be_reached(self) -> None:
        page = read(to_html(report(PASSED, FAILED)))
        link = next(cells(page, "odd")[1].all("a"))
        place = page.one((link.attributes["href"] or "")[1:])
        for text in (place.text, link.attributes["title"] or ""):
            for figure in ("3.5e-03", "9.5e-03", "7.5e-01", "1.5e-12", "7.5e-04", "1,234", "[0, 3, 17]", "2.1e-03 rms"):
                assert figure in text
        assert "2/96" in place.text
        assert "top-1 disagreements: 2 of 96 positions\nnear ties: 5" in (link.attributes["title"] or "")
        details = next(page.one("p1").all("details"))
        assert "open" in details.attributes  # what failed is seen without a click
        assert "open" not in next(page.one("p0").all("details")).attributes

    def test_generation_and_text(self) -> None:
        page = read(to_html(report(PASSED, FAILED)))
        assert [cell.text for cell in cells(page, "greedy_from_start")] == ["✓ 128/128", "✗ 41/128"]
        assert cells(page, "text")[0].text == "✓ -3.5e-09"
        assert "1.482113 bits per byte" in page.one("p0").text
        near = replace(GREEDY, agreeing=96, reason="parts at token 96 on a near tie")
        assert (
            cells(read(to_html(report(row("cpu", greedy=(near,))))), "greedy_from_start")[0].text == "✓ 96/128near tie"
        )

    def test_a_row_that_died_says_what_it_was_doing(self) -> None:
        page = read(to_html(report(DIED)))
        (item,) = page.one("verdicts").all("li")
        assert "Died: the process ended by signal 11 (SIGSEGV) during: ragged_everywhere" in item.text
        assert "One result from before it stands." in item.text

    def test_an_absent_provider_says_why_and_what_to_install(self) -> None:
        page = read(to_html(report(PASSED, ABSENT)))
        assert "exists for darwin only; pip install something" in page.one("absent").text
        assert "coreml" not in page.one("verdicts").text + page.one("matrix").text

    def test_placement(self) -> None:
        page = read(to_html(report(PASSED, MISPLACED, DIED)))
        text = page.one("placement").text
        for words in ("96 on it", "4 for sizes", "80 on it", "5 for sizes", "✗ 2 elsewhere", "not told"):
            assert words in text
        for words in ("/blocks.0/DFT", "/blocks.1/DFT", "no kernel for float32", "CPUExecutionProvider", "not allowed"):
            assert words in text
        allowed = read(to_html(report(replace(MISPLACED, misplaced=False, allowed=True)))).one("placement").text
        assert "(allowed)" in allowed
        assert "✗" not in allowed

    def test_settings_versions_limits_times(self) -> None:
        page = read(to_html(report(PASSED, FAST)))
        text = page.one("p0").text
        for words in ("precision=f32", "onnxruntime=1.30.1", "relative L2 ≤ 1e-05", "12.5 ms for 389 tokens", "512 MB"):
            assert words in text
        assert "not judged" in page.one("p1").text
        pictures = [svg.attributes["aria-label"] or "" for svg in page.one("times").all("svg")]
        assert [label.partition(",")[0] for label in pictures] == [
            "One pass over 389 tokens",
            "A new token",
            "Loading all graphs",
            "Peak memory of the process",
        ]

    def test_bars_far_apart_are_logarithmic_and_say_so(self) -> None:
        slow = row("reference", timings=Timings(0.5, 389, 9000.0, 3.5))
        text = read(to_html(report(PASSED, slow))).one("times").text
        assert "One pass over 389 tokensms, log scale from 1" in text
        assert "A new tokenms, from 0" in text

    def test_several_machines(self) -> None:
        merged = report(PASSED, row("cpu", machine=1), FAST, machines=2)
        page = read(to_html(merged))
        assert [name for name, _ in pills(page)] == ["cpu · machine 1", "cpu · machine 2", "cpu · fast · machine 1"]
        assert "Processor 0" in page.one("machines").text
        assert "Processor 1" in page.one("machines").text
        assert "machine 2: Processor 1, OS 1" in page.one("p1").text
        assert "cpu · machine 2" in to_markdown(merged)
        assert "Processor 1" in to_markdown(merged)

    def test_errors_by_layer(self) -> None:
        layers = {
            "cpu": [Layer("0 mhf", "/blocks.0/Add", 1e-6, 2e-7), Layer("1 swa", "/blocks.1/Add", math.nan, None)],
            "nobody": [Layer("0", "t", 0.0, math.inf)],
            "empty": [],
        }
        page = read(to_html(report(PASSED), layers)).one("layers")
        pictures = [svg.attributes["aria-label"] for svg in page.all("svg")]
        assert pictures == ["Error across the blocks, cpu", "Error across the blocks, nobody"]
        for words in (
            "0 mhf (/blocks.0/Add): relative L2 1.0e-06, its own 2.0e-07",
            "NaN",
            "limit of the output 1e-05",
        ):
            assert words in page.text
        for node in page.all():
            for name in ("x", "y", "cx", "cy", "width", "height", "points"):
                assert not re.search("nan|inf", node.attributes.get(name) or "")
        assert not read(to_html(report(PASSED))).has("layers")

    def test_what_comes_from_data_is_text(self) -> None:
        evil = row(
            EVIL,
            title=EVIL,
            reason=EVIL,
            note=EVIL,
            level=EVIL,
            settings={EVIL: EVIL},
            versions={EVIL: EVIL},
            cases=(CaseResult(EVIL, 1, 1, "FAILED", BAD, 0.1, EVIL),),
            greedy=(replace(GREEDY, name=EVIL, reason=EVIL),),
            text=replace(TEXT, name=EVIL, reason=EVIL),
            placement={EVIL: Placement({EVIL: 2}, {EVIL: {EVIL: 1}}, (Misplaced(EVIL, EVIL, EVIL, EVIL, EVIL),), 0)},
        )
        whole = replace(
            report(evil, replace(evil, **NOTHING, absent=True), replace(evil, died=True), PASSED),
            bundle=EVIL,
            bundle_id=EVIL,
            reference=EVIL,
            mixing=EVIL,
            precision=EVIL,
            machines=({EVIL: EVIL, "processor": EVIL, "caracal-onnx": EVIL, "commit": EVIL},),
        )
        page = read(to_html(whole, {EVIL: [Layer(EVIL, EVIL, 1e-3, 1e-3)]}))
        assert len(list(page.all("script"))) == 1
        assert not list(page.all("img"))
        for node in page.all():
            assert not [name for name in node.attributes if name.startswith("on")]
        assert "alert" in page.text
        written = to_markdown(whole)
        assert not re.search(r"<(?!/?(details|summary)>)", written)
        assert "@" not in written
        assert "\n# head" not in written

    def test_control_characters_and_no_characters(self, tmp_path: Path) -> None:
        html = to_html(report(row("cpu", reason="a\x00b\x1b[31m\udcff")))
        assert "\x00" not in html
        assert "\x1b" not in html
        write_report(report(row("cpu", reason="a\x00\udcff")), tmp_path)
        read((tmp_path / "index.html").read_text(encoding="utf-8"))

    def test_without_machines_and_without_anything(self) -> None:
        bare = replace(report(), machines=())
        read(to_html(bare))
        assert "No provider was compared." in to_markdown(bare)
        read(to_html(replace(report(PASSED), machines=())))

    def test_where_the_bundle_lay_is_not_told(self) -> None:
        assert "private" not in to_html(report(PASSED))
        assert "private" not in to_markdown(report(PASSED))
        assert "my-bundle" in to_html(replace(report(PASSED), bundle="C:\\private\\my-bundle\\"))


class TestMarkdown:
    def test_verdicts_are_those_of_the_page(self) -> None:
        whole = report(*EVERYTHING)
        written = to_markdown(whole)
        listed = re.findall(r"^\| (not judged|. (?:PASSED|FAILED|NOT RUN)) \| (.*?) \|", written, re.MULTILINE)
        assert [(name, verdict if verdict != "not judged" else "○ NOT JUDGED") for verdict, name in listed] == pills(
            read(to_html(whole))
        )

    def test_tables_have_as_many_cells_as_heads(self) -> None:
        whole = report(
            *EVERYTHING, row("a|b", reason="x | y", cases=(CaseResult("c|d", 1, 1, "PASSED", metrics(), 0.1),))
        )
        for block in to_markdown(whole).split("\n\n"):
            lines = block.splitlines()
            if lines and lines[0].startswith("|"):
                assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1

    def test_content(self) -> None:
        written = to_markdown(report(*EVERYTHING))
        for words in (
            "✗ FAILED: parity of my-bundle",
            "| forward | odd | 2 \N{MULTIPLICATION SIGN} 37 |",
            "**✗ 3.5e-03**",
            "| &gt; 4.5e-03 |",
            "1.482113 bits per byte",
            "died: the process ended by signal 11",
            "FAILED openvino:GPU.0, odd: relative L2 3.50e-03",
            "first outlier \\[0, 3, 17\\]",
            "80 / 5 / 2",
            "2 DFT of step ran on CPUExecutionProvider: no kernel for float32",
            "exists for darwin only; pip install something",
            "| cpu | 389 | 12.5 | 3.5 | 0.5 | 512 |",
            "- processor: Processor 0",
        ):
            assert words in written

    def test_many_failures_are_counted(self) -> None:
        cases = tuple(CaseResult(f"vocabulary_{n}", 1, 1, "FAILED", BAD, 0.1, "wrong") for n in range(60))
        assert "and 20 more" in to_markdown(report(row("cpu", cases=cases)))


class TestWriting:
    def test_three_files(self, tmp_path: Path) -> None:
        whole = report(*EVERYTHING)
        folder = tmp_path / "a" / "b"
        paths = write_report(whole, folder)
        assert [path.name for path in paths] == list(FILES)
        assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
        data = json.loads(paths[2].read_text(encoding="utf-8"), parse_constant=pytest.fail)
        assert ParityReport.from_dict(data, "it") == whole
        assert paths[0].read_text(encoding="utf-8") == to_html(whole)
        assert paths[1].read_text(encoding="utf-8") == to_markdown(whole)

    def test_again_in_the_same_folder(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("stays")
        write_report(report(PASSED), tmp_path)
        write_report(report(FAILED), tmp_path)
        assert "FAILED" in (tmp_path / "parity.md").read_text(encoding="utf-8")
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*FILES, "mine.txt"])

    def test_a_file_is_replaced_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_report(report(PASSED), tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        write_bytes = Path.write_bytes

        def full(path: Path, data: bytes) -> int:
            write_bytes(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(InputError, match="No space left on device"):
            write_report(report(FAILED), tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_what_cannot_be_rendered_leaves_the_former_report(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_report(report(PASSED), tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

        def broken(whole: ParityReport) -> str:
            raise RuntimeError("a fault")

        monkeypatch.setattr(writing, "to_markdown", broken)
        with pytest.raises(RuntimeError):
            write_report(report(FAILED), tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before

    def test_a_file_is_no_folder(self, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_text("mine")
        with pytest.raises(InputError, match="expected a folder"):
            write_report(report(PASSED), file)
        with pytest.raises(InputError, match="cannot be written"):
            write_report(report(PASSED), file / "below")
        assert file.read_text() == "mine"
        (tmp_path / "folder" / "index.html").mkdir(parents=True)
        with pytest.raises(InputError, match="cannot be written"):
            write_report(report(PASSED), tmp_path / "folder")
        with pytest.raises(InputError):
            write_report(report(PASSED), Path("a\0b"))


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate_schema", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


class TestSchema:
    def test_the_published_one_is_what_the_classes_give(self, generator: Any) -> None:
        assert SCHEMA.read_text(encoding="utf-8") == generator.to_text(), "run python scripts/generate_schema.py"

    def test_reports_fit(self, validator: Any) -> None:
        for whole in (report(*EVERYTHING, machines=2), report(), replace(report(PASSED), machines=())):
            validator.validate(json.loads(json.dumps(whole.to_dict())))

    def test_a_real_report_fits(self, validator: Any, exported: Any) -> None:
        whole = run_parity(Bundle.open(exported.bundle), threads=1)
        validator.validate(json.loads(json.dumps(whole.to_dict())))
        (title,) = read(to_html(whole)).all("h1")
        assert title.text == "✓ PASSED"

    @pytest.mark.parametrize("path", [("format",), ("verdict",), ("providers", 0, "verdict"), ("providers", 0, "ep")])
    def test_a_missing_key_does_not(self, validator: Any, path: tuple[str | int, ...]) -> None:
        data: Any = json.loads(json.dumps(report(PASSED).to_dict()))
        at = data
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(data)
