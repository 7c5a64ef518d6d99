"""Scores samples: verifiers, weighted and added up."""

from instep.generation.rewards.config import RewardConfig, RewardFunction
from instep.generation.rewards.dataset import DatasetRewards

__all__ = ["DatasetRewards", "RewardConfig", "RewardFunction"]
