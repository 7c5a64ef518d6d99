"""vLLM's worker with a push's methods: `LLM(...,
worker_extension_cls="instep.vllm.WorkerExtension")`."""

from instep.engine.vllm.worker import WorkerExtension

__all__ = ["WorkerExtension"]
