"""What a sample is worth: verifiers, weighed and added."""

from instep.generation.rewards.config import RewardConfig, RewardFunction
from instep.generation.rewards.dataset import DatasetRewards

__all__ = ["DatasetRewards", "RewardConfig", "RewardFunction"]
