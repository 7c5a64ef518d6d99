"""`instep plan` against an engine in memory: its rows, its tables, and what it says where engine and trainer do not fit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.toys import checkpoint
from rich.console import Console
from safetensors.torch import save_file

from instep import MemoryEngine, WeightSync, cli
from instep.bench.report import time
from instep.cli import plan as command
from instep.cli import plan_memory
from instep.cli.layer_rows import Row, alike, rows, tables, together
from instep.cli.plan_memory import Free
from instep.errors import ConfigError

LAYERS = "model.layers.0..2"
GB = 10**9

Run = Callable[..., tuple[int, str, str]]


def planned(tp: int = 1, **arguments: Any) -> dict[str, Row]:
    weights = checkpoint(1, layers=3, **arguments)
    with WeightSync(weights, [MemoryEngine(checkpoint(0, layers=3, **arguments), tp=tp)]) as sync:
        sync.push("one")
        command.change(weights.values())
        receipt = sync.push("two").engines[0]
        plan = sync._session.fleet.members[0].plan
        assert plan is not None
        return {row.name: row for row in rows(plan, receipt)}


def test_equal_layers_are_one_row_that_says_what_each_of_them_needs() -> None:
    row = planned()[f"{LAYERS}.mlp.gate_up_proj"]
    layers = [f"model.layers.{index}.mlp.gate_up_proj" for index in range(3)]
    assert row == Row(f"{LAYERS}.mlp.gate_up_proj", layers, ["weight bfloat16[24, 8]"], 2, 24 * 8 * 2, "direct")


def test_a_layer_on_reload_says_why() -> None:
    row = planned()[f"{LAYERS}.self_attn.qkv_proj"]
    assert (row.way, row.reason, row.routes) == ("reload", "scale is derived from weights", 3)


def test_routes_and_bytes_are_of_all_workers_and_without_padding() -> None:
    found = planned(tp=2)
    assert (found[f"{LAYERS}.mlp.gate_up_proj"].routes, found[f"{LAYERS}.mlp.gate_up_proj"].nbytes) == (4, 24 * 8 * 2)
    assert found["model.embed_tokens"].nbytes == 20 * 8 * 2
    assert found["model.embed_tokens"].params == ["weight bfloat16[16, 8]"]


def test_experts_are_one_layer_with_a_route_for_each_of_their_tensors() -> None:
    row = planned(moe=True)[f"{LAYERS}.mlp.experts"]
    assert (row.routes, row.params) == (9, ["w13_weight bfloat16[3, 24, 8]", "w2_weight bfloat16[3, 8, 12]"])


def test_a_tied_head_is_kept() -> None:
    row = planned(tied=True)["lm_head"]
    assert (row.way, row.reason, row.nbytes) == ("kept", "the same tensor as model.embed_tokens.weight", 0)


def test_names_that_differ_in_their_numbers_are_drawn_together() -> None:
    assert together(["a.0.b", "a.1.b", "a.2.b", "a.5.b", "a.10.b"]) == "a.0..2,5,10.b"
    assert together(["a.0.b.3", "a.0.b.4", "a.1.b.3", "a.1.b.4"]) == "a.0..1.b.3..4"
    assert together(["conv1d.weight"]) == "conv1d.weight"
    assert alike({"a.0.w": "x", "a.1.w": "x", "a.2.w": "y"}) == {"a.0..1.w": "x", "a.2.w": "y"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint directory, for which the command starts an engine in memory with a vocabulary of 20."""

    @contextmanager
    def running(*_: object) -> Iterator[MemoryEngine]:
        print("STARTED", file=sys.stderr)
        yield MemoryEngine(checkpoint(0))

    monkeypatch.setattr(command, "running", running)
    monkeypatch.setattr(command, "check_vllm", lambda: None)
    save_file(checkpoint(1), tmp_path / "model.safetensors")
    return tmp_path


