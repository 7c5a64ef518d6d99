"""A transformers model as an engine in the trainer's process: for a laptop without vLLM, and as
a reference.

engine = TransformersEngine(AutoModelForCausalLM.from_pretrained(...))  # a model of its own, not
the trainer's sync = WeightSync(source=trainer_model, engines=[engine]) completions =
engine.generate([[1, 2, 3]], max_tokens=16, temperature=1.0, seed=0)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from instep.engine import CachePolicy
from instep.engine.gate import CHANGING, Gate, gated
from instep.protocol import Method
from instep.receiver import PlainHost
from instep.receiver.regions import load_region
from instep.receiver.state import Receiver
from instep.source.layout import Saved, layout
from instep.source.module import ModuleSource
from instep.source.tensors import identity

HELD = 60.0
"""Seconds for which a forward waits for a push to end."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion. token_ids: those generated, the stop token included. logprobs: natural
    log, after temperature, one per token. weight_version: the version that made the first token."""

    token_ids: list[int]
    logprobs: list[float]
    weight_version: str | None


class TransformersEngine:
    """An engine that generates in this process with a model of transformers.

    model: a causal language model of transformers, unwrapped. The engine owns it from now on.
    """

    def __init__(self, model: Any, name: str = "transformers") -> None:
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.version: str | None = None
        self.device = model.device  # asked now: while a push traces the model it lies nowhere
        self.receiver = Receiver(ModelHost(model))
        self.thread = ThreadPoolExecutor(max_workers=1)  # of pushes
        self.gate = Gate()
        gated(model, self.gate, name, HELD)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> list[Completion]:
        """Returns one completion for each prompt. Temperature 0 takes the likeliest token.
        Prompts are padded on the left and run as one batch.

        May be called in any thread. A push waits for the forward that runs, and the next forward
        for the push: a completion that meets one goes on with the new weights.

        Raises `EngineDirty` while a push has left it with parts of two versions, `RuntimeError`
        where nobody has it go on within 60 s.
        """
        device = self.device
        generator = torch.Generator(device).manual_seed(seed) if seed is not None else None
        longest = max(len(prompt) for prompt in prompts)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        inputs = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
        results: list[Completion] = []
        running = set(range(len(prompts)))
        cache = None
        for _ in range(max_tokens):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -inputs.shape[1] :]
            with self.gate.passing(self.name, HELD):
                results = results or [Completion([], [], self.receiver.version) for _ in prompts]
                output = self.model(inputs, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1].float() / (temperature or 1.0), dim=-1)
            tokens = logprobs.argmax(-1) if temperature == 0 else torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
            for row in sorted(running):
                token = int(tokens[row])
                results[row].token_ids.append(token)
                results[row].logprobs.append(float(logprobs[row, token]))
                if token in stop_token_ids:
                    running.discard(row)
            if not running:
                break
            inputs, mask = tokens[:, None], torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        return results

    async def call(self, method: Method, payload: bytes) -> list[bytes]:
        return [await asyncio.get_running_loop().run_in_executor(self.thread, self._handle, method, payload)]

    def _handle(self, method: Method, payload: bytes) -> bytes:
        with self.gate.changing() if method in CHANGING else nullcontext():
            return self.receiver.handle(method, payload)

    async def pause(self, caches: CachePolicy) -> None:  # noqa: ARG002
        """Closes the gate. `caches` has no effect: no KV cache outlives a call of `generate`."""
        await self.gate.pause()

    async def resume(self) -> None:
        self.gate.resume()

    async def label(self, version: str) -> None:
        self.version = version

    async def score(self, token_ids: list[int]) -> list[float]:
        with self.gate.passing(self.name, HELD):
            return ModuleSource(self.model).score(token_ids) or [math.nan] * (len(token_ids) - 1)

    async def refuse(self, reason: str | None) -> None:
        self.gate.refuse(reason)


class ModelHost(PlainHost):
    """The model as a receiver's worker. Its loader takes the names that `save_pretrained`
    writes."""

    rank, world_size = 0, 1

    def __init__(self, model: Any) -> None:
        self.model: nn.Module = model
        self.device = str(model.device)
        state = model.state_dict()
        self.places: dict[str, Saved] = {
            saved.meta.name: saved for saved in layout(model, state, {name: identity(tensor) for name, tensor in state.items()})
        }
        # What is saved under another name is taken under the model's own too: so a push asks for
        # buffers that the source left out.
        moved = (saved for saved in self.places.values() if len(saved.parts) == 1 and saved.whole)
        self.places |= {saved.parts[0]: saved for saved in list(moved) if saved.parts[0] not in self.places}

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        live = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers(remove_duplicate=False))
        for name, tensor in tensors:
            place = self.places.get(name)
            if place is None:
                raise ValueError(f"{type(self.model).__name__} saves no tensor named {name!r}")
            if place.view is None:
                raise ValueError(f"{name} is computed from {', '.join(place.parts)} when it is saved, and cannot be loaded back in place")
            if tuple(tensor.shape) != place.view.shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model's has {list(place.view.shape)}")
            load_region(live[place.parts[0]].detach(), place.view, tensor)

    @contextmanager
    def reload(self) -> Iterator[None]:
        """A transformers model derives nothing from its weights: loading is all there is to a
        session."""
        yield
