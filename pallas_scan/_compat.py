"""Every difference between the jax versions we support, in one place (tested with 0.10.2, 0.11.2 and 0.12.0.1)."""

from __future__ import annotations

import jax

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:3] if part.isdigit())


def gpu_backend() -> bool:
    """Whether arrays live on a CUDA GPU by default."""
    return jax.default_backend() in ("gpu", "cuda")


def gpu() -> tuple[str, int]:
    """The kind and the number of multiprocessors of the GPU; of an RTX 3090's size where there is none to ask."""
    if not gpu_backend():
        return "none", 82
    device = jax.devices()[0]
    return device.device_kind, int(getattr(device, "core_count", 82))
