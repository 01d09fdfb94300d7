"""Memory of this process: what it holds, and what it could hold."""

import psutil
import torch


def memory_held() -> int:
    """Most bytes that tensors on the GPU held so far; without a GPU, the bytes that this process holds."""
    return (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else psutil.Process().memory_info().rss
    )


def memory_for(device: torch.device) -> int:
    """Bytes that this process can hold on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().available + psutil.Process().memory_info().rss
