"""The hook that looks at a commit's subject."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIGHT = ["plan: cut rows\n\nThe reason.\n", 'Revert "plan: cut rows"\n', "fixup! plan: cut rows\n", f"plan: cut {'r' * 61}"]
WRONG = {
    "": "not `area: verb ...`",
    "cut rows at words": "not `area: verb ...`",
    "Plan: cut rows": "not `area: verb ...`",
    "plan: Cut rows": "not `area: verb ...`",
    "plan: rows": "not `area: verb ...`",
    "plan: cut rows.": "ends with a full stop",
    f"plan: cut {'r' * 62}": "72 characters",
}


def said(message: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "message").write_text(message)
    return subprocess.run([sys.executable, "scripts/commit_subject.py", folder / "message"], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("message", RIGHT)
def test_a_subject_that_names_area_and_verb_passes(message: str, tmp_path: Path) -> None:
    found = said(message, tmp_path)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("message", WRONG)
def test_another_subject_is_refused_with_the_reason(message: str, tmp_path: Path) -> None:
    found = said(message, tmp_path)
    assert found.returncode == 1
    assert WRONG[message] in found.stderr


def test_the_hook_runs_the_script() -> None:
    assert "scripts/commit_subject.py" in (ROOT / ".pre-commit-config.yaml").read_text()
