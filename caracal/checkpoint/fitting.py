"""How each parameter of a model comes from the stored tensors: names, shapes, transposed and fused matrices, a tied head.

Works on names and shapes alone, so that a checkpoint can be judged without reading it and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from caracal.checkpoint.key_map import Renamed
from caracal.checkpoint.names import SCALES, normalize_key, parts_of
from caracal.checkpoint.options import IN_OUT, LINEAR_LAYOUTS, OUT_IN
from caracal.checkpoint.parameters import EMBEDDING, HEAD, MAX_ELEMENTS, Shape, is_linear, parameter_shapes
from caracal.checkpoint.stores import Stored
from caracal.config import CaracalConfig
from caracal.errors import CheckpointError

_MAX_LISTED = 8
_AXES = {OUT_IN: "out, in", IN_OUT: "in, out"}
# Counters that averaging wrappers keep among the weights (torch.optim.swa_utils.AveragedModel).
_BOOKKEEPING = ("n_averaged", "num_batches_tracked")


@dataclass(frozen=True)
class Recipe:
    """Where a parameter comes from: `stored[key]`, transposed, rows `start:stop` of it, reshaped to `shape`.

    Args:
        key: the stored name.
        shape: what comes out.
        rows: of the (transposed) stored matrix, for a part of a fused one.
        transpose: the stored matrix is [in, out].
        scale: the stored name of the factor of 8-bit floats.
    """

    key: str
    shape: Shape
    rows: tuple[int, int] | None = None
    transpose: bool = False
    scale: str | None = None


@dataclass(frozen=True)
class Named:
    """The stored tensors under the model's names: `keys` maps those to the stored ones."""

    entries: Mapping[str, Stored]
    keys: Mapping[str, str]
    scales: Mapping[str, str]
    transpose: Mapping[str, bool]

    def entry(self, name: str) -> Stored:
        """What is stored for one of the model's names."""
        return self.entries[self.keys[name]]


def name_tensors(entries: Mapping[str, Stored], renamed: Mapping[str, Renamed], source: str) -> Named:
    """Gives every stored tensor the name that it has in the model.

    Args:
        entries: the stored tensors by their names.
        renamed: what the user's key map made of some of them.
        source: for messages.

    Raises:
        CheckpointError: two stored names mean the same parameter, a sharded dump, a tensor that is too large.
    """
    keys: dict[str, str] = {}
    scales: dict[str, str] = {}
    transpose: dict[str, bool] = {}
    for key, entry in entries.items():
        rule = renamed.get(key)
        if rule is not None and rule.name is None:
            continue
        name = normalize_key(key if rule is None or rule.name is None else rule.name)
        last = name.rpartition(".")[2]
        if last in ("_flat_param", "flat_param"):
            raise CheckpointError(
                f"checkpoint: {key!r:.90} in {source} is a flat parameter of FSDP, whose parts have no names; save the run with "
                f"StateDictType.FULL_STATE_DICT, or with torch.distributed.checkpoint"
            )
        if last in _BOOKKEEPING and not entry.floating and math.prod(entry.shape) == 1:
            continue
        if math.prod(entry.shape) > MAX_ELEMENTS:
            raise CheckpointError(
                f"checkpoint: {key!r:.90} in {source} has {math.prod(entry.shape):,} elements, at most {MAX_ELEMENTS:,} in one "
                f"tensor are computed correctly; split it or use a smaller model"
            )
        for ending in SCALES:
            if name.endswith(ending) and (weight := name.removesuffix(ending)).endswith(".weight"):
                if weight in scales:
                    raise CheckpointError(
                        f"checkpoint: {source} has two factors for {weight:.90}, {scales[weight]!r:.90} and {key!r:.90}; remove one"
                    )
                scales[weight] = key
                break
        else:
            if name in keys:
                raise CheckpointError(
                    f"checkpoint: {source} has {name:.90} twice, as {keys[name]!r:.90} and {key!r:.90}; remove one, or drop it with "
                    f"--key-map"
                )
            keys[name] = key
            if rule is not None and rule.transpose is not None:
                transpose[name] = rule.transpose
    return Named(entries, keys, scales, transpose)


