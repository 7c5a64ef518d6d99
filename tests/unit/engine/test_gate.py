"""Engines in the trainer's process generate in a thread while pushes come: no forward sees two
versions, or weights that are shapes alone while a push looks where they go (invariant 1)."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.named_weights import WEIGHTS, serves

from instep import MemoryEngine, TransformersEngine, WeightSync
from instep.dropin.answers import in_thread
from instep.engine import gate, memory, transformers
from instep.errors import EngineDirty

pytestmark = pytest.mark.usefixtures("segments")


def llama(value: float) -> Any:
    """Every weight is `value`, so that a forward tells by any of them which version it sees."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 20, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    return fill(model, value)


@torch.no_grad()
def fill(model: Any, value: float) -> Any:
    for parameter in model.parameters():
        parameter.fill_(value)
    return model


class Watched:
    """A TransformersEngine whose forward stops in its second layer, and what each layer saw."""

    def __init__(self) -> None:
        self.engine = TransformersEngine(llama(1.0))
        self.within, self.go_on = threading.Event(), threading.Event()
        self.seen: list[float] = []
        for index, layer in enumerate(self.engine.model.model.layers):
            layer.register_forward_pre_hook(lambda module, _, at=index: self.look(module, at))

    def look(self, layer: Any, index: int) -> None:
        self.seen.append(float(layer.mlp.down_proj.weight[0, 0]))
        if index == 1:
            self.within.set()
            assert self.go_on.wait(30)


WAYS: dict[str, Callable[[Any], Any]] = {
    "generate": lambda engine: engine.generate([[1, 2]], max_tokens=1, temperature=0),
    "forward": lambda engine: engine.model(torch.tensor([[1, 2]])),
    "score": lambda engine: asyncio.run(engine.score([1, 2])),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_push_waits_for_a_forward_that_runs_also_with_its_first_look_at_the_model(
    way: Any,
) -> None:
    watched, trainer = Watched(), llama(2.0)
    with WeightSync(trainer, [watched.engine], timeout=30) as sync:
        running = in_thread(lambda: way(watched.engine))
        assert watched.within.wait(30)
        push = in_thread(lambda: sync.push("v1"))
        waited = threading.Event().wait(0.3)
        assert (waited, push.done(), watched.engine.version) == (False, False, None)
        watched.go_on.set()
        running.result(30)
        push.result(30)
    assert watched.seen[:3] == [1.0, 1.0, 1.0]
    assert watched.engine.version == "v1"


class Slow(TransformersEngine):
    """Its commit stops half way."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.half, self.go_on = threading.Event(), threading.Event()
        host: Any = self.receiver.host
        load = host.load

        def stopping(tensors: Any) -> None:
            for index, one in enumerate(tensors):
                load([one])
                if index == 3 and not one[1].is_meta:
                    self.half.set()
                    assert self.go_on.wait(30)

        host.load = stopping


def test_a_forward_waits_for_a_commit_and_sees_all_of_it() -> None:
    engine, trainer = Slow(llama(1.0)), llama(2.0)
    with WeightSync(trainer, [engine], timeout=30) as sync:
        push = in_thread(lambda: sync.push("v1"))
        assert engine.half.wait(30)
        completions = in_thread(lambda: engine.generate([[1, 2]], max_tokens=2, temperature=0))
        assert not threading.Event().wait(0.2)
        assert not completions.done()
        engine.go_on.set()
        push.result(30)
        assert completions.result(30)[0].weight_version == "v1"


def test_a_forward_that_waits_hears_that_the_engine_is_dirty() -> None:
    engine = TransformersEngine(llama(1.0))
    asyncio.run(engine.pause("keep"))
    waiting = in_thread(lambda: engine.generate([[1]], max_tokens=1))
    asyncio.run(engine.refuse("half an update"))
    with pytest.raises(EngineDirty, match="half an update"):
        waiting.result(30)


def test_the_thread_that_has_paused_an_engine_does_not_wait_for_itself() -> None:
    """As where an event loop pushes and generates."""
    engine = TransformersEngine(llama(1.0))

    async def main() -> None:
        await engine.pause("keep")
        assert engine.generate([[1]], max_tokens=1)
        assert len(await engine.score([1, 2])) == 1
        await engine.resume()

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["transformers", "memory"])
def test_an_engine_that_nobody_resumes_is_not_waited_for_without_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "HELD", 0.05)
    monkeypatch.setattr(memory, "HELD", 0.05)
    if kind == "memory":
        engine: Any = MemoryEngine(WEIGHTS["start"])
        generate = lambda: engine.generate([1], 1)  # noqa: E731
    else:
        engine = TransformersEngine(llama(1.0))
        generate = lambda: engine.generate([[1]], max_tokens=1)  # noqa: E731
    asyncio.run(engine.pause("keep"))
    with pytest.raises(RuntimeError, match="was left paused for"):
        in_thread(generate).result(30)
    asyncio.run(engine.resume())
    assert generate()


def test_a_forward_within_a_forward_passes_while_a_change_waits() -> None:
    one = gate.Gate()
    changed = threading.Event()

    def change() -> None:
        with one.changing():
            changed.set()

    with one.passing("engine", 10):
        in_thread(change)
        while not one._changing:
            pass
        with one.passing("engine", 0.01):
            assert not changed.is_set()
    assert changed.wait(30)


def test_an_interrupt_within_a_forward_leaves_the_gate_open() -> None:
    engine = TransformersEngine(llama(1.0))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = engine.model.model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.model(torch.tensor([[1]]))
    hook.remove()
    with WeightSync(llama(2.0), [engine], timeout=5) as sync:
        sync.push("v1")


def test_a_copy_of_an_engines_model_is_a_model_of_its_own() -> None:
    engine = TransformersEngine(llama(1.0))
    of_its_own = fill(copy.deepcopy(engine.model), 3.0)
    names = list(inspect.signature(engine.model.forward).parameters)
    assert names == list(inspect.signature(type(engine.model).forward).parameters)[1:]
    expected = llama(3.0)(torch.tensor([[1, 2]])).logits
    asyncio.run(engine.refuse("half an update"))
    assert torch.equal(of_its_own(torch.tensor([[1, 2]])).logits, expected)
    with pytest.raises(EngineDirty):
        engine.model(torch.tensor([[1, 2]]))


def test_an_engine_in_memory_generates_through_its_first_push() -> None:
    engine, stop, errors = MemoryEngine(WEIGHTS["start"]), threading.Event(), list[Exception]()
    source = dict(WEIGHTS["a"])

    def generate() -> None:
        while not stop.is_set():
            try:
                engine.generate([1], 1)
            except Exception as error:
                errors.append(error)

    with WeightSync(source, [engine]) as sync:
        running = in_thread(generate)
        for version in ("a", "b", "c"):
            source.update(WEIGHTS[version])
            sync.push(version)
        stop.set()
        running.result(30)
    assert errors == []
    assert serves(engine) == ("c", "c")
