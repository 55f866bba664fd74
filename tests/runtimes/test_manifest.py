"""`manifest.json`: the written form reads back, and nothing malformed is taken."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from caracal_runtimes.errors import BundleError
from caracal_runtimes.manifest import PRECISIONS, Manifest, safe_name
from hypothesis import example, given
from hypothesis import strategies as st

HASH = "0123456789abcdef" * 4
IDS = {"name": "input_ids", "dtype": "int64", "shape": ["batch", "length"]}
LOGITS = {"name": "logits", "dtype": "float32", "shape": ["batch", "positions", 19]}
GRAPHS = ("forward", "extend", "step", "step_resident", "convolve", "convolve_long")


def graph(name: str, inputs: list[Any], outputs: list[Any]) -> dict[str, Any]:
    return {
        "file": f"graphs/{name}.onnx",
        "opset": 18,
        "mixing": "matmul",
        "inputs": inputs,
        "outputs": outputs,
        "operators": {"MatMul": 3},
    }


VALID: dict[str, Any] = {
    "format": "caracal-bundle",
    "format_version": 4,
    "config": {
        "vocab_size": 19,
        "hidden_size": 12,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "sliding_window": 4,
        "conv_kernel": 3,
        "layer_types": ["mhf", "sliding_attention", "mhf"],
        "bos_token_id": 0,
        "eos_token_id": 18,
    },
    "precision": "float32",
    "graphs": {
        "forward": graph("forward", [IDS], [LOGITS]),
        **{name: graph(name, [], []) for name in GRAPHS[1:]},
    },
    "weights": ["w.safetensors", "shards/w2.safetensors"],
    "golden": {
        "file": "g.safetensors",
        "reference": "PyTorch",
        "cases": [{"name": "one", "batch": 1, "length": 2, "columns": False}],
        "greedy": [{"name": "greedy", "prompt_length": 1, "new_tokens": 32}],
        "text": {"name": "text", "tokens": 5, "bytes": 9},
        "rounding": 1e-6,
    },
    "files": {
        name: {"bytes": 7, "sha256": HASH}
        for name in (
            *(f"graphs/{name}.onnx" for name in GRAPHS),
            *("w.safetensors", "shards/w2.safetensors", "g.safetensors", "tokenizer.json"),
        )
    },
    "tokenizer": "tokenizer.json",
    "producer": {"torch": "2"},
    "source": {"name": "x"},
    "verification": {"verdict": "PASSED"},
    "quantization": None,
}

Keys = tuple[str | int, ...]
OPTIONAL: set[Keys] = {
    ("tokenizer",),
    ("verification",),
    ("quantization",),
    ("config", "bos_token_id"),
    ("config", "eos_token_id"),
    ("golden", "text"),
    ("golden", "rounding"),
}
MAPS: set[Keys] = {("graphs",), ("files",), ("producer",), *(("graphs", name, "operators") for name in GRAPHS)}
FREE: set[Keys] = {("source",), ("verification",)}


def walk(value: Any, path: Keys = ()) -> Iterator[Keys]:
    """Paths of all values below the top, except inside objects whose contents are free."""
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict) and path not in FREE:
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, item in items:
        yield (*path, key)
        yield from walk(item, (*path, key))


def at(data: Any, path: Keys) -> Any:
    for key in path:
        data = data[key]
    return data


def replaced(path: Keys, value: Any) -> str:
    """The valid manifest's text with one value replaced."""
    data = copy.deepcopy(VALID)
    at(data, path[:-1])[path[-1]] = value
    return json.dumps(data)


def without(path: Keys) -> str:
    data = copy.deepcopy(VALID)
    del at(data, path[:-1])[path[-1]]
    return json.dumps(data)


def place(path: Keys) -> str:
    """How an error names a value: dots for keys, brackets for indices."""
    return "manifest" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)