def fit(
    config: CaracalConfig, named: Named, source: str, linear_layout: str | None = None
) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    """A recipe for every parameter of the configured model (with a tied head, none for it), and what was assumed.

    Args:
        config: of the model.
        named: what is stored.
        source: for messages.
        linear_layout: how square matrices are stored, where the user has said it.

    Raises:
        MisfitError: listing each missing, unknown or misshapen tensor.
        CheckpointError: a tensor is not floating point; shapes cannot tell how matrices are stored.
    """
    if linear_layout not in (None, *LINEAR_LAYOUTS):
        raise CheckpointError(f"--linear-layout must be one of {' '.join(LINEAR_LAYOUTS)}, found {linear_layout!r}")
    for key in [*named.keys.values(), *named.scales.values()]:
        if not named.entries[key].floating:
            raise CheckpointError(
                f"checkpoint: {key:.90} in {source} must be floating point, found {named.entries[key].dtype}; if it is no weight, "
                f"drop it with --key-map"
            )
    for weight, key in named.scales.items():
        if weight in named.keys and not named.entry(weight).dtype.startswith("float8"):
            raise CheckpointError(
                f"checkpoint: {key:.90} in {source} is the factor of an 8-bit weight, but {named.keys[weight]:.90} is "
                f"{named.entry(weight).dtype}; if it is not to be multiplied, drop it with --key-map"
            )
    wanted = parameter_shapes(config)
    available = dict(named.keys)
    if config.tie_word_embeddings and HEAD in available:
        # The shared matrix may be stored under either name or under both.
        head = available.pop(HEAD)
        if EMBEDDING not in available:
            available[EMBEDDING] = head
            if HEAD in named.scales:
                named = replace(named, scales={**named.scales, EMBEDDING: named.scales[HEAD]})
            if HEAD in named.transpose:
                named = replace(named, transpose={**named.transpose, EMBEDDING: named.transpose[HEAD]})
    recipes: dict[str, Recipe] = {}
    used: set[str] = set()
    wrong: list[str] = []
    fused = {name: parts for name in available if (parts := parts_of(name)) is not None}
    for name, parts in fused.items():
        if not all(part in wanted for part in parts):
            continue  # unknown, and listed as such
        if doubled := [part for part in parts if part in available]:
            raise CheckpointError(
                f"checkpoint: {source} has {doubled[0]} twice, by itself and inside {available[name]!r:.90}; remove one"
            )
        used.add(name)
        rows = [wanted[part][0] for part in parts]
        whole = (sum(rows), *wanted[parts[0]][1:])
        recipe = _recipe(name, available[name], named, whole, linear=len(whole) == 2)
        if recipe is None:
            wrong.append(_wrong(name, named.entries[available[name]], whole))
            recipe = Recipe(available[name], whole)
        start = 0
        for part, size in zip(parts, rows, strict=True):
            recipes[part] = replace(recipe, shape=wanted[part], rows=(start, start + size))
            start += size
    for name, shape in wanted.items():
        if name in recipes or name not in available:
            continue
        used.add(name)
        recipe = _recipe(name, available[name], named, shape, linear=is_linear(name) or name == EMBEDDING)
        if recipe is None:
            wrong.append(_wrong(name, named.entries[available[name]], shape))
        else:
            recipes[name] = recipe
    missing = sorted(wanted.keys() - recipes.keys() - used)
    unknown = sorted(available[name] for name in available.keys() - used)
    known = used | ({HEAD} if config.tie_word_embeddings and HEAD in named.keys else set())
    unknown += sorted(key for weight, key in named.scales.items() if weight not in known)
    problems = [
        *_listed("missing", missing),
        *_listed("unknown", unknown),
        *_listed("of another shape", wrong),
    ]
    if problems:
        raise MisfitError(
            f"checkpoint: {source} does not fit its configuration: {'; '.join(problems)}{_remedy(missing, unknown, wrong)}",
            missing=tuple(missing),
            unknown=tuple(unknown),
        )
    return _settle_squares(recipes, named, source, linear_layout)


