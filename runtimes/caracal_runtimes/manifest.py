"""`manifest.json`: what a bundle is, as one set of dataclasses that the exporter writes and every reader parses.

Parsing trusts nothing: each value is checked for type and range, and the first that does not fit raises BundleError
with its place in the file. `docs/bundle-format.md` states the same format for readers in other languages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from caracal_runtimes.errors import BundleError

FORMAT = "caracal-bundle"
FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.json"
#: Graphs that every bundle has; `docs/bundle-format.md` states what they take and give.
GRAPHS = ("forward", "extend", "step", "step_resident", "convolve", "convolve_long")
#: Those of them that read no weights.
WEIGHTLESS = ("convolve", "convolve_long")

MHF, SWA = "mhf", "sliding_attention"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPES = ("float32", "int64")


@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and sha256 (lower-case hex) of one file of the bundle."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class TensorSpec:
    """An input or output of a graph; a dimension is a number or the name of a symbolic axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class GraphSpec:
    """One ONNX graph: its file, opset, way of computing the mixing, inputs, outputs, and number of nodes by operator."""

    file: str
    opset: int
    mixing: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    operators: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """What a runtime must know of the model; `Manifest.config` has the whole configuration."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    sliding_window: int
    bos_token_id: int | None
    eos_token_id: int | None
    conv_kernel: int
    layer_types: tuple[str, ...]

    def layers(self, kind: str) -> tuple[int, ...]:
        """Indices of the layers of a kind, `MHF` or `SWA`."""
        return tuple(index for index, layer in enumerate(self.layer_types) if layer == kind)


@dataclass(frozen=True)
class GoldenCase:
    """One recorded forward pass: tensors `<name>/input_ids`, `/lengths`, `/logit_positions`, `/logits` in the file.

    With `columns`, the logits were recorded for the vocabulary ids in `<name>/columns` only.
    """

    name: str
    batch: int
    length: int
    columns: bool = False


@dataclass(frozen=True)
class GoldenGreedy:
    """One recorded greedy continuation: tensors `<name>/prompt`, `/continuation`, `/margins` in the file."""

    name: str
    prompt_length: int
    new_tokens: int


@dataclass(frozen=True)
class GoldenText:
    """A text's likelihood.

    `<name>/ids` int64 [tokens], `<name>/nats` float64, the negative log-likelihood of all ids but
    the first, from one pass over all of them; `bytes` is the UTF-8 length of what those ids stand for.
    """

    name: str
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Golden:
    """The reference outputs that travel with the bundle."""

    file: str
    reference: str
    cases: tuple[GoldenCase, ...]
    greedy: tuple[GoldenGreedy, ...]
    text: GoldenText | None = None


@dataclass(frozen=True)
class Manifest:
    """The whole of `manifest.json`."""

    config: dict[str, Any]
    precision: str
    graphs: dict[str, GraphSpec]
    weights: str
    golden: Golden
    files: dict[str, FileEntry]
    tokenizer: str | None = None
    producer: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    verification: dict[str, Any] | None = None

    @property
    def model(self) -> ModelSpec:
        """The numbers of `config` that a runtime needs, checked."""
        return _parse_model(self.config)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        return json.dumps({"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses and checks the text of a `manifest.json`. Raises BundleError."""
        try:
            data = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"manifest.json is not valid JSON ({error}); export the bundle again") from None
        top = _Reader(data, "manifest")
        if top.get("format", str) != FORMAT:
            raise BundleError(f'manifest.format must be "{FORMAT}", found {data["format"]!r}')
        version = top.get("format_version", int)
        if version != FORMAT_VERSION:
            raise BundleError(
                f"manifest.format_version {version} is not one this version reads ({FORMAT_VERSION}); "
                + ("update caracal-onnx" if version > FORMAT_VERSION else "export the bundle again")
            )
        files = {
            safe_name(name, "manifest.files"): FileEntry(entry.size("bytes"), entry.sha256("sha256"))
            for name, entry in top.children("files")
        }
        graphs = {name: _parse_graph(entry) for name, entry in top.children("graphs")}
        for name in GRAPHS:
            if name not in graphs:
                raise BundleError(f"manifest.graphs must have an entry {name!r}")
        manifest = cls(
            config=top.get("config", dict),
            precision=top.get("precision", str),
            graphs=graphs,
            weights=top.file("weights"),
            golden=_parse_golden(top.child("golden")),
            files=files,
            tokenizer=None if data.get("tokenizer") is None else top.file("tokenizer"),
            producer=_strings(top.get("producer", dict), "manifest.producer"),
            source=top.get("source", dict),
            verification=None if data.get("verification") is None else top.get("verification", dict),
        )
        _parse_model(manifest.config)
        needed = [manifest.weights, manifest.golden.file, *(graph.file for graph in graphs.values())]
        for name in [*needed, *([manifest.tokenizer] if manifest.tokenizer else [])]:
            if name not in files:
                raise BundleError(f"manifest.files has no entry for {name!r}, which the manifest refers to")
        return manifest