def refused(text: str, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        Manifest.from_json(text)


PATHS = list(walk(VALID))
DIMENSIONS = [path for path in PATHS if "shape" in path[:-1]]
LAYERS = [path for path in PATHS if path[:-1] == ("config", "layer_types")]
TYPED = [path for path in PATHS if path not in DIMENSIONS and path not in LAYERS]
REQUIRED = [path for path in TYPED if isinstance(path[-1], str) and path not in OPTIONAL and path[:-1] not in MAPS]
NUMBERS = [path for path in TYPED if type(at(VALID, path)) is int and path != ("format_version",)]
FILES: list[Keys] = [
    ("weights", 0),
    ("weights", 1),
    ("golden", "file"),
    ("tokenizer",),
    *(("graphs", name, "file") for name in GRAPHS),
]
WRONG: list[Any] = [None, True, 1, 1.5, math.nan, math.inf, "x", [], {}]


class TestRoundTrip:
    def test_written_and_read_again(self) -> None:
        manifest = Manifest.from_json(json.dumps(VALID))
        assert json.loads(manifest.to_json()) == VALID
        assert Manifest.from_json(manifest.to_json()) == manifest

    def test_fields(self) -> None:
        manifest = Manifest.from_json(json.dumps(VALID))
        graph = manifest.graphs["forward"]
        assert (graph.file, graph.opset, graph.outputs[0].shape) == (
            "graphs/forward.onnx",
            18,
            ("batch", "positions", 19),
        )
        assert manifest.files["w.safetensors"].sha256 == HASH
        assert manifest.weights == ("w.safetensors", "shards/w2.safetensors")
        assert (manifest.golden.cases[0].length, manifest.golden.greedy[0].new_tokens) == (2, 32)
        assert (manifest.model.sliding_window, manifest.model.conv_kernel, manifest.model.eos_token_id) == (4, 3, 18)
        assert manifest.model.layer_types == ("mhf", "sliding_attention", "mhf")
        assert (manifest.model.layers("mhf"), manifest.model.layers("sliding_attention")) == ((0, 2), (1,))

    @pytest.mark.parametrize("path", sorted(OPTIONAL))
    def test_optional_values_may_be_null_or_absent(self, path: Keys) -> None:
        for text in (replaced(path, None), without(path)):
            manifest = Manifest.from_json(text)
            holder = {"config": manifest.model, "golden": manifest.golden}.get(str(path[0]), manifest)
            assert getattr(holder, str(path[-1])) == (0 if path[-1] == "rounding" else None)

    def test_unknown_keys_are_ignored(self) -> None:
        for path in ((), ("golden",), ("golden", "cases", 0), ("graphs", "forward"), ("files", "w.safetensors")):
            assert Manifest.from_json(replaced((*path, "of a later version"), 1)) is not None

    def test_an_exported_manifest(self, exported: Any) -> None:
        text = (exported.bundle / "manifest.json").read_text(encoding="utf-8")
        assert json.loads(Manifest.from_json(text).to_json()) == json.loads(text)


class TestMalformed:
    def test_the_lists_below_reach_every_part(self) -> None:
        assert len(REQUIRED) > 30
        assert len(NUMBERS) > 15

    @pytest.mark.parametrize("path", REQUIRED, ids=place)
    def test_missing(self, path: Keys) -> None:
        refused(without(path), re.escape(place(path)) + " is missing")

    @pytest.mark.parametrize("path", TYPED, ids=place)
    def test_another_type(self, path: Keys) -> None:
        """A number that is a boolean, a fraction or NaN is another type too."""
        right = type(at(VALID, path))
        for value in WRONG:
            if type(value) is right or (value is None and path in OPTIONAL) or (right is float and type(value) is int):
                continue
            refused(replaced(path, value), re.escape(place(path)))

    @pytest.mark.parametrize("path", NUMBERS, ids=place)
    def test_numbers_out_of_range(self, path: Keys) -> None:
        for value in (-1, 2**63, 10**400):
            refused(replaced(path, value), re.escape(place(path)))

    @pytest.mark.parametrize(
        "path",
        [path for path in NUMBERS if path[-1] not in ("bytes", "bos_token_id", "eos_token_id", "MatMul")],
        ids=place,
    )
    def test_numbers_that_cannot_be_zero(self, path: Keys) -> None:
        refused(replaced(path, 0), re.escape(place(path)))

    @pytest.mark.parametrize("value", [-1e-9, 1.5, 2, -1, 10**400])
    def test_a_rounding_that_is_none(self, value: float) -> None:
        refused(replaced(("golden", "rounding"), value), r"manifest\.golden\.rounding must be a number from 0 to 1")

    @pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
    def test_a_special_token_outside_the_vocabulary(self, key: str) -> None:
        refused(replaced(("config", key), 19), rf"manifest\.config\.{key}")

    @pytest.mark.parametrize("found", ["", "caracal", "CARACAL-BUNDLE"])
    def test_another_format(self, found: str) -> None:
        refused(replaced(("format",), found), rf'manifest\.format must be "caracal-bundle", found {found!r}')

    @pytest.mark.parametrize(
        ("version", "advice"),
        [
            (6, "update caracal-onnx"),
            (10**30, "update"),
            (3, "export the bundle again"),
            (2, "export the bundle again"),
            (1, "export the bundle again"),
            (0, "export the bundle again"),
        ],
    )
    def test_another_version(self, version: int, advice: str) -> None:
        refused(replaced(("format_version",), version), rf"manifest\.format_version {version} .*{advice}")

    @pytest.mark.parametrize("digest", ["", HASH[:-1], HASH + "0", HASH.upper(), "g" + HASH[1:], HASH + "\n"])
    def test_no_sha256(self, digest: str) -> None:
        refused(replaced(("files", "w.safetensors", "sha256"), digest), r"manifest\.files\.w\.safetensors\.sha256")

    @pytest.mark.parametrize("dtype", ["float16", "", "FLOAT32", "int32"])
    def test_another_dtype(self, dtype: str) -> None:
        refused(replaced(("graphs", "forward", "inputs", 0, "dtype"), dtype), r"forward\.inputs\[0\]\.dtype must be")

    @pytest.mark.parametrize("dim", [-1, 1.0, True, None, [], {}, math.nan])
    def test_no_dimension(self, dim: Any) -> None:
        refused(replaced(("graphs", "forward", "outputs", 0, "shape", 1), dim), r"forward\.outputs\[0\]\.shape must")

    @pytest.mark.parametrize("name", GRAPHS)
    def test_every_graph_is_required(self, name: str) -> None:
        refused(without(("graphs", name)), rf"manifest\.graphs must have an entry '{name}'")
        data = json.loads(without(("graphs", name)))
        data["graphs"]["other"] = VALID["graphs"][name]
        refused(json.dumps(data), rf"manifest\.graphs must have an entry '{name}'")

    @pytest.mark.parametrize(
        "layers",
        [
            [],
            ["mhf"],
            ["mhf"] * 4,
            ["mhf", "mhf", "MHF"],
            ["mhf", "mhf", "swa"],
            *(["mhf", "mhf", wrong] for wrong in (None, 1, True, [], {}, math.nan)),
        ],
        ids=str,
    )
    def test_layers_that_are_none(self, layers: list[Any]) -> None:
        refused(replaced(("config", "layer_types"), layers), r"manifest\.config\.layer_types must name 3 layers")

    @pytest.mark.parametrize("path", FILES, ids=place)
    def test_a_file_that_is_not_listed(self, path: Keys) -> None:
        refused(replaced(path, "elsewhere.bin"), r"manifest\.files has no entry for 'elsewhere\.bin'")

    def test_one_weight_file_is_a_list_too(self) -> None:
        assert Manifest.from_json(replaced(("weights",), ["w.safetensors"])).weights == ("w.safetensors",)
        refused(
            replaced(("weights",), "w.safetensors"), r"manifest\.weights must be of type list, found 'w\.safetensors'"
        )

    def test_no_weight_file(self) -> None:
        refused(replaced(("weights",), []), r"manifest\.weights must name at least one file")

    def test_a_weight_file_twice(self) -> None:
        refused(replaced(("weights", 1), "w.safetensors"), r"manifest\.weights\[1\]: 'w\.safetensors' is named twice")

    @pytest.mark.parametrize("outer", [(), ("files",), ("files", "w.safetensors"), ("config",)])
    def test_the_same_key_twice(self, outer: Keys) -> None:
        """Which of two entries counts differs between JSON readers, so that they would check different hashes."""
        text = json.dumps(VALID)
        data = at(VALID, outer)
        key = next(iter(data))
        member = f"{json.dumps(key)}: {json.dumps(data[key])}"
        start = text.index("{" + member)
        refused(text[: start + 1] + member + ", " + text[start + 1 :], re.escape(key))


QUANTIZATION: dict[str, Any] = {
    "parameters": 1234,
    "weights": {"a.weight": "int4", "b.weight": "int8"},
    "block_size": 32,
    "source": HASH,
}


def quantized(path: Keys = (), value: Any = None, precision: str = "int4") -> str:
    """The text of a valid manifest of a bundle in fewer bits, with one value of what it says of them replaced."""
    data = copy.deepcopy({**VALID, "precision": precision, "quantization": QUANTIZATION})
    if path:
        at(data["quantization"], path[:-1])[path[-1]] = value
    return json.dumps(data)


class TestQuantization:
    @pytest.mark.parametrize("precision", PRECISIONS[1:])
    def test_written_and_read_again(self, precision: str) -> None:
        manifest = Manifest.from_json(quantized(precision=precision))
        assert json.loads(manifest.to_json()) == json.loads(quantized(precision=precision))
        assert Manifest.from_json(manifest.to_json()) == manifest
        found = manifest.quantization
        assert found is not None
        assert (manifest.precision, found.parameters, found.block_size, found.source) == (precision, 1234, 32, HASH)
        assert found.weights == QUANTIZATION["weights"]

    def test_a_block_size_may_be_null_or_absent(self) -> None:
        absent = json.loads(quantized())
        del absent["quantization"]["block_size"]
        for text in (quantized(("block_size",)), json.dumps(absent)):
            found = Manifest.from_json(text).quantization
            assert found is not None
            assert found.block_size is None

    @pytest.mark.parametrize("precision", ["", "int3", "INT8", "float64", "float"])
    def test_an_unknown_precision(self, precision: str) -> None:
        refused(
            quantized(precision=precision),
            rf"manifest\.precision must be one of float32, float16, bfloat16, int8, int4, found {precision!r}",
        )

    def test_it_goes_with_every_precision_but_float32(self) -> None:
        message = r"manifest\.quantization must be there for every precision but float32, and precision is"
        refused(quantized(precision="float32"), f"{message} float32")
        for precision in PRECISIONS[1:]:
            refused(replaced(("precision",), precision), f"{message} {precision}")

    @pytest.mark.parametrize("key", ["parameters", "weights", "source"])
    def test_missing(self, key: str) -> None:
        data = json.loads(quantized())
        del data["quantization"][key]
        refused(json.dumps(data), rf"manifest\.quantization\.{key} is missing")

    @pytest.mark.parametrize(
        ("path", "wrong"),
        [
            (("parameters",), [None, True, 0, -1, 1.5, "1", 2**63]),
            (("block_size",), [True, 0, -1, 1.5, "32", [], 2**63]),
            (("source",), [None, 1, "", HASH[:-1], HASH.upper(), []]),
            (("weights",), [None, [], "a", 1]),
            (("weights", "a.weight"), [None, 1, "", "float32", "int3", "INT8", []]),
        ],
    )
    def test_values_that_are_none(self, path: Keys, wrong: list[Any]) -> None:
        for value in wrong:
            refused(quantized(path, value), re.escape("manifest.quantization." + ".".join(map(str, path))))

    @pytest.mark.parametrize("value", [True, 1, "int8", []])
    def test_no_object(self, value: Any) -> None:
        refused(json.dumps({**VALID, "precision": "int8", "quantization": value}), r"manifest\.quantization must be")


BAD_NAMES = [
    "", "/", "/etc/passwd", "..", ".", "../w", "a/../w", "a/..", "./w", "a/./b", "a//b", "a/", "//host/w",
    "\\", "a\\b", "..\\w", "\\\\host\\share\\w", "C:", "C:w", "C:/w", "c:\\w", "a\0b", "\0",
]  # fmt: skip


class TestNames:
    @pytest.mark.parametrize("name", BAD_NAMES)
    @pytest.mark.parametrize("path", FILES, ids=place)
    def test_a_path_that_may_leave_the_bundle(self, path: Keys, name: str) -> None:
        refused(replaced(path, name), re.escape(place(path)))

    @pytest.mark.parametrize("name", BAD_NAMES)
    def test_in_the_list_of_files(self, name: str) -> None:
        refused(replaced(("files", name), {"bytes": 1, "sha256": HASH}), r"manifest\.files: ")

    @pytest.mark.parametrize(
        "name",
        ["a", "a.b", "..a", ".hidden", "a b/c", "ü/日本", "a/b/c.onnx", "console", "com", "com12", "nul_", "x.nul", "lpt.1",
         "con-a.txt", "a" * 1000, "%s{x}$HOME", "-x", "~", "a'b"],
    )  # fmt: skip
    def test_plain_names(self, name: str) -> None:
        assert safe_name(name, "here") == name

    @pytest.mark.parametrize(
        "name",
        ["CON", "con", "NUL", "nul.txt", "Aux.tar.gz", "PRN.", "COM1", "com9.onnx", "LPT1", "lpt0.x", "COM\u00b2", "CONIN$",
         "conout$.x", "NUL .txt", "nul/a", "a/b/aux", "a/NUL.onnx", "Com1.\u65e5\u672c"],
    )  # fmt: skip
    def test_devices_of_windows(self, name: str) -> None:
        with pytest.raises(BundleError, match=r"^here: .* names a device on Windows; refused"):
            safe_name(name, "here")

    @pytest.mark.parametrize("name", ["a.", "a ", "a..", "...", "a/b.", "a./b", "a /b", "a.onnx "])
    def test_endings_that_windows_drops(self, name: str) -> None:
        with pytest.raises(BundleError, match="ends in a dot or a blank"):
            safe_name(name, "here")

    @pytest.mark.parametrize(
        ("name", "code"),
        [("a\nb", "000A"), ("a\tb", "0009"), ("\x1b[2Ja", "001B"), ("a\x7f", "007F"), ("a\x85b", "0085"),
         ("a\u200bb", "200B"), ("a\u202exno.b", "202E"), ("\ufeffa", "FEFF"), ("a\u2028b", "2028"), ("a\udcffb", "DCFF")],
    )  # fmt: skip
    def test_what_cannot_be_seen(self, name: str, code: str) -> None:
        with pytest.raises(BundleError, match=rf"control or invisible character U\+{code}") as caught:
            safe_name(name, "here")
        assert str(caught.value).isprintable()

    @pytest.mark.parametrize("name", ["ab:c", "w.safetensors:x", "a/b:$DATA", 'a"b', "a<b", "a>b", "a|b", "a?", "*"])
    def test_what_windows_keeps_for_itself(self, name: str) -> None:
        with pytest.raises(BundleError, match="means something else on Windows"):
            safe_name(name, "here")

    def test_names_longer_than_any_file_has(self) -> None:
        for name in ("a" * 1001, "a/" * 500_000 + "a"):
            with pytest.raises(BundleError, match="at most 1000 characters") as caught:
                safe_name(name, "here")
            assert len(str(caught.value)) < 400

    @pytest.mark.parametrize(
        ("one", "other"),
        [("more", "MORE"), ("a/b", "A/b"), ("a/b", "a/B"), ("caf\u00e9", "cafe\u0301"), ("CAFE\u0301", "caf\u00e9"),
         ("\u212b", "\u00e5"), ("stra\u00dfe", "STRASSE")],
    )  # fmt: skip
    def test_two_names_that_are_one_file_on_some_systems(self, one: str, other: str) -> None:
        entry = {"bytes": 1, "sha256": HASH}
        for names in ((one, other), (other, one)):
            data = copy.deepcopy(VALID)
            data["files"].update(dict.fromkeys(names[:1], entry))
            Manifest.from_json(json.dumps(data))
            data["files"][names[1]] = entry
            refused(json.dumps(data), r"manifest\.files: .* are the same file on some systems")

    @pytest.mark.parametrize("name", ["manifest.json", "Manifest.JSON", "manifest.sig", "MANIFEST.SIG"])
    def test_the_manifest_and_its_signature_are_not_listed(self, name: str) -> None:
        refused(replaced(("files", name), {"bytes": 1, "sha256": HASH}), "are the same file on some systems")

    @pytest.mark.parametrize("name", ["w.safetensors/x", "W.safetensors/x", "manifest.sig/x", "graphs/step.onnx/a/b"])
    def test_a_file_that_is_the_folder_of_another(self, name: str) -> None:
        refused(replaced(("files", name), {"bytes": 1, "sha256": HASH}), "is a file and the folder of")

    @pytest.mark.parametrize("name", [None, 1, b"a", ["a"]])
    def test_no_string(self, name: object) -> None:
        with pytest.raises(BundleError, match="here: expected a file name"):
            safe_name(name, "here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(2**70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def taken_or_refused(text: str) -> None:
    """Either a manifest that is written and read without a loss, or BundleError; never anything else."""
    try:
        manifest = Manifest.from_json(text)
    except BundleError:
        return
    assert manifest.model.vocab_size > 0
    assert Manifest.from_json(manifest.to_json()).to_json() == manifest.to_json()


class TestFuzz:
    @given(st.sampled_from([*PATHS, ("source", "x"), ("new",)]), json_values)
    def test_one_value_replaced(self, path: Keys, value: Any) -> None:
        taken_or_refused(replaced(path, value))

    @given(st.data())
    def test_several_changes(self, data: st.DataObject) -> None:
        manifest = copy.deepcopy(VALID)
        for _ in range(data.draw(st.integers(1, 4))):
            path = data.draw(st.sampled_from(list(walk(manifest))))
            outer = at(manifest, path[:-1])
            if data.draw(st.booleans()):
                outer[path[-1]] = data.draw(json_values)
            else:
                del outer[path[-1]]
        taken_or_refused(json.dumps(manifest))

    @given(st.text() | json_values.map(json.dumps))
    @example("")
    @example("\ufeff{}")
    @example("null")
    @example("[]")
    def test_anything_else(self, text: str) -> None:
        refused(text, "manifest")

    @pytest.mark.parametrize("path", [("precision",), ("graphs", "forward", "inputs", 0, "name")], ids=place)
    def test_nested_too_deep(self, path: Keys) -> None:
        """Also at a depth that reading JSON bears and printing the value might not."""
        for depth in (*range(880, 1010), 100_000):
            refused(replaced(path, "HERE").replace('"HERE"', "[" * depth + "]" * depth), "manifest")

    def test_a_number_of_too_many_digits(self) -> None:
        refused(replaced(("graphs", "forward", "opset"), "HERE").replace('"HERE"', "9" * 5000), "manifest")
