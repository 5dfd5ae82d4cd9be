"""A sequence split over a mesh axis: the segment algorithm across devices.

Each device scans its part from a zero state, which leaves (Σδ, state); one all_gather exchanges these, every device
folds those before its own into its initial state, and scans again. Communication is
parts × batch × dim × (state + 1) floats, whatever the length. Nothing here needs a derivative of its own: JAX
transposes the collective.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_scan import reference
from pallas_scan.problem import Operands, Options


def sequence_sharded(
    run: Callable[[Operands, Options], tuple[Array, Array]],
    ops: Operands,
    options: Options,
    segment_ids: Array | None,
    axis_name: str,
) -> tuple[Array, Array]:
    """`run` over a sequence whose parts lie on the devices of `axis_name`, in order.

    Returns out of this device's part, and the final state of the whole sequence, the same on every device.
    """
    parts = lax.axis_size(axis_name)
    position = lax.axis_index(axis_name)
    position = parts - 1 - position if options.reverse else position
    if segment_ids is not None and ops.keep is not None:
        ops = ops._replace(keep=_across_border(ops.keep, segment_ids, axis_name, options.reverse, parts))

    _, state = run(ops._replace(initial_state=None), options)
    total = jnp.sum(reference.step_size(ops, options), axis=1)
    passes = jnp.ones(total.shape[:1], bool) if ops.keep is None else jnp.all(ops.keep, axis=1)
    gathered = [lax.all_gather(x, axis_name) for x in (state, total, passes)]

    whole = mine = jnp.zeros_like(state) if ops.initial_state is None else ops.initial_state
    for i in range(parts):
        part = parts - 1 - i if options.reverse else i
        state, total, passes = (x[part] for x in gathered)
        mine = jnp.where(position == i, whole, mine)
        decay = jnp.where(passes[:, None, None], jnp.exp(total[..., None] * ops.A), 0.0)
        whole = decay * whole + state
    out, _ = run(ops._replace(initial_state=mine), options)
    return out, whole


def _across_border(keep: Array, segment_ids: Array, axis_name: str, reverse: bool, parts: int) -> Array:
    """keep, where the first step in scan order compares itself with the last of the device before."""
    last, first = (0, -1) if reverse else (-1, 0)
    pairs = [(i, (i - 1 if reverse else i + 1) % parts) for i in range(parts)]
    before = lax.ppermute(segment_ids[:, last], axis_name, pairs)
    start = lax.axis_index(axis_name) == (parts - 1 if reverse else 0)
    same = (segment_ids[:, first] == before) | start
    return keep.at[:, first].set(same)
