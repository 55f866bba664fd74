"""Signing and verifying bundles: what OpenSSL and OpenSSH say of the same keys and signatures, and what an attacker may try."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from caracal_runtimes.cli import build_parser
from caracal_runtimes.errors import InputError, NotRunError
from caracal_runtimes.integrity import sign, verify
from caracal_runtimes.manifest import FileEntry, Golden, GoldenCase, GraphSpec, Manifest
from caracal_runtimes.signing import PrivateKey, PublicKey
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa, x25519

Caracal = Callable[..., Any]
ROOT = Path(__file__).parents[2]
posix = pytest.mark.skipif(sys.platform == "win32", reason="links, pipes and permissions of POSIX")
GRAPHS = ("forward", "extend", "step", "step_resident", "convolve", "convolve_long")
NO_PASSPHRASE = forms.NoEncryption()
# The first test of RFC 8032, 7.1: a private key, its public key, and the signature of the empty message.
SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
POINT = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
OF_NOTHING = bytes.fromhex(
    "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
)


def tool(name: str) -> Any:
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name}")


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, **options)


def write_bundle(folder: Path, seed: str = "a") -> Path:
    """A bundle whose files hold nothing that could be run: here only their bytes count."""
    names = [f"{name}.onnx" for name in GRAPHS]
    contents = {
        name: f"{name} {seed}".encode() * 100
        for name in (*names, "weights.safetensors", "golden.safetensors", "sub/README.md")
    }
    config = {
        "vocab_size": 19, "hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 20,
        "sliding_window": 4, "conv_kernel": 3, "layer_types": ["mhf"],
    }  # fmt: skip
    manifest = Manifest(
        config=config,
        precision="float32",
        graphs={name: GraphSpec(f"{name}.onnx", 18, "matmul", (), ()) for name in GRAPHS},
        weights=("weights.safetensors",),
        golden=Golden("golden.safetensors", "PyTorch", (GoldenCase("one", 1, 1),), ()),
        files={
            name: FileEntry(len(content), hashlib.sha256(content).hexdigest()) for name, content in contents.items()
        },
    )
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "manifest.json").write_text(manifest.to_json(), encoding="utf-8")
    return folder


def private_pem(key: Any, passphrase: bytes | None = None) -> bytes:
    how = NO_PASSPHRASE if passphrase is None else forms.BestAvailableEncryption(passphrase)
    return bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, how))


def private_ssh(key: Any, passphrase: bytes | None = None) -> bytes:
    how = NO_PASSPHRASE if passphrase is None else forms.BestAvailableEncryption(passphrase)
    return bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, how))


def public_pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo))


def public_ssh(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH)) + b" me@here\n"


class Keys:
    """Files of one key in every form, and of another one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = ed25519.Ed25519PrivateKey.from_private_bytes(SEED)
        self.private = self.write("private.pem", private_pem(self.key))
        self.public = self.write("public.pem", public_pem(self.key))
        self.private_ssh = self.write("id", private_ssh(self.key))
        self.public_ssh = self.write("id.pub", public_ssh(self.key))
        self.other = self.write("other.pem", public_pem(ed25519.Ed25519PrivateKey.generate()))

    def write(self, name: str, content: bytes) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name


@pytest.fixture(autouse=True)
def no_passphrase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARACAL_KEY_PASSPHRASE", raising=False)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    (tmp_path / "keys").mkdir()
    return Keys(tmp_path / "keys")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def signed(bundle: Path, keys: Keys) -> Path:
    sign(bundle, PrivateKey.read(keys.private))
    return bundle


def refused(ran: Any, code: int, *words: str) -> None:
    """One line that says what is wrong; progress may come before it."""
    assert (ran.code, ran.out) == (code, "")
    line = ran.err.splitlines()[-1]
    assert line.startswith("caracal: ")
    assert "unexpected" not in line
    assert "Traceback" not in ran.err
    for word in words:
        assert word in line


def failed(ran: Any, *words: str) -> None:
    assert ran.code == 1
    line = ran.out.splitlines()[-1]
    assert line.startswith("FAILED  verify  ")
    for word in words:
        assert word in line


def passed(ran: Any) -> bool:
    return bool(ran.code == 0 and ran.out.splitlines()[-1].startswith("PASSED  verify  "))


