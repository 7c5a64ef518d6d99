"""Old names of modules that have moved. An import by the old name finds the same module."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

REMOTE = "actor_handle|answers|asgi|http|http_answer|http_control|http_once|http_token|http_url|observed|pipe|ray|rpc|server_log|tcp"
GENERATION = {
    "background": "actor", "client": "actor", "follower": "actor", "manager": "actor", "work": "actor",
    "arguments": "ray", "placement": "ray", "ray_actor": "ray.actor",
    "ray_metrics": "ray.metrics", "ray_queues": "ray.queues", "ray_tools": "ray.tools",
    "foreign": "exchange", "ledger": "exchange", "prompts": "exchange", "queues": "exchange", "foreign_records": "exchange.records",
    "dataset_rewards": "rewards.dataset", "maths": "verifiers", "budget": "rollout", "transcript": "rollout",
    "parsers": "tools", "patterns": "tools", "schema": "tools", "http_addresses": "tools.addresses", "http_tool": "tools.http",
    "mcp_tool": "tools.mcp", "python_tool": "tools.python",
}  # fmt: skip
"""Folders of modules, and names of those that have another one."""
ABSORBED = {
    "exchange.prompts": "types", "sandbox.limits": "sandbox.programs", "sandbox.run": "sandbox.kept",
    "tools.patterns": "tools.schema", "verifiers.fences": "verifiers.code",
}  # fmt: skip
"""Modules of `instep.generation` whose contents are in another one."""
MOVED = (
    (re.compile(r"instep\.engine\.vllm_(\w+)"), r"instep.engine.vllm.\1"),
    (re.compile(rf"instep\.engine\.({REMOTE})"), r"instep.engine.remote.\1"),
    *(
        (re.compile(rf"instep\.generation\.{old}"), f"instep.generation.{new if '.' in new else f'{new}.{old}'}")
        for old, new in GENERATION.items()
    ),
    *((re.compile(rf"instep\.generation\.{old}"), f"instep.generation.{new}") for old, new in ABSORBED.items()),
)
"""Old names, and what they have become."""


def new_name(name: str) -> str | None:
    """Returns the present name of a module that had this name; None if no module had it."""
    return next((old.sub(new, name) for old, new in MOVED if old.fullmatch(name)), None)


class Moved(MetaPathFinder, Loader):
    """Finds a module under its old name."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(name, self) if new_name(name) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(new_name(spec.name) or spec.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's own spec, in whose place Python has put the old name's. The
        module has run already."""
        module.__spec__ = module.__spec__.loader_state if module.__spec__ else None


def follow() -> None:
    """Makes Python's imports know the old names."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.append(Moved())
