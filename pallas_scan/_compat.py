"""Every difference between the jax versions we support, in one place (tested with 0.10.2, 0.11.2 and 0.12.0.1)."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as _config
from jax._src import dispatch as _dispatch
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

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
    device = AbstractDevice("NVIDIA A10", None, "cuda")  # the sm_86 card in jax's table
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


_WARNINGS = threading.RLock()  # a thread that lowers must not restore the filters under another


@contextlib.contextmanager
def without_deprecation_of_triton():
    """From 0.11 every lowering of a kernel warns that Pallas's Triton backend is deprecated: what we know, and users
    cannot change."""
    with _WARNINGS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


# --- what JAX's types say of meshes ---


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which x differs from device to device, inside a `jax.shard_map` that checks them."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: Array, axes: frozenset[str]) -> Array:
    """x as a value that may differ over the axes; the cotangent is then summed over those where it did not."""
    missing = axes - varying_axes(x)
    return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x


def typed(like: Any, shape: Sequence[int], dtype: Any, axes: Sequence[int | None]) -> jax.core.ShapedArray:
    """A type with like's varying axes, each array axis sharded as that one of like's which `axes` names."""
    like = like if isinstance(like, jax.core.ShapedArray) else jax.typeof(like)
    mesh, spec = like.sharding.mesh, like.sharding.spec
    if mesh.empty:
        return jax.core.ShapedArray(tuple(shape), jnp.dtype(dtype))
    sharding = NamedSharding(mesh, PartitionSpec(*(None if a is None else spec[a] for a in axes)))
    return jax.core.ShapedArray(
        tuple(shape), jnp.dtype(dtype), sharding=sharding, manual_axis_type=like.manual_axis_type
    )


def zeros(kind: jax.core.ShapedArray) -> Array:
    sharding = None if kind.sharding.mesh.empty else kind.sharding
    return vary(lax.full(kind.shape, 0, kind.dtype, sharding=sharding), kind.manual_axis_type.varying)


@contextlib.contextmanager
def untyped():
    """Inside, values have neither varying axes, which Pallas's interpret mode does not know (0.10.2 to 0.12.0.1), nor
    explicit shardings: what is traced is one device's part."""
    mesh = jax.sharding.get_abstract_mesh()
    explicit = [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit]
    without = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
    hidden = jax.sharding.use_abstract_mesh(without) if explicit else contextlib.nullcontext()
    with _config._check_vma(False), hidden:
        yield


def partitioned_by_xla(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether what is lowered is for several devices, and outside of any `jax.shard_map`."""
    axes = ctx.module_context.axis_context
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices > 1


def knows_devices_when_lowered(primitive: Primitive) -> None:
    """Has jit tell the primitive's lowering of the devices, as `custom_partitioning` inside it wants."""
    _dispatch.prim_requires_devices_during_lowering.add(primitive)