class TestAgainstOthers:
    """What is signed here is believed elsewhere, and the other way round."""

    def test_a_published_signature(self, keys: Keys) -> None:
        private = PrivateKey.read(keys.private)
        assert private.public.raw == POINT
        assert private.sign(b"") == OF_NOTHING
        assert private.public.verifies(OF_NOTHING, b"")
        assert not private.public.verifies(OF_NOTHING, b"\0")

    @tool("openssl")
    def test_openssl_verifies_what_is_signed_here(self, caracal: Caracal, bundle: Path, keys: Keys) -> None:
        assert caracal("sign", bundle, "--key", keys.private).code == 0
        command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys.public, "-rawin",
                   "-in", bundle / "manifest.json", "-sigfile", bundle / "manifest.sig"]  # fmt: skip
        assert run(*command).returncode == 0
        with (bundle / "manifest.json").open("ab") as file:
            file.write(b"\n")
        assert run(*command).returncode != 0

    @tool("openssl")
    def test_what_openssl_signs_is_verified_here(self, caracal: Caracal, bundle: Path, tmp_path: Path) -> None:
        private, public = tmp_path / "private.pem", tmp_path / "public.pem"
        run("openssl", "genpkey", "-algorithm", "ed25519", "-out", private, check=True)
        run("openssl", "pkey", "-in", private, "-pubout", "-out", public, check=True)
        run("openssl", "pkeyutl", "-sign", "-inkey", private, "-rawin", "-in", bundle / "manifest.json",
            "-out", bundle / "manifest.sig", check=True)  # fmt: skip
        assert passed(caracal("verify", bundle, "--key", public))
        assert (bundle / "manifest.sig").read_bytes() == PrivateKey.read(private).sign(
            (bundle / "manifest.json").read_bytes()
        )

    @tool("openssl")
    def test_a_key_that_openssl_encrypted(
        self, caracal: Caracal, bundle: Path, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        encrypted = tmp_path / "encrypted.pem"
        run("openssl", "pkey", "-in", keys.private, "-aes256", "-passout", "pass:a b", "-out", encrypted, check=True)
        monkeypatch.setenv("CARACAL_KEY_PASSPHRASE", "a b")
        assert caracal("sign", bundle, "--key", encrypted).code == 0
        assert passed(caracal("verify", bundle, "--key", keys.public))

    @tool("ssh-keygen")
    @pytest.mark.parametrize("passphrase", ["", "a b"])
    def test_keys_of_ssh_keygen(
        self, caracal: Caracal, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passphrase: str
    ) -> None:
        private = tmp_path / "id"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "me at home", "-f", private, check=True)
        monkeypatch.setenv("CARACAL_KEY_PASSPHRASE", passphrase)
        assert caracal("sign", bundle, "--key", private).code == 0
        ran = caracal("verify", bundle, "--key", f"{private}.pub")
        assert passed(ran)
        fingerprint = run("ssh-keygen", "-lf", f"{private}.pub", check=True).stdout.split()[1]
        assert ran.out.rstrip().endswith(f"sha256 and Ed25519 signature by {fingerprint}")

    @tool("openssl")
    @tool("ssh-keygen")
    def test_the_commands_of_the_security_page(self, bundle: Path, tmp_path: Path) -> None:
        """In the order of the page, with what the reader has by then."""
        bundle.rename(tmp_path / "my-bundle")
        text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
        lines = "".join(re.findall(r"^```console\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)).splitlines()
        commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        assert len(commands) >= 7
        programs = [command.split()[0] for command in commands]
        assert {"caracal", "openssl", "ssh-keygen"} == set(programs)
        for command in commands:
            if command.startswith("caracal"):
                build_parser().parse_args(shlex.split(command)[1:])
            if command.startswith("ssh-keygen -t"):
                command += " -q -N ''"
            ran = run("sh", "-c", command, cwd=tmp_path)
            assert ran.returncode == 0, (command, ran.stdout, ran.stderr)


class TestKeyForms:
    @pytest.mark.parametrize("private", ["private", "private_ssh"])
    @pytest.mark.parametrize("public", ["public", "public_ssh"])
    @pytest.mark.parametrize("change", ["as it is", "crlf", "bom", "no last line end"])
    def test_every_form_of_one_key(self, bundle: Path, keys: Keys, private: str, public: str, change: str) -> None:
        changes: dict[str, Callable[[bytes], bytes]] = {
            "as it is": lambda data: data,
            "crlf": lambda data: data.replace(b"\n", b"\r\n"),
            "bom": lambda data: b"\xef\xbb\xbf" + data,
            "no last line end": lambda data: data.rstrip(b"\n"),
        }
        files = [getattr(keys, name) for name in (private, public)]
        for file in files:
            file.write_bytes(changes[change](file.read_bytes()))
        sign(bundle, PrivateKey.read(files[0]))
        found = verify(bundle, PublicKey.read(files[1]))
        assert (found.verdict, found.problems, found.files) == ("PASSED", (), 9)
        blob = base64.b64decode(public_ssh(keys.key).split()[1])
        assert found.key == "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")

    @pytest.mark.parametrize("form", [private_pem, private_ssh])
    def test_passphrases(self, caracal: Caracal, bundle: Path, keys: Keys, monkeypatch: Any, form: Any) -> None:
        encrypted = keys.write("encrypted", form(keys.key, "päss".encode()))
        refused(caracal("sign", bundle, "--key", encrypted), 2, "is encrypted", "CARACAL_KEY_PASSPHRASE")
        monkeypatch.setenv("CARACAL_KEY_PASSPHRASE", "wrong")
        refused(caracal("sign", bundle, "--key", encrypted), 2, "is not opened by the passphrase in CARACAL_KEY_")
        assert not (bundle / "manifest.sig").exists()
        monkeypatch.setenv("CARACAL_KEY_PASSPHRASE", "päss")
        assert caracal("sign", bundle, "--key", encrypted).code == 0
        # One that needs none is not disturbed by it.
        assert caracal("sign", bundle, "--key", keys.private, "--overwrite").code == 0
        assert passed(caracal("verify", bundle, "--key", keys.public))

    OTHERS: tuple[tuple[str, Any], ...] = (
        ("RSA", lambda: rsa.generate_private_key(65537, 2048)),
        ("EC", lambda: ec.generate_private_key(ec.SECP256R1())),
        ("Ed448", ed448.Ed448PrivateKey.generate),
        ("X25519", x25519.X25519PrivateKey.generate),
        ("DSA", lambda: dsa.generate_private_key(2048)),
    )

    @pytest.mark.parametrize(("kind", "make"), OTHERS, ids=[kind for kind, _ in OTHERS])
    def test_other_kinds_of_keys(self, caracal: Caracal, bundle: Path, keys: Keys, kind: str, make: Any) -> None:
        key = make()
        private, public = keys.write("p", private_pem(key)), keys.write("q", public_pem(key))
        words = (f"a key of the kind {kind}", "expected Ed25519", "openssl genpkey -algorithm ed25519")
        refused(caracal("sign", bundle, "--key", private), 2, *words)
        refused(caracal("verify", bundle, "--key", public), 2, *words)
        if kind in ("RSA", "EC"):
            refused(caracal("sign", bundle, "--key", keys.write("s", private_ssh(key))), 2, *words)
            found = caracal("verify", bundle, "--key", keys.write("t", public_ssh(key)))
            refused(found, 2, "a key of the kind", "expected ssh-ed25519")
            old = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.TraditionalOpenSSL, NO_PASSPHRASE)
            refused(caracal("sign", bundle, "--key", keys.write("u", old)), 2, *words)

    def test_a_security_key_and_a_certificate_are_other_kinds(self, caracal: Caracal, bundle: Path, keys: Keys) -> None:
        """Both hold an Ed25519 point, but what is signed with them has another form."""
        for kind in (b"sk-ssh-ed25519@openssh.com", b"ssh-ed25519-cert-v01@openssh.com"):
            line = public_ssh(keys.key).replace(b"ssh-ed25519", kind)
            refused(
                caracal("verify", bundle, "--key", keys.write("k", line)), 2, kind.decode()[:40], "expected ssh-ed25519"
            )
        pem = b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----\n"
        refused(caracal("verify", bundle, "--key", keys.write("c", pem)), 2, "is a certificate", "openssl x509")

    @pytest.mark.parametrize("name", ["private", "private_ssh"])
    def test_a_private_key_given_to_verify(self, caracal: Caracal, signed: Path, keys: Keys, name: str) -> None:
        ran = caracal("verify", signed, "--key", getattr(keys, name))
        refused(ran, 2, "is a private key, which must not be handed on", "-pubout")

    @pytest.mark.parametrize("name", ["public", "public_ssh"])
    def test_a_public_key_given_to_sign(self, caracal: Caracal, bundle: Path, keys: Keys, name: str) -> None:
        refused(caracal("sign", bundle, "--key", getattr(keys, name)), 2, "is a public key; sign takes the private one")
        assert not (bundle / "manifest.sig").exists()

    @pytest.mark.parametrize("command", ["sign", "verify"])
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "is empty"),
            (b" \r\n", "is empty"),
            (b"\0" * 64, "no key in PEM or OpenSSH format"),
            (bytes(range(256)), "no key in PEM or OpenSSH format"),
            (b"hello", "no key in PEM or OpenSSH format"),
            (b"ssh-ed25519", "no key in PEM or OpenSSH format"),
            (b"-----BEGIN PRIVATE KEY-----", "private key"),
            (b"-----BEGIN PUBLIC KEY-----", ""),
            (b"-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n", "private key"),
            (b"-----BEGIN PUBLIC KEY-----\n!!!!\n-----END PUBLIC KEY-----\n", ""),
            (b"-----BEGIN SPAM-----\nAAAA\n-----END SPAM-----\n", "expected a"),
            (b"A" * (1 << 16), "no key in PEM or OpenSSH format"),
            (b"A" * ((1 << 16) + 1), "has more than 65,536 bytes"),
        ],
        ids=lambda value: str(value[:24]) if isinstance(value, bytes) else "",
    )
    def test_what_is_no_key(
        self, caracal: Caracal, signed: Path, keys: Keys, command: str, content: bytes, words: str
    ) -> None:
        refused(caracal(command, signed, "--key", keys.write("k", content)), 2, "--key: ", words)

    @pytest.mark.parametrize("command", ["sign", "verify"])
    @pytest.mark.parametrize("path", ["nowhere", "", "a\0b", ".", "x" * 5000])
    def test_where_no_key_is(self, caracal: Caracal, signed: Path, command: str, path: str) -> None:
        ran = caracal(command, signed, "--key", path)
        refused(ran, 2, "--key: ")
        assert len(ran.err) < 500

    @posix
    @pytest.mark.parametrize("command", ["sign", "verify"])
    def test_a_file_without_an_end(self, caracal: Caracal, signed: Path, command: str) -> None:
        refused(caracal(command, signed, "--key", "/dev/zero"), 2, "has more than 65,536 bytes")

    @pytest.mark.parametrize("text", ["", "AAAA", "!", "AAAAC3NzaC1lZDI1NTE5AAAAIA==", "é"])
    def test_a_damaged_line_of_openssh(self, keys: Keys, text: str) -> None:
        with pytest.raises(InputError, match=r"damaged|no key"):
            PublicKey.read(keys.write("k", f"ssh-ed25519 {text}\n".encode()))

    def test_a_line_that_says_another_kind_inside(self, keys: Keys) -> None:
        inner = base64.b64encode(base64.b64decode(public_ssh(keys.key).split()[1]).replace(b"ed25519", b"ed25518"))
        with pytest.raises(InputError, match="damaged"):
            PublicKey.read(keys.write("k", b"ssh-ed25519 " + inner))

    def test_two_keys_in_one_file(self, keys: Keys) -> None:
        """Who vouches must be one."""
        other = public_pem(ed25519.Ed25519PrivateKey.generate())
        for content in (public_pem(keys.key) + other, public_ssh(keys.key) * 2):
            with pytest.raises(InputError, match="holds 2"):
                PublicKey.read(keys.write("k", content))
        with pytest.raises(InputError, match="holds 2"):
            PrivateKey.read(keys.write("k", private_pem(keys.key) + public_pem(keys.key)))

    def test_no_message_shows_the_key(self, caracal: Caracal, bundle: Path, keys: Keys) -> None:
        secret = private_pem(keys.key).splitlines()[1].decode()
        for content in (private_pem(keys.key)[:-30], private_pem(keys.key).replace(b"PRIVATE", b"SECRET")):
            ran = caracal("sign", bundle, "--key", keys.write("k", content), "--debug")
            assert ran.code == 2
            assert secret not in ran.err + ran.out


