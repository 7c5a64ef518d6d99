"""The rules of the repository that a reader relies on: who imports whom, what stays light, how long a file gets."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import instep

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "instep"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
FILES = sorted(
    path for folder in ("src", "tests", "scripts", "bench", "examples") for path in (ROOT / folder).rglob("*.py") if path.stat().st_size
)

ANYWHERE = {
    "vllm": ("engine/vllm/*", "receiver/*", "dropin/*"),
    "ray": ("generation/ray*.py", "engine/vllm/engine.py", "dropin/ray_group.py"),
}
"""Files that may import a package at any place."""
INSIDE_FUNCTIONS = {
    "vllm": ("bench/*", "demo/*", "cli/self_test.py", "cli/serve.py"),
    "ray": ("bench/engines.py", "dropin/torchrl/vllm_async.py", "demo/ray_loop.py"),
}
"""Files that may import it inside a function: they work without it too."""

HEAVY = ("torch", "vllm", "transformers", "ray", "matplotlib", "numpy")


def test_layers() -> None:
    # In a process of its own: import-linter switches off every logger that exists, and later tests would see no log.
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


PROGRAMS = ("bench", "demo")
"""Folders that nothing else is built on."""


def test_every_folder_has_layers_that_name_all_its_files() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layered = {container for contract in settings if contract.get("exhaustive") for container in contract["containers"]}
    folders = {f"instep.{path.parent.name}" for path in PACKAGE.glob("*/__init__.py") if path.parent.name not in PROGRAMS}
    assert {"instep", *folders} <= layered


def test_no_file_leads_back_to_itself() -> None:
    """A package's own `__init__` is left out: it names what its files share, and imports them when they are asked for."""
    graph = grimp.build_graph("instep", exclude_type_checking_imports=True, cache_dir=None)
    leads = {
        module: {other for other in graph.find_modules_directly_imported_by(module) if not module.startswith(f"{other}.")}
        for module in graph.modules
    }
    TopologicalSorter(leads).prepare()  # raises `CycleError`, which names the circle


def test_a_module_is_found_under_its_old_name() -> None:
    program = (
        "import instep.engine.vllm_plugin as old, instep.engine.http_token\n"
        "from instep.engine.vllm import plugin\n"
        "from instep.engine.remote import http_token\n"
        "assert old is plugin and instep.engine.http_token is http_token\n"
        "assert old.__spec__.name == old.__name__ == 'instep.engine.vllm.plugin'\n"
        "from instep.engine.vllm import VllmEngine\n"
        "from instep.generation.prompts import checked\n"
        "import instep.generation.sandbox.limits\n"
        "try:\n    import instep.engine.vllm_nothing\n"
        "except ModuleNotFoundError as error:\n    assert error.name == 'instep.engine.vllm.nothing'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Top-level package of every import, and whether it happens inside a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0], inside
        yield from imports(node, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("module", MODULES)
def test_vllm_and_ray_stay_at_the_edge(module: str) -> None:
    for package, inside in imports(ast.parse((PACKAGE / module).read_text())):
        if package in ANYWHERE and not any(fnmatch(module, pattern) for pattern in ANYWHERE[package]):
            allowed = any(fnmatch(module, pattern) for pattern in INSIDE_FUNCTIONS[package])
            assert allowed, f"{module} must not import {package}"
            assert inside, f"{module} may import {package} inside a function only"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_has_at_most_300_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


@pytest.mark.parametrize("module", ["instep", "instep.errors", "instep.config", "instep.protocol", "instep.cli"])
def test_imports_stay_light(module: str) -> None:
    program = f"import sys, {module}; print(*[name for name in {HEAVY!r} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert loaded == []


def test_public_names_are_sorted_and_exist() -> None:
    assert instep.__all__ == sorted(instep.__all__)
    assert [name for name in instep.__all__ if not hasattr(instep, name)] == []


def test_no_file_names_a_package_index_or_a_folder_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    wrong = re.compile(r"(?<![\w.-])/(work|home|root|Users)/|pypi\.org|python[h]osted|download\.pytorch", re.IGNORECASE)
    found = []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".safetensors"):
            found += [f"{name}:{number}: {line}" for number, line in enumerate(path.read_text().splitlines(), 1) if wrong.search(line)]
    assert found == []
