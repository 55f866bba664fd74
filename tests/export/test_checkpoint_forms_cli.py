"""Every form of checkpoint through the command line: a clean folder, or one line, exit code 2 and nothing written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_forms as forms
import pytest
import safetensors.torch
import torch
from caracal_runtimes.cli import main

from caracal import CaracalModel

TINY = {"vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 20,
        "sliding_window": 4}  # fmt: skip


@pytest.fixture(autouse=True)
def _keep_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _model(overrides: dict[str, Any]) -> CaracalModel:
    from caracal import CaracalConfig
    from caracal.model import init_weights

    torch.manual_seed(0)
    model = CaracalModel(CaracalConfig(**{**TINY, **overrides}))
    init_weights(model)
    return model.eval().requires_grad_(False)


def _flags(options: dict[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        found += [flag] if value is True else [flag, str(value)]
    return found


@pytest.mark.parametrize("form", forms.FORMS, ids=lambda form: form.id)
def test_the_command_line_takes_or_refuses_it(form: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = form.make(tmp_path / "in", _model(dict(form.model)))
    code = main(["convert", str(case.path), "-o", str(tmp_path / "out"), *_flags(case.options)])
    out, err = capsys.readouterr()
    assert not (tmp_path / "in" / "ran").exists()
    if not form.refused:
        assert code == 0, err
        assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
        return
    if form.id == "beyond_float32":  # which a folder in the stored dtype holds; only computing needs float32
        assert code == 0
        return
    # Progress, and what was assumed before the refusal, stand above it.
    lines = [line for line in err.splitlines() if not line.endswith(" ...") and not line.startswith("assumed: ")]
    assert (code, out, len(lines)) == (2, "", 1), err
    if form.id != "bundle_as_checkpoint":  # to convert a bundle is another thing than to read it as a checkpoint
        assert all(piece in lines[0] for piece in form.refused)
    assert {path.name for path in tmp_path.iterdir()} == {"in"}
