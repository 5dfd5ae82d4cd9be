"""Operands sharded over batch and dim, under `jax.jit`: every device scans its own rows and channels.

XLA cannot look into a kernel, so it would gather what a kernel reads. `custom_partitioning` tells it what a scan, its
tangent and its backward are on a shard: themselves, on fewer rows and channels. Only B and C, which all channels read,
are whole on every device that has a part of dim, and so their gradients, which sum over channels, are summed by an
all-reduce. Parameters' gradients are one a batch row here (problem.py); their sum over batch is outside.

Axes are named by letters, one string an array: b batch, s seq, d dim, n state, g groups, r rows of saved states, and o
where parameters have a leading axis of one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from pallas_scan import _compat

SHARDED = ("b", "d")


def axes_of(name: str, ndim: int, leading: int) -> str:
    """The axes of an operand, its tangent or its cotangent. `leading` is the size of its first axis."""
    if name in ("A", "B", "C", "D", "delta_bias") and ndim < 4:
        return ("o" if leading == 1 else "b") + ("d" if ndim == 2 else "dn")
    return {
        "B": "bsgn",
        "C": "bsgn",
        "initial_state": "bdn",
        "final": "bdn",
        "saved": "brnd",
        "keep": "bs",
    }.get(name, "bsd")


def partitioned(form: Callable[..., list[Array]], names: Sequence[str], results: Sequence[str]) -> Callable:
    """`form` such that XLA partitions it over batch and dim.

    Args:
      names: of the arrays that it takes, the first of them u.
      results: names of those that it returns; parameters' gradients are one a batch row.
    """

    def labels(of: Sequence[str], arrays: Sequence[Any]) -> list[str]:
        return [axes_of(name, len(x.shape), x.shape[0]) for name, x in zip(of, arrays, strict=True)]

    def partition(mesh, arguments, outputs):
        u = arguments[0]
        spec = (*u.sharding.spec, None, None, None)
        batch, _, dim = u.shape
        where = {"b": _divides(batch, spec[0], mesh), "d": _divides(dim, spec[2], mesh)}

        def shardings(axes: list[str]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, PartitionSpec(*(where.get(a) for a in letters))) for letters in axes)

        def local(*arrays: Array) -> tuple[Array, ...]:
            with _compat.untyped():  # XLA calls this back when it compiles
                return tuple(_of_shard(form, names, results, arrays, where["d"]))

        return mesh, local, shardings(labels(results, outputs)), shardings(labels(names, arguments))

    def rule(mesh, operands, outputs):
        del mesh
        inside = [" ".join(x) for x in labels(names, operands)]
        outside = [" ".join(x) for x in labels(results, outputs)]
        letters = dict.fromkeys(a for x in (*inside, *outside) for a in x.split())  # in order, as Shardy numbers them
        return f"{', '.join(inside)} -> {', '.join(outside)}", {
            "need_replication_factors": tuple(a for a in letters if a not in SHARDED)
        }

    wrapped = custom_partitioning(lambda *arrays: tuple(form(*arrays)))
    wrapped.def_partition(partition=partition, sharding_rule=rule)
    return wrapped


def _divides(size: int, axes: Any, mesh: Any) -> Any:
    """The mesh axes that an array axis is cut over: none where it does not come to equal parts."""
    return axes if axes is not None and size % _parts(axes, mesh.shape) == 0 else None


def _parts(axes: Any, shape: Any) -> int:
    return math.prod(shape[a] for a in (axes if isinstance(axes, tuple) else (axes,)))


def _of_shard(form: Callable, names: Sequence[str], results: Sequence[str], arrays: Sequence[Array], axes: Any):
    """`form` on one device's shards; `axes` are the mesh axes that dim is cut over."""
    if axes is None:
        return form(*arrays)
    cut = functools.partial(_own_groups, parts=lax.axis_size(axes), index=lax.axis_index(axes))
    matrices = {name: x for name, x in zip(names, arrays, strict=True) if name in ("B", "C") and x.ndim == 4}

    def own(name: str, x: Array) -> Array:
        if name not in matrices:
            return x
        # For their gradients in float32: in half precision each device's part of the sum would be rounded.
        return cut(x.astype(jnp.float32) if name in results else x)

    outputs = form(*(own(name, x) for name, x in zip(names, arrays, strict=True)))

    def summed(name: str, x: Array) -> Array:
        if name not in matrices:
            return x
        whole = matrices[name]
        _, put_back = jax.vjp(cut, jnp.zeros(whole.shape, jnp.float32))
        return lax.psum(put_back(x)[0], axes).astype(whole.dtype)

    return [summed(name, x) for name, x in zip(results, outputs, strict=True)]


def _own_groups(x: Array, *, parts: int, index: Array) -> Array:
    """The groups of B or C that a device's channels read; a group that several devices share is on each of them."""
    groups = x.shape[2]
    whole = math.lcm(groups, parts)
    x = jnp.repeat(x, whole // groups, axis=2)
    return lax.dynamic_slice_in_dim(x, index * (whole // parts), whole // parts, axis=2)