def test_the_command_reads_no_more_than_names_dtypes_and_shapes_of_a_directory(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert command.plan(str(folder), json=True) == 0
    found = json.loads(capfd.readouterr().out)
    assert {row["way"] for row in found["rows"]} == {"direct", "reload"}
    assert (found["tensors"], found["nbytes"]) == (len(checkpoint(1)), sum(tensor.nbytes for tensor in checkpoint(1).values()))
    assert found["transport"] == "shm"
    assert "not ipc, because" in found["why"]
    assert found["kept"]["model.embed_tokens.weight"] == "padded vocabulary rows have no weights"
    assert all(0 < found[push]["apply"] < found[push]["pause"] < found[push]["seconds"]["total"] for push in ("first", "second"))


def test_casts_are_told_and_the_table_has_shapes_in_brackets(folder: Path) -> None:
    weights = checkpoint(1)
    save_file(weights | {name: tensor.float() for name, tensor in weights.items() if "layernorm" in name}, folder / "model.safetensors")
    report = command.tried("some", folder, 1)
    assert report.casts == {"model.layers.0..1.input_layernorm.weight": "float32 to bfloat16"}
    console = Console(width=240)
    with console.capture() as captured:
        console.print(tables(report))
    assert "weight bfloat16[24, 8]" in captured.get()
    assert (
        f"expected here: {time(report.second.seconds['total'])} a push, generation paused for {time(report.second.pause)}" in captured.get()
    )
    assert "model.layers.0..1.input_layernorm.weight is rounded from float32 to bfloat16" in captured.get()
    layers = sum(len(row.layers) for row in report.rows if row.routes)
    assert f"reload leaves {layers} layers as its initial load makes them, bit for bit" in captured.get()


def test_what_is_widened_is_told_apart_from_what_is_rounded(folder: Path) -> None:
    """The engine of this test stores bfloat16."""
    weights = checkpoint(1)
    save_file(weights | {"model.norm.weight": weights["model.norm.weight"].to(torch.float8_e5m2)}, folder / "model.safetensors")
    report = command.tried("some", folder, 1)
    assert (report.casts, report.widened) == ({}, {"model.norm.weight": "float8_e5m2 to bfloat16"})
    console = Console(width=240)
    with console.capture() as captured:
        console.print(tables(report))
    assert "model.norm.weight is widened from float8_e5m2 to bfloat16: no value changes" in captured.get()


def test_a_trainer_that_does_not_fit_ends_with_1_and_the_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    save_file({name: tensor for name, tensor in checkpoint(1).items() if ".0.self_attn.k_proj" not in name}, folder / "model.safetensors")
    monkeypatch.setattr(sys, "argv", ["instep", "plan", str(folder), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capfd.readouterr()
    assert (ended.value.code, output.out) == (1, "")
    assert "PlanError" in output.err
    assert "model.layers.0.self_attn.qkv_proj.weight" in output.err


def test_what_it_starts_and_takes_is_said_before_it_starts(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_memory, "free", lambda: Free(64 * GB, "the machine's memory"))
    code, out, err = run("plan", folder, "--json")
    assert (code, json.loads(out)["tensors"]) == (0, len(checkpoint(1)))
    before = err.partition("STARTED")[0]
    assert f"plan starts a real vLLM on the CPU, with random weights of {folder} (0.0 GB), and a trainer" in before
    assert "it needs about " in before
    assert "; 64.0 GB are free" in before


def test_too_little_memory_is_refused_with_both_numbers_before_any_is_taken(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel would kill it without a word."""
    devices = []
    made = command.trainer

    def trainer(folder: Path, device: str) -> Any:
        devices.append(device)
        return made(folder, device)

    monkeypatch.setattr(command, "trainer", trainer)
    monkeypatch.setattr(command, "check_vllm", lambda: None)
    monkeypatch.setattr(command, "running", lambda *_: pytest.fail("it was started"))
    monkeypatch.setattr(plan_memory, "free", lambda: Free(21 * GB, "the limit of 24.0 GB of the control group /pod"))
    code, out, err = run("plan", "--shapes", "qwen3-8b")
    assert (code, out) == (1, "")
    need = plan_memory.COPIES * 16.38 * GB + plan_memory.KV_CACHE + plan_memory.WORKER + plan_memory.PROCESSES
    assert f"it needs about {need / GB:.1f} GB of memory" in err
    assert "and 21.0 GB are free (the limit of 24.0 GB of the control group /pod)" in err
    assert devices == ["meta"]


def test_gpus_are_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer takes the last of them."""
    left = {0: 20 * GB, 1: 20 * GB}
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda gpu: (left[gpu], 80 * GB))
    said = plan_memory.announced("some", 10 * GB, 1, 2)
    assert "a real vLLM on 1 GPU, " in said
    assert "18.6 GB of GPU 0, 10.0 GB of GPU 1" in said
    with pytest.raises(ConfigError, match=r"needs about 23\.6 GB of GPU 1, and 20\.0 GB are free"):
        plan_memory.announced("some", 10 * GB, 2, 2)
    left.clear()
    left[0] = 25 * GB
    with pytest.raises(ConfigError, match=r"needs about 28\.6 GB of GPU 0, and 25\.0 GB are free"):
        plan_memory.announced("some", 10 * GB, 1, 1)


def test_the_kv_cache_is_small_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    engine = SimpleNamespace(LLM=lambda *_, **__: seen.append(os.environ["VLLM_CPU_KVCACHE_SPACE"]))
    monkeypatch.setitem(sys.modules, "vllm", engine)
    monkeypatch.setattr(command, "stop_vllm", lambda _: None)
    with command.running(tmp_path, None, 1, 1):
        assert seen == ["1"]
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "40"


def test_a_model_and_shapes_are_one_too_many(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["instep", "plan", "some", "--shapes", "tiny"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "either a model or --shapes" in capsys.readouterr().err
