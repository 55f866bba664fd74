"""A bundle of a tiny model for the runtime's tests. Only the fixture `exported` may import torch or the exporter."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
from caracal_runtimes.bundle import Bundle
from caracal_runtimes.cli import main
from caracal_runtimes.model import CausalLM
from caracal_runtimes.safetensors_file import SafetensorsFile

TEXT = [
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
    "and darkness was upon the face of the deep. naïve café — 「日本語」 😀 e\u0301 по-русски",
    "And God said, Let there be light: and there was light. And God saw the light, that it was good.",
]


LAGS = 8  # of the tiny bundle: blocks of 4 tokens and more are met within a few dozen


@dataclass(frozen=True)
class Exported:
    """Folders that tests only read."""

    checkpoint: Path
    bundle: Path
    shipped: Path  # a bundle of the trained checkpoint that comes with the package


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """V 320, D 48, 3 layers (MHF, MHF, SWA), 4 heads, window 8, byte-level BPE; `<|endoftext|>` is id 0."""
    import caracal_export
    import torch
    from caracal_export import export_checkpoint, goldens
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    from caracal import CaracalConfig, CaracalModel, save_checkpoint

    folder = tmp_path_factory.mktemp("exported")
    end = "<|endoftext|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))

    config = CaracalConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=48, num_hidden_layers=3, num_attention_heads=4,
        sliding_window=8, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = CaracalModel(config)
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:  # a forgotten bias or LayerNorm must show
                parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            else:
                # Scores that differ much make every mistake in the attention show; elsewhere large weights would let
                # rounding grow to the tolerance.
                gain = 1.6 if name.endswith(("q_proj.weight", "k_proj.weight")) else 0.4
                parameter.copy_(gain * noise / parameter[0].numel() ** 0.5)
    save_checkpoint(model, folder / "checkpoint", tokenizer_file=folder / "tokenizer.json")
    # Other tests of the same process may export with shorter ones.
    kept, goldens.GREEDY_TOKENS = goldens.GREEDY_TOKENS, 128
    export_checkpoint(folder / "checkpoint", folder / "bundle", threads=1, lags=LAGS)
    shipped = Path(caracal_export.__file__).parent / "checkpoints" / "kjv"
    export_checkpoint(shipped, folder / "shipped", verify=False)
    goldens.GREEDY_TOKENS = kept
    return Exported(folder / "checkpoint", folder / "bundle", folder / "shipped")


@pytest.fixture(scope="session")
def model(exported: Exported) -> CausalLM:
    """The tiny bundle on one thread."""
    return Bundle.open(exported.bundle).model(threads=1)


class BundleCopy:
    """A copy of the tiny bundle that a test may alter; hashes are made right again unless the test says otherwise."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "manifest.json").read_text(encoding="utf-8")))

    def edit_manifest(self, change: Callable[[dict[str, Any]], object]) -> None:
        data = self.manifest()
        change(data)
        (self.path / "manifest.json").write_text(json.dumps(data), encoding="utf-8")

    def rehash(self) -> None:
        def change(data: dict[str, Any]) -> None:
            for name in data["files"]:
                content = (self.path / name).read_bytes()
                data["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

        self.edit_manifest(change)

    def weight(self, name: str) -> np.memmap[Any, Any]:
        """One float32 weight, writable in place; call `rehash` afterwards."""
        entry = SafetensorsFile.open(self.path / "weights.safetensors").entries[name]
        return np.memmap(self.path / "weights.safetensors", "<f4", "r+", offset=entry.offset, shape=entry.shape)

    def edit_golden(self, change: Callable[[dict[str, Any]], object]) -> None:
        tensors = safetensors.numpy.load_file(self.path / "golden.safetensors")
        change(tensors)
        safetensors.numpy.save_file(tensors, self.path / "golden.safetensors")
        self.rehash()

    def drop_tokenizer(self) -> None:
        (self.path / "tokenizer.json").unlink()
        self.edit_manifest(lambda data: (data.update(tokenizer=None), data["files"].pop("tokenizer.json")))

    def open(self) -> Bundle:
        return Bundle.open(self.path)

    def model(self) -> CausalLM:
        return self.open().model(threads=1)


@pytest.fixture
def copy(exported: Exported, tmp_path: Path) -> BundleCopy:
    shutil.copytree(exported.bundle, tmp_path / "bundle")
    return BundleCopy(tmp_path / "bundle")


class Ran(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def caracal(capfdbinary: pytest.CaptureFixture[bytes]) -> Iterator[Callable[..., Ran]]:
    """`caracal(*argv)` runs the command line in this process."""
    handler = signal.getsignal(signal.SIGTERM)

    def run(*argv: object) -> Ran:
        capfdbinary.readouterr()
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as exit_:  # argparse's own errors and --help
            code = int(exit_.code or 0)
        out, err = capfdbinary.readouterr()
        return Ran(code, out.decode(), err.decode())

    yield run
    signal.signal(signal.SIGTERM, handler)
