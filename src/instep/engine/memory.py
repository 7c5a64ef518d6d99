"""An engine in memory, for tests of your own training loop: no GPU, no vLLM, milliseconds.

    engine = MemoryEngine(model.state_dict(), tp=2)
    sync = WeightSync(source=model, engines=[engine])
    engine.inject("commit", "error")          # the next push fails there
    engine.generate([1, 2, 3], max_tokens=4)  # tokens that depend on every weight

It stores weights as engines do: q, k and v fused, gate and up fused, experts packed, vocabulary padded, the head tied where the checkpoint
has none, tensor-parallel slices, a tensor derived from weights, a prefix cache. Its workers run the same receiver as vLLM's.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
import xxhash
from torch import nn

from instep.digest import MASK, as_bytes, mix
from instep.engine import CachePolicy
from instep.errors import ConfigError, EngineDirty, EngineLost, PlanError
from instep.protocol import Manifest, Method
from instep.receiver import MERGED, Host, NeverRebuilds
from instep.receiver.adapter import AdapterHost, register
from instep.receiver.state import Receiver
from instep.receiver.trace import shape_only
from instep.transport import Me, open_location

Point = Literal["hello", "trace", "prepare", "ready", "tensor", "commit", "digest", "label", "pause", "resume", "abort"]
Kind = Literal["error", "hang", "die"]

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
PARTS = {"k_proj": 1, "v_proj": 2, "up_proj": 1}  # order within a fused layer; the first part is 0
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
PAD = 8
HELD = 60.0
"""Seconds for which `generate` waits for a push to end."""


class MemoryEngine:
    """
    checkpoint: names and tensors as `save_pretrained` writes them; the shapes the engine is built from, and its first weights.
    tp: tensor-parallel workers. Where they do not divide a size the last ones have less.

    Raises `ConfigError` for a checkpoint that is no mapping.
    """

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], *, tp: int = 1, name: str = "memory") -> None:
        if not isinstance(checkpoint, Mapping):
            raise ConfigError(
                f"a MemoryEngine is made of names and tensors, not of a {type(checkpoint).__name__}", next_step="model.state_dict()"
            )
        self.name = name
        self.hosts = [MemoryHost(checkpoint, rank, tp) for rank in range(tp)]
        for host in self.hosts:
            with host.reload():
                host.load(checkpoint.items())
        self.receivers = [Receiver(host, self._open) for host in self.hosts]
        self.threads = ThreadPoolExecutor(max_workers=tp)  # workers run side by side, as processes do
        self.version: str | None = None
        self.paused = False
        self.turn = threading.Condition()  # of tokens and of pushes
        self.dead = False
        self.refusal: str | None = None
        self.prefix_cache: dict[tuple[int, ...], int] = {}
        self.faults: dict[str, Kind] = {}
        self.calls: list[str] = []

    def inject(self, point: Point, kind: Kind = "error", *, tensor: int = 0) -> None:
        """The next call that reaches `point` fails, hangs until its deadline, or takes the process down.

        `tensor` is the index of the tensor at which the last worker's loader fails, for the point "tensor". Raises `ConfigError` for a
        point or a kind that is not there.
        """
        for given, known in ((point, get_args(Point)), (kind, get_args(Kind))):
            if given not in known:
                raise ConfigError(f"cannot inject {given!r}; known: {', '.join(known)}")
        if point == "tensor":
            self.hosts[-1].fail_at = tensor
        else:
            self.faults[point] = kind

    def restart(self, checkpoint: Mapping[str, torch.Tensor]) -> MemoryEngine:
        """A new process of the same engine, with the weights that it starts from."""
        return MemoryEngine(checkpoint, tp=len(self.hosts), name=self.name)

    def generate(self, prompt: Sequence[int], max_tokens: int, *, adapter: int = 0) -> list[int]:
        """Tokens below 1000 that follow from every weight and the prompt. A prompt seen before is answered from the prefix cache.

        adapter: the LoRA adapter to use, by its number.

        Waits while it is paused, as an engine holds its requests back. Raises `EngineDirty` while a push has left it with parts of two
        versions, `RuntimeError` where nobody has it go on within 60 s.
        """
        with self.turn:
            if not self.turn.wait_for(lambda: self.refusal or not self.paused, HELD):
                raise RuntimeError(f"{self.name} was left paused for {HELD:g} s")
            if self.refusal:
                raise EngineDirty(f"{self.name} refuses to generate: {self.refusal}")
            weights = self.prefix_cache.setdefault((-adapter, *prompt) if adapter else tuple(prompt), self.fingerprint(adapter))
        state = mix(np.array([weights], np.uint64) + np.uint64(hash(tuple(prompt)) & MASK))
        tokens = []
        for _ in range(max_tokens):
            state = mix(state)
            tokens.append(int(state[0] % np.uint64(1000)))
        return tokens

    def fingerprint(self, adapter: int = 0) -> int:
        """A number that depends on every bit of every weight and derived tensor of every worker, and of an adapter's."""
        return sum(host.fingerprint(adapter) for host in self.hosts) & MASK

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        await self._point(method)
        loop = asyncio.get_running_loop()
        calls = (loop.run_in_executor(self.threads, receiver.handle, method, payload) for receiver in self.receivers)
        return list(await asyncio.gather(*calls))

    async def pause(self, caches: CachePolicy) -> None:
        await self._point("pause")
        with self.turn:
            self.paused = True
            if caches == "reset":
                self.prefix_cache.clear()

    async def resume(self) -> None:
        await self._point("resume")
        with self.turn:
            self.paused = False
            self.turn.notify_all()

    async def label(self, version: str) -> None:
        await self._point("label")
        self.version = version

    async def score(self, token_ids: list[int]) -> list[float]:
        """Numbers that stand for log-probabilities: they depend on the weights, and on nothing that a trainer could compute."""
        return [-(1 + (self.fingerprint() >> shift % 48) % 1000 / 1000) for shift in token_ids[1:]]

    async def refuse(self, reason: str | None) -> None:
        with self.turn:
            self.refusal = reason
            self.turn.notify_all()

    async def _point(self, point: str) -> None:
        self.calls.append(point)
        if self.dead:
            raise EngineLost(f"{self.name} is dead")
        kind = self.faults.pop(point, None)
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "die":
            self.dead = True
            raise EngineLost(f"{self.name} died in {point}")
        if kind == "error":
            raise EngineLost(f"{self.name} was told to fail at {point}")

    def _open(self, manifest: Manifest, me: Me) -> Any:
        reader = open_location(manifest, me)
        if self.faults.pop("digest", None):
            reader.bytes = reader.bytes ^ np.uint8(1)
        return reader


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker keeps its part of one checkpoint tensor: `param[index]`, after the tensor was cut along `axis`."""

    param: str
    index: tuple[int | slice, ...]
    axis: int | None


class MemoryHost(NeverRebuilds):
    """One worker: a module laid out as engines lay it out, and a loader that takes checkpoint names."""

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], rank: int, tp: int) -> None:
        self.rank, self.world_size, self.device = rank, tp, "cpu"
        self.model = nn.Module()
        self.adapters: dict[int, Mapping[str, torch.Tensor]] = {}
        self.fail_at: int | None = None
        self.places: dict[str, Place] = {}
        rows: dict[str, int] = defaultdict(int)
        shards = {name: self._shard(name, tensor) for name, tensor in checkpoint.items()}
        for name in sorted(checkpoint, key=lambda name: (_param(name), PARTS.get(_layer(name), 0))):
            self.places[name] = Place(_param(name), self._index(name, shards[name], rows), _axis(name))
        for name, shard in shards.items():
            param = _param(name)
            if EXPERT.fullmatch(name):
                experts = 1 + max(int(EXPERT.fullmatch(other)[2]) for other in shards if _param(other) == param)  # type: ignore[index]
                shape = (experts, shard.shape[0] * (2 if param.endswith("w13_weight") else 1), *shard.shape[1:])
            else:
                count = -(-rows[param] // PAD) * PAD if param.endswith(VOCABULARY) else rows[param]
                shape = (count, *shard.shape[1:]) if shard.ndim else ()
            register(self.model, param, nn.Parameter(torch.zeros(shape, dtype=shard.dtype), requires_grad=False))
        if "lm_head.weight" not in checkpoint and "model.embed_tokens.weight" in checkpoint:
            register(self.model, "lm_head.weight", self.model.get_parameter("model.embed_tokens.weight"))

    def _index(self, name: str, shard: torch.Tensor, rows: dict[str, int]) -> tuple[int | slice, ...]:
        if expert := EXPERT.fullmatch(name):
            half = shard.shape[0]
            return (
                (int(expert[2]),)
                if expert[3] == "down"
                else (int(expert[2]), slice(half * (expert[3] == "up"), half * (1 + (expert[3] == "up"))))
            )
        if not shard.ndim:
            return ()
        start = rows[_param(name)]
        rows[_param(name)] += shard.shape[0]
        return (slice(start, start + shard.shape[0]),)

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = _axis(name)
        if axis is None or self.world_size == 1:
            return tensor
        size = -(-tensor.shape[axis] // self.world_size)
        start = min(self.rank * size, tensor.shape[axis])
        return tensor.narrow(axis, start, min(size, tensor.shape[axis] - start))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for count, (name, tensor) in enumerate(tensors):
            if self.fail_at == count and not tensor.is_meta:
                self.fail_at = None
                raise RuntimeError(f"told to fail at tensor {count}, {name}")
            if name not in self.places:
                raise ValueError(f"there is no module or parameter named {name!r}")
            place = self.places[name]
            target, shard = self.model.get_parameter(place.param).detach()[place.index], self._shard(name, tensor)
            if target.shape != shard.shape:
                raise ValueError(f"cannot load {list(shard.shape)} into {list(target.shape)} of {place.param}")
            target.copy_(shard)

    def checkpoint_layout(self) -> AbstractContextManager[None]:
        return shape_only(self.model)

    @contextmanager
    def reload(self) -> Iterator[None]:
        """Loads in place; what is derived from weights is computed at the end, so a session cut short leaves it stale."""
        yield
        for name, module in self.model.named_modules():
            if name.endswith("qkv_proj"):
                module.scale = module.get_parameter("weight").float().abs().mean()

    def spare(self, parameter: str) -> tuple[int, str | None]:
        if not parameter.endswith(VOCABULARY):
            return 0, None
        tensor = self.model.get_parameter(parameter)
        names = [name for name, place in self.places.items() if place.param == parameter]
        filled = sum(
            place.index[0].stop - place.index[0].start for name in names if isinstance((place := self.places[name]).index[0], slice)
        )
        return (len(tensor) - filled) * tensor.shape[1], "padded vocabulary rows have no weights"

    def adapter(self, number: int) -> Host:
        return MemoryAdapter(self, number)

    def fingerprint(self, adapter: int = 0) -> int:
        derived = [module.scale for name, module in self.model.named_modules() if name.endswith("qkv_proj")]
        tensors = [*self.model.parameters(), *derived, *(self.adapters[adapter].values() if adapter else ())]
        total: int = sum(xxhash.xxh3_64_intdigest(as_bytes(tensor).data, seed=index) for index, tensor in enumerate(tensors))
        return total & MASK


class MemoryAdapter(AdapterHost):
    """A LoRA adapter for the layers that the model has."""

    def __init__(self, host: MemoryHost, number: int) -> None:
        super().__init__(host.rank, host.world_size, host.device)
        self.host, self.number = host, number

    def check(self, tensors: Mapping[str, torch.Tensor], config: str) -> None:  # noqa: ARG002
        for name in tensors:
            layer = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
            if f"{layer}.weight" not in self.host.places:
                raise PlanError(f"the engine has no layer for {name}", tensor=name, next_step=MERGED)

    def install(self, tensors: Mapping[str, torch.Tensor], config: str) -> None:  # noqa: ARG002
        self.host.adapters[self.number] = tensors


def _param(name: str) -> str:
    """The engine's parameter for a checkpoint tensor."""
    if expert := EXPERT.fullmatch(name):
        return f"{expert[1]}.{'w2' if expert[3] == 'down' else 'w13'}_weight"
    prefix, _, leaf = name.rpartition(".")
    parent, _, layer = prefix.rpartition(".")
    return f"{parent}.{FUSED[layer]}.{leaf}" if layer in FUSED else name


def _layer(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj.weight`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _axis(name: str) -> int | None:
    """The axis along which tensor parallelism cuts a tensor; None for one that every worker has whole."""
    if name.endswith(ROW_PARALLEL):
        return 1
    return 0 if _layer(name) in FUSED or name.endswith(VOCABULARY) else None
