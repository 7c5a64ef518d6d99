"""Makes samples from a prompt, in turns of the model and of its tools."""

from instep.generation.rollout.budget import Limits
from instep.generation.rollout.turns import Client, Harness, answer, rollout

__all__ = ["Client", "Harness", "Limits", "answer", "rollout"]
