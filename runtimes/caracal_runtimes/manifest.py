"""`manifest.json`: what a bundle is, as one set of dataclasses that the exporter writes and every reader parses.

Parsing trusts nothing: each value is checked for type and range, and the first that does not fit raises BundleError
with its place in the file. `docs/bundle-format.md` states the same format for readers in other languages.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from caracal_runtimes.errors import BundleError
from caracal_runtimes.pass_lengths import PassLengths

FORMAT = "caracal-bundle"
FORMAT_VERSION = 4
#: Of a bundle whose passes are bounded: a reader that does not know the bound would compute wrong values beyond it.
BOUNDED_VERSION = 5
MANIFEST_FILE = "manifest.json"
#: The raw Ed25519 signature of the manifest's bytes, where somebody signed.
SIGNATURE_FILE = "manifest.sig"
#: Graphs that every bundle has; `docs/bundle-format.md` states what they take and give.
GRAPHS = ("forward", "extend", "step", "step_resident", "convolve", "convolve_long")
#: Those of them that read no weights.
WEIGHTLESS = ("convolve", "convolve_long")

#: Of the weights, and of what is multiplied by them.
PRECISIONS = ("float32", "float16", "bfloat16", "int8", "int4")

MHF, SWA = "mhf", "sliding_attention"

#: Names that Windows gives to devices in every folder, whatever their extension.
_DEVICE = re.compile(
    r"(CON|PRN|AUX|NUL|CONIN\$|CONOUT\$|(COM|LPT)[0-9\u00b9\u00b2\u00b3]) *(\..*)?", re.IGNORECASE | re.DOTALL
)
#: Characters that no Windows file name has; a colon there names a drive or a hidden stream of a file.
_RESERVED = frozenset('<>:"|?*')
#: Control, invisible, halves of a character, and ends of lines: names that look alike, or steer a terminal.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")

_MOST_NAME = 1000  # characters, folders included

_DEEPEST = 32  # lists and objects inside of each other; what is deeper could exhaust the stack

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_./-]{1,60}")
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
    """The reference outputs that travel with the bundle.

    `rounding` is the relative L2 of the reference's float32 logits from float64 on the longest single row.
    """

    file: str
    reference: str
    cases: tuple[GoldenCase, ...]
    greedy: tuple[GoldenGreedy, ...]
    text: GoldenText | None = None
    rounding: float = 0.0


@dataclass(frozen=True)
class Quantization:
    """What was stored in fewer bits than float32.

    Args:
        parameters: numbers of the model, a tied head counted once.
        weights: precision of each weight tensor that is not float32, by its name in the weight files.
        block_size: inputs that share a factor in int4; None without int4.
        source: id of the float32 bundle that was quantized.
    """

    parameters: int
    weights: dict[str, str]
    block_size: int | None
    source: str


@dataclass(frozen=True)
class Manifest:
    """The whole of `manifest.json`.

    `max_length` is the most tokens that one pass over a row may read, None without such a bound; with `static_length` every
    pass has exactly so many.
    """

    config: dict[str, Any]
    precision: str
    graphs: dict[str, GraphSpec]
    weights: tuple[str, ...]
    golden: Golden
    files: dict[str, FileEntry]
    tokenizer: str | None = None
    producer: dict[str, str] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    verification: dict[str, Any] | None = None
    quantization: Quantization | None = None
    max_length: int | None = None
    static_length: bool = False

    @property
    def lengths(self) -> PassLengths:
        """What one pass can take."""
        return PassLengths(self.max_length, self.static_length)

    @property
    def model(self) -> ModelSpec:
        """The numbers of `config` that a runtime needs, checked."""
        return _parse_model(self.config)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        data = asdict(self)
        version = BOUNDED_VERSION
        if self.max_length is None:
            version = FORMAT_VERSION
            del data["max_length"], data["static_length"]
        return json.dumps({"format": FORMAT, "format_version": version, **data}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parses and checks the text of a `manifest.json`. Raises BundleError."""
        try:
            data = json.loads(text, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"manifest.json is not valid JSON ({error}); export the bundle again") from None
        _check_depth(data)
        top = _Reader(data, "manifest")
        if top.get("format", str) != FORMAT:
            raise BundleError(f'manifest.format must be "{FORMAT}", found {data["format"]!r:.60}')
        version = top.get("format_version", int)
        if version not in (FORMAT_VERSION, BOUNDED_VERSION):
            raise BundleError(
                f"manifest.format_version {version!r:.40} is not one this version reads ({FORMAT_VERSION}, {BOUNDED_VERSION}); "
                + ("update caracal-onnx" if version > BOUNDED_VERSION else "export the bundle again")
            )
        files = {
            safe_name(name, "manifest.files"): FileEntry(entry.size("bytes"), entry.sha256("sha256"))
            for name, entry in top.children("files")
        }
        _check_apart(files)
        graphs = {name: _parse_graph(entry) for name, entry in top.children("graphs")}
        for name in GRAPHS:
            if name not in graphs:
                raise BundleError(f"manifest.graphs must have an entry {name!r}")
        manifest = cls(
            config=top.get("config", dict),
            precision=top.get("precision", str),
            graphs=graphs,
            weights=top.files("weights"),
            golden=_parse_golden(top.child("golden")),
            files=files,
            tokenizer=None if data.get("tokenizer") is None else top.file("tokenizer"),
            producer=_strings(top.get("producer", dict), "manifest.producer"),
            source=top.get("source", dict),
            verification=None if data.get("verification") is None else top.get("verification", dict),
            quantization=None if data.get("quantization") is None else _parse_quantization(top.child("quantization")),
            max_length=None if data.get("max_length") is None else top.size("max_length", 2),
            static_length="static_length" in data and top.get("static_length", bool),
        )
        if (manifest.max_length is None) != (version == FORMAT_VERSION):
            raise BundleError(
                f"manifest.max_length must be there if and only if format_version is {BOUNDED_VERSION}, found "
                f"{manifest.max_length} with {version}; export the bundle again"
            )
        if manifest.static_length and manifest.max_length is None:
            raise BundleError("manifest.static_length is true without a max_length; export the bundle again")
        if manifest.precision not in PRECISIONS:
            raise BundleError(
                f"manifest.precision must be one of {', '.join(PRECISIONS)}, found {manifest.precision!r:.60}"
            )
        if (manifest.precision == PRECISIONS[0]) != (manifest.quantization is None):
            raise BundleError(
                f"manifest.quantization must be there for every precision but {PRECISIONS[0]}, and precision is "
                f"{manifest.precision}"
            )
        _parse_model(manifest.config)
        for key in ("config", "source", "verification"):  # what is kept as it stands
            _check_numbers(getattr(manifest, key), f"manifest.{key}")
        needed = [*manifest.weights, manifest.golden.file, *(graph.file for graph in graphs.values())]
        for name in [*needed, *([manifest.tokenizer] if manifest.tokenizer else [])]:
            if name not in files:
                raise BundleError(f"manifest.files has no entry for {name!r}, which the manifest refers to")
        return manifest


