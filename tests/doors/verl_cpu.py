"""verl's platform for CPUs, by verl's own plug-in: VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_PLATFORM=cpu. verl has none."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


def nothing(*_: Any, **__: Any) -> None: ...


@PlatformRegistry.register("cpu")
class PlatformCpu(PlatformCUDA):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect", "set_device"), nothing),
        is_available=lambda: True,
        current_device=lambda: 0,
        device=lambda *_: nullcontext(),
    )

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self, device_index: int | None = None) -> None: ...

    def set_device(self, device_index: int) -> None: ...

    def empty_cache(self) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def is_ipc_supported(self) -> bool:
        return False

    def communication_backend_name(self) -> str:
        return "gloo"

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)
