"""Every difference between the jax versions we support, in one place (tested with 0.10.2 and 0.11.2)."""

from __future__ import annotations

import contextlib

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


def lowering_for_gpu() -> contextlib.AbstractContextManager:
    """Inside, `lower(lowering_platforms=("cuda",))` works on a machine with no GPU: from 0.11 it asks for a device."""
    if JAX_VERSION < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice("NVIDIA A10", None, "cuda")  # the sm_86 card in jax's table
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