def safe_name(name: object, where: str) -> str:
    """`name` if it is a plain relative path inside the bundle, on every system that a bundle may be copied to.

    Raises:
        BundleError: it may leave the bundle, name a device, or is not what it looks like.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
        raise BundleError(f"{where}: expected a file name of at most {_MOST_NAME} characters, found {name!r:.200}")
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    unsafe = "\\" in name or "\0" in name or posix.is_absolute() or windows.drive or windows.root
    if unsafe or ".." in posix.parts or str(posix) != name or name == ".":
        raise BundleError(f"{where}: {name!r:.200} is not a plain path inside the bundle; refused")
    for part in posix.parts:
        why = _why_not_everywhere(part)
        if why:
            raise BundleError(f"{where}: {name!r:.200} {why}; refused, give the file another name")
    return name


def _why_not_everywhere(part: str) -> str:
    """Why a part of a path means something else on some system; empty where it does not."""
    if _DEVICE.fullmatch(part):
        return "names a device on Windows"
    if part[-1] in ". ":
        return "ends in a dot or a blank, which Windows drops"
    for character in part:
        if unicodedata.category(character) in _UNSEEN:
            return f"has the control or invisible character U+{ord(character):04X}"
        if character in _RESERVED:
            return f"has the character {character!r}, which means something else on Windows"
    return ""


def _check_apart(names: Iterable[str]) -> None:
    """Refuses names that some file systems hold for the same: one file would overwrite the other.

    Raises:
        BundleError: two names are equal without regard to case or normalization, one is the folder of another, or one is
            taken for the manifest or its signature.
    """
    taken = {own: own for own in (MANIFEST_FILE, SIGNATURE_FILE)}
    for name in names:
        if (key := folded(name)) in taken:
            raise BundleError(
                f"manifest.files: {name!r:.100} and {taken[key]!r:.100} are the same file on some systems; refused, give one "
                f"another name"
            )
        taken[key] = name
    for name in list(taken.values()):
        for above in PurePosixPath(name).parents:
            if str(above) != "." and folded(str(above)) in taken:
                raise BundleError(
                    f"manifest.files: {str(above)!r:.100} is a file and the folder of {name!r:.100}; refused"
                )


def folded(name: str) -> str:
    """What two names have in common that differ in case or Unicode normalization only."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object without repeated keys: two readers that keep different ones would check different hashes."""
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise BundleError(f"manifest.json has the key {key!r:.60} twice; export the bundle again")
        data[key] = value
    return data