class TestSign:
    def test_text_and_json(self, caracal: Caracal, bundle: Path, keys: Keys) -> None:
        ran = caracal("sign", bundle, "--key", keys.private)
        assert ran.code == 0
        assert ran.out.startswith("signed 9 files, 0.0 MB, by SHA256:")
        content = (bundle / "manifest.json").read_bytes()
        assert (bundle / "manifest.sig").read_bytes() == keys.key.sign(content)
        data = json.loads(caracal("sign", bundle, "--key", keys.private, "--overwrite", "--format", "json").out)
        assert (data["files"], data["signature"]) == (9, str(bundle / "manifest.sig"))
        assert sorted(path.name for path in bundle.iterdir() if "sig" in path.name) == ["manifest.sig"]

    @pytest.mark.parametrize("name", ["weights.safetensors", "sub/README.md"])
    def test_what_is_damaged_is_not_signed(self, caracal: Caracal, bundle: Path, keys: Keys, name: str) -> None:
        content = bytearray((bundle / name).read_bytes())
        content[0] ^= 1
        (bundle / name).write_bytes(content)
        ran = caracal("sign", bundle, "--key", keys.private)
        refused(ran, 2, f"{name} was altered", "nothing was signed")
        (bundle / name).unlink()
        refused(caracal("sign", bundle, "--key", keys.private), 2, f"{name} is missing")
        assert not (bundle / "manifest.sig").exists()

    def test_what_no_signature_would_cover_is_not_signed(self, caracal: Caracal, bundle: Path, keys: Keys) -> None:
        (bundle / "sub" / "notes").write_text("mine")
        refused(caracal("sign", bundle, "--key", keys.private), 2, "sub/notes is not listed", "move it away")
        assert not (bundle / "manifest.sig").exists()

    def test_a_signature_is_replaced_only_when_asked(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        before = (signed / "manifest.sig").read_bytes()
        other = keys.write("o", private_pem(ed25519.Ed25519PrivateKey.generate()))
        refused(caracal("sign", signed, "--key", other), 2, "has a signature already", "--overwrite")
        assert (signed / "manifest.sig").read_bytes() == before
        assert caracal("sign", signed, "--key", other, "--overwrite").code == 0
        failed(caracal("verify", signed, "--key", keys.public), "no signature of this manifest.json")

    @posix
    @pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
    def test_a_place_that_is_no_file_is_never_written_to(
        self, caracal: Caracal, bundle: Path, keys: Keys, tmp_path: Path, kind: str
    ) -> None:
        (tmp_path / "precious").write_text("precious")
        make_odd(bundle / "manifest.sig", kind, tmp_path / "precious")
        refused(caracal("sign", bundle, "--key", keys.private, "--overwrite"), 2, "is a link or no file")
        assert (tmp_path / "precious").read_text() == "precious"

    @posix
    @pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root writes anywhere")
    def test_a_folder_that_cannot_be_written(self, caracal: Caracal, bundle: Path, keys: Keys) -> None:
        bundle.chmod(0o500)
        refused(caracal("sign", bundle, "--key", keys.private), 2, "cannot be written", "nothing was signed")
        bundle.chmod(0o700)

    def test_a_full_disk_keeps_the_former_signature(
        self, caracal: Caracal, signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = (signed / "manifest.sig").read_bytes()
        real = Path.open

        def fail(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
            if mode == "xb":
                raise OSError(28, "No space left on device")
            return real(self, mode, *args, **more)

        monkeypatch.setattr(Path, "open", fail)
        refused(caracal("sign", signed, "--key", keys.private, "--overwrite"), 2, "No space left", "nothing was signed")
        assert (signed / "manifest.sig").read_bytes() == before

    @pytest.mark.parametrize("path", ["", "nowhere", "a\0b", "keys"])
    def test_no_bundle(self, caracal: Caracal, tmp_path: Path, keys: Keys, monkeypatch: Any, path: str) -> None:
        monkeypatch.chdir(tmp_path)
        refused(caracal("sign", path, "--key", keys.private), 2, "is no bundle", "manifest.json")
        refused(caracal("verify", path, "--key", keys.public), 2, "is no bundle", "manifest.json")
        refused(caracal("verify", path), 2, "is no bundle", "manifest.json")


def make_odd(place: Path, kind: str, target: Path) -> None:
    if kind == "link":
        place.symlink_to(target)
    elif kind == "dangling":
        place.symlink_to("nowhere")
    elif kind == "folder":
        place.mkdir()
    else:
        os.mkfifo(place)


class TestVerifyHashes:
    """Without a key."""

    def test_passed_and_says_what_it_does_not_say(self, caracal: Caracal, bundle: Path) -> None:
        ran = caracal("verify", bundle)
        assert ran.code == 0
        note, verdict = ran.out.splitlines()
        assert note.startswith("note: without --key nobody vouches for the manifest")
        assert verdict == "PASSED  verify  9 files, 0.0 MB  sha256 only, nobody vouches for the manifest"

    def test_a_signature_that_nobody_looked_at_is_told(self, caracal: Caracal, signed: Path) -> None:
        (signed / "manifest.sig").write_bytes(b"nonsense")
        ran = caracal("verify", signed)
        assert passed(ran)
        assert "there is a signature, which was not compared" in ran.out

    def test_json(self, caracal: Caracal, bundle: Path) -> None:
        (bundle / "notes").write_text("mine")
        data = json.loads(caracal("verify", bundle, "--format", "json").out)
        assert (data["verdict"], data["files"], data["key"], data["unlisted"]) == ("PASSED", 9, None, ["notes"])
        files = json.loads((bundle / "manifest.json").read_text())["files"]
        assert data["bytes"] == sum(entry["bytes"] for entry in files.values())
        lines = "".join(f"{entry['sha256']} {name}\n" for name, entry in sorted(files.items()))
        assert data["bundle_id"] == hashlib.sha256(lines.encode()).hexdigest()

    def test_an_altered_file(self, caracal: Caracal, bundle: Path) -> None:
        for name, change in (
            ("step.onnx", lambda data: data[:-1] + b"?"),
            ("sub/README.md", lambda data: data + b"\n"),
            ("weights.safetensors", lambda data: b""),
        ):
            content = (bundle / name).read_bytes()
            (bundle / name).write_bytes(change(content))
            failed(caracal("verify", bundle), f"9 files, 0.0 MB  {name} ")
            data = json.loads(caracal("verify", bundle, "--format", "json").out)
            assert (data["verdict"], len(data["problems"])) == ("FAILED", 1)
            (bundle / name).write_bytes(content)
        assert passed(caracal("verify", bundle))

    def test_every_altered_file_is_named(self, caracal: Caracal, bundle: Path) -> None:
        for name in ("step.onnx", "forward.onnx"):
            (bundle / name).write_bytes(b"x")
        (bundle / "extend.onnx").unlink()
        ran = caracal("verify", bundle)
        failed(ran, "(and 2 more)")
        for words in ("step.onnx has 1 bytes, the manifest says", "forward.onnx has 1 bytes", "extend.onnx is missing"):
            assert words in ran.out

    @posix
    @pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
    @pytest.mark.parametrize("name", ["step.onnx", "sub/README.md"])
    def test_what_is_no_file(self, caracal: Caracal, bundle: Path, tmp_path: Path, kind: str, name: str) -> None:
        (bundle / name).rename(tmp_path / "content")
        make_odd(bundle / name, kind, tmp_path / "content")
        failed(caracal("verify", bundle), f"{name} is ")

    @posix
    def test_a_socket_in_place_of_a_file(self, caracal: Caracal, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (bundle / "step.onnx").unlink()
        monkeypatch.chdir(bundle)  # its path may not be long
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("step.onnx")
            failed(caracal("verify", "."), "step.onnx is no plain file")

    @posix
    def test_a_linked_folder_on_the_way(self, caracal: Caracal, bundle: Path, tmp_path: Path) -> None:
        (bundle / "sub").rename(tmp_path / "outside")
        (bundle / "sub").symlink_to(tmp_path / "outside")
        failed(caracal("verify", bundle), "sub/README.md lies behind a link")

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe{", b'{"format": "caracal-bundle"}'])
    def test_a_manifest_that_is_none(self, caracal: Caracal, bundle: Path, content: bytes) -> None:
        (bundle / "manifest.json").write_bytes(content)
        refused(caracal("verify", bundle), 2, "manifest")

    def test_a_signature_needs_a_key(self, caracal: Caracal, signed: Path) -> None:
        refused(caracal("verify", signed, "--signature", signed / "manifest.sig"), 2, "give --key PUBLIC too")


class TestVerifySignature:
    def test_passed(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        ran = caracal("verify", signed, "--key", keys.public)
        fingerprint = PublicKey(POINT).fingerprint
        expected = f"PASSED  verify  9 files, 0.0 MB  sha256 and Ed25519 signature by {fingerprint}\n"
        assert (ran.code, ran.out) == (0, expected)
        data = json.loads(caracal("verify", signed, "--key", keys.public, "--format", "json").out)
        assert (data["verdict"], data["key"], data["problems"]) == ("PASSED", fingerprint, [])

    def test_another_key(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        failed(caracal("verify", signed, "--key", keys.other), "no signature of this manifest.json by SHA256:")

    def test_a_removed_signature(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        (signed / "manifest.sig").unlink()
        failed(caracal("verify", signed, "--key", keys.public), "there is no signature", "was removed")

    def test_the_signature_of_another_bundle(self, caracal: Caracal, signed: Path, keys: Keys, tmp_path: Path) -> None:
        other = write_bundle(tmp_path / "other", "b")
        shutil.copyfile(signed / "manifest.sig", other / "manifest.sig")
        failed(caracal("verify", other, "--key", keys.public), "no signature of this manifest.json")

    @pytest.mark.parametrize(
        "change",
        [
            lambda text: json.dumps(json.loads(text)),
            lambda text: text.rstrip("\n"),
            lambda text: text + " ",
            lambda text: text.replace("\n", "\r\n"),
            lambda text: "\ufeff" + text,
        ],
        ids=["other blanks", "no line end", "a blank", "crlf", "bom"],
    )
    def test_the_same_manifest_in_other_bytes(
        self, caracal: Caracal, signed: Path, keys: Keys, change: Callable[[str], str]
    ) -> None:
        text = (signed / "manifest.json").read_bytes().decode()
        (signed / "manifest.json").write_bytes(change(text).encode())
        failed(caracal("verify", signed, "--key", keys.public), "no signature of this manifest.json")

    def test_whoever_alters_a_file_and_its_hash_is_found_by_the_signature_only(
        self, caracal: Caracal, signed: Path, keys: Keys
    ) -> None:
        content = b"another model"
        (signed / "weights.safetensors").write_bytes(content)
        failed(caracal("verify", signed, "--key", keys.public), "weights.safetensors has 13 bytes")
        data = json.loads((signed / "manifest.json").read_text())
        data["files"]["weights.safetensors"] = {"bytes": 13, "sha256": hashlib.sha256(content).hexdigest()}
        (signed / "manifest.json").write_text(json.dumps(data, indent=2) + "\n")
        assert passed(caracal("verify", signed))
        failed(caracal("verify", signed, "--key", keys.public), "no signature of this manifest.json")

    def test_a_manifest_that_is_not_believed_is_not_parsed(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        (signed / "manifest.json").write_bytes(b"{" * 100_000)
        failed(caracal("verify", signed, "--key", keys.public), "no signature of this manifest.json")

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda data: b"", "0 bytes"),
            (lambda data: data[:-1], "63 bytes"),
            (lambda data: data + b"\n", "more than 64 bytes"),
            (lambda data: data * 100_000, "more than 64 bytes"),
            (lambda data: base64.b64encode(data), "more than 64 bytes"),
            (lambda data: bytes(64), "no signature of this"),
            (lambda data: data[:63] + bytes([data[63] ^ 0x80]), "no signature of this"),
            (lambda data: bytes([data[0] ^ 1]) + data[1:], "no signature of this"),
        ],
        ids=["empty", "short", "a line end more", "long", "base64", "zeros", "last bit", "first bit"],
    )
    def test_a_signature_that_is_none(
        self, caracal: Caracal, signed: Path, keys: Keys, change: Callable[[bytes], bytes], words: str
    ) -> None:
        (signed / "manifest.sig").write_bytes(change((signed / "manifest.sig").read_bytes()))
        failed(caracal("verify", signed, "--key", keys.public), words)

    @posix
    @pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
    @pytest.mark.parametrize("name", ["manifest.sig", "manifest.json"])
    def test_no_plain_files(
        self, caracal: Caracal, signed: Path, keys: Keys, tmp_path: Path, kind: str, name: str
    ) -> None:
        (signed / name).rename(tmp_path / name)
        make_odd(signed / name, kind, tmp_path / name)
        failed(caracal("verify", signed, "--key", keys.public), f"{name} is ")

    def test_a_signature_elsewhere(self, caracal: Caracal, signed: Path, keys: Keys, tmp_path: Path) -> None:
        argv = ["verify", signed, "--key", keys.public, "--signature", tmp_path / "elsewhere"]
        failed(caracal(*argv), "there is no signature at")
        (signed / "manifest.sig").rename(tmp_path / "elsewhere")
        assert passed(caracal(*argv))
        # What then lies in the bundle under the usual name is not part of it, unless it is a signature's file.
        (signed / "manifest.sig").mkdir()
        (signed / "manifest.sig" / "hidden").write_text("x")
        failed(caracal(*argv), "manifest.sig/hidden is not listed")

    def test_the_folder_as_signature(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        failed(caracal("verify", signed, "--key", keys.public, "--signature", signed), "cannot be read")

    @posix
    def test_an_endless_signature(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        failed(caracal("verify", signed, "--key", keys.public, "--signature", "/dev/zero"), "more than 64 bytes")

    @pytest.mark.parametrize("name", ["notes", "sub/notes", "sub/deep/notes", ".hidden", "Manifest.sig", "a\nb"])
    @pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="file systems that ignore case")
    def test_an_unlisted_file(self, caracal: Caracal, signed: Path, keys: Keys, name: str) -> None:
        (signed / name).parent.mkdir(exist_ok=True)
        (signed / name).write_text("x")
        ran = caracal("verify", signed, "--key", keys.public)
        failed(ran, "is not listed in the manifest; no signature covers it")
        assert len(ran.out.splitlines()) == 1
        unkeyed = caracal("verify", signed)
        assert passed(unkeyed)
        assert "not listed in the manifest, and never read: " in unkeyed.out

    @posix
    def test_a_listed_file_under_a_name_that_the_file_system_made_of_it(
        self, caracal: Caracal, signed: Path, keys: Keys
    ) -> None:
        """A second name for the same file looks the same; one that nobody would confuse is no listed file."""
        os.link(signed / "step.onnx", signed / "STEP.onnx")
        assert passed(caracal("verify", signed, "--key", keys.public))
        os.link(signed / "step.onnx", signed / "plugin.py")
        failed(caracal("verify", signed, "--key", keys.public), "plugin.py is not listed")

    @posix
    def test_an_unlisted_link(self, caracal: Caracal, signed: Path, keys: Keys, tmp_path: Path) -> None:
        (signed / "more").symlink_to(tmp_path)
        failed(caracal("verify", signed, "--key", keys.public), "more is not listed")

    def test_an_empty_folder_is_nothing(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        (signed / "empty").mkdir()
        assert passed(caracal("verify", signed, "--key", keys.public))

    def test_what_is_parsed_is_what_was_compared(
        self, signed: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The manifest changes between the two: the altered one is never looked at."""
        original = PublicKey.verifies
        content = b"another model"

        def swap(self: PublicKey, signature: bytes, message: bytes) -> bool:
            data = json.loads((signed / "manifest.json").read_text())
            data["files"]["weights.safetensors"] = {"bytes": 13, "sha256": hashlib.sha256(content).hexdigest()}
            (signed / "manifest.json").write_text(json.dumps(data))
            (signed / "weights.safetensors").write_bytes(content)
            return original(self, signature, message)

        monkeypatch.setattr(PublicKey, "verifies", swap)
        found = verify(signed, PublicKey.read(keys.public))
        assert found.verdict == "FAILED"
        assert "weights.safetensors has 13 bytes" in found.problems[0]

    def test_signed_and_yet_no_manifest(self, caracal: Caracal, signed: Path, keys: Keys) -> None:
        (signed / "manifest.json").write_bytes(b"{}")
        (signed / "manifest.sig").write_bytes(keys.key.sign(b"{}"))
        refused(caracal("verify", signed, "--key", keys.public), 2, "manifest.format is missing")


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
from caracal_runtimes.cli import main
code = main(sys.argv[1:])
sys.stdout.flush()
print(*{{name.partition(".")[0] for name in sys.modules}}, file=sys.stderr)
sys.exit(code)
"""


def blocked(*argv: object, names: tuple[str, ...] = ("cryptography",), **options: Any) -> Any:
    return run(sys.executable, "-c", BLOCK.format(blocked=set(names)), *argv, **options)


class TestWhatIsLoaded:
    def test_verify_without_cryptography_did_not_run(self, signed: Path, keys: Keys) -> None:
        for key in (keys.public, keys.public_ssh):
            ran = blocked("verify", signed, "--key", key)
            assert ran.returncode == 3
            last = ran.stdout.splitlines()[-1]
            assert last.startswith("NOT RUN  verify  ")
            assert "pip install 'caracal-onnx[sign]'" in last
            ran = blocked("verify", signed, "--key", key, "--format", "json")
            assert (ran.returncode, json.loads(ran.stdout)["verdict"]) == (3, "NOT RUN")

    def test_sign_without_cryptography_did_not_run(self, bundle: Path, keys: Keys) -> None:
        ran = blocked("sign", bundle, "--key", keys.private)
        assert (ran.returncode, ran.stdout) == (3, "")
        assert "pip install 'caracal-onnx[sign]'" in ran.stderr
        assert not (bundle / "manifest.sig").exists()

    def test_an_encrypted_openssh_key_without_bcrypt(self, bundle: Path, keys: Keys) -> None:
        encrypted = keys.write("e", private_ssh(keys.key, b"x"))
        environment = {**os.environ, "CARACAL_KEY_PASSPHRASE": "x"}
        ran = blocked("sign", bundle, "--key", encrypted, names=("bcrypt",), env=environment)
        assert ran.returncode == 3
        assert "pip install 'caracal-onnx[sign]'" in ran.stderr

    def test_hashes_need_nothing(self, bundle: Path) -> None:
        names = ("numpy", "torch", "onnx", "onnxruntime", "tokenizers", "safetensors", "cryptography")
        ran = blocked("verify", bundle, names=names)
        assert ran.returncode == 0, ran.stderr
        assert not set(names) & set(ran.stderr.split())

    def test_signing_needs_no_numpy(self, bundle: Path, keys: Keys) -> None:
        for argv in (["sign", bundle, "--key", keys.private], ["verify", bundle, "--key", keys.public_ssh]):
            ran = blocked(*argv, names=("numpy", "torch", "onnx", "onnxruntime", "tokenizers", "safetensors"))
            assert ran.returncode == 0, ran.stderr

    def test_a_signature_that_does_not_verify_is_never_written(
        self, bundle: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = PrivateKey.read(keys.private)
        monkeypatch.setattr(PublicKey, "verifies", lambda *args: False)
        with pytest.raises(NotRunError, match="does not verify"):
            sign(bundle, key)
        assert not (bundle / "manifest.sig").exists()
