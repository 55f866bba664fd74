"""Ed25519 keys from PEM and OpenSSH files, and signatures as the 64 raw bytes that OpenSSL writes and reads too.

The package `cryptography` is an extra, imported where it is used only.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caracal_runtimes.errors import InputError, NotRunError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

SIGNATURE_BYTES = 64
PASSPHRASE = "CARACAL_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable

_MOST_KEY = 1 << 16  # bytes; a device may have no end
_PEM = re.compile(rb"^-----BEGIN ([A-Z0-9 ]+)-----\s*$", re.MULTILINE)
_SSH_PUBLIC = re.compile(rb"^(sk-)?(ssh|ecdsa)-[a-z0-9@.-]+[ \t]", re.MULTILINE)
_PUBLIC_OF_PRIVATE = "openssl pkey -in PRIVATE -pubout -out PUBLIC, or the .pub file that ssh-keygen wrote"
_MAKE = "make one with: openssl genpkey -algorithm ed25519 -out private.pem, or: ssh-keygen -t ed25519 -f private"


@dataclass(frozen=True)
class PublicKey:
    """A public key, by its 32 raw bytes."""

    raw: bytes

    @property
    def fingerprint(self) -> str:
        """`SHA256:…` as OpenSSH shows it (`ssh-keygen -lf`), whatever file the key came from."""
        blob = b"".join(struct.pack(">I", len(part)) + part for part in (b"ssh-ed25519", self.raw))
        return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether the holder of the private key signed this message. Raises NotRunError without `cryptography`."""
        _require_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except InvalidSignature:
            return False
        return True

    @classmethod
    def read(cls, path: str | Path) -> PublicKey:
        """Reads a PEM (SubjectPublicKeyInfo) or OpenSSH file.

        Raises:
            InputError: it cannot be read, or is anything but one public Ed25519 key.
            NotRunError: the package `cryptography` is missing.
        """
        data = _read(path)
        where = _where(path)
        labels = _labels(data, where)
        if any(b"PRIVATE KEY" in label for label in labels):
            raise InputError(
                f"{where} is a private key, which must not be handed on; verify takes the public one: {_PUBLIC_OF_PRIVATE}"
            )
        if labels and labels[0] == b"CERTIFICATE":
            raise InputError(
                f"{where} is a certificate; expected a public key: openssl x509 -in CERTIFICATE -pubkey -noout"
            )
        if labels and labels[0] != b"PUBLIC KEY":
            raise InputError(f"{where} is of the kind {_text(labels[0])}; expected a public Ed25519 key; {_MAKE}")
        if labels:
            return cls(_load_public_pem(data, where))
        return cls(_load_public_ssh(data, where))


