"""An engine serves what its trainer had at one moment, or what it served before: whoever writes to the weights, and how."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.toys import Checkpoint, bits, described
from safetensors.torch import save_file
from torch import nn

from instep import MemoryEngine, WeightSync
from instep.errors import SourceError
from instep.plan.packed import packed
from instep.protocol import TensorMeta, dtype_name
from instep.source.module import MappingSource
from instep.transport import Placed, cast, copying
from instep.transport.again import second

pytestmark = pytest.mark.usefixtures("segments")

NAMES = [f"layers.{index}.weight" for index in range(4)]
COPIED = ["shm", "http"]


def model() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(96, 96, generator=generator)) for name in NAMES}


def fused_step(params: Mapping[str, nn.Parameter]) -> None:
    for param in params.values():
        param.grad = torch.ones_like(param)
    torch.optim.AdamW(params.values(), lr=1e-2, fused=True).step()


def one_element_of_data(params: Mapping[str, nn.Parameter]) -> None:
    params[NAMES[0]].data.view(-1)[77] += 1


def one_element_of_a_numpy_view(params: Mapping[str, nn.Parameter]) -> None:
    params[NAMES[0]].detach().numpy().reshape(-1)[-1] += 1


def counted_step(params: Mapping[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params.values():
            param.add_(1)


WRITES = [fused_step, one_element_of_data, one_element_of_a_numpy_view, counted_step]


class Trainer:
    """A source that writes to its own weights, in the middle of one of its reads."""

    device = torch.device("cpu")

    def __init__(self, write: Callable[[Mapping[str, nn.Parameter]], None], read: int, index: int) -> None:
        self.params, self.write, self.moment = model(), write, (read, index)
        self.reads = 0
        self.states = [self.state()]

    def state(self) -> int:
        return MemoryEngine({name: param.detach().clone() for name, param in self.params.items()}).fingerprint()

    def metadata(self) -> list[TensorMeta]:
        return described({name: param.detach() for name, param in self.params.items()})

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reads += 1
        for index, (name, param) in enumerate(self.params.items()):
            if (self.reads, index) == self.moment:
                self.write(self.params)
                self.states.append(self.state())
            yield name, param

    def stamp(self) -> int:
        return 0

    def score(self, token_ids: list[int]) -> None: ...


def zeros() -> Checkpoint:
    return {name: torch.zeros(96, 96) for name in NAMES}


def attempt(sync: WeightSync, version: str) -> SourceError | None:
    try:
        sync.push(version)
    except SourceError as error:
        return error
    return None


@pytest.mark.parametrize("transport", COPIED)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("moment", [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (2, 3)])
def test_a_write_at_any_point_of_either_read(write: Any, moment: tuple[int, int], transport: Any) -> None:
    source, engine = Trainer(write, *moment), MemoryEngine(zeros())
    untouched = engine.fingerprint()
    with WeightSync(source, [engine], transport=transport) as sync:
        error = attempt(sync, "a")
        if error:
            assert "changed its weights while they were copied; no engine was touched" in str(error)
            assert (engine.fingerprint(), engine.version) == (untouched, None)
            assert "prepare" not in engine.calls
            assert moment != (1, 0), "nothing had been read"
        else:
            assert engine.fingerprint() in source.states
            assert moment in ((1, 0), (2, 1), (2, 3)), "what had been read twice already may change"
        sync.push("b")
    assert engine.fingerprint() == source.state()


def test_the_error_names_a_tensor_that_differs() -> None:
    source, engine = Trainer(one_element_of_a_numpy_view, 2, 0), MemoryEngine(zeros())
    with WeightSync(source, [engine]) as sync, pytest.raises(SourceError, match=r"\(layers\.0\.weight was read twice") as caught:
        sync.push("a")
    assert caught.value.tensor == NAMES[0]
    assert "between optimizer steps" in str(caught.value)


def held(engine: MemoryEngine) -> Checkpoint:
    return {name: param.detach() for name, param in engine.hosts[0].model.named_parameters()}


def same(engine: MemoryEngine, weights: Mapping[str, torch.Tensor]) -> bool:
    return all(torch.equal(bits(value), bits(weights[name])) for name, value in held(engine).items())


def between_the_reads(monkeypatch: pytest.MonkeyPatch, write: Callable[[], object], times: int = 1) -> None:
    """When all values have been read once, and none twice."""
    left = iter(range(times))

    def later(*arguments: Any) -> Any:
        if next(left, None) is not None:
            write()
        return second(*arguments)

    monkeypatch.setattr(copying, "second", later)


def module_of(params: Mapping[str, nn.Parameter]) -> nn.Module:
    module = nn.Module()
    module.layers = nn.ModuleList(nn.Linear(96, 96, bias=False) for _ in params)
    for layer, param in zip(module.layers, params.values(), strict=True):
        layer.weight = param
    return module


@pytest.mark.parametrize("transport", COPIED)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", ["module", "dict"])
def test_a_write_to_live_tensors_between_the_reads(write: Any, transport: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such sources are copied in threads, while the next tensor is asked for."""
    params, engine = model(), MemoryEngine(zeros())
    with WeightSync(module_of(params) if kind == "module" else params, [engine], transport=transport) as sync:
        sync.push("a")
        before = engine.fingerprint()
        between_the_reads(monkeypatch, lambda: write(params))
        with pytest.raises(SourceError, match="changed its weights"):
            sync.push("torn")
        assert (engine.fingerprint(), engine.version) == (before, "a")
        sync.push("b")
    assert engine.fingerprint() == MemoryEngine({name: param.detach() for name, param in params.items()}).fingerprint()


