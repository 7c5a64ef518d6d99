"""What both receivers know their engine by: the engine, the policy that holds it, or a path that
leads to either from a context."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from instep.dropin.torchrl.reach import resolve
from instep.errors import ConfigError


class FromContext:
    """The two methods of TorchRL's receivers before 0.11."""

    def __init__(self, model_ref: Any) -> None:
        self._model_ref = model_ref
        self._context: Callable[[], Any] = lambda: None

    def register_model(self, model_ref: Any) -> None:
        """The engine, the policy that holds it, or the path of either from the context: `policy`,
        `env.policies[0]`."""
        self._model_ref = model_ref

    def set_context(self, context: Any) -> None:
        """Where a path starts. It is not kept alive, where Python can do without."""
        try:
            self._context = weakref.ref(context)
        except TypeError:
            self._context = lambda: context

    def _engine(self) -> Any:
        found = self._model_ref
        if found is None:
            raise ConfigError(
                "this receiver has no engine",
                next_step="scheme.create_receiver(engine), or register_model",
            )
        if isinstance(found, str):
            context = self._context()
            if context is None:
                raise ConfigError(
                    f"{found!r} is a path from a context, and there is none, or none any more",
                    next_step="call set_context",
                )
            found = resolve(context, found)
        return found
