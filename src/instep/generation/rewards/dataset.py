"""Scores prompts that name a row of a dataset. The row says what an answer is verified against."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from msgspec import structs

from instep.errors import ConfigError
from instep.generation.exchange.foreign import METRICS, SENT_AS, request_info
from instep.generation.rewards.config import RewardConfig, RewardFunction
from instep.generation.text import Tokenizer, told
from instep.generation.types import GenerationResult, Label, PromptRequest, Reward, Split
from instep.generation.waiting import contained

logger = logging.getLogger(__name__)
INDEX, TRUTH, SOURCE, QUERY = "index", "ground_truth", "dataset", "prompt"
"""Columns of Open Instruct's datasets. `dataset` names the verifier, or several, and `ground_truth`
is what each of them takes."""


class DatasetRewards:
    """Takes the place of a `RewardConfig`. config: one of ours, or Open Instruct's, whose
    `build()` makes a function that scores a prompt's samples together.

    Raises `ConfigError` where the datasets lack a column, or the config needs one that is not
    there.
    """

    def __init__(self, config: Any, train_dataset: Any = None, eval_dataset: Any = None) -> None:
        self.config = config
        self.own = isinstance(config, RewardConfig)
        if not self.own and not callable(getattr(config, "build", None)):
            raise ConfigError(f"reward_config is a {type(config).__name__}, which has no build()")
        given: dict[Split, Any] = {"train": train_dataset, "eval": eval_dataset}
        self.datasets = {split: dataset for split, dataset in given.items() if dataset is not None}
        if not self.own and not self.datasets:
            raise ConfigError("reward_config scores answers against rows of a dataset, and there is neither train_dataset nor eval_dataset")
        self.places = {split: _places(dataset, f"{split}_dataset") for split, dataset in self.datasets.items()}

    def check(self, request: PromptRequest) -> None:
        """Raises `ConfigError` for a request whose row or verifier is not there."""
        row = self._row(request)
        if self.own:
            self.config.check(_labelled(request, row))
        elif row is None:
            raise ConfigError(f"prompt {request.id} is of no dataset: there is no {request.id.split}_dataset")

    def build(self, tokenizer: Tokenizer) -> RewardFunction:
        function = self.config.build(tokenizer) if self.own else self.config.build()

        async def own(result: GenerationResult) -> GenerationResult:
            scored: GenerationResult = await function(structs.replace(result, request=_labelled(result.request, self._row(result.request))))
            return scored

        async def judged(result: GenerationResult) -> tuple[list[Reward], dict[str, Any]]:
            samples, row = result.samples, self._row(result.request)
            assert row is not None
            texts = [tokenizer.decode(sample.token_ids, skip_special_tokens=True) for sample in samples]
            query = row.get(QUERY) or tokenizer.decode(result.request.prompt_token_ids, skip_special_tokens=False)
            many = [[value] * len(samples) for value in (row[TRUTH], row[SOURCE], query)]
            ends = ["stop" if sample.finish_reason == "done" else sample.finish_reason for sample in samples]
            info = request_info(samples, result.request.metadata.get(SENT_AS))
            scores, metrics = await function([sample.token_ids for sample in samples], texts, many[0], many[1], ends, info, many[2])
            if len(scores) != len(samples):
                raise ValueError(f"{len(scores)} scores for {len(samples)} samples")
            return [_reward(score) for score in scores], metrics

        async def theirs(result: GenerationResult) -> GenerationResult:
            samples = result.samples
            metrics: dict[str, Any] = {}
            try:
                rewards, metrics = await contained(judged(result))
            except Exception as error:  # a verifier's, and no reason to end the run
                logger.warning("prompt %s has no score: %s", result.request.id, told(error))
                rewards = [Reward(0.0, [], told(error))] * len(samples)
            request = structs.replace(result.request, metadata={**result.request.metadata, METRICS: metrics})
            scored = [structs.replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True)]
            return GenerationResult(request=request, samples=scored)

        return own if self.own else theirs

    def _row(self, request: PromptRequest) -> Mapping[str, Any] | None:
        split = request.id.split
        if split not in self.datasets or (request.labels and request.index is None):
            return None
        if request.index not in self.places[split]:
            raise ConfigError(f"prompt {request.id}: {split}_dataset has no row with index {request.index}")
        row: Mapping[str, Any] = self.datasets[split][self.places[split][request.index]]
        return row


def _reward(score: Any) -> Reward:
    """Makes a reward. A score that is no finite number becomes an error."""
    try:
        number = math.nan if isinstance(score, str | bytes) else float(score)
    except Exception:
        number = math.nan
    return Reward(number) if math.isfinite(number) else Reward(0.0, [], f"a score is a {type(score).__name__}, and no finite number")


def _places(dataset: Any, name: str) -> dict[Any, int]:
    """Returns the positions of rows by their index."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and len(dataset):
        columns = list(dataset[0])
    if missing := [column for column in (INDEX, TRUTH, SOURCE) if columns is not None and column not in columns]:
        raise ConfigError(f"{name} has no column {', '.join(missing)}: it says what prompts are verified against")
    indices = dataset[INDEX] if hasattr(dataset, "column_names") else [row[INDEX] for row in dataset]
    return {index: position for position, index in enumerate(indices)}


def _labelled(request: PromptRequest, row: Mapping[str, Any] | None) -> PromptRequest:
    """Returns the request with the labels of its row. A request that has labels keeps them."""
    if row is None or request.labels:
        return request
    several = isinstance(row[SOURCE], list | tuple)
    names, values = (row[SOURCE], row[TRUTH]) if several else ([row[SOURCE]], [row[TRUTH]])
    if len(names) != len(values):
        raise ConfigError(f"row {request.index} names {len(names)} verifiers and {len(values)} ground truths")
    return structs.replace(request, labels=tuple(Label(name, value) for name, value in zip(names, values, strict=True)))
