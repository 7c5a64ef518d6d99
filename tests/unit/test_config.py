"""Settings are checked before anything is touched, and the message says what would be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.toys import checkpoint

from instep import MemoryEngine, WeightSync
from instep.config import Config
from instep.errors import ConfigError

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "require": ({"require": "most"}, "require must be 'all' or 'any', not 'most'"),
    "caches": ({"caches": "drop"}, "caches must be 'reset' or 'keep', not 'drop'"),
    "no time": ({"timeout": 0}, "timeout must be a positive number of seconds, not 0"),
    "negative time": ({"timeout": -1.0}, "timeout must be a positive number of seconds, not -1.0"),
    "no number": ({"timeout": float("nan")}, "timeout must be a positive number of seconds, not nan"),
    "a word": ({"timeout": "soon"}, "timeout must be a positive number of seconds, not 'soon'"),
    "for ever": ({"timeout": float("inf")}, "timeout must be a positive number of seconds, not inf"),
    "no bound": ({"canary_bound": 0.0}, "canary_bound must be positive, not 0.0"),
    "bound is no number": ({"canary_bound": float("nan")}, "canary_bound must be positive, not nan"),
    "one token": ({"canary": [1]}, "canary needs at least two token ids"),
    "a flag": ({"canary": True}, "canary is a list of token ids, not True"),
    "a text": ({"canary": "hello"}, "canary is a list of token ids, not 'hello'"),
    "no token": ({"canary": []}, "canary needs at least two token ids"),
}


@pytest.mark.parametrize(("settings", "text"), WRONG.values(), ids=WRONG)
def test_wrong_settings(settings: dict[str, Any], text: str, segments: Path) -> None:
    engine = MemoryEngine(checkpoint(0, layers=1))
    with pytest.raises(ConfigError) as caught:
        WeightSync(checkpoint(1, layers=1), [engine], **settings)
    assert text in str(caught.value)
    assert engine.calls == []
    assert list(segments.iterdir()) == []


def test_the_defaults_are_the_safe_ones() -> None:
    config = Config()
    assert (config.require, config.caches, config.cast, config.timeout) == ("all", "reset", False, 60.0)


@pytest.mark.parametrize("source", [3, None, [("w", 1)]], ids=repr)
def test_a_source_that_is_none(source: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot read weights from .*: give a torch\.nn\.Module, a dict of tensors, a checkpoint directory"
    ):
        WeightSync(source, [MemoryEngine(checkpoint(0, layers=1))])
