"""The drop-in for TorchRL with a real vLLM, by TorchRL's own usage: the oracle is a vLLM that loads the checkpoint from disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import SETTINGS, greedy, start
from models import PROMPTS, tiny
from torchrl_engine import EngineProcess

from instep.bench.subjects import stop_vllm
from instep.dropin.torchrl import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, get_model_metadata
from instep.dropin.torchrl.collective import free_port
from instep.errors import ApplyError, EngineLost, EngineTimeout, SyncError, TransportError

pytestmark = pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")

FAMILY = "qwen3"
STEPS = ("hello", "trace", "prepare")
CONFIG = {"master_port": free_port(), "token": "of-the-tests", "timeout": 120.0}
METADATA = get_model_metadata(tiny(FAMILY, 1))


@pytest.fixture(scope="class")
def llm(checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]) -> Iterator[Any]:
    # It ends with its class, and `reference` has ended its own engines when this one starts: one at a time.
    llm = start(checkpoints(FAMILY, 1))
    yield llm
    stop_vllm(llm)


@pytest.fixture(scope="class")
def process(checkpoints: Callable[[str, int], Path], reference: Callable[..., Any]) -> Iterator[EngineProcess]:
    process = EngineProcess(checkpoints(FAMILY, 1), CONFIG, METADATA)
    yield process
    process.end()


class TestInOneProcess:
    @pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
    def test_the_pages_own_sequence(self, llm: Any, reference: Callable[..., Any], strategy: Any) -> None:
        scheme = VLLMWeightSyncScheme(strategy=strategy, timeout=120.0)
        sender, receiver = scheme.create_sender(), scheme.create_receiver(llm)
        sender.register_model(model := tiny(FAMILY, 2))
        with ThreadPoolExecutor(2) as pool:  # both at once, as the page wants it
            running = [
                pool.submit(sender.init_all_workers_group, METADATA, vllm_engine=receiver),
                pool.submit(receiver.init_all_workers_group, METADATA),
            ]
            assert [each.exception(120) for each in running] == [None, None]
        assert not receiver.poll_and_apply(timeout=0.1)
        sender.update_weights()
        assert receiver.poll_and_apply(timeout=0.1)
        assert greedy(llm, PROMPTS) == reference(FAMILY, 2)
        model.load_state_dict(tiny(FAMILY, 3).state_dict())
        sender.update_weights()
        assert greedy(llm, PROMPTS) == reference(FAMILY, 3)
        sender.shutdown()
        receiver.shutdown()

    def test_the_engine_given_to_the_sender_alone(self, llm: Any, reference: Callable[..., Any]) -> None:
        """As TorchRL's own training scripts have it."""
        sender = VLLMWeightSyncScheme(timeout=120.0).create_sender()
        sender.init_all_workers_group(METADATA, vllm_engine=llm)
        sender.update_weights(tiny(FAMILY, 2).state_dict())
        assert greedy(llm, PROMPTS) == reference(FAMILY, 2)

    def test_the_double_buffer(self, llm: Any, reference: Callable[..., Any], tmp_path: Path) -> None:
        """TorchRL's reports success and loads nothing."""
        scheme = VLLMDoubleBufferSyncScheme(str(tmp_path), timeout=120.0)
        sender, receiver = scheme.create_sender(), scheme.create_receiver(llm)
        for seed in (3, 2):
            version = sender.update_weights(tiny(FAMILY, seed))
            assert receiver.poll_and_apply(0)
            assert (receiver.version, greedy(llm, PROMPTS)) == (version, reference(FAMILY, seed))
        assert not receiver.poll_and_apply(0)

    def test_weights_applied_by_hand(self, llm: Any, reference: Callable[..., Any]) -> None:
        VLLMWeightSyncScheme(timeout=120.0).create_receiver(llm).apply_weights(tiny(FAMILY, 3).state_dict())
        assert greedy(llm, PROMPTS) == reference(FAMILY, 3)


def joined(process: EngineProcess, **settings: Any) -> Any:
    """A sender that has the engine of the other process."""
    sender = VLLMWeightSyncScheme(**{**CONFIG, **settings}).create_sender()
    process.send("join")
    sender.init_all_workers_group(METADATA)
    process.answer()
    return sender


