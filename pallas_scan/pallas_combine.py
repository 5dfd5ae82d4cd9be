"""From the segments' summaries to what each segment starts from, both ways: the kernel between the two passes, and,
where segments lie side by side in a program, what it does between its own.

State elements do not meet here, so a program's lanes are neighbours in the plane of (state, dim), one a thread. Of a
tile [state, channels] the layout would follow the load of A, and every store cross shared memory between two barriers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_scan import sequence_sharding
from pallas_scan.pallas_cut import Cut
from pallas_scan.pallas_math import LOG2_E, exp2, fma
from pallas_scan.pallas_tile import Program, carried, launch, load, segment_passes
from pallas_scan.problem import Operands, Options

LANES = 128  # of a program
TOGETHER = 32  # segments whose summaries are loaded together: one waits as long as all of them
# The same within a program, on fewer than 16 warps and on 16. With more, registers spill; with fewer, the compiler
# gives the scan's loop as few registers as this part needs, and its loads come late (float32: 160 us for 114).
SIDES = 8, 16


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
    passed = carried(decay * start, None if passes is None else passes[:, last])
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

    def read(segment: Array | int) -> Summary:
        keep = refs["passes"][batch, segment] if "passes" in refs else None
        end = load(refs["ends"], batch, segment, lanes, mask=exists)
        return end, load(refs["totals"], batch, segment, channels, mask=exists), keep

    def write(segment: Array | int, h: Array) -> None:
        plgpu.store(refs["starts"].at[batch, segment, lanes], h, mask=exists)

    def pass_over(first: Array | int, count: int, h: Array) -> Array:
        segments = [cut.segments - 1 - first - i if backwards else first + i for i in range(count)]
        return _through(segments, h, A, cut, read, write)

    rounds, rest = divmod(cut.segments, TOGETHER)
    h = lax.fori_loop(0, rounds, lambda r, h: pass_over(r * TOGETHER, TOGETHER, h), h)
    pass_over(rounds * TOGETHER, rest, h)


Summary = tuple[Array, Array, Array | None]  # a segment's end from zero, its Σδ, and whether anything passes through it


def _through(
    segments: list[Any],
    h: Array,
    A: Array,
    cut: Cut,
    read: Callable[[Any], Summary],
    write: Callable[[Any, Array], None],
) -> Array:
    """h after the segments, each of whose starts is written. All are read before the first is."""
    summaries = [read(segment) for segment in segments]
    for segment, (end, total, keep) in zip(segments, summaries, strict=True):
        write(segment, h)
        decay = exp2(total * A, cut)
        h = fma(decay, h, end, cut) if keep is None else carried(decay * h, keep) + end
    return h


class Lanes:
    """The plane of a program's states and channels, one lane a thread, where segments lie side by side in it."""

    def __init__(self, program: Program) -> None:
        cut, self.program = program.cut, program
        lanes = lax.iota(jnp.int32, cut.dim_block * cut.state_block)
        self.local, self.states = lax.div(lanes, jnp.int32(cut.state_block)), lax.rem(lanes, jnp.int32(cut.state_block))
        inside = program.first + self.local
        self.channels = program.group * cut.width + inside
        self.mask = None if cut.width % cut.dim_block == 0 else inside < cut.width
        self.exist = None if cut.state == cut.state_block else self.states < cut.state
        if self.mask is not None and self.exist is not None:
            self.exist = self.mask & self.exist
        elif self.exist is None:
            self.exist = self.mask
        self.A = program.load("A", program.row("A"), self.channels, self.states, mask=self.mask) * LOG2_E

    def initial(self) -> Array:
        program = self.program
        if "initial_state" not in program.refs:
            return jnp.zeros(self.channels.shape, jnp.float32)
        return program.load("initial_state", program.batch, self.states, self.channels, mask=self.exist)

    def store_final(self, h: Array) -> None:
        program = self.program
        index = (program.batch, self.states, self.channels)
        plgpu.store(program.refs["final"].at[index], h, mask=self.exist)

    def combine(self, number: Array | int, h: Array) -> Array:
        """What the next round starts from. What the segments of this one start from takes their ends' place."""
        program = self.program
        refs, cut = program.refs, program.cut
        place = (program.batch, program.block)

        def read(side: Array | int) -> Summary:
            keep = refs["passes"][program.batch, number * cut.together + side] if "passes" in refs else None
            end = program.load("ends", *place, side, self.local, self.states)
            return end, program.load("totals", *place, side, self.local), keep

        def write(side: Array | int, h: Array) -> None:
            plgpu.store(refs["ends"].at[(*place, side, self.local, self.states)], h)

        count = min(SIDES[cut.num_warps >= 16], cut.together)

        def some(i: Array | int, h: Array) -> Array:
            return _through([i * count + k for k in range(count)], h, self.A, cut, read, write)

        return lax.fori_loop(0, cut.together // count, some, h)
