"""What the documentation says: its links lead somewhere, its Python runs, and it names what there is."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry

import instep
from instep import WeightSync, generation
from instep.bench.group import free_port
from instep.cli import checks
from instep.metrics import metrics

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
WORDS = 700
"""At most in the README, which is read in two minutes."""
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)
RUN = ("quickstart.md", "transports.md", "metrics.md")
"""Pages whose Python needs neither a GPU nor a server. A block that does is marked `no-run` after `python`."""


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{target}#{anchor}")
    assert broken == []


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= WORDS


def test_lines_of_text_have_at_most_100_columns() -> None:
    wide = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text().splitlines(), start=1)
        if len(line) > 100 and not line.lstrip().startswith("|")
    ]
    assert wide == []


def test_sentences_in_code_have_lines_of_at_most_100_columns() -> None:
    """Those of docstrings, and of comments that have a line of their own. A module's docstring may
    hold tables and code, which are indented."""
    wide = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        lines = file.read_text().splitlines()
        docs = [node.value for node in ast.walk(ast.parse("\n".join(lines))) if isinstance(node, ast.Expr)]
        spans = [range(doc.lineno, (doc.end_lineno or 0) + 1) for doc in docs if isinstance(getattr(doc, "value", None), str)]
        said = {number for span in spans for number in span} | {number for number, line in enumerate(lines, 1) if line.lstrip()[:1] == "#"}
        table = {number for span in spans if span.start == 1 for number in span if lines[number - 1].startswith("    ")}
        wide += [f"{file.relative_to(ROOT)}:{number}" for number in sorted(said - table) if len(lines[number - 1]) > 100]
    assert wide == []


def test_the_package_page_has_the_readme_without_links_into_the_repository() -> None:
    text = run_path(str(ROOT / "scripts" / "links.py"))["without_links"]((ROOT / "README.md").read_text())
    assert LINK.findall(text) == []
    assert "[" not in text.replace('"instep[', "").replace("engines=[llm]", "")
    assert "Quickstart" in text


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    told = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2])
    there = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    roots = {"index.md", "contributing.md", "changelog.md", "design/index.md"}
    assert sorted(set(told) - roots) == sorted(page for page in there if not page.startswith("design/"))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference").glob("*.md")), ids=lambda page: page.stem)
def test_every_name_of_the_reference_is_there_and_has_a_docstring(page: Path) -> None:
    for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
        assert (resolve_name(name).__doc__ or "").strip(), name


def test_the_reference_has_every_public_name() -> None:
    told = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    public = [f"{module.__name__}.{name}" for module in (instep, generation) for name in module.__all__]
    assert [name for name in public if f"::: {name}\n" not in told] == []


def test_the_index_of_decisions_has_every_page_once() -> None:
    told = re.findall(r"\(docs/design/([\w-]+)\.md\)", (ROOT / "DESIGN.md").read_text())
    assert sorted(told) == sorted(page.stem for page in (ROOT / "docs" / "design").glob("*.md"))


@pytest.mark.parametrize("name", RUN)
@pytest.mark.usefixtures("segments")
def test_the_python_of_a_page_runs_from_top_to_bottom(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    logged: list[Any] = []

    class Logger:
        def log(self, found: dict[str, float]) -> None:
            logged.append(found)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            logged.append((name, value, step))

    blocks = CODE.findall((ROOT / "docs" / name).read_text())
    assert blocks
    namespace: dict[str, Any] = {"run": Logger(), "writer": Logger()}
    for block in blocks:
        exec(compile(block, name, "exec"), namespace)
    output = capsys.readouterr().out
    if name == "quickstart.md":
        assert "step-1: 0 MB in 4 tensors to 1 engine" in output
        assert "DIRTY: refuses to generate until a push succeeds" in output
        assert "\nstep-3\nstep-4: 0 MB in 4 tensors to 1 engine" in output
    if name == "metrics.md":
        assert logged[0]["instep/bytes"] == 32
        assert ("instep/bytes", 32, 0) in logged
        samples = namespace["registry"].get_sample_value
        assert samples("instep_syncs_total", {"outcome": "ok"}) == 1


@pytest.fixture
def ports(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Those of the recipes, each with one that is free here."""
    monkeypatch.setenv("INSTEP_TOKEN", "a token of the test")
    return {"29500": str(free_port()), "9464": str(free_port())}


def test_the_recipes_run(ports: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A block that begins with the name of a file is a program; the others are one program, from top to bottom."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    for told, free in ports.items():
        assert told in text
        text = text.replace(told, free)
    programs, namespace = [], dict[str, Any]()
    try:
        for block in CODE.findall(text):
            if name := re.match(r"# (\w+\.py)\n", block):
                (tmp_path / name[1]).write_text(block)
                programs.append(subprocess.Popen([sys.executable, tmp_path / name[1]]))
            else:
                exec(compile(block, "recipes.md", "exec"), namespace)
        assert [program.poll() for program in programs] == [None]
        with urlopen(f"http://127.0.0.1:{ports['9464']}/metrics") as answer:
            assert 'instep_syncs_total{outcome="ok"} 1.0' in answer.read().decode()
    finally:
        for program in programs:
            program.kill()
            program.wait(30)
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith("step-1: 0 MB in 1 tensors to 1 engine")
    assert others == ["run-1/step-7"]
    assert namespace["sync"].status()[0].version == "average-1"


def test_the_quickstart_has_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    settings = {name: found.default for name, found in signature(WeightSync).parameters.items() if found.kind is found.KEYWORD_ONLY}
    told = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE)
    assert {name: ast.literal_eval(default) for name, default in told} == settings


def test_the_quickstart_has_every_extra() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text().partition("## ")[0]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - {"test", "docs"}
    assert set(re.findall(r"`([\w-]+)`", "".join(re.findall(r"^\|([^|]+)\|", page, re.MULTILINE)))) == extras


def test_troubleshooting_has_every_line_of_the_doctor_that_may_warn() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    source = Path(checks.__file__).read_text()
    warned = set(re.findall(r'Finding\(\s*"([^"]+)", "(?:warn|fail)"', source))
    assert {name for name in warned if f"| {name} |" not in page} == set()
    assert {"vllm", "shared memory", "VLLM_PLUGINS"} <= warned


def names() -> set[str]:
    """Of all metrics, as a server tells them."""
    registry = CollectorRegistry()
    metrics(registry)
    return {metric.name + ("_total" if metric.type == "counter" else "") for metric in registry.collect()}


def test_the_page_of_metrics_has_each_of_them() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert set(re.findall(r"`(instep_\w+)", page)) == names()


def test_the_dashboard_has_a_panel_for_each_metric_and_asks_for_no_other() -> None:
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"instep_\w+", "".join(expressions(dashboard)))}
    assert asked == names()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [cell for panel in panels for cell in area(panel["gridPos"])]
    assert len(set(cells)) == len(cells)
    assert all(x < 24 for x, _ in cells)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"} == variables == {"datasource", "job"}


def expressions(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def area(position: dict[str, int]) -> list[tuple[int, int]]:
    x, y, w, h = (position[name] for name in "xywh")
    return [(column, row) for column in range(x, x + w) for row in range(y, y + h)]