def test_values_that_are_cast_on_the_way_are_read_twice_too(monkeypatch: pytest.MonkeyPatch) -> None:
    params = model()
    params[NAMES[2]] = nn.Parameter(params[NAMES[2]].detach().t())
    engine = MemoryEngine({name: value.bfloat16() for name, value in zeros().items()})
    with WeightSync(params, [engine], cast=True) as sync:
        between_the_reads(monkeypatch, lambda: params[NAMES[2]].data[0].add_(1))
        with pytest.raises(SourceError, match=r"layers\.2\.weight was read twice"):
            sync.push("torn")
        sync.push("b")
    assert same(engine, {name: param.detach().bfloat16() for name, param in params.items()})


def test_a_thread_that_writes_through_numpy_all_the_time() -> None:
    weight = torch.zeros(1 << 20)
    engine, stop, started = MemoryEngine({"w": weight.clone()}), threading.Event(), threading.Event()

    def train() -> None:
        view, step = weight.numpy(), 0.0
        while not stop.is_set():
            step += 1
            view[:] = step
            started.set()

    thread = threading.Thread(target=train)
    with WeightSync({"w": weight}, [engine]) as sync:
        thread.start()
        try:
            started.wait()
            errors = [attempt(sync, f"v{number}") for number in range(20)]
            assert any(errors)
            assert len(set(engine.hosts[0].model.get_parameter("w").tolist())) <= 2, "more than one fill"
        finally:
            stop.set()
            thread.join()


def test_a_checkpoint_that_is_rewritten_in_place_during_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size and, within the kernel's clock, its time stay what they were."""
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    save_file(zeros(), path)
    engine = MemoryEngine(zeros())
    before, stat = engine.fingerprint(), path.stat()

    def rewrite() -> None:
        with path.open("r+b") as file:
            file.seek(stat.st_size - 8)
            file.write(b"\x01\x02\x03\x04\x05\x06\x07\x08")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    with WeightSync(path.parent, [engine]) as sync:
        between_the_reads(monkeypatch, rewrite)
        with pytest.raises(SourceError, match="changed its weights"):
            sync.push("torn")
        assert engine.fingerprint() == before
        sync.push("b")
    assert engine.fingerprint() != before


def test_a_source_that_gives_its_tensors_only_once_is_told_so() -> None:
    class Once(MappingSource):
        device = torch.device("cpu")

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            self.given = getattr(self, "given", None) or super().tensors()
            return self.given

    engine = MemoryEngine(zeros())
    with WeightSync(Once(zeros()), [engine]) as sync, pytest.raises(SourceError, match="once and not again: each call of `tensors`"):
        sync.push("a")


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("lies", ["in order", "transposed", "with gaps"])
def test_both_reads_of_a_value_that_is_cast_find_the_same_bytes(sent: torch.dtype, held: torch.dtype, lies: str) -> None:
    """A conversion writes another NaN for each kind of loop that PyTorch takes."""
    rows = torch.randn(257, 2 * 521, generator=torch.Generator().manual_seed(1)).to(held)
    rows[:, ::7] = torch.nan
    value = {"in order": rows, "transposed": rows.T, "with gaps": rows[:, ::2]}[lies]
    sizes = [1, cast.PIECE - 1, cast.PIECE, 3 * cast.PIECE + 5]
    values = {"rows": value, "none": value[:0], "one": rows[0, 0]} | {f"flat.{size}": rows.reshape(-1)[:size] for size in sizes}
    metas = [TensorMeta(name, dtype_name(sent), tuple(some.shape)) for name, some in values.items()]
    places = packed(metas)
    view = np.full(places.size, 255, np.uint8)
    with ThreadPoolExecutor(2) as pool:
        copying.Copier(pool).copied(view, metas, Placed(lambda: iter(values.items()), lambda: iter(values.items()), stays=True))
    for meta in metas:
        found = torch.from_numpy(view[places.offsets[meta.name] :][: meta.nbytes]).view(sent).view(meta.shape)
        torch.testing.assert_close(found, values[meta.name].to(sent), rtol=0, atol=0, equal_nan=True)
