"""Makes torchvision importable in the process that imports this, also where torch is built for
CPUs.

The wheel of torchvision is linked with CUDA: its library does not load there, and torchvision then
fails at the import, as two operators are missing. Its transforms are plain torch. Import this
before transformers, which looks for torchvision once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "torchvision"
"""The folder into which `scripts/setup.py` puts torchvision. Only this module looks there."""

if torch.version.cuda is None and FOLDER.is_dir() and str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
    for operator in ("nms", "qnms"):
        schema = "(Tensor boxes, Tensor scores, float iou) -> Tensor"
        torch.library.define(f"torchvision::{operator}", schema)
