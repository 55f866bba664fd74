"""A checkpoint on the Hugging Face hub: one revision, pinned to its commit, from the local cache where it is there."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caracal.checkpoint.files import CONFIG_FILE, INDEX, SAFETENSORS_FILE, TOKENIZER_FILE, TORCH_FILE
from caracal.errors import CheckpointError, MissingPackageError

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """A repository's files at one commit.

    Args:
        path: the folder in the cache.
        repository: its id, `organization/name`.
        commit: the 40 digits of the commit.
    """

    path: Path
    repository: str
    commit: str

    @property
    def record(self) -> dict[str, str]:
        """What a bundle keeps of it."""
        return {"repository": self.repository, "commit": self.commit}


def fetch_snapshot(repository: str, revision: str | None = None) -> Snapshot:
    """Fetches what a checkpoint needs, all of one commit; what the cache has is not fetched again.

    Where there is no network (or `HF_HUB_OFFLINE=1`), the cache alone answers. Of files that the cache names by their
    sha256, the contents are compared with it.

    Args:
        repository: `organization/name`.
        revision: a branch, a tag or a commit; None for the main branch.

    Raises:
        MissingPackageError: `huggingface_hub` is not installed.
        CheckpointError: no such repository or revision, it cannot be reached, or a cached file was altered.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingPackageError(
            "--hub needs the package `huggingface_hub`: pip install 'caracal-onnx[hub]'"
        ) from None
    beside = [CONFIG_FILE, TOKENIZER_FILE]
    wanted = [*beside, SAFETENSORS_FILE, SAFETENSORS_FILE + INDEX, "model-*.safetensors"]
    folder = _download(snapshot_download, repository, revision, wanted)
    if not any(folder.glob("model*.safetensors")):
        stem, suffix = TORCH_FILE.split(".")
        folder = _download(
            snapshot_download, repository, folder.name, [*beside, TORCH_FILE, TORCH_FILE + INDEX, f"{stem}-*.{suffix}"]
        )
    if _COMMIT.fullmatch(folder.name) is None:
        raise CheckpointError(
            f"--hub: {folder} is not named after a commit, so the revision cannot be recorded; clear the cache"
        )
    _check_blobs(folder)
    return Snapshot(folder, repository, folder.name)


def _download(download: Any, repository: str, revision: str | None, patterns: list[str]) -> Path:
    arguments = {"repo_id": repository, "revision": revision, "allow_patterns": patterns}
    try:
        return Path(download(**arguments))
    except Exception as error:  # noqa: BLE001 - the library raises what its own libraries raise
        try:  # a cache of an older run may have it all the same
            return Path(download(**arguments, local_files_only=True))
        except Exception:  # noqa: BLE001 - the first reason is the telling one
            at = "" if revision is None else f" at {revision!r:.60}"
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            raise CheckpointError(
                f"--hub: {repository!r:.120}{at} cannot be fetched and is not in the cache ({type(error).__name__}: {reason}); "
                f"check the id and --revision, or name a folder on this machine without --hub"
            ) from None


def _check_blobs(folder: Path) -> None:
    """Compares the files of a snapshot with the names of the blobs that they link to: large ones are named by sha256."""
    for path in sorted(folder.iterdir()):
        if not path.is_file():
            continue
        name = path.resolve().name
        if _SHA256.fullmatch(name) is None:
            continue
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        if digest.hexdigest() != name:
            raise CheckpointError(
                f"--hub: the cached {path} was altered, its sha256 is not {name}; delete it and fetch it again"
            )
