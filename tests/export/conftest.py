"""A tiny checkpoint whose every parameter matters, and its bundles, exported once for all tests."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from caracal_export import export_checkpoint, goldens
from caracal_runtimes.cli import main
from caracal_runtimes.forward import ForwardPass
from caracal_runtimes.manifest import ModelSpec
from caracal_runtimes.providers.ort import OrtSession
from numpy.typing import NDArray

from caracal import CaracalConfig, CaracalModel, load_checkpoint, save_checkpoint

sys.path.insert(0, str(Path(__file__).parent))  # for `running`, which tests import

from running import Ran

# Dozens of models are exported here, and writing 128 tokens is most of an export; the runtime's tests have them.
goldens.GREEDY_TOKENS = 32
LAGS = 8  # of the tiny bundles' step graph: their greedy goldens are long enough to need the convolve graph as well
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "sliding_window": 8,
}


def _random_model(seed: int = 0, **overrides: Any) -> CaracalModel:
    model = CaracalModel(CaracalConfig(**{**TINY, **overrides}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * noise)
            elif name in ("embed_tokens.weight", "lm_head.weight"):
                parameter.copy_(noise)
            else:
                # At 0.7 the rounding of a thousand tokens grows to the tolerance itself.
                parameter.copy_(noise * 0.4 / math.sqrt(parameter[0].numel()))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., CaracalModel]:
    """`random_model(seed=0, **overrides)`: V 97, D 32, MHF MHF SWA, 4 heads, window 8; no parameter is zero or one.

    A fresh model has zero biases and LayerNorms that scale by one: an export that drops them would still look right.
    """
    return _random_model


@pytest.fixture
def caracal(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Ran]]:
    """`caracal(*arguments)` in this process, with what native libraries print too."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: object) -> Ran:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:  # argparse leaves by itself
            code = int(left.code or 0)
        return Ran(code, *capfd.readouterr())

    yield run
    signal.signal(signal.SIGTERM, before)


def _tokenizer_json(words: int) -> str:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0")).to_str()


@pytest.fixture(scope="session")
def tokenizer_json() -> Callable[[int], str]:
    """`tokenizer_json(words)`: the text of a tokenizer.json with that many token ids."""
    return _tokenizer_json


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model (tied head) as a checkpoint folder with a tokenizer. Read only."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(_random_model(), folder)
    (folder / "tokenizer.json").write_text(_tokenizer_json(TINY["vocab_size"]), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> CaracalModel:
    """The PyTorch reference of `checkpoint`."""
    return load_checkpoint(checkpoint)


@pytest.fixture(scope="session")
def untied_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `checkpoint`, with a head of its own and no tokenizer."""
    folder = tmp_path_factory.mktemp("untied") / "tiny"
    save_checkpoint(_random_model(1, tie_word_embeddings=False), folder)
    return folder


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`bundle(mixing)`: the verified bundle of `checkpoint`. Read only; see `copy_bundle`."""
    exported: dict[str, Path] = {}

    def export(mixing: str) -> Path:
        if mixing not in exported:
            target = tmp_path_factory.mktemp("bundles") / mixing
            exported[mixing] = export_checkpoint(checkpoint, target, mixing=mixing, threads=1, lags=LAGS).path
        return exported[mixing]

    return export


@pytest.fixture(scope="session")
def untied_bundle(untied_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The verified `matmul` bundle of `untied_checkpoint`. Read only."""
    target = tmp_path_factory.mktemp("bundles") / "untied"
    return export_checkpoint(untied_checkpoint, target, threads=1, lags=LAGS).path


@pytest.fixture
def copy_bundle(tmp_path: Path) -> Callable[[Path], Path]:
    """`copy_bundle(path)`: a copy that the test may alter."""

    def copy(path: Path) -> Path:
        return Path(shutil.copytree(path, tmp_path / "altered"))

    return copy


@pytest.fixture(scope="session")
def stored_tensor() -> Callable[[Path, str], NDArray[Any]]:
    """`stored_tensor(file, name)`: a float32 tensor of a safetensors file, mapped so that assignment changes the file."""

    def view(file: Path, name: str) -> NDArray[Any]:
        raw = file.read_bytes()
        size = int.from_bytes(raw[:8], "little")
        entry = json.loads(raw[8 : 8 + size])[name]
        assert entry["dtype"] == "F32"
        begin = 8 + size + entry["data_offsets"][0]
        return np.memmap(file, dtype="<f4", mode="r+", offset=begin, shape=tuple(entry["shape"]))

    return view


@pytest.fixture(scope="session")
def rehash() -> Callable[[Path], None]:
    """`rehash(bundle)`: makes the manifest's hashes those of the files, as a forger would."""

    def write(folder: Path) -> None:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")

    return write


@pytest.fixture(scope="session")
def run_graph() -> Callable[[Path, CaracalConfig], ForwardPass]:
    """`run_graph(onnx_file, config)`: a forward graph in ONNX Runtime, one thread."""

    def load(onnx_file: Path, config: CaracalConfig) -> ForwardPass:
        spec = ModelSpec(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            sliding_window=config.sliding_window,
            bos_token_id=None,
            eos_token_id=None,
            conv_kernel=config.conv_kernel,
            layer_types=tuple(config.layer_types),
        )
        return ForwardPass(OrtSession.on_cpu(onnx_file, threads=1), spec)

    return load


@pytest.fixture(scope="session")
def relative_l2() -> Callable[[NDArray[Any], NDArray[Any]], float]:
    """`relative_l2(got, want)` in float64; shapes must agree."""

    def measure(got: NDArray[Any], want: NDArray[Any]) -> float:
        assert got.shape == want.shape
        a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    return measure
