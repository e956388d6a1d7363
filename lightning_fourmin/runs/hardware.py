"""What a run ran on: hardware and the versions of what matters."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from lightning_fourmin.runs.record import Hardware

PACKAGES = ("lightning-fourmin", "torch", "lightning", "torchmetrics", "webdataset", "hydra-core", "numpy")


def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}


def hardware() -> Hardware:
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Asking makes a context on the GPU, which only a process that computes there should have.
    num_gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(num_gpus))
    return Hardware(_cpu(), os.cpu_count() or 1, round(memory_bytes / 1e9, 1), gpus)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
