"""An engine that answers prompts and follows a trainer: `LLMActor`. Ray is not needed."""

from instep.generation.actor.actor import LLMActor
from instep.generation.actor.manager import ActorManager, ActorStatus

__all__ = ["ActorManager", "ActorStatus", "LLMActor"]
