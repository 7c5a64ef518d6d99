"""A worker of the engine in memory, which stores weights as engines do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import xxhash
from torch import nn
from torch.nn import functional as F

from instep.digest import MASK, as_bytes
from instep.errors import PlanError
from instep.receiver import MERGED, Fill, Host, PlainHost
from instep.receiver.adapter import AdapterHost, register, slot

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
PARTS = {"k_proj": 1, "v_proj": 2, "up_proj": 1}  # order within a fused layer; the first part is 0
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
PAD = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker's part of one checkpoint tensor is: `param[index]`, after the tensor was
    cut along `axis`."""

    param: str
    index: tuple[int | slice, ...]
    axis: int | None


class MemoryHost(PlainHost):
    """One worker: a module laid out as engines lay it out, and a loader that takes checkpoint
    names."""

    software = "the engine in memory"

    def __init__(self, checkpoint: Mapping[str, torch.Tensor], rank: int, tp: int) -> None:
        self.rank, self.world_size, self.device = rank, tp, "cpu"
        self.shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in checkpoint.items()}
        self.model = nn.Module()
        self.adapters: dict[int, Mapping[str, torch.Tensor]] = {}
        self.fail_at: int | None = None
        """The tensor at which the loader fails, as often as it gets there."""
        self.failed = False
        self.places: dict[str, Place] = {}
        rows: dict[str, int] = defaultdict(int)
        shards = {name: self._shard(name, tensor) for name, tensor in checkpoint.items()}
        params = _params(checkpoint)
        for name in sorted(checkpoint, key=lambda name: (params[name], PARTS.get(_layer(name), 0))):
            self.places[name] = Place(params[name], self._index(name, params[name], shards[name], rows), _axis(name))
        experts: dict[str, int] = defaultdict(int)
        for name in shards:
            if expert := EXPERT.fullmatch(name):
                experts[params[name]] = max(experts[params[name]], 1 + int(expert[2]))
        for param, shard in {params[name]: shard for name, shard in shards.items()}.items():
            if param in experts:
                shape = (experts[param], shard.shape[0] * (2 if param.endswith("w13_weight") else 1), *shard.shape[1:])
            else:
                count = -(-rows[param] // PAD) * PAD if param.endswith(VOCABULARY) else rows[param]
                shape = (count, *shard.shape[1:]) if shard.ndim else ()
            register(self.model, param, nn.Parameter(torch.zeros(shape, dtype=shard.dtype), requires_grad=False))
        if "lm_head.weight" not in checkpoint and "model.embed_tokens.weight" in checkpoint:
            register(self.model, "lm_head.weight", self.model.get_parameter("model.embed_tokens.weight"))

    def _index(self, name: str, param: str, shard: torch.Tensor, rows: dict[str, int]) -> tuple[int | slice, ...]:
        if expert := EXPERT.fullmatch(name):
            half = shard.shape[0]
            return (
                (int(expert[2]),)
                if expert[3] == "down"
                else (int(expert[2]), slice(half * (expert[3] == "up"), half * (1 + (expert[3] == "up"))))
            )
        if not shard.ndim:
            return ()
        start = rows[param]
        rows[param] += shard.shape[0]
        return (slice(start, start + shard.shape[0]),)

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        axis = _axis(name)
        if axis is None or self.world_size == 1 or tensor.ndim <= axis:
            return tensor
        size = -(-tensor.shape[axis] // self.world_size)
        start = min(self.rank * size, tensor.shape[axis])
        return tensor.narrow(axis, start, min(size, tensor.shape[axis] - start))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for count, (name, tensor) in enumerate(tensors):
            if self.fail_at == count and not tensor.is_meta:
                self.failed = True
                raise RuntimeError(f"told to fail at tensor {count}, {name}")
            if name not in self.places:
                raise ValueError(f"there is no module or parameter named {name!r}")
            place = self.places[name]
            target, shard = self.model.get_parameter(place.param).detach()[place.index], self._shard(name, tensor)
            if target.shape != shard.shape:
                raise ValueError(f"cannot load {list(shard.shape)} into {list(target.shape)} of {place.param}")
            target.copy_(shard)

    @contextmanager
    def reload(self) -> Iterator[None]:
        """Loads in place. The values derived from weights are computed at the end, so a session
        cut short leaves them stale."""
        yield
        for module in self._scaled():
            sizes = module.get_parameter("weight").float().abs().flatten()
            module.scale = F.pad(sizes, (0, 1)).amax()  # exact on every device, unlike a mean

    def _scaled(self) -> list[nn.Module]:
        """Returns the modules that hold a value derived from their weight."""
        return [module for name, module in self.model.named_modules() if name.endswith("qkv_proj") and "weight" in module._parameters]

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

    def fresh(self, fill: int) -> MemoryFresh:  # noqa: ARG002
        return MemoryFresh(MemoryHost(self.shapes, self.rank, self.world_size))

    def fingerprint(self, adapter: int = 0) -> int:
        derived = [module.scale for module in self._scaled()]
        tensors = [*self.model.parameters(), *derived, *(self.adapters[adapter].values() if adapter else ())]
        total: int = sum(xxhash.xxh3_64_intdigest(as_bytes(tensor).data, seed=index) for index, tensor in enumerate(tensors))
        return total & MASK


class MemoryFresh:
    """A second worker, loaded all at once. All its tensors can be read."""

    def __init__(self, host: MemoryHost) -> None:
        self.host, self.model = host, host.model

    def units(self) -> list[dict[str, str]]:
        return [{name: name for name, _ in self.model.named_modules()}]

    @contextmanager
    def loading(self, unit: Mapping[str, str], tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:  # noqa: ARG002
        with self.host.reload():
            self.host.load(tensors)
        yield

    def computes(self, layer: str) -> torch.Tensor:
        raise NotImplementedError

    def rebuild(self, layer: str, fill: Fill) -> None:
        raise NotImplementedError

    def refresh(self) -> None:
        pass


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


def _params(names: Iterable[str]) -> dict[str, str]:
    """Returns the engine's parameter for each checkpoint tensor, whatever its name is."""
    wanted = {name: _param(name) for name in names}
    modules = {param[:at] for param in wanted.values() for at, letter in enumerate(param) if letter == "."}
    found: dict[str, str] = {}
    for param in dict.fromkeys(wanted.values()):
        found[param] = param
        while found[param] in modules or (found[param] != param and found[param] in wanted.values()):
            found[param] += "~"
    return {name: found[param] for name, param in wanted.items()}


def _param(name: str) -> str:
    """Returns the engine's parameter for a checkpoint tensor, if no module has that name."""
    if expert := EXPERT.fullmatch(name):
        return slot(f"{expert[1]}.{'w2' if expert[3] == 'down' else 'w13'}_weight")
    *path, layer, leaf = ["", *name.split(".")]
    if layer in FUSED and leaf in ("weight", "bias"):
        return slot(".".join([*path, FUSED[layer], leaf][1:]))
    return slot(name) if leaf != "scale" else slot(name) + "~"  # `scale` is derived


def _layer(name: str) -> str:
    """Returns `q_proj` for `model.layers.0.self_attn.q_proj.weight`."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _axis(name: str) -> int | None:
    """Returns the axis along which tensor parallelism cuts a tensor; None if every worker has
    the whole tensor."""
    if name.endswith(ROW_PARALLEL):
        return 1
    return 0 if _layer(name) in FUSED or name.endswith(VOCABULARY) else None
