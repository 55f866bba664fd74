"""Running a bundle needs no torch, onnx or safetensors, and says what to install where something is missing."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import caracal_runtimes
import pytest

EXPORTER_ONLY = ("torch", "onnx", "onnxscript", "onnx_ir", "safetensors", "ml_dtypes", "transformers")
COMMANDS = ("caracal_export.cli", *(f"caracal_export.cli.{name}" for name in ("demo", "export", "info", "require")))
REFERENCE = ("caracal", "caracal.config", "caracal.errors", "caracal_export", "caracal_export.errors")
MODULES = [module.name for module in pkgutil.walk_packages(caracal_runtimes.__path__, "caracal_runtimes.")]
MODULES.remove("caracal_runtimes.__main__")  # importing it runs it

BLOCK = """
import importlib, json, sys
blocked = json.loads(sys.argv[1])
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
for name in blocked:
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} is not blocked")
"""


def python(code: str, *arguments: str, blocked: Sequence[str] = EXPORTER_ONLY) -> str:
    """Standard output of a new interpreter in which some packages cannot be imported."""
    command = [sys.executable, "-c", BLOCK + code, json.dumps(blocked), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return ran.stdout


def test_every_module_imports_without_the_exporters_packages() -> None:
    modules = ["caracal_runtimes", *MODULES, *REFERENCE, *COMMANDS]
    assert len(modules) > 25
    code = "names = sys.argv[2:]\nfor name in names: importlib.import_module(name)\nprint(len(names))"
    assert int(python(code, *modules)) == len(modules)


def test_every_public_name_is_there() -> None:
    code = "import caracal_runtimes as r\nprint(*(getattr(r, name).__module__ for name in r.__all__))"
    assert python(code).split() == ["caracal_runtimes." + home for home in caracal_runtimes._HOMES.values()]
    with pytest.raises(AttributeError, match="has no attribute 'Bundel'"):
        _ = caracal_runtimes.Bundel


def test_the_commands_work_without_the_exporters_packages(exported: Any) -> None:
    code = """
import io, os
from caracal_runtimes.cli import main
sys.stderr = io.StringIO()  # progress
(bundle,) = sys.argv[2:]
print([main(argv) for argv in (
    ["info", bundle], ["parity", bundle, "--threads", "1", "--json", os.devnull, "--format", "json"],
    ["generate", bundle, "-p", "God", "-n", "2"])])
"""
    assert python(code, str(exported.bundle)).splitlines()[-1] == "[0, 0, 0]"


def test_a_checkpoint_is_described_without_torch(exported: Any) -> None:
    code = "from caracal_runtimes.cli import main\nmain(['info', sys.argv[2]])"
    blocked = [name for name in EXPORTER_ONLY if name != "safetensors"]
    assert "loads: yes" in python(code, str(exported.checkpoint), blocked=blocked)


RAISES = """
from caracal_runtimes import Bundle, NotRunError
bundle = Bundle.open(sys.argv[2])
try:
    {action}
except NotRunError as error:
    print(error.exit_code, error)
"""


@pytest.mark.parametrize(
    ("blocked", "action", "words"),
    [
        ("onnxruntime", "bundle.model()", "pip install 'caracal-onnx[cpu]'"),
        ("tokenizers", "bundle.tokenizer()", "pip install tokenizers"),
        ("tokenizers", "bundle.model(threads=1).generate('God')", "pip install tokenizers"),
        ("tokenizers", "bundle.model(threads=1).score('God')", "pip install tokenizers"),
    ],
)
def test_what_is_missing_is_said_with_what_to_install(exported: Any, blocked: str, action: str, words: str) -> None:
    output = python(RAISES.format(action=action), str(exported.bundle), blocked=[blocked])
    assert output.startswith("3 ")
    assert words in output


def test_ids_need_no_tokenizers(exported: Any) -> None:
    """Nor does the forward pass; text is left out where it cannot be made."""
    code = "from caracal_runtimes import Bundle\nmodel = Bundle.open(sys.argv[2]).model(threads=1)\n"
    code += "print(model.forward([[1]]).shape, model.score([1, 2]).tokens)"
    assert python(code, str(exported.bundle), blocked=["tokenizers"]).strip() == "(1, 1, 320) 2"


@pytest.mark.parametrize(
    ("blocked", "argv"),
    [("onnxruntime", ["generate", "BUNDLE", "-p", "God"]), ("tokenizers", ["generate", "BUNDLE", "-p", "God"])],
)
def test_the_command_line_says_it_in_one_line(exported: Any, blocked: str, argv: list[str]) -> None:
    code = "from caracal_runtimes.cli import main\nsys.stderr = sys.stdout\nprint(main(sys.argv[2:]))"
    arguments = [str(exported.bundle) if item == "BUNDLE" else item for item in argv]
    message, code_line = python(code, *arguments, blocked=[blocked]).splitlines()
    assert code_line == "3"
    assert message.startswith("caracal: ")
    assert "pip install" in message


def test_parity_without_onnxruntime_did_not_run(exported: Any) -> None:
    # In this process: what is blocked here is there in another one.
    code = (
        "from caracal_runtimes import Bundle, run_parity\nfrom caracal_runtimes.report import verdict_lines\n"
        "report = run_parity(Bundle.open(sys.argv[2]))\nprint(verdict_lines(report))\nprint(report.exit_code)"
    )
    lines = python(code, str(exported.bundle), blocked=["onnxruntime"]).splitlines()
    assert lines[0].startswith("NOT RUN  parity matmul float32 on cpu  provider cpu does not work here: ")
    assert "running a bundle needs ONNX Runtime" in lines[0]
    assert lines[-1] == "3"
