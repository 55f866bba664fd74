"""A bundle on disk: opened, checked file by file, and handed out as arrays, a tokenizer or a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from caracal_runtimes.errors import BundleError, NotRunError
from caracal_runtimes.manifest import MANIFEST_FILE, WEIGHTLESS, FileEntry, Manifest
from caracal_runtimes.onnx_graph import read_model
from caracal_runtimes.text import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from caracal_runtimes.model import CausalLM
    from caracal_runtimes.safetensors_file import SafetensorsFile, SafetensorsFiles

_CHUNK = 1 << 20
_AGAIN = "copy the bundle again or export it again"


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Make one with `Bundle.open`."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | Path, *, check_hashes: bool = True) -> Bundle:
        """Reads the manifest and checks that every file is there, inside the folder, and unaltered.

        Args:
            path: the bundle's folder.
            check_hashes: read every file whole and compare its sha256; without, presence and size only.

        Raises:
            BundleError: naming the file or manifest entry that is wrong.
        """
        if not str(path).strip():
            raise BundleError("bundle: the path is empty; expected a folder that `caracal export` wrote")
        folder = Path(path)
        manifest_file = folder / MANIFEST_FILE
        try:
            exists = folder.exists()
        except (OSError, ValueError) as error:
            raise BundleError(f"bundle: {str(path)[:60]!r} is no path ({error})") from None
        if not exists:
            raise BundleError(f"bundle: nothing at {folder}; expected a folder that `caracal export` wrote")
        if not folder.is_dir() or not manifest_file.is_file():
            hint = ""
            if folder.is_dir() and (folder / "config.json").exists():
                hint = f"; it looks like a checkpoint, run `caracal export {folder} -o BUNDLE` first"
            raise BundleError(f"bundle: {folder} is no bundle, it has no {MANIFEST_FILE}{hint}")
        if manifest_file.is_symlink():
            raise BundleError(f"bundle: {MANIFEST_FILE} is a link, which a bundle must not contain; {_AGAIN}")
        try:
            text = manifest_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BundleError(f"bundle: {manifest_file} cannot be read ({error})") from None
        bundle = cls(folder, Manifest.from_json(text))
        for name, entry in bundle.manifest.files.items():
            try:
                bundle._check_file(name, entry, check_hashes)
            except OSError as error:
                raise BundleError(f"bundle: {name} cannot be read ({error.strerror}); {_AGAIN}") from None
        return bundle

    def parameters(self) -> int:
        """How many numbers the model has. Raises BundleError when the weight files are not what they should be."""
        quantization = self.manifest.quantization
        return self.weights().numbers if quantization is None else quantization.parameters

    def weights(self) -> SafetensorsFiles:
        """The weight files. Raises BundleError for a bad file, and for a tensor that two of them have."""
        from caracal_runtimes.safetensors_file import SafetensorsFiles

        return SafetensorsFiles.open(map(self.file, self.manifest.weights))

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files."""
        return self.path / name

    def id(self) -> str:
        """sha256 over the hashes of all files: two bundles with the same id compute the same."""
        lines = "".join(f"{entry.sha256} {name}\n" for name, entry in sorted(self.manifest.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()

    def tokenizer(self) -> Tokenizer:
        """The bundle's tokenizer. Raises BundleError when it has none, NotRunError without the library."""
        if self.manifest.tokenizer is None:
            raise BundleError(
                "bundle: it has no tokenizer.json, so it cannot read or write text; use token ids (--ids)"
            )
        try:
            return read_tokenizer(self.file(self.manifest.tokenizer), self.manifest.model.vocab_size)
        except ImportError:
            raise NotRunError("text needs the package `tokenizers`: pip install tokenizers") from None
        except ValueError as error:
            raise BundleError(f"bundle: {self.manifest.tokenizer} {error}") from None

    def golden(self) -> SafetensorsFile:
        """The recorded reference tensors."""
        from caracal_runtimes.safetensors_file import SafetensorsFile

        return SafetensorsFile.open(self.file(self.manifest.golden.file))

    def model(
        self,
        ep: str = "cpu",
        *,
        threads: int = 0,
        ep_options: Mapping[str, str] | None = None,
        fast: bool = False,
        allow_fallback: bool = False,
        resident: bool | None = None,
        low_memory: bool = False,
        graph_cache: bool = False,
    ) -> CausalLM:
        """A model that runs this bundle.

        Args:
            ep: provider, as `NAME` or `NAME:DEVICE`; see `caracal_runtimes.providers`.
            threads: intra-op threads, 0 for one per core that this process may use.
            ep_options: options for the provider.
            fast: the provider's own defaults instead of its exact settings.
            allow_fallback: accept that other providers run computing nodes.
            resident: keep the decode state in the memory in which the provider computes; None: where that is not the
                host's. True needs a provider that can.
            low_memory: give back what a pass over many tokens took, instead of keeping it for the next one, and keep one copy
                of the weights; slower.
            graph_cache: take graphs as they were optimised before from this user's cache (`CARACAL_CACHE`), and put them
                there; they load in less time. For ONNX Runtime's own kernels; others do without.

        Raises:
            InputError: no such provider, device or option.
            NotRunError: the provider does not work here.
            PlacementError: when a graph is first used: other providers run part of it.
        """
        from caracal_runtimes.decode_graphs import DecodeGraphs
        from caracal_runtimes.graph_interface import check_session
        from caracal_runtimes.model import CausalLM
        from caracal_runtimes.providers import Settings, parse
        from caracal_runtimes.session import Session

        provider, device = parse(ep)
        graphs = self.manifest.graphs
        for graph in graphs.values():
            self._check_external_data(graph.file)
        # Opened whatever the provider: one that reads by name and one that reads by place must not differ.
        weights = tuple(file.path for file in self.weights().files)

        asked = Settings(device, threads, fast, ep_options or {}, (), allow_fallback, low_memory)

        def open_session(graph: str, *, packed: bool = False) -> Session:
            # The convolution has no weights to share. Quantized ones are small, and products of bytes want them packed.
            shared = () if packed or graph in WEIGHTLESS or self.manifest.quantization is not None else weights
            # A copy of the weights of its own, and quantized ones, would be written into the optimised graph.
            cached_by = self._weights_digest(graph) if graph_cache and (shared or graph in WEIGHTLESS) else ""
            settings = replace(asked, weights=shared, cached_by=cached_by)
            session = provider.open(self.file(graphs[graph].file), graphs[graph], settings)
            check_session(graphs[graph], session.inputs())
            return session

        if resident is None:
            resident = provider.state_memory(asked) is not None
        spec = self.manifest.model
        return CausalLM(
            DecodeGraphs(
                spec,
                graphs,
                open_session,
                resident=resident,
                keeps_memory=not low_memory,
                lengths=self.manifest.lengths,
            ),
            mixing=graphs["forward"].mixing,
            bundle_id=self.id(),
            load_tokenizer=self.tokenizer,
            has_tokenizer=self.manifest.tokenizer is not None,
        )

    def _weights_digest(self, graph: str) -> str:
        """What identifies the weights that a graph reads. Their hashes may not have been compared, so their times count too."""
        if graph in WEIGHTLESS:
            return "none"
        files = ((self.manifest.files[name].sha256, self.file(name).stat()) for name in self.manifest.weights)
        lines = "".join(f"{sha256} {status.st_size} {status.st_mtime_ns}\n" for sha256, status in files)
        return hashlib.sha256(lines.encode()).hexdigest()

    def _check_external_data(self, graph: str) -> None:
        """Refuses a graph that reads a file which no hash of the manifest covers."""
        for name in sorted(read_model(self.file(graph)).locations):
            if name not in self.manifest.files:
                raise BundleError(f"bundle: {graph} reads {name!r:.80}, which the manifest does not list; refused")

    def _check_file(self, name: str, entry: FileEntry, check_hash: bool) -> None:
        path = self.path / name
        # A link may lead anywhere, also inside a folder on the way: every step must stay in the bundle.
        step = self.path
        for part in Path(name).parts:
            step = step / part
            if step.is_symlink():
                raise BundleError(f"bundle: {name} is a link, which a bundle must not contain; {_AGAIN}")
        if not path.is_file():
            raise BundleError(f"bundle: {name} is missing from {self.path}; {_AGAIN}")
        size = path.stat().st_size
        if size != entry.bytes:
            raise BundleError(f"bundle: {name} has {size:,} bytes, the manifest says {entry.bytes:,}; {_AGAIN}")
        if check_hash and sha256_of(path) != entry.sha256:
            raise BundleError(f"bundle: {name} was altered, its sha256 is not the manifest's; {_AGAIN}")


def sha256_of(path: Path) -> str:
    """sha256 of a file in lower-case hex, read in pieces."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise BundleError(f"bundle: {path} cannot be read ({error})") from None
    return digest.hexdigest()
