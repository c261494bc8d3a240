"""How much memory is free, on a GPU or on the host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on `device`; on a host that does not say so, 4 GB."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) << 10 if found else 4 << 30


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator raised it: the GPU's has a class of its own, the CPU's has none."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
