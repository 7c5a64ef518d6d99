"""The page of measurements and its picture say what the kept results say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from instep.bench import kept, page, shapes
from instep.bench.beside import beside
from instep.bench.picture import picture
from instep.bench.report import time
from instep.bench.results import Limit, Results, Row, Setting

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"
SETTING = Setting(
    kind="gpu", shapes="made-up", nbytes=2_000_000_000, tensors=2, repeats=1, machine=["2 x Card"],
    versions={"vllm": "9.9"}, date="2001-02-03", command="instep bench",
)  # fmt: skip


def row(way: str, engine: str, total: float, **other: str) -> Row:
    run = {"total": total, "pause": total / 2}
    return Row(way=way, engine=engine, runs=[run], **other)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["benchmarks.md", "push.svg"])
def test_what_the_page_shows_is_what_make_benchmarks_writes(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == page.texts(RESULTS)[name], "run `make benchmarks`"


def test_the_page_has_a_section_for_each_file_with_its_machine_versions_date_and_command() -> None:
    sections = dict(re.findall(r"^## ([\w.-]+)\n\n(.+?)\n\n", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE | re.DOTALL))
    files = [file for file in RESULTS.glob("*.json") if not file.match(kept.MODELS)]
    assert sections.keys() == {file.stem for file in files}
    for file in files:
        setting = msgspec.convert(msgspec.json.decode(file.read_bytes())["setting"], Setting)
        said = [*setting.machine, *setting.versions.values(), setting.date, setting.command]
        assert all(words in " ".join(sections[file.stem].split()) for words in said), file


def test_a_push_is_compared_with_the_fastest_of_vllms_ways_into_the_same_engine() -> None:
    rows = [
        row("instep ipc", "GPU 1", 0.05, limit="peer copy"),
        row("instep nccl", "GPU 1", 0.06),
        row("vLLM nccl", "GPU 1", 0.3),
        row("vLLM nccl packed", "GPU 1", 0.2),
        row("instep ipc", "GPU 0", 0.01),
        Row(way="vLLM ipc", engine="GPU 0", error="no"),
    ]  # fmt: skip
    limits = [Limit(name="peer copy", engine="GPU 1", nbytes=1_000_000_000, seconds=[0.02])]
    found: Any
    (found,) = beside(Results(setting=SETTING, limits=limits, rows=rows, copies=[]))
    assert (found.way, found.rival, found.times, found.limit) == (
        "instep ipc",
        "vLLM nccl packed",
        pytest.approx(4.0),
        pytest.approx(0.04),
    )


def test_the_bars_of_the_picture_share_one_scale_and_fit_in_it() -> None:
    rows = [pushed for results in kept.read(RESULTS).values() if isinstance(results, Results) for pushed in beside(results)]
    drawn = ElementTree.fromstring(picture(rows, ["of one run", "of another"]))
    width, height = float(drawn.attrib["width"]), float(drawn.attrib["height"])
    bars = [bar for bar in drawn.iter("{http://www.w3.org/2000/svg}rect") if bar.attrib["class"] != "ground"]
    lengths = [float(bar.attrib["width"]) for bar in bars]
    seconds = [value / pushed.nbytes for pushed in rows for value in (pushed.push, pushed.theirs)]
    assert max(lengths) < width
    assert [length / max(lengths) for length in lengths] == pytest.approx([value / max(seconds) for value in seconds], abs=1e-3)
    lines = {text.text or "": float(text.attrib["y"]) for text in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert lines["of one run"] < lines["of another"] < height
    texts = " ".join(lines)
    assert all(time(pushed.push) in texts and time(pushed.theirs) in texts for pushed in rows)


def test_a_file_that_no_benchmark_writes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"setting": {}}')
    with pytest.raises(ValueError, match=r"odd\.json"):
        kept.read(tmp_path)


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-0.6b", "qwen3-8b", "qwen3-moe"])
def test_the_shapes_of_a_kept_result_are_those_that_the_benchmark_makes_today(name: str) -> None:
    tensors = list(shapes.model(name, 1, "meta").parameters())
    measured = [results.setting for results in kept.read(RESULTS).values() if results.setting.shapes == name]
    assert measured
    assert {(setting.nbytes, setting.tensors) for setting in measured} == {(sum(tensor.nbytes for tensor in tensors), len(tensors))}
