"""vLLM's `AsyncLLM` as an engine that serves requests (see `serving.py`), with its own HTTP app."""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from instep.engine import Engine
from instep.engine.serving import KVCacheInfo, ModelDims, Sampled
from instep.engine.vllm.config import EXTENSION
from instep.engine.vllm.engine import AsyncVllmEngine
from instep.errors import ConfigError, EngineDirty, EngineLost, GenerationError
from instep.extras import needed_by

FORCED: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from: a trainer divides by the temperature too
    "generation_config": "vllm",  # a model's own would change temperature and length of requests that do not say
}
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""How chats are written for a tokenizer without a template, by the HTTP app: contents one after the
other."""
DEFAULTS: dict[str, Any] = {"worker_extension_cls": EXTENSION, "disable_log_stats": True}
ON_CPU: dict[str, Any] = {"enable_chunked_prefill": False}
"""Where a step reads only part of a prompt, vLLM takes back what the request's seed gave for it. A
generator on the CPU cannot go back, and the engine dies: seen in 0.32, after a push in flight too,
when all that runs is read again."""


async def start_vllm(model: str, **arguments: Any) -> VllmServing:
    """Starts an engine on the running event loop.

    arguments: those of `vllm.AsyncEngineArgs`. What its log-probabilities mean is not a choice:
    they are those of the sampled distribution.
    """
    with needed_by("start_vllm()"):
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

    if wrong := [name for name, value in FORCED.items() if arguments.get(name, value) != value]:
        raise ConfigError(f"an actor needs {', '.join(f'{name}={FORCED[name]!r}' for name in wrong)}")
    if arguments.get("weight_transfer_config") is None:
        arguments = {**DEFAULTS, **arguments}
    if current_platform.is_cpu():
        arguments = {**ON_CPU, **arguments}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **{**arguments, **FORCED}))
    return VllmServing(llm, model)


class VllmServing:
    """A running `AsyncLLM` as `Serving`. A request that vLLM does not take raises `ConfigError`,
    a dirty engine `EngineDirty`, a lost process `EngineLost`.

    llm: as `start_vllm` makes it. model: the name or directory that it was started with, of which
    the HTTP app needs to know.
    """

    def __init__(self, llm: Any, model: str) -> None:
        self.llm = llm
        self.model = model
        self.weights: Engine = AsyncVllmEngine(llm)
        self.tokenizer = None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()
        self.kv_cache = _kv_cache(llm.vllm_config)
        self.dims = _dims(llm.vllm_config)

    async def generate(self, token_ids: Sequence[int], sampling: dict[str, Any], request_id: str, salt: str | None) -> Sampled:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        known = [*token_ids, *sampling.get("stop_token_ids", ())]  # vLLM 0.26 does not look at the latter
        if known and not 0 <= min(known) <= max(known) < self.dims.vocab_size:
            raise ConfigError(f"request {request_id} has tokens that the model has not: its vocabulary has {self.dims.vocab_size}")
        try:
            params = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        except Exception as error:
            raise ConfigError(f"vLLM does not take request {request_id}: {_told(error)}") from error
        prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids), **({"cache_salt": salt} if salt else {})}
        final = None
        try:
            async for final in self.llm.generate(prompt, params, request_id):  # noqa: B007
                pass
        except EngineDirty:
            raise
        except Exception as error:
            await self.check(error)
            # The engine lives, so this is of the request: settings and tokens that vLLM refuses, or
            # that it stumbled over.
            raise ConfigError(f"vLLM does not take request {request_id}: {_told(error)}") from error
        if final is None or not final.finished:
            raise GenerationError(f"vLLM ended request {request_id} without an answer")
        return _sampled(final.outputs[0])

    async def abort(self, request_id: str) -> None:
        await self.llm.abort(request_id)

    async def collective_rpc(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        answers: list[Any] = await self.llm.collective_rpc(method, args=tuple(arguments))
        return answers

    async def reset_prefix_cache(self) -> bool:
        return bool(await self.llm.reset_prefix_cache())

    async def check(self, cause: Exception | None = None) -> None:
        if self.llm.errored:
            raise EngineLost(f"{self.weights.name} lost a process: {_told(cause or self.llm.dead_error)}") from cause

    async def serve(self, sock: socket.socket) -> None:
        import uvicorn

        try:
            from vllm.entrypoints.launchers.api_server.app_state import init_app_state
            from vllm.entrypoints.launchers.app import build_app
        except ImportError:  # vLLM before 0.28
            from vllm.entrypoints.openai.api_server import build_app, init_app_state
        args = _server_arguments(self.model, template_for(self.tokenizer))
        tasks = await self.llm.get_supported_tasks()
        app = build_app(args, tasks, self.llm.model_config)
        await init_app_state(self.llm, app.state, args, tasks)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        try:
            await server.serve(sockets=[sock])
        finally:
            server.should_exit = server.force_exit = True

    async def aclose(self) -> None:
        self.llm.shutdown()


def _sampled(output: Any) -> Sampled:
    token_ids = list(output.token_ids)
    spans = getattr(output, "weight_versions", None)  # vLLM 0.27 and later
    return Sampled(
        token_ids=token_ids,
        logprobs=[float(entry[token].logprob) for entry, token in zip(output.logprobs or (), token_ids, strict=True)],
        finish_reason=output.finish_reason or "error",
        stop_reason=output.stop_reason,
        versions=None if spans is None else [(span.version, span.start, span.end) for span in spans],
    )


def _kv_cache(config: Any) -> KVCacheInfo:
    """Returns the size of the KV cache. vLLM 0.27 and later tell what they measured, also for
    layers that differ. Before, only blocks are known."""
    cache, length = config.cache_config, config.model_config.max_model_len
    tokens = getattr(cache, "kv_cache_size_tokens", None) or (cache.num_gpu_blocks or 0) * cache.block_size
    concurrency = getattr(cache, "kv_cache_max_concurrency", None) or tokens / length
    return KVCacheInfo(tokens, float(concurrency), length, config.scheduler_config.max_num_seqs)


def _dims(config: Any) -> ModelDims:
    from vllm.platforms import current_platform

    model, text = config.model_config, config.model_config.hf_text_config
    window, kinds = model.get_sliding_window(), getattr(text, "layer_types", None)
    layers, hidden = model.get_total_num_hidden_layers(), model.get_hidden_size()
    return ModelDims(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * hidden,
        vocab_size=model.get_vocab_size(),
        num_attn_heads=text.num_attention_heads,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_dim=model.get_head_size(),
        sliding_window=window,
        num_sliding_window_layers=0 if window is None else kinds.count("sliding_attention") if kinds else layers,
        device_name=current_platform.get_device_name(),
    )


def template_for(tokenizer: Any) -> str | None:
    """Returns the template for chats; None if the tokenizer has one, or if there is no
    tokenizer."""
    return None if tokenizer is None or getattr(tokenizer, "chat_template", None) else PLAIN_TEMPLATE


def _server_arguments(model: str, template: str | None) -> Namespace:
    """Returns the arguments that `vllm serve MODEL` would have."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # vLLM before 0.28
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", model, "--disable-fastapi-docs"])
    args.chat_template = template
    return args


def _told(error: Any) -> str:
    cause = getattr(error, "__cause__", None) or error
    return f"{type(cause).__name__}: {cause}".rstrip(": ")
