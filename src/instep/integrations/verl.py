"""verl: its own senders go on sending, and each update is committed as a whole. One line:

    actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=instep.integrations.verl.WorkerExtension

All of verl's ways of sending end in the workers' `update_weights_from_ipc`, where buckets of
tensors arrive. verl itself loads each bucket into the running model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from instep.dropin.calls import by_all
from instep.dropin.communicator import DEADLINE
from instep.dropin.staged import StagedExtension, StagedModel
from instep.errors import ConfigError, TransportError
from instep.extras import needed_by
from instep.protocol import WorkerReceipt
from instep.source.pairs import Pair


class Updates(StagedExtension):
    """The part of the extension that is not verl's."""

    @by_all
    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> WorkerReceipt | None:
        """Receives one update from verl's sender and commits it. The sender is served to its end
        also where the update is refused.

        peft_config, base_sync_done: with both, the update is a LoRA adapter and goes verl's own way
        into vLLM's adapters.
        """
        if peft_config and base_sync_done:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)  # type: ignore[misc]
            return None

        def receive(model: StagedModel) -> None:
            def bucket(weights: list[Pair], is_last: bool) -> None:  # noqa: ARG001
                model.load_weights(_named(self, weights) if peft_config else weights)

            _receive(self, bucket, use_shm)

        return self.instep_stage(receive, _unfit(self))


def _receive(worker: Any, bucket: Any, use_shm: bool) -> None:
    """Runs verl's receiver. Raises `TransportError` where its sender is silent for too long."""
    with needed_by("verl"):
        import zmq
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

    class Receiver(BucketedWeightReceiver):  # type: ignore[misc]
        def _init_socket(self) -> None:
            super()._init_socket()
            self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * DEADLINE))

    try:
        Receiver(worker._get_zmq_handle(), worker.device, use_shm).receive_weights(on_bucket_received=bucket)
    except zmq.Again as error:
        raise TransportError(f"verl's sender was silent for {DEADLINE:g} s", next_step="send all weights again") from error


def _named(worker: Any, weights: list[Pair]) -> list[Pair]:
    """The weights under an adapter, by the names that vLLM's layers with adapters have."""
    from verl.utils.vllm import resolve_weight_name

    model = worker.model_runner.get_model()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)} | {name for name, _ in model.named_buffers()}
    return [(resolve_weight_name(model, name, names), tensor) for name, tensor in weights]


def _unfit(worker: Any) -> ConfigError | None:
    """Why updates of this engine cannot be staged, or None."""
    from verl.utils.vllm.vllm_quant_utils import is_quantized_model

    quantised = worker._is_qat_model or worker._is_modelopt_qat or is_quantized_model(worker.model_runner.vllm_config)
    what = "a quantised engine" if quantised else "a draft model that is trained too" if worker._use_mtp_drafter_weight_sync() else None
    if what is None:
        return None
    return ConfigError(
        f"instep cannot update {what} in verl", next_step="leave out worker_extension_cls: verl then updates it in its own way"
    )


@cache
def _extension() -> type:
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

    return type("WorkerExtension", (Updates, vLLMColocateWorkerExtension), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """Makes `WorkerExtension` when vLLM asks for it: half of it is verl's."""
    if name == "WorkerExtension":
        return _extension()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
