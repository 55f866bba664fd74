"""A first draft of a key map for a checkpoint whose names are unknown: guesses from shapes and words, said to be guesses.

A module's weight and bias go together, and names that differ only in a block's number are one rule. What a module is, its
shapes tell first (only a Fourier block has a depthwise convolution) and the words of its name second. Where several
remain, the rule is a comment with the choices, so that the draft does not load until someone who knows has decided.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from caracal.checkpoint.names import normalize_key
from caracal.checkpoint.stores import Stored

_NUMBER = re.compile(r"(?:(?<=\.)|^)([0-9]{1,6})(?=\.)")  # a component that is a number
_WORD = re.compile(r"[A-Z]+(?![a-z])[0-9]*|[A-Z]?[a-z]+[0-9]*|[0-9]+")
# What a part of a block is called; a name with one of these words is no module of another part.
_FAMILIES = {
    "mhf": frozenset({"mhf", "fourier"}),
    "swa": frozenset({"swa", "attn", "attention", "self"}),
    "ffn": frozenset({"ffn", "mlp", "ff", "feedforward"}),
}
_NUMBERED_NORM = re.compile(r"(?:ln|norm|layernorm)[0-9]|[0-9]")
_TAILS = {"weight": "weight", "gamma": "weight", "scale": "weight", "kernel": "weight", "bias": "bias", "beta": "bias"}
_HEADER = """\
# First draft of a key map. Read every line: names were guessed from shapes and words.
# Rules that begin with #? could not be decided: choose one name, or drop = true, and take the marks away.
"""


@dataclass(frozen=True)
class _Role:
    """A module of the model: what it is called elsewhere, and what its weight's shape must be (see `_fits`)."""

    name: str
    words: str
    shape: str
    bias: str = "D"


_OUTSIDE = (
    _Role("embed_tokens", "embed embedding embeddings wte tok token tokens word emb", "*D"),
    _Role("lm_head", "head lm output unembed unembedding decoder logits", "*D"),
    _Role("norm", "norm ln final f out layernorm", "D"),
)
_FFN = (
    _Role("ffn.norm", "ffn mlp ff norm ln layernorm 2 ln2 norm2 layernorm2 post", "D"),
    _Role("ffn.gate_proj", "ffn mlp ff gate w1", "*D", "*"),
    _Role("ffn.up_proj", "ffn mlp ff up w3 fc fc1 in", "*D", "*"),
    _Role("ffn.down_proj", "ffn mlp ff down w2 fc2 proj out", "*D"),
)
_MHF = (
    _Role("mhf.pre_conv", "mhf fourier mixer conv pre depthwise dw dwconv", "D1*"),
    _Role("mhf.norm", "mhf fourier mixer norm ln layernorm 1 ln1 norm1 layernorm1", "D"),
    _Role("mhf.input_norm", "mhf fourier mixer input in pre norm ln layernorm", "D"),
    _Role("mhf.value_proj", "mhf fourier mixer value v content", "DD"),
    _Role("mhf.gate_proj", "mhf fourier mixer gate g g1 filter", "DD"),
    _Role("mhf.gate_conv", "mhf fourier mixer gate g g2 conv filter group grouped", "Dh1"),
    _Role("mhf.out_proj", "mhf fourier mixer out o output linear proj", "DD"),
)
_SWA = (
    _Role("swa.norm", "swa attn attention self norm ln layernorm 1 ln1 norm1 layernorm1 input", "D"),
    _Role("swa.qkv_proj", "swa attn attention self qkv c in wqkv", "3D", "3"),
    _Role("swa.q_proj", "swa attn attention self q query queries wq", "DD"),
    _Role("swa.k_proj", "swa attn attention self k key keys wk", "DD"),
    _Role("swa.v_proj", "swa attn attention self v value values wv", "DD"),
    _Role("swa.out_proj", "swa attn attention self o out output proj wo dense", "DD"),
)


@dataclass
class _Module:
    """A module of the stored weights, in all blocks that have it: `pattern` has {} where the block's number stands."""

    pattern: str
    sample: str
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by last component
    blocks: set[int] = field(default_factory=set)
    right: bool = True  # its names are the model's already


