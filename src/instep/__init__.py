"""Keep LLM inference engines in step with a trainer.

from instep import WeightSync

sync = WeightSync(source=model, engines=[llm])
receipt = sync.push(version="step-1")
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from instep.moved import follow

if TYPE_CHECKING:
    from instep.engine.memory import MemoryEngine as MemoryEngine
    from instep.engine.transformers import TransformersEngine as TransformersEngine
    from instep.receipt import Receipt as Receipt
    from instep.source.adapter import Adapter as Adapter
    from instep.source.pairs import PairSource as PairSource
    from instep.sync import WeightSync as WeightSync

    __version__: str

_HOMES = {
    "Adapter": "instep.source.adapter",
    "MemoryEngine": "instep.engine.memory",
    "PairSource": "instep.source.pairs",
    "Receipt": "instep.receipt",
    "TransformersEngine": "instep.engine.transformers",
    "WeightSync": "instep.sync",
}

follow()

__all__ = ["Adapter", "MemoryEngine", "PairSource", "Receipt", "TransformersEngine", "WeightSync"]


def __getattr__(name: str) -> Any:
    """Loads a public name on first use: `instep --help` must not wait for torch."""
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name not in _HOMES:
        raise AttributeError(f"module 'instep' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
