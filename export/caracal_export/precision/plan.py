"""Which weight is stored in which format: by what the graphs do with it, and by what the caller asked for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx_ir as ir
from caracal_runtimes.errors import InputError
from caracal_runtimes.manifest import PRECISIONS

from caracal_export.precision.formats import BFloat16, Float16, Format, Int4, Int8

_SHORT = {"fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
#: How a product with int4 weights is written: the standard's DequantizeLinear, or ONNX Runtime's own operator.
INT4_OPERATORS = ("DequantizeLinear", "MatMulNBits")


# What a graph does with a weight. PRODUCT: the [in, out] matrix of a MatMul. GROUPED: one matrix per head. HEAD: the table
# [vocabulary, width] that a Gemm reads transposed. EMBEDDING: the table of which rows are taken. OTHER: anything else.
PRODUCT, GROUPED, HEAD, EMBEDDING, OTHER = "product", "grouped", "head", "embedding", "other"
# What the transpose of a tied head's table is stored as; a head of its own, which may have this name, is no table.
TIED_HEAD = "lm_head.weight"
_HALVES: dict[str, type[Format]] = {"float16": Float16, "bfloat16": BFloat16}


@dataclass(frozen=True)
class Precision:
    """What was asked for.

    Args:
        name: one of `PRECISIONS`.
        keep: patterns of names of weights that stay float32, `*` for anything.
        block: inputs that share a factor in int4.
        operator: one of `INT4_OPERATORS`.
    """

    name: str
    keep: tuple[str, ...] = ()
    block: int = 32
    operator: str = INT4_OPERATORS[0]

    def __post_init__(self) -> None:
        """Raises InputError for what cannot be."""
        if self.name not in PRECISIONS:
            raise InputError(f"--precision must be one of {', '.join(PRECISIONS)}, found {self.name!r:.40}")
        if self.operator not in INT4_OPERATORS:
            raise InputError(f"--int4-operator must be one of {', '.join(INT4_OPERATORS)}, found {self.operator!r:.40}")
        if isinstance(self.block, bool) or self.block not in (16, 32, 64, 128, 256):
            raise InputError(f"--block-size must be 16, 32, 64, 128 or 256, found {self.block!r:.40}")

    @classmethod
    def parse(cls, name: str, **options: object) -> Precision:
        """As the command line gives it: any case, and the usual short names."""
        plain = name.strip().lower()
        return cls(_SHORT.get(plain, plain), **options)  # type: ignore[arg-type]


def check_bound(bound: object) -> None:
    """Refuses a bound on KL that is no positive number. Raises InputError."""
    if not (isinstance(bound, float) and 0 < bound < math.inf):
        raise InputError(f"--max-kl: expected a number of nats above 0, such as 0.01, found {bound!r:.40}")


@dataclass(frozen=True)
class Planned:
    """A tensor that a quantized bundle stores in another format.

    Args:
        weight: of which weight of the float32 bundle.
        stored_as: under which name.
        format: how.
        role: for which use of the weight.
        shape: of the matrix that is stored.
        turned: that matrix is the weight's transpose.
    """

    weight: str
    stored_as: str
    format: Format
    role: str
    shape: tuple[int, ...]
    turned: bool = False


def weight_reads(model: ir.Model) -> list[tuple[ir.Node, int, str, str]]:
    """Every node that reads a weight: the node, at which input, the weight's name, and what it does with it."""
    weights = {id(value): name for name, value in model.graph.initializers.items()}
    return [
        (node, place, weights[id(value)], role_of(node, place, value))
        for node in model.graph
        for place, value in enumerate(node.inputs)
        if value is not None and id(value) in weights
    ]


def roles_of(graphs: Iterable[ir.Model]) -> dict[str, frozenset[str]]:
    """What any of the graphs does with each of its weights."""
    found: dict[str, set[str]] = {}
    for model in graphs:
        for _, _, name, role in weight_reads(model):
            found.setdefault(name, set()).add(role)
    return {name: frozenset(roles) for name, roles in found.items()}


def role_of(node: ir.Node, place: int, value: ir.Value) -> str:
    """What a node does with the weight that is its input at a place."""
    rank = len(value.shape or ())
    if node.op_type == "MatMul" and place == 1 and rank in (2, 3):
        return PRODUCT if rank == 2 else GROUPED
    if node.op_type == "Gemm" and place == 1 and rank == 2 and len(node.inputs) == 2:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        turned = (attributes.pop("transA", 0), attributes.pop("transB", 0))
        if turned == (0, 1) and all(attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta")):
            return HEAD
    if node.op_type == "Gather" and place == 0 and rank == 2 and node.attributes.get_int("axis", 0) == 0:
        return EMBEDDING
    return OTHER


def plan(
    precision: Precision,
    roles: Mapping[str, Collection[str]],
    shapes: Mapping[str, tuple[int, ...]],
    higher: Collection[str] = (),
) -> list[Planned]:
    """What is stored in another format than float32.

    Args:
        precision: what was asked for.
        roles: of every weight, from `roles_of`.
        shapes: of every weight.
        higher: weights that get the next higher precision: int8 where int4 was asked for, else float32.

    Raises:
        InputError: a pattern of `keep` fits no weight that would be stored otherwise, or the patterns leave none.
    """
    found = []
    unused = set(precision.keep)
    for name in sorted(roles):
        kept = {pattern for pattern in precision.keep if fnmatchcase(name, pattern)}
        planned = list(_planned(precision, name, roles[name], shapes[name], higher=name in higher))
        if planned:
            unused -= kept
        if not kept:
            found += planned
    if unused:
        raise InputError(
            f"--keep: {min(unused)!r:.80} fits no weight that {precision.name} would change; weights are called like "
            f"{', '.join(sorted(name for name in roles if PRODUCT in roles[name])[:2])}"
        )
    if precision.name != "float32" and not found:
        raise InputError(f"--keep leaves no weight to store as {precision.name}; keep fewer of them")
    return found


def _planned(
    precision: Precision, name: str, roles: Collection[str], shape: tuple[int, ...], *, higher: bool
) -> Sequence[Planned]:
    half = _HALVES.get(precision.name)
    if precision.name == "float32" or OTHER in roles or (higher and precision.name != "int4"):
        return ()
    if half is not None:
        return [Planned(name, name, half(), role, shape) for role in sorted(roles)]
    found = []
    whole = Int8() if precision.name == "int8" or higher else Int4(precision.block, precision.operator == "MatMulNBits")
    for role in sorted(roles):
        if role == PRODUCT:
            found.append(Planned(name, name, whole, role, shape))
        elif role == EMBEDDING:
            found.append(Planned(name, name, Int8(by_row=True), role, shape))
        elif role == HEAD:  # a table that is read transposed is stored so: no runtime multiplies by bytes the other way
            found.append(Planned(name, TIED_HEAD, whole, role, (shape[1], shape[0]), turned=True))
    return found
