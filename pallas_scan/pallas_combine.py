"""From the segments' summaries to what each segment starts from: the kernel between the two passes, both ways.

State elements do not meet here, so a program's lanes are neighbours in the plane of (state, dim), one a thread. Of a
tile [state, channels] the layout would follow the load of A, and every store cross shared memory between two barriers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_scan import sequence_sharding
from pallas_scan.pallas_tile import LOG2_E, Cut, carried, exp2, launch, load, segment_passes
from pallas_scan.problem import Operands, Options

LANES = 128  # of a program
TOGETHER = 32  # segments whose summaries are loaded together: one waits as long as all of them


def summary_shapes(cut: Cut) -> dict[str, jax.ShapeDtypeStruct]:
    """A segment's end from a zero start, and its Σδ."""
    return {
        "ends": jax.ShapeDtypeStruct((cut.batch, cut.segments, cut.state, cut.dim), jnp.float32),
        "totals": jax.ShapeDtypeStruct((cut.batch, cut.segments, cut.dim), jnp.float32),
    }


def combine(ops: Operands, cut: Cut, summaries: dict[str, Array], initial: Array | None, *, backwards: bool) -> Array:
    """What each segment starts from, (batch, segments, state, dim): the state or, backwards, the cotangent.

    Args:
      initial: what the first segment starts from (backwards: the last), (batch, state, dim); zero if None.
    """
    plane = cut.state * cut.dim
    ends = summaries["ends"].reshape(cut.batch, cut.segments, plane)
    inputs = {"A": ops.A, "ends": ends, "totals": summaries["totals"]}
    if initial is not None:
        inputs["initial"] = initial.reshape(cut.batch, plane)
    passes = segment_passes(ops, cut)
    if passes is not None:
        inputs["passes"] = passes
    results = launch(
        lambda refs: _kernel(refs, cut, backwards=backwards),
        inputs,
        {"starts": jax.ShapeDtypeStruct(ends.shape, jnp.float32)},
        name="selective_scan_combine",
        grid=(pl.cdiv(plane, LANES), cut.batch),
        num_warps=LANES // 32,
        interpret=cut.interpret,
    )
    return results["starts"].reshape(summaries["ends"].shape)


def between_devices(
    ops: Operands, options: Options, cut: Cut, summaries: dict[str, Array], initial: Array | None, *, backwards: bool
) -> Array:
    """What enters the segments of this device from the devices before it (backwards: after it), (batch, state, dim).

    Args:
      initial: as `combine`'s.
    """
    last = 0 if backwards else cut.segments - 1
    start = combine(ops, cut, summaries, initial, backwards=backwards)[:, last]
    decay = jnp.exp(summaries["totals"][:, last, None] * jnp.swapaxes(ops.A, 1, 2))
    passes = segment_passes(ops, cut)
    passed = carried(decay * start, None if passes is None else passes[:, last, None, None])
    end = jnp.swapaxes(passed + summaries["ends"][:, last], 1, 2)
    total = jnp.sum(summaries["totals"], axis=1)
    entering = sequence_sharding.incoming(ops, options, end, total=total, backwards=backwards)
    return jnp.swapaxes(entering, 1, 2)


def _kernel(refs: dict, cut: Cut, *, backwards: bool) -> None:
    batch = pl.program_id(1)
    lanes = pl.program_id(0) * LANES + lax.iota(jnp.int32, LANES)
    states, channels = lax.div(lanes, jnp.int32(cut.dim)), lax.rem(lanes, jnp.int32(cut.dim))
    plane = cut.state * cut.dim
    exists = None if plane % LANES == 0 else lanes < plane
    A = load(refs["A"], batch if refs["A"].shape[0] > 1 else 0, channels, states, mask=exists) * LOG2_E
    h = jnp.zeros((LANES,), jnp.float32)
    if "initial" in refs:
        h = load(refs["initial"], batch, lanes, mask=exists)

    def pass_over(first: Array | int, count: int, h: Array) -> Array:
        segments = [cut.segments - 1 - first - i if backwards else first + i for i in range(count)]
        loaded = []
        for segment in segments:
            keep = refs["passes"][batch, segment] if "passes" in refs else None
            end = load(refs["ends"], batch, segment, lanes, mask=exists)
            loaded.append((end, load(refs["totals"], batch, segment, channels, mask=exists), keep))
        for segment, (end, total, keep) in zip(segments, loaded, strict=True):
            plgpu.store(refs["starts"].at[batch, segment, lanes], h, mask=exists)
            h = carried(exp2(total * A, cut) * h, keep) + end
        return h

    rounds, rest = divmod(cut.segments, TOGETHER)
    h = lax.fori_loop(0, rounds, lambda r, h: pass_over(r * TOGETHER, TOGETHER, h), h)
    pass_over(rounds * TOGETHER, rest, h)
