"""The methods to copy one plan, among them the kernels, within a GPU and from the other one."""

from __future__ import annotations

import pytest
import torch

from instep.bench.copies import METHODS, copies, digest_alone
from instep.bench.trainer import Trainer


@pytest.mark.parametrize("device", range(2), ids=["one GPU", "two GPUs"])
def test_every_method_copies_every_region(device: int) -> None:
    if device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    found = copies(Trainer("tiny", "cuda:0").tensors, torch.device("cuda", device), repeats=1)
    assert [(copy.method, copy.error) for copy in found] == [(method, None) for method in METHODS]


def test_the_digest_alone_is_measured() -> None:
    found = digest_alone(Trainer("tiny", "cuda:0").tensors, torch.device("cuda", 0), repeats=2)
    assert len(found.seconds) == 2
