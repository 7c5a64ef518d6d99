"""Compares methods to copy all regions of one plan within one process: from the trainer's
tensors into fused layers like an engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from instep.bench.results import Copy
from instep.bench.trainer import timed_runs
from instep.digest_cuda import SPAN, TILE, WARPS, Table, in_one
from instep.engine.memory_host import MemoryHost
from instep.plan.region import view
from instep.plan.rows import Rows, contiguous
from instep.protocol import Route, TensorMeta, dtype_name
from instep.receiver.copies import Copies, live_tensors
from instep.receiver.pull import Puller
from instep.receiver.regions import holds
from instep.receiver.trace import trace

Tensors = Mapping[str, torch.Tensor]
WARM_UPS = 3


class NotCopied(Exception):
    """A method left a region uncopied."""


@dataclass(frozen=True)
class Plan:
    """Routes from tensors to the live parameters of one worker on `device`."""

    routes: list[Route]
    metas: dict[str, TensorMeta]
    tensors: Tensors
    model: torch.nn.Module
    live: Tensors
    device: torch.device

    def pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns views of all targets, and of their sources."""
        moves = [(route, route.tensor, route.source) for route in self.routes]
        targets = [view(self.live[route.param], route.target) for route, _, _ in moves]
        return targets, [view(self.tensors[name], source) for _, name, source in moves if name is not None and source is not None]


def make_plan(tensors: Tensors, device: torch.device) -> Plan:
    """Makes a plan into fused layers of zeros on `device`, laid out as engines lay them out."""
    with device:
        host = MemoryHost(tensors, 0, 1)
    metas = [TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    routes = [route for route in trace(host, metas).routes if route.tensor is not None]
    return Plan(routes, {meta.name: meta for meta in metas}, tensors, host.model, dict(live_tensors(host.model)), device)


def copies(tensors: Tensors, device: torch.device, repeats: int) -> list[Copy]:
    """Measures every method. A method that fails gives an entry with its error."""
    plan = make_plan(tensors, device)
    return [measure(name, method, plan, repeats) for name, method in METHODS.items() if device.type == "cuda" or method not in ON_GPUS]


def digest_alone(tensors: Tensors, device: torch.device, repeats: int) -> Copy:
    """Measures the sums that a trainer takes of its tensors on `device` for each push. Nothing
    is moved."""
    metas = [TensorMeta(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
    table = Table([in_one(tensors[meta.name].data_ptr(), meta, slot) for slot, meta in enumerate(metas)], len(metas), device, copy=False)

    def sums() -> None:
        table.launch()
        table.result()

    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Copy(method="digest alone", to=str(device), regions=len(metas), nbytes=nbytes, seconds=timed_runs(sums, WARM_UPS, repeats))


def measure(name: str, method: Method, plan: Plan, repeats: int) -> Copy:
    nbytes = sum(view(plan.live[route.param], route.target).nbytes for route in plan.routes)
    found = partial(Copy, method=name, to=str(plan.device), regions=len(plan.routes), nbytes=nbytes)
    try:
        copy = method(plan)
        torch._foreach_zero_(list({tensor.data_ptr(): tensor for tensor in plan.live.values()}.values()))
        seconds = timed_runs(copy, WARM_UPS, repeats)
        wrong = [route.param for route in plan.routes if not holds(plan.live[route.param], route, plan.tensors)]
        if wrong:
            raise NotCopied(f"{wrong[0]} does not hold the tensor's bytes afterwards")
    except Exception as error:
        return found(error=f"{type(error).__name__}: {error}")
    return found(seconds=seconds)


def loop(plan: Plan) -> Callable[[], object]:
    pairs = list(zip(*plan.pairs(), strict=True))

    def copy() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return copy


def foreach(plan: Plan) -> Callable[[], object]:
    targets, sources = plan.pairs()
    return lambda: torch._foreach_copy_(targets, sources, non_blocking=True)


def kernel(plan: Plan) -> Callable[[], object]:
    """Returns the kernel of a push without its sums."""
    from instep.bench.kernel import copy

    table = _puller(plan).table

    def launch() -> None:
        with torch.cuda.device(plan.device):
            copy[(table.programs,)](table.runs, table.of_program, TILE=TILE, SPAN=SPAN, num_warps=WARPS)

    return launch


def kernel_with_digest(plan: Plan) -> Callable[[], object]:
    """Returns what a push over CUDA IPC does in the engine's worker, the sums brought to the
    host."""
    puller, reader = _puller(plan), _OneProcess(plan)

    def pull() -> object:
        puller.launch(reader)  # type: ignore[arg-type]
        puller.wait()
        return puller.sums()

    return pull


def _puller(plan: Plan) -> Puller:
    copies = Copies(plan.model, frozenset(), plan.routes, plan.routes)
    puller = Puller(copies, plan.metas, _OneProcess(plan), ())  # type: ignore[arg-type]
    if odd := puller.moves.odd:
        raise NotCopied(f"{len(odd)} tensors are no whole words")
    return puller


class _OneProcess:
    """A reader for a puller in the process that has the tensors."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.device = plan, plan.device
        there = next(iter(plan.tensors.values())).device
        torch.empty(1, device=plan.device).to(there)  # PyTorch lets a GPU reach another one when it first copies to it

    def places(self, meta: TensorMeta) -> list[Rows]:
        return [contiguous(-(-meta.nbytes // 8), self.plan.tensors[meta.name].data_ptr() // 8)]


Method = Callable[[Plan], Callable[[], object]]
"""Prepares a plan once; what it returns copies."""
METHODS: dict[str, Method] = {
    "loop of copy_": loop,
    "torch._foreach_copy_": foreach,
    "kernel without digest": kernel,
    "kernel with digest": kernel_with_digest,
}
ON_GPUS = (kernel, kernel_with_digest)
