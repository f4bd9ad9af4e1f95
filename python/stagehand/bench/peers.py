"""Offloading by other libraries, as their users call it. Each function prepares a model on the host for a CUDA device
and returns the library's version. ImportError where it is not installed."""

from __future__ import annotations

import importlib.metadata

import torch


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # on the path, not installed
        return "unknown"


def offload_groups(model, level: str, device: str = "cuda", **options) -> str:
    from diffusers.hooks import apply_group_offloading

    apply_group_offloading(model, onload_device=torch.device(device), offload_device=torch.device("cpu"),
                           offload_type=level, non_blocking=True, use_stream=True, **options)
    return version_of("diffusers")


def diffusers_leaf(model, device: str = "cuda") -> str:
    """Group offloading at leaf level with a stream."""
    return offload_groups(model, "leaf_level", device, record_stream=True)


def accelerate(model, device: str = "cuda") -> str:
    from accelerate import cpu_offload

    cpu_offload(model, execution_device=torch.device(device))
    return version_of("accelerate")
