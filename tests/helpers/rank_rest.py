"""What else a trainer of several ranks does."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import LoraConfig
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from transformers import LlamaConfig, LlamaForCausalLM

from helpers.rank_failures import attempt, begun
from helpers.rank_models import MODELS, WRAPS, make, plain
from helpers.rank_ways import opened
from helpers.source_models import TEXT, llama, lora, saved
from instep import PairSource, WeightSync
from instep.bench.apart import Apart
from instep.bench.sharded import peak
from instep.engine.memory import MemoryEngine
from instep.transport.broadcast import publish as broadcast

RANK = int(os.environ["RANK"])


def many(count: str, dtype: str) -> dict[str, Any]:
    """Pushes of a LoRA model that is not trained in between."""
    MODELS["small"] = lambda: lora(LlamaForCausalLM(LlamaConfig(**{**TEXT, "num_hidden_layers": 1})), target_modules=["q_proj"])
    model = plain("small", dtype=getattr(torch, dtype))
    trainer = WRAPS["fsdp2"](model, plain("small", dtype=getattr(torch, dtype)))
    engine = MemoryEngine(saved(plain("small", 1, getattr(torch, dtype)))) if RANK == 0 else None
    sync = opened(trainer.module, engine, "shm")
    before = {name: param._local_tensor.clone() for name, param in trainer.module.named_parameters()}
    digests = {sync.push(f"v{number}").digest for number in range(int(count))}
    after = {name: param._local_tensor for name, param in trainer.module.named_parameters()}
    sync.close()
    return {"digests": len(digests), "same": all(torch.equal(before[name], after[name]) for name in before)}


def nothing_is_gathered(wrap: str) -> dict[str, Any]:
    """What a push through shared memory takes of the ranks: bytes that each gives, and whether they formed a group."""
    trainer = make(wrap, "llama")
    engine = MemoryEngine(saved(plain("llama", seed=1))) if RANK == 0 else None
    sync = opened(trainer.module, engine, "shm")
    receipt = sync.push("v0")
    role: Any = sync._role
    if RANK == 0:
        run = role.source.runs[False]
        given, group = run.nbytes(0, 0, run.size), role.source.meeting.group
    else:
        role.runs[False] = role._run(role.shared.tensors, role.given[0])
        given, group = role.runs[False].nbytes(RANK, 0, role.runs[False].size), role.meeting.group
    sync.close()
    return {"given": given, "grouped": group is not None, "nbytes": receipt.nbytes}


def room_for_buckets(wrap: str) -> dict[str, Any]:
    """What a broadcast in buckets of their true size takes of this rank's private memory, as the kernel counts it. The engine is another
    process. A small push before it takes what does not depend on the model: modules, tables, threads."""
    first = begun("one")[2]
    first.push("v0")
    first.close()
    shapes = {f"layers.{index}.weight": (2048, 8192) for index in range(5)}
    engine = (
        Apart({name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}, 1) if RANK == 0 else None
    )
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.Linear(8192, 2048, bias=False, dtype=torch.bfloat16, device="meta") for _ in shapes)
    dim = 1 if wrap == "columns" else 0
    fully_shard(model, shard_placement_fn=lambda _: Shard(dim))
    model.to_empty(device="cpu")
    param: Any
    for param in model.parameters():
        param._local_tensor.fill_(RANK + 1)
    torch.distributed.barrier()
    with WeightSync(model, [engine] if engine else [], transport="gloo", timeout=60.0) as sync, peak() as found:
        receipt = sync.push("v0")
    if engine:
        engine.close()
    return {"most": found[0], "bucket": broadcast.SETTINGS["gloo"].bucket, "nbytes": receipt.nbytes}


def cast() -> dict[str, Any]:
    """A trainer in float32 for an engine in bfloat16."""
    model = plain("llama", dtype=torch.float32)
    trainer = WRAPS["fsdp2"](model, plain("llama", dtype=torch.float32))
    found: dict[str, Any] = {}
    for way in ("shm", "ipc", "seven", "http"):
        engine = MemoryEngine(saved(plain("llama", seed=1))) if RANK == 0 else None
        sync = opened(trainer.module, engine, way)
        found[f"refused {way}"] = attempt(lambda sync=sync: sync.push("v0"))["kind"]
        sync.close()
        sync = opened(trainer.module, engine, way, cast=True)
        found[f"nbytes {way}"] = sync.push("v1").nbytes
        wanted = MemoryEngine(saved(trainer.gathered().to(torch.bfloat16)))
        found[f"same {way}"] = engine is None or engine.fingerprint() == wanted.fingerprint()
        sync.close()
    narrow = WRAPS["fsdp2"](plain("llama"), plain("llama"))
    for way in ("shm", "ipc", "seven", "http"):
        engine = MemoryEngine(saved(plain("llama", seed=1, dtype=torch.float32))) if RANK == 0 else None
        with opened(narrow.module, engine, way) as sync:
            found[f"widened {way}"] = sync.push("v0").nbytes
        wanted = MemoryEngine(saved(narrow.gathered().float()))
        found[f"very {way}"] = engine is None or engine.fingerprint() == wanted.fingerprint()
    found["numel"] = sum(param.numel() for param in plain("llama").parameters())
    return found


def adapter_changes() -> dict[str, Any]:
    """Another adapter is chosen between two pushes: every rank sees it."""

    def two() -> Any:
        model = lora(llama())
        model.add_adapter("other", LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))
        return model

    MODELS["two"] = two
    trainer = make("fsdp2", "two")
    engine = MemoryEngine(saved(plain("two", seed=1))) if RANK == 0 else None
    sync = opened(trainer.module, engine, "shm")
    same = []
    for version, adapter in (("v0", "default"), ("v1", "other"), ("v2", "default")):
        for model in (trainer.module, trainer.plain):
            model.set_adapter(adapter)
        sync.push(version)
        wanted = MemoryEngine(saved(trainer.gathered()))
        same.append(engine is None or engine.fingerprint() == wanted.fingerprint())
    sync.close()
    return {"same": same}


def zero_inside_gather() -> dict[str, Any]:
    """A push while the trainer itself has gathered: it neither needs nor disturbs that."""
    import deepspeed

    trainer = make("zero3", "llama")
    engine = MemoryEngine(saved(plain("llama", seed=1))) if RANK == 0 else None
    sync = opened(trainer.module, engine, "shm")
    params = list(trainer.module.parameters())
    with deepspeed.zero.GatheredParameters(params):
        sync.push("v0")
        still = all(param.numel() == param.ds_numel for param in params)
    wanted = MemoryEngine(saved(trainer.gathered()))
    sync.close()
    return {"still": still, "same": engine is None or engine.fingerprint() == wanted.fingerprint()}


def late_engine() -> dict[str, Any]:
    """An engine restarts and catches up, from shared memory, from the ranks' own and by a broadcast; every rank makes the call."""
    found: dict[str, Any] = {}
    for way in ("shm", "ipc", "one"):
        trainer = make("fsdp2", "llama")
        first = saved(plain("llama", seed=1))
        engine = MemoryEngine(first) if RANK == 0 else None
        sync = opened(trainer.module, engine, way)
        found[f"early {way}"] = attempt(sync.catch_up)["kind"]
        sync.push("v0")
        if engine:
            engine.dead = True
            sync.status()
        other = engine.restart(first) if engine else None
        found[f"caught {way}"] = attempt(lambda sync=sync, other=other: sync.catch_up(other))["error"]
        wanted = MemoryEngine(saved(trainer.gathered()))
        found[f"same {way}"] = other is None or (other.fingerprint() == wanted.fingerprint() and other.version == "v0")
        sync.close()
    return found


