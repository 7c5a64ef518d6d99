"""TorchRL's weight updaters, which GRPO recipes give to their collectors: `collector.weight_updater
= vLLMUpdaterV2(engine)`.

Needs TorchRL.
"""

from __future__ import annotations

import warnings
from typing import Any

from instep.dropin.torchrl.weights import AnnouncedSource, Metadata, described, open_weights
from instep.dropin.torchrl.weights import get_model_metadata as metadata_of
from instep.errors import ConfigError
from instep.extras import needed_by

with needed_by("vLLMUpdaterV2"):
    from torchrl.collectors.llm.weight_update import vllm_v2

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # TorchRL's, of each class that is made of its updaters

    class vLLMUpdaterV2(vllm_v2.vLLMUpdaterV2):  # type: ignore[misc]
        """Gives an engine with TorchRL's interface, such as `AsyncVLLM`, the weights of a model.

        An update has all of the model's weights, under the names that `save_pretrained` writes,
        adapters merged beside the model: the original merges them into it.
        """

        _announced: Metadata | None = None

        def init(self, model_metadata: Metadata | None = None) -> None:
            """model_metadata: what updates are compared with before they are sent, where it is
            given."""
            self._announced = model_metadata
            super().init(model_metadata)

        def push_weights(self, weights: Any) -> None:
            """weights: pairs of a name and a tensor, a mapping, a TensorDict or a module.

            Raises `PlanError` where they are not what `init` was told of, and what the engine's
            `update_weights` raises.
            """
            if self.initialized_group is None:
                raise ConfigError("call init first")
            source = open_weights(weights, self._announced)
            if self._announced is not None:
                announced = AnnouncedSource()
                announced.source, announced.announced = source, described(self._announced)
                announced.metadata()
            self.vllm_engine.update_weights(source.tensors())
            self._call_post_hooks()

        def push_weights_from_transformers(self, transformers_model: Any) -> None:
            """As `push_weights`."""
            self.push_weights(transformers_model)

        def push_weights_from_transformers_optimized(self, transformers_model: Any, batch_size: int = 50) -> None:
            """As `push_weights`. batch_size: 0 or more; whatever it says, an update is one, and is
            counted once."""
            if batch_size < 0:
                raise ConfigError(f"batch_size must be 0 or more, not {batch_size}")
            self.push_weights(transformers_model)

        def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
            """What a collector calls. Every engine takes an update or none does: `worker_ids` is
            refused."""
            if worker_ids is not None:
                raise ConfigError("every engine takes an update or none does: worker_ids cannot choose among them")
            if policy_or_weights is None:
                raise ConfigError("there are no weights to send", next_step="update_policy_weights_(model)")
            self.push_weights(policy_or_weights)

        @classmethod
        def get_model_metadata(cls, model: Any) -> dict[str, Any]:
            return metadata_of(model)


class vLLMUpdater:
    """`vLLMUpdater(vllm_engine=engine, v2=True)` makes a `vLLMUpdaterV2`. Raises `ConfigError`
    without `v2=True`: the first version calls methods that vLLM's workers no longer have."""

    def __new__(cls, *args: Any, v2: bool = False, **kwargs: Any) -> Any:
        if not v2:
            raise ConfigError(
                "vLLMUpdater's first version is not here",
                next_step="vLLMUpdater(vllm_engine=engine, v2=True)",
            )
        if args or kwargs.keys() - {"vllm_engine"}:
            raise TypeError("with v2=True vLLMUpdater takes vllm_engine, by its name, and nothing else")
        return vLLMUpdaterV2(**kwargs)