def draft_key_map(entries: Mapping[str, Stored]) -> str:
    """The text of a key map for stored tensors of another layout.

    Args:
        entries: the stored tensors by their names.

    Returns:
        TOML; loads as a `KeyMap` once every rule that begins with `#?` was decided.
    """
    floating = {key: entry for key, entry in entries.items() if entry.floating}
    width = _width(floating)
    outside, inside = _modules(floating, width)
    rules = [_drop(pattern) for pattern in _patterns(sorted(entries.keys() - floating.keys()))]
    decided = _decide(outside, _OUTSIDE, width)
    rules += [_rule(module, decided.get(module.pattern), _OUTSIDE, width, "") for module in outside if not module.right]
    fourier = {
        block for m in inside for block in m.blocks if any(_fits("D1*", shape, width) for shape in m.shapes.values())
    }
    choices: dict[str, list[tuple[set[int], _Role | None, tuple[_Role, ...]]]] = defaultdict(list)
    kinds: tuple[tuple[tuple[_Role, ...], bool], ...] = (((*_MHF, *_FFN), True), ((*_SWA, *_FFN), False))
    for roles, wanted in kinds:
        present = [m for m in inside if any((block in fourier) == wanted for block in m.blocks)]
        decided = _decide(present, roles, width)
        for module in present:
            blocks = {block for block in module.blocks if (block in fourier) == wanted}
            choices[module.pattern].append((blocks, decided.get(module.pattern), roles))
    for module in inside:
        if module.right:
            continue
        found = choices[module.pattern]
        if len({role for _, role, _ in found}) == 1:  # the same in every block
            found = [(module.blocks, found[0][1], found[0][2])]
        for blocks, role, roles in found:
            numbers = r"\d+" if len(found) == 1 else "|".join(map(str, sorted(blocks)))
            rules.append(_rule(module, role, roles, width, r"blocks.\1.", f"({numbers})"))
    return "\n".join([_HEADER, *rules])


def _modules(entries: Mapping[str, Stored], width: int) -> tuple[list[_Module], list[_Module]]:
    """Modules outside and inside the blocks, in the order in which they are stored."""
    found: dict[tuple[bool, str], _Module] = {}
    for key, entry in entries.items():
        number = _NUMBER.search(key)
        stem, dot, tail = key.rpartition(".")
        if tail not in _TAILS:
            stem, dot, tail = key, "", ""
        if number is not None and number.end() <= len(stem):
            pattern = _escape(stem[: number.start()]) + "{}" + _escape(stem[number.end() :])
        else:
            pattern, number = _escape(stem), None
        module = found.setdefault((number is not None, pattern), _Module(pattern, stem))
        module.shapes[dot + tail] = entry.shape
        if number is not None:
            module.blocks.add(int(number[1]))
        module.right = module.right and _is_right(normalize_key(key))
    outside = [module for (inside, _), module in found.items() if not inside]
    return outside, [module for (inside, _), module in found.items() if inside]


def _escape(text: str) -> str:
    """For a regular expression that is also a format."""
    return re.escape(text).replace("{", "{{").replace("}", "}}")


def _is_right(name: str) -> bool:
    match = re.fullmatch(r"(?:blocks\.\d+\.)?(.+)\.(?:weight|bias)", name)
    return match is not None and match[1] in {role.name for role in (*_OUTSIDE, *_MHF, *_SWA, *_FFN)}


def _width(entries: Mapping[str, Stored]) -> int:
    """The size that occurs most often: every norm and every projection has it."""
    counts = Counter(size for entry in entries.values() for size in entry.shape if size > 1)
    return counts.most_common(1)[0][0] if counts else 1


def _decide(modules: list[_Module], roles: tuple[_Role, ...], width: int) -> dict[str, _Role]:
    """The role of each module by pattern, best score first; a tie that nothing can break leaves all of it open."""
    norms = sum(all(_fits("D", shape, width) for shape in module.shapes.values()) for module in modules)
    if norms <= 2:  # one of the mixer, one of the feed-forward: there is none in front of the convolution
        roles = tuple(role for role in roles if role.name != "mhf.input_norm")
    scores = {
        (module.pattern, role): _score(role, module, numbered=norms == 2)
        for module in modules
        for role in roles
        if _can_be(module, role, width)
    }
    chosen: dict[str, _Role] = {}
    taken: set[_Role] = set()
    for score in sorted({score for score in scores.values() if score > 0}, reverse=True):
        best = [pair for pair, s in scores.items() if s == score and pair[0] not in chosen and pair[1] not in taken]
        patterns, used = Counter(pattern for pattern, _ in best), Counter(role for _, role in best)
        for pattern, role in best:
            if patterns[pattern] == 1 and used[role] == 1:
                chosen[pattern] = role
                taken.add(role)
    # What is left when all but one is known needs no words.
    for _ in modules:
        for module in modules:
            left = [r for r in roles if r not in taken and _can_be(module, r, width)]
            if module.pattern not in chosen and len(left) == 1 and scores.get((module.pattern, left[0]), 0) > 0:
                chosen[module.pattern] = left[0]
                taken.add(left[0])
    return chosen


