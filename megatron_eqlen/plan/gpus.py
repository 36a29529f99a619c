"""Figures of the data sheets of known GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_gib: float
    flops: float
    """Dense bfloat16 FLOPs per second."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    network: float
    """Bytes per second from GPUs of other nodes: the GPU's share of the network in its maker's nodes (200 and
    400 Gbit/s InfiniBand per GPU; RTX 4090: 25 Gbit/s); an assumption."""


GPUS = (
    Gpu("RTX 4090", 24, 165e12, 1.01e12, 3e9),
    Gpu("A100", 80, 312e12, 2.04e12, 25e9),
    Gpu("H100", 80, 989e12, 3.35e12, 50e9),
    Gpu("H200", 141, 989e12, 4.8e12, 50e9),
)
"""Known GPUs; H100 and H200 are SXM modules."""


def gpu_named(device: str | None) -> Gpu | None:
    """Return the GPU with the given device name (``NVIDIA H100 80GB HBM3``); None for unknown GPUs and for
    slower cards of the same name (``NVIDIA H100 PCIe``, ``NVIDIA H100 NVL``)."""
    if not device or any(card in device.upper() for card in ("PCIE", "NVL")):
        return None
    return next((gpu for gpu in GPUS if gpu.name in device), None)