class TestOverTcp:
    """In the order of the file: the last tests end processes."""

    def test_the_pages_own_sequence(self, process: EngineProcess, reference: Callable[..., Any]) -> None:
        assert process.do("generate") != reference(FAMILY, 2)
        sender = joined(process)
        sender.register_model(model := tiny(FAMILY, 2))
        assert sender.update_weights().engines[0].read_back
        assert process.do("poll", 0.1)
        assert process.do("generate") == reference(FAMILY, 2)
        model.load_state_dict(tiny(FAMILY, 3).state_dict())
        sender.update_weights()
        assert process.do("generate") == reference(FAMILY, 3)
        assert process.do("poll", 0.1)
        assert not process.do("poll", 0.1)
        sender.shutdown()

    @pytest.mark.parametrize("point", ["hang:commit", *(pytest.param(f"hang:{one}", marks=pytest.mark.exhaustive) for one in STEPS)])
    def test_an_engine_that_hangs(self, process: EngineProcess, reference: Callable[..., Any], point: str) -> None:
        sender = joined(process)
        sender.update_weights(tiny(FAMILY, 3))
        sender.shutdown()
        process.do("inject", point, 8.0)
        impatient = joined(process, timeout=4.0)
        started = time.monotonic()
        with pytest.raises(EngineTimeout, match=point.partition(":")[2]):
            impatient.update_weights(tiny(FAMILY, 2))
        assert time.monotonic() - started < 60
        impatient.shutdown()
        time.sleep(8)  # until the engine has woken up
        sender = joined(process)
        sender.update_weights(tiny(FAMILY, 2))
        assert process.do("generate") == reference(FAMILY, 2)
        sender.shutdown()

    @pytest.mark.parametrize("point", ["step", "finish"])
    def test_a_loader_that_fails_in_the_middle(self, process: EngineProcess, reference: Callable[..., Any], point: str) -> None:
        sender = joined(process)
        process.do("inject", point, 5)
        with pytest.raises(ApplyError) as caught:
            sender.update_weights(tiny(FAMILY, 3))
        assert [state.serving for state in caught.value.engines] == ["dirty"]
        with pytest.raises(Exception, match="refuses to generate"):
            process.do("generate")
        sender.update_weights(tiny(FAMILY, 2))
        assert process.do("generate") == reference(FAMILY, 2)
        sender.shutdown()

    def test_a_trainer_that_is_killed_while_the_engine_is_paused(self, process: EngineProcess, reference: Callable[..., Any]) -> None:
        """The commit goes on without it, and so does the engine, under the new version's label."""
        sender = joined(process)
        sender.update_weights(tiny(FAMILY, 2))
        sender.shutdown()
        process.do("inject", "hang:commit", 4.0)
        process.send("join")
        environment = {**os.environ, **SETTINGS, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", KILLED, str(CONFIG)], env=environment, timeout=240, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        process.answer()
        assert process.do("poll", 60)
        assert process.do("generate") == reference(FAMILY, 3)
        sender = joined(process)
        sender.update_weights(tiny(FAMILY, 2))
        assert process.do("generate") == reference(FAMILY, 2)
        sender.shutdown()

    def test_a_receiver_without_a_trainer_and_a_trainer_without_receivers(self, process: EngineProcess) -> None:
        process.do("stop_waiting_after", 2.0)
        with pytest.raises(TransportError, match="no trainer came within 2 s"):
            process.do("join")
        with pytest.raises(TransportError, match="0 of 1 engines dialled"):
            VLLMWeightSyncScheme(**{**CONFIG, "timeout": 2.0}).create_sender().init_all_workers_group(METADATA)
        process.do("stop_waiting_after", CONFIG["timeout"])

    def test_an_engine_that_dies_in_its_commit(self, process: EngineProcess) -> None:
        sender = joined(process)
        process.do("inject", "die:commit", 0)
        started = time.monotonic()
        with pytest.raises(SyncError) as caught:
            sender.update_weights(tiny(FAMILY, 3))
        assert isinstance(caught.value, EngineLost)
        assert time.monotonic() - started < 60
        process.process.join(60)
        assert process.process.exitcode == 1
        sender.shutdown()


KILLED = """
import os, signal, sys, threading
from models import tiny
from instep.dropin.torchrl import VLLMWeightSyncScheme, get_model_metadata

def sink(event):
    if event.phase == "commit":
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGKILL)).start()

sender = VLLMWeightSyncScheme(**eval(sys.argv[1]), sinks=[sink]).create_sender()
sender.init_all_workers_group(get_model_metadata(tiny("qwen3", 1)))
sender.update_weights(tiny("qwen3", 3))
"""