class PrivateKey:
    """A private key; make one with `read`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """The signature, 64 bytes. Raises NotRunError when it does not verify, which a sound machine never shows."""
        signature = self._key.sign(message)
        if not self.public.verifies(signature, message):
            raise NotRunError("the signature that was just made does not verify; do not trust this machine's memory")
        return signature

    @classmethod
    def read(cls, path: str | Path) -> PrivateKey:
        """Reads a PEM (PKCS #8) or OpenSSH file; the passphrase of an encrypted one is in `CARACAL_KEY_PASSPHRASE`.

        Raises:
            InputError: it cannot be read, is anything but one private Ed25519 key, or the passphrase does not open it.
            NotRunError: the package `cryptography`, or `bcrypt` for an encrypted OpenSSH key, is missing.
        """
        data = _read(path)
        where = _where(path)
        labels = _labels(data, where)
        if not labels or not any(b"PRIVATE KEY" in label for label in labels):
            if _SSH_PUBLIC.search(data) or b"PUBLIC KEY" in b" ".join(labels):
                raise InputError(f"{where} is a public key; sign takes the private one that belongs to it")
            raise InputError(f"{where} is no key in PEM or OpenSSH format; expected a private Ed25519 key; {_MAKE}")
        return cls(_load_private(data, labels[0], where))


def _load_private(data: bytes, label: bytes, where: str) -> Ed25519PrivateKey:
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    load = load_ssh_private_key if label == b"OPENSSH PRIVATE KEY" else load_pem_private_key
    key: Any
    try:
        try:
            key = load(data, None)
        except TypeError:  # encrypted
            passphrase = os.environ.get(PASSPHRASE, "")
            if not passphrase:
                raise InputError(f"{where} is encrypted; put its passphrase into the variable {PASSPHRASE}") from None
            key = _load_encrypted(load, data, passphrase, where)
    except UnsupportedAlgorithm as error:
        raise InputError(
            f"{where} is of a kind that is not supported ({str(error)[:80]}); expected a private Ed25519 key; {_MAKE}"
        ) from None
    except ValueError:
        raise InputError(
            f"{where} is damaged or no whole private key; copy it again, with its first and last line, or {_MAKE}"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{where} is a key of the kind {_kind(key)}; expected Ed25519; {_MAKE}")
    return key


def _load_encrypted(load: Any, data: bytes, passphrase: str, where: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        return load(data, passphrase.encode("utf-8", "surrogateescape"))
    except UnsupportedAlgorithm as error:
        if "bcrypt" in str(error):
            raise NotRunError(
                "an encrypted OpenSSH key needs the package `bcrypt`: pip install 'caracal-onnx[sign]'"
            ) from None
        raise
    except ValueError:
        raise InputError(
            f"{where} is not opened by the passphrase in {PASSPHRASE}; correct it, or the key file is damaged"
        ) from None


def _load_public_pem(data: bytes, where: str) -> bytes:
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise InputError(
            f"{where} is damaged or of a kind that is not supported; expected a public Ed25519 key; copy it again, with its "
            f"first and last line"
        ) from None
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{where} is a key of the kind {_kind(key)}; expected Ed25519; {_MAKE}")
    return key.public_bytes_raw()


def _load_public_ssh(data: bytes, where: str) -> bytes:
    """The key in a `.pub` file: `ssh-ed25519 BASE64 comment`.

    Read here: the package takes a key that lives in a security key for a plain one, whose signatures are of another form.
    """
    lines = [line for raw in data.splitlines() if (line := raw.strip()) and not line.startswith(b"#")]
    if not lines or not _SSH_PUBLIC.match(lines[0]):
        raise InputError(f"{where} is no key in PEM or OpenSSH format; expected a public Ed25519 key; {_MAKE}")
    if len(lines) > 1:
        raise InputError(f"{where} holds {len(lines)} keys; expected one, so that it is clear who vouches")
    kind, text = lines[0].split(None, 2)[:2]
    if kind != b"ssh-ed25519":
        raise InputError(f"{where} is a key of the kind {_text(kind)}; expected ssh-ed25519; {_MAKE}")
    head = struct.pack(">I", len(kind)) + kind + struct.pack(">I", 32)
    try:
        blob = base64.b64decode(text, validate=True)
    except ValueError:
        blob = b""
    if len(blob) != len(head) + 32 or not blob.startswith(head):
        raise InputError(f"{where} is damaged; copy the .pub file that ssh-keygen wrote again")
    return blob[len(head) :]


def _read(path: str | Path) -> bytes:
    where = _where(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_KEY + 1)
    except FileNotFoundError:
        raise InputError(f"{where}: no such file; expected a key in PEM or OpenSSH format; {_MAKE}") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{where} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(data) > _MOST_KEY:
        raise InputError(f"{where} has more than {_MOST_KEY:,} bytes, which no key has; name the key's file")
    if not data.strip():
        raise InputError(f"{where} is empty; expected a key in PEM or OpenSSH format; {_MAKE}")
    return data.removeprefix(b"\xef\xbb\xbf")  # which some editors put in front


def _labels(data: bytes, where: str) -> list[bytes]:
    labels = _PEM.findall(data)
    if len(labels) > 1:
        raise InputError(
            f"{where} holds {len(labels)} PEM blocks ({', '.join(_text(label) for label in labels[:3])}); expected one Ed25519 "
            f"key, so that it is clear who vouches"
        )
    return labels


def _where(path: str | Path) -> str:
    return f"--key: {str(path)[:200]!r}"


def _kind(key: object) -> str:
    return type(key).__name__.removesuffix("PrivateKey").removesuffix("PublicKey").strip("_")


def _text(word: bytes) -> str:
    return word[:40].decode("ascii", "replace")


def _require_cryptography() -> None:
    try:
        importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError:
        raise NotRunError("signatures need the package `cryptography`: pip install 'caracal-onnx[sign]'") from None
