"""The older names ``torch.cuda.amp``: autocast and GradScaler with the device "cuda" understood."""

from __future__ import annotations

from typing import Any

from .. import amp
from ..grad_scaler import GradScaler as _GradScaler

__all__ = ["GradScaler", "autocast"]


class autocast(amp.autocast):
    """``peft_core.autocast("cuda", ...)``; float16 by default."""

    def __init__(self, enabled: bool = True, dtype: Any = "float16", cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype=dtype, enabled=enabled)


class GradScaler(_GradScaler):
    """``peft_core.amp.GradScaler("cuda", ...)``."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
