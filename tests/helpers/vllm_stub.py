"""As much of vLLM as its weight transfer is made of, in the shapes of several versions, for machines without vLLM."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Generic, TypeVar

import pytest

I = TypeVar("I")  # noqa: E741
U = TypeVar("U")
BASE = "vllm.distributed.weight_transfer.base"


def install(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> ModuleType:
    """Makes `vllm.distributed.weight_transfer` of that version importable, and instep's backend is imported anew. Returns the module."""
    module = weight_transfer(version)
    for name, found in {
        "vllm": ModuleType("vllm"),
        "vllm.distributed": SimpleNamespace(weight_transfer=module),
        "vllm.distributed.weight_transfer": module,
        BASE: module,
    }.items():
        monkeypatch.setitem(sys.modules, name, found)
    for name in ("instep.engine.vllm.backend", "instep.engine.vllm.trainer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return module


def weight_transfer(version: tuple[int, int]) -> Any:
    module: Any = ModuleType("vllm.distributed.weight_transfer")
    module.WeightTransferEngine = engine_base(version)
    module.WeightTransferInitInfo = module.WeightTransferUpdateInfo = type("Info", (), {})
    module.WeightTransferEngineFactory = factory()
    if version >= (0, 26):
        module.WeightTransferTrainerFactory = factory()
        module.TrainerInitInfo, module.TrainerWeightTransferEngine = trainer_base(version)
        module.WeightSource = type("WeightSource", (), {})
    return module


def engine_base(version: tuple[int, int]) -> Any:
    class WeightTransferEngine(ABC, Generic[I, U]):
        init_info_cls: Any
        update_info_cls: Any

        def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
            self.model = model

        def parse_init_info(self, given: dict[str, Any]) -> Any:
            return parsed(self.init_info_cls, given, "init_info")

        def parse_update_info(self, given: dict[str, Any]) -> Any:
            return parsed(self.update_info_cls, given, "update_info")

        def reset_weight_update_target(self) -> None: ...

        @abstractmethod
        def init_transfer_engine(self, init_info: Any) -> None: ...

        @abstractmethod
        def receive_weights(self, update_info: Any) -> None: ...

        @abstractmethod
        def shutdown(self) -> None: ...

        if version >= (0, 25):

            @abstractmethod
            def start_weight_update(self) -> None: ...

            @abstractmethod
            def finish_weight_update(self) -> None: ...

        if version < (0, 28):

            @staticmethod
            @abstractmethod
            def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...

    return WeightTransferEngine


def trainer_base(version: tuple[int, int]) -> tuple[Any, Any]:
    """0.26 has two type parameters and passes a config; later versions ask for the backend's name in the info."""

    @dataclass
    class TrainerInitInfo:
        rank: int = field(kw_only=True)

        def __init_subclass__(cls) -> None:
            assert version < (0, 28) or cls.backend  # type: ignore[attr-defined]

        @property
        def is_sender(self) -> bool:
            return self.rank == 0

    parameters = (I, U) if version < (0, 28) else (I,)

    class TrainerWeightTransferEngine(ABC, Generic[parameters]):  # type: ignore[misc]
        @classmethod
        @abstractmethod
        def trainer_init(cls, *args: Any, **kwargs: Any) -> Any: ...

        @abstractmethod
        def send_weights(self) -> None: ...

    return TrainerInitInfo, TrainerWeightTransferEngine


def parsed(cls: Any, given: dict[str, Any], what: str) -> Any:
    try:
        return cls(**given)
    except TypeError as error:
        raise ValueError(f"Invalid {what}: {error}") from error


def factory() -> Any:
    class Factory:
        names: ClassVar[dict[str, tuple[str, str]]] = {}

        @classmethod
        def register_engine(cls, name: str, module: str, class_name: str) -> None:
            if name in cls.names:
                raise ValueError(f"{name} is already registered")
            cls.names[name] = (module, class_name)

        @classmethod
        def found(cls, name: str) -> Any:
            module, class_name = cls.names[name]
            return getattr(importlib.import_module(module), class_name)

    return Factory


class Worker:
    """vLLM's worker around a weight transfer engine: what it marks, and when it takes the mark back."""

    def __init__(self, rank: int, size: int, model: Any) -> None:
        self.rank = rank
        self.parallel_config = SimpleNamespace(world_size=size, distributed_executor_backend="mp")
        self.vllm_config = SimpleNamespace(parallel_config=self.parallel_config)
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self._weight_update_active = False
        self.steps: list[int] = []

    def load_model(self, factory: Any) -> None:
        self.weight_transfer_engine = factory.found("instep")(None, self.vllm_config, "cpu", self.model_runner.get_model())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.weight_transfer_engine.init_transfer_engine(self.weight_transfer_engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self._weight_update_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._weight_update_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self.weight_transfer_engine.update_weights(update_info)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        if not self._weight_update_active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def execute_model(self, scheduled: Any) -> None:
        self.steps.append(scheduled.total_num_scheduled_tokens)

    def execute_dummy_batch(self) -> None:
        self.steps.append(0)


class Executor:
    """Calls all workers at once and reads their replies as vLLM does: in the order of ranks, up to the first that failed."""

    def __init__(self, workers: list[Worker]) -> None:
        self.workers = workers
        self.threads = [ThreadPoolExecutor(1) for _ in workers]
        self.queues: list[deque[Any]] = [deque() for _ in workers]

    def call(self, method: str, *args: Any) -> list[Any]:
        for worker, thread, replies in zip(self.workers, self.threads, self.queues, strict=True):
            replies.append(thread.submit(self._run, getattr(worker, method), args))
        answers = []
        for replies in self.queues:
            failure, answer = replies.popleft().result(timeout=60)
            if failure is not None:
                raise RuntimeError(f"Worker failed with error '{failure}'") from failure
            answers.append(answer)
        return answers

    @staticmethod
    def _run(method: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Exception | None, Any]:
        try:
            return None, method(*args)
        except Exception as error:
            return error, None
