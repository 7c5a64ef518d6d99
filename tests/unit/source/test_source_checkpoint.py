from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.source_models import assert_source_equals, qwen3_moe, saved
from safetensors.torch import save_file

from instep.errors import ConfigError, SourceError
from instep.source import Source, open_source
from instep.source.checkpoint import CheckpointSource

STATE = {f"layers.{layer}.w": torch.randn(2, 3 + layer) for layer in (10, 2, 1)}


@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"], ids=["single", "sharded"])
@pytest.mark.parametrize("indexed", [True, False])
def test_reads_what_save_pretrained_wrote(tmp_path: Path, max_shard_size: str, indexed: bool) -> None:
    model = qwen3_moe().to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or max_shard_size == "20KB"
    if not indexed:
        for index in tmp_path.glob("*.index.json"):
            index.unlink()
    source = open_source(tmp_path)
    assert isinstance(source, CheckpointSource)
    assert isinstance(source, Source)
    assert_source_equals(source, saved(model))
    assert source.score([1, 2]) is None


def test_one_file_in_natural_order(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "weights.safetensors")
    source = open_source(str(tmp_path / "weights.safetensors"))
    assert [meta.name for meta in source.metadata()] == ["layers.1.w", "layers.2.w", "layers.10.w"]
    assert_source_equals(source, STATE)


def test_tensors_are_mapped_not_read(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1 << 20)}, tmp_path / "model.safetensors")
    (_, first), (_, again) = (*CheckpointSource(tmp_path).tensors(), *CheckpointSource(tmp_path).tensors())
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "model.safetensors") in mapped
    assert torch.equal(first, again)


def test_the_stamp_follows_the_files(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    source = CheckpointSource(tmp_path)
    stamp = source.stamp()
    assert source.stamp() == stamp
    stat = (tmp_path / "model.safetensors").stat()
    os.utime(tmp_path / "model.safetensors", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert source.stamp() != stamp
    changed = {name: tensor + 1 for name, tensor in STATE.items()}
    save_file(changed, tmp_path / "model.safetensors")
    assert_source_equals(source, changed)


def _index(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_only_files_of_the_index_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    _index(tmp_path, a="model-1.safetensors")
    assert_source_equals(CheckpointSource(tmp_path), {"a": torch.ones(2)})


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"a": torch.ones(2)}, tmp_path / f"model-{number}.safetensors")
    with pytest.raises(SourceError, match=r"a is in model-1\.safetensors and again in model-2\.safetensors") as caught:
        CheckpointSource(tmp_path).metadata()
    assert caught.value.tensor == "a"


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    _index(tmp_path, a="model-1.safetensors", b="model-2.safetensors")
    with pytest.raises(SourceError, match=r"model-2\.safetensors is listed in the index .* but missing"):
        CheckpointSource(tmp_path)


def test_a_tensor_of_the_index_that_no_shard_holds_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    _index(tmp_path, a="model-1.safetensors", b="model-1.safetensors")
    with pytest.raises(SourceError, match=r"b is listed in the index but not in model-1\.safetensors"):
        CheckpointSource(tmp_path).metadata()


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SourceError, match="is no safetensors index"):
        CheckpointSource(tmp_path)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 1)
    with pytest.raises(SourceError, match=r"model\.safetensors cannot be read"):
        CheckpointSource(tmp_path).metadata()


def test_a_directory_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found nothing"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"no \.safetensors file in .*, found config\.json, pytorch_model\.bin"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["absent", "config.json"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=rf"{name} is neither a directory nor a \.safetensors file"):
        open_source(tmp_path / name)


def test_a_hub_id_is_told_how_to_become_a_directory() -> None:
    with pytest.raises(ConfigError, match=r"org/model is neither a directory.*\n.*huggingface_hub\.snapshot_download\('org/model'\)"):
        open_source("org/model")
    with pytest.raises(ConfigError) as caught:
        open_source("a/path/that/is/absent")
    assert "snapshot_download" not in str(caught.value)
