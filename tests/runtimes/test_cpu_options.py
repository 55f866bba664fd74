"""What `--ep-option` changes of ONNX Runtime's own kernels: time and memory, never what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.errors import InputError
from caracal_runtimes.providers import Settings, provider

IDS = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]]


@pytest.mark.parametrize("options", [{"spin_us": "0"}, {"spin_us": "500"}, {"pack": "1"}, {"pack": "0"}])
def test_options_do_not_change_what_is_computed(exported: Any, options: dict[str, str]) -> None:
    bundle = Bundle.open(exported.bundle)
    plain, other = bundle.model(threads=2), bundle.model(threads=2, ep_options=options)
    assert np.allclose(other.forward(IDS), plain.forward(IDS), rtol=1e-5, atol=1e-5)
    assert other.generate(IDS, max_new_tokens=20)[0].ids == plain.generate(IDS, max_new_tokens=20)[0].ids


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {"session.intra_op.allow_spinning": "1", "session.intra_op.spin_duration_us": "50"}),
        ({"spin_us": "300"}, {"session.intra_op.allow_spinning": "1", "session.intra_op.spin_duration_us": "300"}),
        ({"spin_us": "0"}, {"session.intra_op.allow_spinning": "0"}),
    ],
)
def test_spinning_reaches_the_session(
    exported: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], settings: dict[str, str]
) -> None:
    found: list[dict[str, str]] = []
    session = onnxruntime.InferenceSession

    def noted(graph: Any, given: Any, **named: Any) -> Any:
        found.append({name: given.get_session_config_entry(name) for name in settings})
        return session(graph, given, **named)

    monkeypatch.setattr(onnxruntime, "InferenceSession", noted)
    Bundle.open(exported.bundle).model(threads=1, ep_options=options)
    assert found == [settings]


def test_packing_takes_no_shared_weights_and_leaves_no_graph(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARACAL_CACHE", str(tmp_path))
    bundle = Bundle.open(exported.bundle)
    packed = bundle.model(threads=1, ep_options={"pack": "1"}, graph_cache=True)
    assert not hasattr(packed.graphs.session("forward"), "_weights")
    assert list(tmp_path.iterdir()) == []
    shared = bundle.model(threads=1, ep_options={"pack": "0"}, graph_cache=True)
    assert hasattr(shared.graphs.session("forward"), "_weights")
    assert list(tmp_path.iterdir()) != []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"spin_us": "-1"}, "spin_us must be an integer from 0 to 1000000, found '-1'"),
        ({"spin_us": "1000001"}, "found '1000001'"),
        ({"spin_us": "9" * 5000}, "spin_us must be an integer"),
        ({"spin_us": "²"}, "spin_us must be an integer"),
        ({"spin_us": ""}, "found ''"),
        ({"pack": "yes"}, "pack must be 0 or 1, found 'yes'"),
        ({"arena": "0"}, "the provider cpu takes pack, spin_us, found arena"),
    ],
)
def test_what_an_option_cannot_be_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match="--ep-option: ") as caught:
        provider("cpu").check(Settings(options=options))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 200