def refusals() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    trainer = make("fsdp2", "llama")
    engine = MemoryEngine(saved(plain("llama", seed=1))) if RANK == 0 else None
    found = {
        "canary": attempt(lambda: opened(trainer.module, engine, "shm", canary=[1, 2, 3]).close())["error"],
        "engines": attempt(lambda: opened(trainer.module, None, "shm").close())["error"],
    }
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    linear = torch.nn.Linear(4, 4, bias=False)
    linear.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]))
    sync = opened(linear, engine, "shm")
    found["partial"] = attempt(lambda: sync.push("v0"))["error"]
    sync.close()
    return found


def pairs() -> dict[str, Any]:
    """Pushes of an iterator that gathers one tensor after the other on all ranks: held, streamed, and
    refused after the first tensor."""
    trainer = make("fsdp2", "llama")
    engine = MemoryEngine(saved(plain("llama", seed=1))) if RANK == 0 else None
    sync = opened(PairSource(), engine, "shm")
    read, found = 0, dict[str, Any]()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal read
        for name, param in trainer.module.named_parameters():
            read += 1
            yield name, param.full_tensor()  # a collective

    for version in ("held", "streamed"):
        trainer.backward()
        trainer.step()
        found[version] = sync.push(version, pairs=gathered()).digest
        whole = trainer.gathered()
        found[f"{version} same"] = engine is None or engine.fingerprint() == MemoryEngine(saved(whole)).fingerprint()
    read = 0
    found["refused"] = attempt(lambda: sync.push("held", pairs=gathered()))["kind"]
    found["read"] = read == len(list(trainer.module.parameters()))
    torch.distributed.barrier()  # the store, by which ranks hear of the refusal, ends with rank 0
    sync.close()
    return found


REST: dict[str, Callable[..., dict[str, Any]]] = {
    "many": many,
    "nothing-is-gathered": nothing_is_gathered,
    "room-for-buckets": room_for_buckets,
    "cast": cast,
    "adapter-changes": adapter_changes,
    "zero-inside-gather": zero_inside_gather,
    "late-engine": late_engine,
    "refusals": refusals,
    "pairs": pairs,
}
