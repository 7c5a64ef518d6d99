"""Runs actors on Ray: a fleet of engines, the queues between them and a trainer, and tools that
are Ray actors."""

from instep.generation.ray.engines import RolloutQueues, create_vllm_engines

__all__ = ["RolloutQueues", "create_vllm_engines"]
