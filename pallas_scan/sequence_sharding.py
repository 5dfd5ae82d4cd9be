"""A sequence split over a mesh axis: the segment algorithm across devices, inside `jax.shard_map`.

    forward     each device scans its part from a zero state, which leaves (state, Σδ); one all_gather exchanges these;
                each folds those before its own into the state that its part starts from, and scans its part
    backward    the same from the last device to the first, with the state's cotangent for the state; then each device
                runs its own backward, which needs nothing more: its part's end has the cotangent of all that follows

A pair is batch × dim × (state + 1) floats, so a device receives parts times as many, whatever the length. exp(A Σδ) is
what a part does to the state that enters it, unless a sequence begins inside.

The functions here run on each device, between collectives. The first device is the first in scan order: with
`options.reverse` that is the last of the axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_scan import reference
from pallas_scan.problem import Operands, Options

Scan = Callable[[Operands, Options], tuple[Array, Array]]


def scan(local: Scan, ops: Operands, options: Options) -> tuple[Array, Array]:
    """`local`, a scan of one device, over the whole sequence. Returns out and the state after this device's part."""

    def whole(ops: Operands) -> tuple[Array, Array]:
        return local(*own_part(local, ops, options))

    # No residuals: jaxlib 0.11.2 crashes where it removes unused operands of a `shard_map`, seen with the 80 that the
    # gradient of `associative_scan` had.
    return jax.checkpoint(whole)(ops)


def own_part(local: Scan, ops: Operands, options: Options) -> tuple[Operands, Options]:
    """What this device scans: its part, from the state that the parts before it leave. Of `local` only the state is
    used."""
    alone = dataclasses.replace(options, axis_name=None)
    ops = ops._replace(initial_state=of_first(ops.initial_state, options))
    _, end = local(ops, alone)
    start = incoming(ops, options, end)
    return ops._replace(initial_state=start if ops.initial_state is None else start + ops.initial_state), alone


def of_first(x: Array | None, options: Options) -> Array | None:
    """x on the first device and zero on the others: an initial state or its gradient."""
    return None if x is None else jnp.where(_position(options) == 0, x, 0.0)


def of_last(x: Array, options: Options) -> Array:
    """The last device's x, on every device."""
    assert options.axis_name is not None
    last = _position(options) == lax.axis_size(options.axis_name) - 1
    return lax.psum(jnp.where(last, x, 0.0), options.axis_name)


def incoming(
    ops: Operands,
    options: Options,
    end: Float[Array, "batch dim state"],
    *,
    total: Float[Array, "batch dim"] | None = None,
    backwards: bool = False,
) -> Float[Array, "batch dim state"]:
    """What enters this device's part from those before it; backwards: from those after it.

    Args:
      end: what leaves this device's part, from zero or, on the device at the border, from what is given there: a state,
        or backwards its cotangent.
      total: Σδ of the part; found here if None.
    """
    assert options.axis_name is not None
    if total is None:
        total = jnp.sum(reference.step_size(ops, options), axis=1)
    parts = lax.axis_size(options.axis_name)
    pair = [end, total[..., None]]
    if ops.keep is not None:
        passes = jnp.all(ops.keep, axis=1)
        pair.append(jnp.broadcast_to(passes[:, None, None], (*total.shape, 1)).astype(jnp.float32))
    gathered = lax.all_gather(jnp.concatenate(pair, axis=-1), options.axis_name)
    state = end.shape[-1]

    whole = mine = jnp.zeros_like(end)
    for position in reversed(range(parts)) if backwards else range(parts):
        part = gathered[parts - 1 - position if options.reverse else position]
        mine = jnp.where(_position(options) == position, whole, mine)
        passed = jnp.exp(part[..., state : state + 1] * ops.A) * whole
        if ops.keep is not None:
            passed = jnp.where(part[..., state + 1 :] > 0, passed, 0.0)
        whole = passed + part[..., :state]
    return mine


def across_border(
    keep: Bool[Array, "batch seq"], segment_ids: Int32[Array, "batch seq"], options: Options
) -> Bool[Array, "batch seq"]:
    """keep, where the first step in scan order compares itself with the last of the device before."""
    assert options.axis_name is not None
    parts = lax.axis_size(options.axis_name)
    last, first = (0, -1) if options.reverse else (-1, 0)
    pairs = [(i, (i - 1 if options.reverse else i + 1) % parts) for i in range(parts)]
    before = lax.ppermute(segment_ids[:, last], options.axis_name, pairs)
    same = (segment_ids[:, first] == before) | (_position(options) == 0)
    return keep.at[:, first].set(same)


def _position(options: Options) -> Array:
    """This device's place in scan order."""
    assert options.axis_name is not None
    index = lax.axis_index(options.axis_name)
    return lax.axis_size(options.axis_name) - 1 - index if options.reverse else index
