"""From stored tensors to a configuration and a recipe for each parameter, or to the reason why there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from caracal.checkpoint.files import Found
from caracal.checkpoint.fitting import Named, Recipe, fit, name_tensors
from caracal.checkpoint.inference import infer_config
from caracal.checkpoint.key_map import KeyMap
from caracal.checkpoint.options import ReadOptions
from caracal.checkpoint.parameters import check_sizes
from caracal.checkpoint.stores import Store
from caracal.config import CaracalConfig
from caracal.errors import CheckpointError


@dataclass(frozen=True)
class Judged:
    """How a checkpoint is to be read.

    Args:
        config: of the model; `config_file` is where it stood, None if elsewhere.
        inferred: it was worked out from names and shapes.
        assumed: what of it nothing told, in words.
        recipes: where each parameter comes from.
    """

    config: CaracalConfig
    config_file: Path | None
    inferred: bool
    assumed: tuple[str, ...]
    recipes: Mapping[str, Recipe]


def judge(
    found: Found, store: Store, options: ReadOptions, head_is_embedding: Callable[[Named], bool] | None = None
) -> Judged:
    """Names the tensors, finds or infers the configuration, and fits one to the other.

    Args:
        found: the checkpoint's files.
        store: opened.
        options: what the user said.
        head_is_embedding: compares the values of embedding and head; None where values are not to be read.

    Raises:
        ConfigError: the configuration is invalid, or its model is too large.
        CheckpointError: see `fit` and `infer_config`.
    """
    key_map = None if options.key_map is None else KeyMap.from_file(options.key_map)
    config_file = options.config or found.config
    given = None if config_file is None else CaracalConfig.from_file(config_file)
    source = str(found.path)
    named = name_tensors(store.entries, {} if key_map is None else key_map.rename(store.entries), source)
    inside = None if store.config is None else CaracalConfig.from_dict(store.config)
    if options.config is None and given is not None and inside is not None and not _same(given, inside):
        raise CheckpointError(
            f"checkpoint: {config_file} and the configuration inside {source} contradict each other; say which is right with "
            f"--config FILE"
        )
    given = given or inside
    assumed: tuple[str, ...] = ()
    if given is None:
        equal = None if head_is_embedding is None else lambda: head_is_embedding(named)
        inferred = infer_config(named, options, source, equal)
        config, assumed = inferred.config, inferred.assumed
    else:
        config = _agreeing(given, options)
    check_sizes(config)
    recipes, guessed = fit(config, named, source, options.linear_layout)
    assumed += guessed
    if config.tie_word_embeddings and head_is_embedding is not None and not head_is_embedding(named):
        raise CheckpointError(
            f"checkpoint: the config says tie_word_embeddings = true, but embed_tokens.weight and lm_head.weight "
            f"differ in {source}; set it to false or remove one"
        )
    return Judged(config, config_file, given is None, assumed, recipes)


def _same(a: CaracalConfig, b: CaracalConfig) -> bool:
    """Whether two configurations are of the same model, however its weights are stored."""
    return replace(a, torch_dtype="float32") == replace(b, torch_dtype="float32")


def _agreeing(config: CaracalConfig, options: ReadOptions) -> CaracalConfig:
    for key, value in options.given_for_config().items():
        if getattr(config, key) != value:
            raise CheckpointError(
                f"checkpoint: --{key.replace('_', '-')} {value} contradicts the configuration, which says "
                f"{getattr(config, key)}; leave it out, or change the configuration"
            )
    return config
