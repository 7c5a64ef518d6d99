"""Sampling settings. Rollouts know some of them by name; all others go to the engine unchanged."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, structs

from instep.errors import ConfigError

DELIVERY = {
    "logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "output_kind",
    "stream_interval", "flat_logprobs", "skip_clone", "output_text_buffer_length",
}  # fmt: skip
"""Settings of vLLM that say how tokens are handed over, not which. A rollout needs them in one way,
see `vllm_kwargs`."""

UNANSWERED = {"prompt_logprobs", "prompt_logprob_token_ids", "prompt_logprob_start", "logprob_token_ids"}
"""Settings of vLLM that ask for what no sample has a place for."""


class Sampling(Struct, frozen=True, kw_only=True):
    """Sampling settings of a prompt. Fields not listed here are those of `vllm.SamplingParams`.

    n: samples of a prompt.
    max_tokens: tokens of a whole response: all turns, tool output included.
    min_tokens: tokens before the model may end its response.
    seed: sample j of a prompt is sampled with seed + j, and each turn with a seed of its own.
    extra: vLLM's other sampling parameters by name, passed on unread.
    """

    n: int = 1
    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    extra: dict[str, Any] = {}

    def __post_init__(self) -> None:
        for name, value in (("n", self.n), ("max_tokens", self.max_tokens)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError(f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must not be negative, not {self.temperature}")
        if not isinstance(self.stop, tuple | list):
            raise ConfigError("stop is a tuple of strings, not one string")
        misplaced = sorted(set(self.extra) & (set(self.__struct_fields__) | DELIVERY | UNANSWERED))
        if misplaced:
            raise ConfigError(f"extra holds {', '.join(misplaced)}: a setting of Sampling itself, or one that rollouts choose")

    @property
    def shaped_by(self) -> tuple[str, ...]:
        """Settings that may change the sampled distribution from softmax(logits / temperature),
        which a trainer computes."""
        plain = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,), "min_tokens": (0,)}
        names = [name for name, values in plain.items() if getattr(self, name) not in values]
        return (*(["temperature"] if self.temperature == 0 else []), *names, *sorted(self.extra))

    def of_turn(self, sample: int, turn: int, *, max_tokens: int, generated: int, stop: tuple[str, ...]) -> Sampling:
        """Returns the settings for one turn of one sample.

        max_tokens: budget of the turn. generated: tokens that the model has generated so far. stop:
        the parser's stop strings.
        """
        return structs.replace(
            self,
            n=1,
            max_tokens=max_tokens,
            min_tokens=min(max(0, self.min_tokens - generated), max_tokens),
            # Turns with one seed would repeat each other's noise.
            seed=None if self.seed is None else (self.seed + sample + turn * 1_000_003) % (1 << 63),
            stop=tuple(dict.fromkeys((*self.stop, *stop))),
        )

    def vllm_kwargs(self) -> dict[str, Any]:
        """Returns arguments of `vllm.SamplingParams`: only the chosen token's log-probability,
        and text only if there are stop strings."""
        kwargs = structs.asdict(self)
        kwargs.pop("extra")
        kwargs.update(stop=list(self.stop), stop_token_ids=list(self.stop_token_ids))
        delivery = {"logprobs": 0, "detokenize": bool(self.stop), "skip_special_tokens": False}
        return {**kwargs, **self.extra, **delivery}


def from_vllm(params: Any) -> Sampling:
    """Returns the settings of a `vllm.SamplingParams`. Raises `ConfigError` if it asks for what
    a sample cannot hold."""
    plain = type(params)()
    names = [name for name in params.__struct_fields__ if not name.startswith("_") and name not in DELIVERY]
    unanswered = [name for name in names if name in UNANSWERED and getattr(params, name) is not None]
    if unanswered:
        raise ConfigError(f"a rollout returns the sampled tokens' log-probabilities: {', '.join(unanswered)} cannot be answered")
    changed = {name: getattr(params, name) for name in names if name not in UNANSWERED and getattr(params, name) != getattr(plain, name)}
    if params.max_tokens is None:
        raise ConfigError("max_tokens must be given: it is the budget of the whole response")
    known = {name: changed.pop(name) for name in list(changed) if name in Sampling.__struct_fields__}
    known.update(max_tokens=params.max_tokens, stop=tuple(params.stop or ()), stop_token_ids=tuple(params.stop_token_ids or ()))
    return Sampling(**known, extra=changed)