class MisfitError(CheckpointError):
    """Stored tensors that are not the model's; `missing` has the model's names, `unknown` the stored ones."""

    def __init__(self, message: str, *, missing: tuple[str, ...], unknown: tuple[str, ...]) -> None:
        super().__init__(message)
        self.missing, self.unknown = missing, unknown


def _remedy(missing: list[str], unknown: list[str], wrong: list[str]) -> str:
    if unknown:
        return (
            "; if these are the weights under other names, write a key map (`caracal info` prints a draft) and pass it "
            "with --key-map"
        )
    if HEAD in missing:
        return "; the head is stored nowhere: is it tied (tie_word_embeddings = true)?"
    return (
        "; the file is not whole, save it again"
        if missing and not wrong
        else "; is it the configuration of this model?"
    )


def _recipe(name: str, key: str, named: Named, shape: Shape, *, linear: bool) -> Recipe | None:
    """How a stored tensor becomes `shape`, or None if it cannot."""
    stored = named.entries[key].shape
    recipe = Recipe(key, shape, scale=named.scales.get(name))
    said = named.transpose.get(name)
    if said is not None:
        turned = tuple(reversed(stored)) if said else stored
        return replace(recipe, transpose=said) if turned == shape else None
    if stored == shape:
        return recipe
    if linear and len(shape) == 2 and stored == (shape[1], shape[0]):
        return replace(recipe, transpose=True)
    # A convolution's weight without (or with more) axes of size 1 lies in memory as it does with them.
    if not linear and _without_ones(stored) == _without_ones(shape):
        return recipe
    return None


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _settle_squares(
    recipes: dict[str, Recipe], named: Named, source: str, layout: str | None
) -> tuple[dict[str, Recipe], tuple[str, ...]]:
    """Decides how square matrices are stored, of which the shape says nothing; see `ReadOptions.linear_layout`.

    Where every matrix that can tell is stored [in, out], the square ones probably are too, and computing with the wrong
    ones would give plausible nonsense: that is asked, not guessed. The head does not count: many that store their layers
    [in, out] keep it as PyTorch does, beside the embedding.
    """
    told: dict[bool, list[str]] = {True: [], False: []}
    square: list[str] = []
    settled = {named.keys.get(name) for name in named.transpose}
    for name, recipe in recipes.items():
        stored = named.entries[recipe.key].shape
        if len(stored) != 2 or not (is_linear(name) or name.endswith("gate_conv.weight")) or recipe.key in settled:
            continue
        if stored[0] == stored[1]:
            square.append(name)
        elif is_linear(name) and name != HEAD:
            told[recipe.transpose].append(name)
    if layout is None:
        if not square or not told[True]:
            return recipes, ()
        if told[False]:
            return recipes, (
                f"square matrices are [{_AXES[OUT_IN]}], as {told[False][0]} is and {told[True][0]} is not (--linear-layout "
                f"says otherwise)",
            )
        raise CheckpointError(
            f"checkpoint: {told[True][0]} in {source} is stored [{_AXES[IN_OUT]}], and so is every matrix whose shape tells; of "
            f"{len(square)} square ones, such as {square[0]}, it does not: say --linear-layout {IN_OUT} (they too) or "
            f"--linear-layout {OUT_IN} (as PyTorch stores them)"
        )
    if layout == IN_OUT and told[False]:  # the other way round is an answer to the question above
        raise CheckpointError(
            f"checkpoint: --linear-layout {layout} contradicts {told[False][0]} in {source}, which is stored "
            f"[{_AXES[OUT_IN]}] by its shape; leave it out, or use transpose in a --key-map"
        )
    return {name: replace(r, transpose=layout == IN_OUT) if name in square else r for name, r in recipes.items()}, ()


def _wrong(name: str, stored: Stored, shape: Shape) -> str:
    return f"{name} has {list(stored.shape)}, the config wants {list(shape)}"


def _listed(what: str, items: Iterable[str]) -> list[str]:
    items = list(items)
    if not items:
        return []
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return [f"{len(items)} {what} ({', '.join(f'{item:.90}' for item in items[:_MAX_LISTED])}{more})"]
