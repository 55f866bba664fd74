"""Every form of checkpoint in the list: it loads to exactly the weights that were written, or is refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_forms as forms
import pytest
import torch
from torch import Tensor

from caracal import CaracalError, CaracalModel, ReadOptions, open_checkpoint
from caracal.checkpoint.parameters import parameter_shapes

LOADS = [form for form in forms.FORMS if not form.refused]
# What a remedy is made of: an imperative, or a question that names the choice.
REMEDY = re.compile(
    r"\b(name|copy|save|say|run|add|give|remove|use|write|pass|leave|set|take|fetch|drop|put|look|correct|make|expected|load|"
    r"export|refer|is it|change|split|scale|convert|caracal|--[a-z-]+|multiply|resave|must)\b"
)
REFUSED = [form for form in forms.FORMS if form.refused]


@pytest.mark.parametrize("form", LOADS, ids=lambda form: form.id)
def test_it_loads_to_the_weights_that_were_written(
    form: Any, random_model: Callable[..., CaracalModel], random_ids: Callable[..., Tensor], tmp_path: Path
) -> None:
    model = random_model(dtype=torch.float32, **form.model)
    case = form.make(tmp_path / "checkpoint", model)
    checkpoint = open_checkpoint(case.path, ReadOptions(**case.options))
    loaded = checkpoint.model()
    expected = forms.state_of(model) if case.state is None else case.state
    expected = dict(expected)
    if loaded.config.tie_word_embeddings:
        expected[forms.HEAD] = expected[forms.EMBEDDING]
        assert loaded.lm_head.weight is loaded.embed_tokens.weight
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name]), name
    assert set(checkpoint.names) == set(parameter_shapes(model.config)), "the configuration is another one"
    ids = random_ids(2, 11)
    model.load_state_dict(expected, strict=True)
    assert torch.equal(loaded(ids), model(ids))


@pytest.mark.parametrize("form", REFUSED, ids=lambda form: form.id)
def test_it_is_refused_in_one_line_with_a_remedy(
    form: Any, random_model: Callable[..., CaracalModel], tmp_path: Path
) -> None:
    case = form.make(tmp_path / "checkpoint", random_model(dtype=torch.float32, **form.model))
    with pytest.raises(CaracalError) as caught:
        open_checkpoint(case.path, ReadOptions(**case.options)).model()
    message = str(caught.value)
    for piece in form.refused:
        assert piece in message
    assert "\n" not in message
    assert re.search(r"[;:,?] \w", message.partition(": ")[2]), "what was found, and no remedy"
    assert REMEDY.search(message), f"no remedy: {message}"
    assert caught.value.exit_code == 2
    assert not (tmp_path / "checkpoint" / "ran").exists(), "code in the checkpoint was run"


def test_the_code_in_the_traps_above_would_run(tmp_path: Path) -> None:
    import pickle

    trap = tmp_path / "ran"
    pickle.loads(pickle.dumps(forms.Evil(f"touch {trap}")))
    assert trap.exists()


def test_forms_have_names_of_their_own() -> None:
    ids = [form.id for form in forms.FORMS]
    assert len(ids) == len(set(ids))
