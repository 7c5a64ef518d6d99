"""A trainer's weights with ZeRO 0 to 3, gathered by all of its ranks in step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch

from instep.errors import SyncError
from instep.extras import needed_by
from instep.source import open_source
from instep.source.names import canonical


def weights(model: torch.nn.Module, stage: int, whole: bool, sending: bool) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Names, values, and whether one is the last. Ranks that do not send get none and take part in
    gathering."""
    if stage == 3 and not whole:
        named = list(model.named_parameters())
        for name, param in named:
            with _gathered([param]):
                if sending:
                    yield canonical(name), param.detach(), param is named[-1][1]
        return
    with _gathered(list(model.parameters())) if stage == 3 else nullcontext():
        if sending:
            source = open_source(model)
            names = [meta.name for meta in source.metadata() if not meta.alias_of]
            yield from ((name, value, name == names[-1]) for name, value in source.tensors())


def _gathered(params: list[torch.nn.Parameter]) -> Any:
    with needed_by("a trainer with ZeRO 3"):
        import deepspeed

    return deepspeed.zero.GatheredParameters(params)


def tell_all_ranks(error: Exception | None) -> None:
    """Every rank raises where rank 0 does: else the others would train on."""
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    failed = torch.tensor([float(error is not None)], device=device)
    torch.distributed.all_reduce(failed)
    if failed.item() and error is None:
        raise SyncError("rank 0 of the trainer could not bring the weights to every engine: its error says what each of them serves")
