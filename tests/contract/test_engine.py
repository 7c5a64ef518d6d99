"""What every engine owes a push. The oracle is a fresh engine, built from the checkpoint that was pushed: the same bits.

`memory` stores weights as engines do (fused, sliced, packed, padded, tied), `transformers` as they are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.toys import checkpoint, differing

from instep import MemoryEngine, TransformersEngine, WeightSync
from instep.engine import Engine, connect
from instep.errors import EngineDirty
from instep.protocol import CommitRequest, Reply, Request, decode, encode, raw


@dataclass
class Subject:
    """How to make sources and engines of one kind from a seed, and how to look at them."""

    source: Callable[[int], Any]
    fresh: Callable[[Any], Any]
    models: Callable[[Any], list[torch.nn.Module]]
    generate: Callable[[Any], Any]


def memory(tp: int, **kind: bool) -> Subject:
    return Subject(
        source=lambda seed: checkpoint(seed, layers=1, **kind),
        fresh=lambda source: MemoryEngine(source, tp=tp),
        models=lambda engine: [host.model for host in engine.hosts],
        generate=lambda engine: engine.generate([1, 2, 3], max_tokens=6),
    )


def tiny(family: str, seed: int, *, tied: bool) -> Any:
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": tied, "max_position_embeddings": 64,
    }  # fmt: skip
    if family == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "decoder_sparse_step": 1}
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.to(torch.bfloat16)


def embedded(family: str, *, tied: bool) -> Subject:
    import copy

    return Subject(
        source=lambda seed: tiny(family, seed, tied=tied),
        fresh=lambda model: TransformersEngine(copy.deepcopy(model)),
        models=lambda engine: [engine.model],
        generate=lambda engine: engine.generate([[1, 2, 3], [4]], max_tokens=6, temperature=0),
    )


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "memory": lambda: memory(1),
    "memory-tp2": lambda: memory(2),
    "memory-tied-tp2": lambda: memory(2, tied=True),
    "memory-moe-tp2": lambda: memory(2, moe=True),
    "qwen3-tied": lambda: embedded("Qwen3", tied=True),
    "llama": lambda: embedded("Llama", tied=False),
    "qwen3-moe": lambda: embedded("Qwen3Moe", tied=False),
}


@pytest.fixture(params=SUBJECTS)
def subject(request: pytest.FixtureRequest, segments: Path) -> Iterator[Subject]:
    yield SUBJECTS[request.param]()
    assert list(segments.iterdir()) == []


def same(subject: Subject, engine: Any, source: Any) -> bool:
    """Whether an engine is what a fresh one would be, bit for bit, and generates the same."""
    fresh = subject.fresh(source)
    for expected, found in zip(subject.models(fresh), subject.models(engine), strict=True):
        assert differing(expected, found) == []
    return strip(subject.generate(fresh)) == strip(subject.generate(engine))


def strip(generated: Any) -> Any:
    """Without the version: a fresh engine has none."""
    return [(one.token_ids, one.logprobs) if hasattr(one, "token_ids") else one for one in generated]


def test_it_is_an_engine(subject: Subject) -> None:
    engine = subject.fresh(subject.source(0))
    assert isinstance(engine, Engine)
    assert connect(engine) is engine


def test_pushes_equal_a_fresh_start(subject: Subject) -> None:
    """A push, another, and the first weights again under a new label."""
    first, second = subject.source(1), subject.source(2)
    engine = subject.fresh(subject.source(0))
    before = strip(subject.generate(engine))
    with WeightSync(first, [engine]) as sync:
        receipt = sync.push("v1")
        assert same(subject, engine, first)
        assert strip(subject.generate(engine)) != before
    with WeightSync(second, [engine]) as sync:
        assert sync.push("v2").digest != receipt.digest
        assert same(subject, engine, second)
    with WeightSync(first, [engine]) as sync:
        again = sync.push("v3")
        assert (again.digest, engine.version) == (receipt.digest, "v3")
        assert same(subject, engine, first)


def test_addresses_stay(subject: Subject) -> None:
    """Invariant 8, through the reload session (first push) and the direct copies (later ones)."""
    engine = subject.fresh(subject.source(0))

    def addresses() -> list[tuple[str, int]]:
        return [(name, parameter.data_ptr()) for model in subject.models(engine) for name, parameter in model.named_parameters()]

    before = addresses()
    for step in range(1, 4):
        with WeightSync(subject.source(step), [engine]) as sync:
            sync.push(f"v{step}")
            assert addresses() == before


def test_an_identity_push_changes_nothing(subject: Subject) -> None:
    source = subject.source(0)
    engine = subject.fresh(source)
    before = strip(subject.generate(engine))
    with WeightSync(source, [engine]) as sync:
        receipt = sync.push("v1")
    assert strip(subject.generate(engine)) == before
    assert receipt.engines[0].direct  # promoted by weights that are nobody's
    assert same(subject, engine, source)


def test_later_pushes_copy_straight_and_read_back(subject: Subject) -> None:
    """The first push proves which layers take plain copies, also where it changes nothing."""
    source = subject.source(0)
    engine = subject.fresh(source)
    tensors = source.values() if isinstance(source, dict) else list(source.parameters())
    with WeightSync(source, [engine]) as sync:
        for step in range(3):
            receipt = sync.push(f"v{step}")
            assert same(subject, engine, source)
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(0.5)
    found = receipt.engines[0]
    assert found.direct
    assert found.read_back > 0
    assert all("derived from" in reason for reason in found.reload.values())


async def _call(engine: Any, method: str, body: Any) -> list[Reply]:
    return [decode(data, Reply) for data in await engine.call(method, encode(Request(41, "contract", raw(body))))]


def run(coroutine: Any) -> Any:
    import asyncio

    return asyncio.run(coroutine)


def test_workers_answer_in_step_and_never_raise(subject: Subject) -> None:
    """Invariant 7."""
    engine = subject.fresh(subject.source(0))
    for method, body in (("hello", None), ("commit", CommitRequest("v1")), ("trace", "nonsense"), ("unheard of", None)):
        replies = run(_call(engine, method, body))
        assert [reply.rank for reply in replies] == list(range(len(subject.models(engine))))
        assert {(reply.seq, reply.state) for reply in replies} == {(41, "serving")}
        assert all((reply.fault is None) == (method == "hello") for reply in replies)


def test_it_refuses_while_it_is_told_to(subject: Subject) -> None:
    """Invariant 2."""
    engine = subject.fresh(subject.source(0))
    before = strip(subject.generate(engine))
    run(engine.refuse("half an update"))
    with pytest.raises(EngineDirty, match="half an update") as caught:
        subject.generate(engine)
    assert "next:" in str(caught.value)
    run(engine.refuse(None))
    assert strip(subject.generate(engine)) == before


def test_pause_and_resume_leave_it_as_it_was(subject: Subject) -> None:
    engine = subject.fresh(subject.source(0))
    before = strip(subject.generate(engine))
    for caches in ("keep", "reset"):
        run(engine.pause(caches))
        run(engine.resume())
        run(engine.resume())
        assert strip(subject.generate(engine)) == before
    run(engine.label("v7"))
    assert engine.version == "v7"


def test_scores_are_one_for_each_token_but_the_first(subject: Subject) -> None:
    scores = run(subject.fresh(subject.source(0)).score([1, 2, 3, 4]))
    assert len(scores) == 3
    assert all(score < 0 for score in scores)
