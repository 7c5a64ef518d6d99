"""Senders, and receivers that find them as TorchRL's page has it: all of them start at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from helpers.toys import attention
from instep import MemoryEngine
from instep.dropin.torchrl import VLLMWeightReceiver, VLLMWeightSender, VLLMWeightSyncScheme, get_model_metadata

Result = BaseException | None
OLD, NEW, LATER = map(attention, range(3))
METADATA = get_model_metadata(NEW)


def holds(engine: MemoryEngine) -> str:
    """Which of these weights an engine has, to the bit and in every worker; `mixed` for anything else."""
    named = {"old": OLD, "new": NEW, "later": LATER}
    fresh = {MemoryEngine(weights, tp=len(engine.hosts)).fingerprint(): name for name, weights in named.items()}
    return fresh.get(engine.fingerprint(), "mixed")


def joined(engine: Any, model: Any = NEW, **settings: Any) -> VLLMWeightSender:
    """A sender that was given the engine itself."""
    sender = VLLMWeightSyncScheme(**{"timeout": 20.0, "gpus_per_replica": None, **settings}).create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=engine)
    return sender


def start(
    sender: VLLMWeightSender, receivers: Sequence[VLLMWeightReceiver], metadata: Any, theirs: Any = None, **given: Any
) -> list[Result]:
    """What came of each `init_all_workers_group`, the sender's first."""
    with ThreadPoolExecutor(1 + len(receivers)) as pool:
        running = [pool.submit(sender.init_all_workers_group, metadata, **given)]
        running += [pool.submit(receiver.init_all_workers_group, theirs or metadata) for receiver in receivers]
        return [each.exception(60) for each in running]


@contextmanager
def pair(model: Any, engines: Sequence[Any], **settings: Any) -> Iterator[tuple[VLLMWeightSender, list[VLLMWeightReceiver]]]:
    """Joined over TCP."""
    scheme = VLLMWeightSyncScheme(num_replicas=len(engines), **{"timeout": 20.0, "gpus_per_replica": None, **settings})
    sender = scheme.create_sender()
    sender.register_model(model)
    receivers = [scheme.create_receiver(engine) for engine in engines]
    try:
        assert start(sender, receivers, get_model_metadata(model)) == [None] * (1 + len(engines))
        yield sender, receivers
    finally:
        sender.shutdown()
        for receiver in receivers:
            receiver.shutdown()