def safe_name(name: object, where: str) -> str:
    """`name` if it is a plain relative path inside the bundle. Raises BundleError for anything that may leave it."""
    if not isinstance(name, str) or not name:
        raise BundleError(f"{where}: expected a file name, found {name!r}")
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    unsafe = "\\" in name or "\0" in name or posix.is_absolute() or windows.drive or windows.root
    if unsafe or ".." in posix.parts or str(posix) != name or name == ".":
        raise BundleError(f"{where}: {name!r} is not a plain path inside the bundle; refused")
    return name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys: two readers that keep different ones would check different hashes."""
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise BundleError(f"manifest.json has the key {key!r:.60} twice; export the bundle again")
        data[key] = value
    return data


class _Reader:
    """Typed access to one JSON object; every failure names its place in the manifest."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise BundleError(f"{where} must be a JSON object, found {type(data).__name__}")
        self.data: dict[str, Any] = data
        self.where = where

    def get(self, key: str, kind: type) -> Any:
        if key not in self.data:
            raise BundleError(f"{self.where}.{key} is missing")
        value = self.data[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BundleError(f"{self.where}.{key} must be of type {kind.__name__}, found {value!r:.60}")
        return value

    def size(self, key: str, minimum: int = 0) -> int:
        value: int = self.get(key, int)
        if not minimum <= value < 2**63:
            raise BundleError(f"{self.where}.{key} must be an integer of at least {minimum}, found {value}")
        return value

    def sha256(self, key: str) -> str:
        value: str = self.get(key, str)
        if not _SHA256.fullmatch(value):
            raise BundleError(f"{self.where}.{key} must be 64 hexadecimal digits, found {value!r:.80}")
        return value

    def file(self, key: str) -> str:
        return safe_name(self.get(key, str), f"{self.where}.{key}")

    def child(self, key: str) -> _Reader:
        return _Reader(self.get(key, dict), f"{self.where}.{key}")

    def children(self, key: str) -> list[tuple[str, _Reader]]:
        where = f"{self.where}.{key}"
        return [(name, _Reader(value, f"{where}.{name}")) for name, value in self.get(key, dict).items()]

    def items(self, key: str) -> list[_Reader]:
        where = f"{self.where}.{key}"
        return [_Reader(value, f"{where}[{index}]") for index, value in enumerate(self.get(key, list))]


def _parse_graph(entry: _Reader) -> GraphSpec:
    return GraphSpec(
        file=entry.file("file"),
        opset=entry.size("opset", 1),
        mixing=entry.get("mixing", str),
        inputs=tuple(_parse_tensor(item) for item in entry.items("inputs")),
        outputs=tuple(_parse_tensor(item) for item in entry.items("outputs")),
        operators={op: counts.size(op) for counts in (entry.child("operators"),) for op in counts.data},
    )


def _parse_tensor(entry: _Reader) -> TensorSpec:
    dtype = entry.get("dtype", str)
    if dtype not in _DTYPES:
        raise BundleError(f"{entry.where}.dtype must be one of {', '.join(_DTYPES)}, found {dtype!r:.60}")
    shape = entry.get("shape", list)
    for dim in shape:
        if isinstance(dim, bool) or not isinstance(dim, (int, str)) or (isinstance(dim, int) and dim < 0):
            raise BundleError(f"{entry.where}.shape must hold sizes and axis names, found {dim!r:.60}")
    return TensorSpec(entry.get("name", str), dtype, tuple(shape))


def _parse_golden(entry: _Reader) -> Golden:
    cases = tuple(
        GoldenCase(case.get("name", str), case.size("batch", 1), case.size("length", 1), case.get("columns", bool))
        for case in entry.items("cases")
    )
    greedy = tuple(
        GoldenGreedy(case.get("name", str), case.size("prompt_length", 1), case.size("new_tokens", 1))
        for case in entry.items("greedy")
    )
    text = None
    if entry.data.get("text") is not None:
        given = entry.child("text")
        text = GoldenText(given.get("name", str), given.size("tokens", 2), given.size("bytes", 1))
    return Golden(entry.file("file"), entry.get("reference", str), cases, greedy, text)


def _parse_model(config: Mapping[str, Any]) -> ModelSpec:
    entry = _Reader(dict(config), "manifest.config")
    sizes = {
        key: entry.size(key, 1)
        for key in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "sliding_window",
            "conv_kernel",
        )
    }
    layer_types = entry.get("layer_types", list)
    if len(layer_types) != sizes["num_hidden_layers"] or any(kind not in (MHF, SWA) for kind in layer_types):
        raise BundleError(
            f"manifest.config.layer_types must name {sizes['num_hidden_layers']} layers, each {MHF!r} or {SWA!r}, found "
            f"{layer_types!r:.60}"
        )
    tokens = {key: None if config.get(key) is None else entry.size(key) for key in ("bos_token_id", "eos_token_id")}
    for key, token in tokens.items():
        if token is not None and token >= sizes["vocab_size"]:
            raise BundleError(f"manifest.config.{key} must be below vocab_size = {sizes['vocab_size']}, found {token}")
    return ModelSpec(**sizes, **tokens, layer_types=tuple(layer_types))  # type: ignore[arg-type]


def _strings(data: Mapping[str, Any], where: str) -> dict[str, str]:
    for key, value in data.items():
        if not isinstance(value, str):
            raise BundleError(f"{where}.{key} must be a string, found {value!r:.60}")
    return dict(data)
