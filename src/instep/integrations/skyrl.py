"""SkyRL: its own senders go on sending, and each update is committed as a whole. One line:

    generator.inference_engine.engine_init_kwargs.worker_extension_cls=instep.integrations.skyrl.WorkerExtension

SkyRL's calls stay: start, any number of updates over NCCL or CUDA IPC, finish. SkyRL itself gives
the running model up between start and finish.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from instep.dropin.calls import by_all
from instep.dropin.extension import rounds_of
from instep.dropin.staged import StagedExtension, StagedModel, StagedWorker
from instep.errors import ConfigError, PlanError
from instep.protocol import WorkerReceipt


class Updates(StagedExtension):
    """The part of the extension that is not SkyRL's."""

    @by_all
    def skyrl_start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begins an update. One that was not finished is dropped.

        Raises `ConfigError` for weights in the layout of the engine's kernels.
        """
        self._skyrl_weight_update_active = False
        if not is_checkpoint_format:
            raise ConfigError("weights in kernel format have no names of a checkpoint", next_step="send is_checkpoint_format=True")
        if getattr(self.model_runner, "drafter", None) is not None:  # type: ignore[attr-defined]
            raise ConfigError(
                "instep cannot update an engine with a draft model in SkyRL",
                next_step="leave out worker_extension_cls: SkyRL then updates both in its own way",
            )
        rounds_of(self).begin()
        self._skyrl_weight_update_active = self._skyrl_is_checkpoint_format = True

    @by_all
    def update_weights_ipc(self, update_info: dict[str, Any]) -> None:
        """Takes one chunk over CUDA IPC, with SkyRL's own code."""
        self._instep_take("update_weights_ipc", update_info)

    @by_all
    def update_weights_nccl(self, update_info: dict[str, Any]) -> None:
        """Takes tensors over NCCL, with SkyRL's own code."""
        self._instep_take("update_weights_nccl", update_info)

    @by_all
    def skyrl_finish_weight_update(self) -> WorkerReceipt:
        """Commits all that came since the start, or none of it."""
        rounds = rounds_of(self)
        if not self._instep_under_way() or not rounds.now.names:
            raise PlanError("no tensor of an update has come", next_step="call skyrl_start_weight_update, then send all weights")
        self._skyrl_weight_update_active = False
        return rounds.finish()

    def _instep_under_way(self) -> bool:
        return bool(vars(self).get("_skyrl_weight_update_active"))

    def _instep_take(self, method: str, update_info: dict[str, Any]) -> None:
        rounds = rounds_of(self)
        try:
            getattr(_stock(), method)(StagedWorker(self, StagedModel(rounds)), update_info)
        except Exception as error:
            self._skyrl_weight_update_active = False
            rounds.drop(error)
            raise


@cache
def _stock() -> Any:
    from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap

    return NewInferenceWorkerWrap


@cache
def _extension() -> type:
    return type("WorkerExtension", (Updates, _stock()), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """Makes `WorkerExtension` when vLLM asks for it: half of it is SkyRL's."""
    if name == "WorkerExtension":
        return _extension()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
