"""Worker extensions for the GPU tests."""

from __future__ import annotations

from instep.dropin.vllm_rlhf import ColocateWorkerExtension, WorkerExtension


class BothExamples(WorkerExtension, ColocateWorkerExtension):
    """vLLM's two RLHF examples in one worker."""