def _can_be(module: _Module, role: _Role, width: int) -> bool:
    return all(
        _fits(role.bias if _TAILS.get(tail.removeprefix("."), "weight") == "bias" else role.shape, shape, width)
        for tail, shape in module.shapes.items()
    )


def _score(role: _Role, module: _Module, *, numbered: bool) -> int:
    """How much a module's name speaks for a role; later words are nearer to the tensor and say more.

    Args:
        role: what it may be.
        module: what it is called.
        numbered: a number says which norm it is: where there are two of them, in this order, and no third.
    """
    words = [word.lower() for word in _WORD.findall(_NUMBER.sub("", module.sample))]
    family = role.name.partition(".")[0]
    if any(
        not names.isdisjoint(words) for other, names in _FAMILIES.items() if family in _FAMILIES and other != family
    ):
        return 0
    meant = role.words.split()
    return sum(
        place
        for place, word in enumerate(words, 1)
        if word in meant and (numbered or not _NUMBERED_NORM.fullmatch(word))
    )


def _fits(symbols: str, shape: tuple[int, ...], width: int) -> bool:
    """Whether a stored shape can be what the symbols say, whichever way round a matrix lies.

    D a vector of the width, * one of any size, 3 of three widths; DD, *D, 3D matrices; D1* the depthwise convolution; Dh1
    the gate convolution.
    """
    sizes = tuple(size for size in shape if size != 1) or (1,)
    if symbols in ("D", "*", "3"):
        return len(sizes) == 1 and (symbols == "*" or sizes[0] == (width if symbols == "D" else 3 * width))
    if symbols in ("DD", "3D", "*D"):
        other = {"DD": width, "3D": 3 * width, "*D": 0}[symbols]
        return len(shape) == 2 and width in shape and (not other or sorted(shape) == [width, other])
    if symbols == "D1*":
        return len(shape) == 3 and shape[:2] == (width, 1)
    return len(shape) >= 2 and len(sizes) == 2 and sizes[0] == width and width % sizes[1] == 0


def _patterns(keys: list[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"(?:(?<=\.)|^)[0-9]+(?=\\\.)", r"\\d+", re.escape(key)) for key in keys))


def _drop(pattern: str) -> str:
    return f"[[rule]]  # not floating point\nmatch = {_quoted(pattern)}\ndrop = true\n"


def _rule(
    module: _Module, role: _Role | None, roles: tuple[_Role, ...], width: int, stem: str, numbers: str = ""
) -> str:
    """The text of one rule, or of a comment with the choices."""
    pattern = module.pattern.format(numbers)
    group = 2 if numbers else 1
    tails = {tail.removeprefix("."): _TAILS.get(tail.removeprefix("."), "weight") for tail in module.shapes}
    shapes = ", ".join(
        f"{tail or 'weight'} {list(shape)}" for tail, shape in zip(tails, module.shapes.values(), strict=True)
    )
    note = f"# {module.sample}: {shapes}" + (f", in {len(module.blocks)} blocks" if len(module.blocks) > 1 else "")
    note = "".join(c if c.isprintable() else "?" for c in note)
    plain = all(tail == name for tail, name in tails.items())
    parts = []
    if plain:
        parts.append((rf"{pattern}\.({'|'.join(tails)})", rf"\{group}"))
    else:
        parts += [(pattern + (rf"\.{tail}" if tail else ""), name) for tail, name in tails.items()]
    text = ""
    for match, tail in parts:
        if role is not None:
            text += f"[[rule]]  {note}\nmatch = {_quoted(match)}\nname = '{stem}{role.name}.{tail}'\n"
            continue
        left = [r for r in roles if _can_be(module, r, width)]
        names = " or ".join([*(f"'{stem}{r.name}.{tail}'" for r in left), "drop = true"])
        text += f"#? [[rule]]  {note}\n#? match = {_quoted(match)}\n#? name = {names}\n"
    return text


def _quoted(pattern: str) -> str:
    """As a TOML string; re.escape leaves nothing but a quote that a literal one cannot hold."""
    if "'" not in pattern and pattern.isprintable():
        return f"'{pattern}'"
    escaped = pattern.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
