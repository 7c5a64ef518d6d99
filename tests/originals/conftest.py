"""What the pages of other projects show, against the drop-ins. Models and engines are those of the integration tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integration"))