def _values(data: object) -> Iterator[tuple[object, int]]:
    """All values in a JSON document, and how many lists and objects each lies in."""
    waiting = [(data, 0)]
    while waiting:
        value, depth = waiting.pop()
        yield value, depth
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(item, depth + 1) for item in inner]


def _check_depth(data: object) -> None:
    if any(depth > _DEEPEST for _, depth in _values(data)):
        raise BundleError(f"manifest.json has values in more than {_DEEPEST} others; export the bundle again")


def _check_numbers(data: object, where: str) -> None:
    """Refuses numbers that Python reads and no other reader of JSON takes."""
    for value, _ in _values(data):
        if isinstance(value, float) and not math.isfinite(value):
            raise BundleError(f"{where} has the number {value}, which JSON does not have; export the bundle again")


def _step(key: str) -> str:
    """A key of an object as part of a place; one that could be mistaken for more than a key is quoted and cut."""
    return f".{key}" if _PLAIN_KEY.fullmatch(key) else f"[{key!r:.60}]"


class _Reader:
    """Typed access to one JSON object; every failure names its place in the manifest."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise BundleError(f"{where} must be a JSON object, found {type(data).__name__}")
        self.data: dict[str, Any] = data
        self.where = where

    def get(self, key: str, kind: type) -> Any:
        if key not in self.data:
            raise BundleError(f"{self.where}{_step(key)} is missing")
        value = self.data[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise BundleError(f"{self.where}{_step(key)} must be of type {kind.__name__}, found {value!r:.60}")
        return value

    def size(self, key: str, minimum: int = 0) -> int:
        value: int = self.get(key, int)
        if not minimum <= value < 2**63:
            raise BundleError(
                f"{self.where}{_step(key)} must be an integer from {minimum} to {2**63 - 1}, found {value!r:.60}"
            )
        return value

    def sha256(self, key: str) -> str:
        value: str = self.get(key, str)
        if not _SHA256.fullmatch(value):
            raise BundleError(f"{self.where}{_step(key)} must be 64 hexadecimal digits, found {value!r:.80}")
        return value

    def file(self, key: str) -> str:
        return safe_name(self.get(key, str), f"{self.where}.{key}")

    def files(self, key: str) -> tuple[str, ...]:
        where = f"{self.where}.{key}"
        names = tuple(safe_name(name, f"{where}[{index}]") for index, name in enumerate(self.get(key, list)))
        if not names:
            raise BundleError(f"{where} must name at least one file, found none")
        for index, name in enumerate(names):
            if name in names[:index]:
                raise BundleError(f"{where}[{index}]: {name!r:.80} is named twice; export the bundle again")
        return names

    def child(self, key: str) -> _Reader:
        return _Reader(self.get(key, dict), f"{self.where}.{key}")

    def children(self, key: str) -> list[tuple[str, _Reader]]:
        where = f"{self.where}.{key}"
        return [(name, _Reader(value, f"{where}{_step(name)}")) for name, value in self.get(key, dict).items()]

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
    rounding = entry.data.get("rounding")
    rounding = 0.0 if rounding is None else rounding
    if isinstance(rounding, bool) or not isinstance(rounding, (int, float)) or not 0 <= rounding <= 1:
        raise BundleError(f"{entry.where}.rounding must be a number from 0 to 1, found {rounding!r:.60}")
    return Golden(entry.file("file"), entry.get("reference", str), cases, greedy, text, float(rounding))


def _parse_quantization(entry: _Reader) -> Quantization:
    weights = _strings(entry.get("weights", dict), f"{entry.where}.weights")
    for name, precision in weights.items():
        if precision not in PRECISIONS[1:]:
            raise BundleError(
                f"{entry.where}.weights{_step(name)} must be one of {', '.join(PRECISIONS[1:])}, found {precision!r:.60}"
            )
    block = None if entry.data.get("block_size") is None else entry.size("block_size", 1)
    return Quantization(entry.size("parameters", 1), weights, block, entry.sha256("source"))


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
            raise BundleError(
                f"manifest.config.{key} must be below vocab_size = {sizes['vocab_size']}, found {token!r:.40}"
            )
    return ModelSpec(**sizes, **tokens, layer_types=tuple(layer_types))  # type: ignore[arg-type]


def _strings(data: Mapping[str, Any], where: str) -> dict[str, str]:
    for key, value in data.items():
        if not isinstance(value, str):
            raise BundleError(f"{where}{_step(key)} must be a string, found {value!r:.60}")
    return dict(data)
