"""How a configuration is fitted to a shape: a `Cut` is everything static that a kernel needs.

Segments of one sequence run in parallel in one of two ways. Each is a program of its own, and kernels follow each other
(`together` is 1). Or, where the configuration has several warps, a program holds `together` segments side by side, a
thread one channel of one of them, and goes over the sequence in rounds of as many: one kernel, with barriers inside.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_scan.config import KernelConfig
from pallas_scan.problem import Operands, Options

MAX_CHUNK = 16  # steps unrolled in a loop body; the compiler's time grows faster than their number
MAX_STATE = 256  # states of one tile; more are split over several scans (pallas_triton.py)
WIDE = 128  # channels a warp, from which on a thread of a tile has all states of its channels
MAX_STATE_TOGETHER = 16  # a thread holds all states of its channel, twice with A
TILE_STATES = 4  # of a tile where a thread has all states of its channels: rows of B and C come in loads of as many


@dataclasses.dataclass(frozen=True)
class Cut:
    """A configuration fitted to a shape."""

    batch: int
    seq: int
    dim: int
    state: int
    groups: int  # of channels; B and C may each have a divisor of them
    chunk: int
    dim_block: int
    num_warps: int
    segment: int
    together: int  # segments of a program
    in_thread: bool  # whether a thread has one channel of a segment with all its states
    tile_states: int
    save_every: int
    reverse: bool
    delta_softplus: bool
    interpret: bool

    @property
    def state_block(self) -> int:
        return _power_of_two(self.state)

    @property
    def tiles(self) -> int:
        """That the state is held in."""
        return self.state_block // self.tile_states

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes of a program's arrays before those of state and channel."""
        return () if self.together == 1 else (self.together,)

    @property
    def values_a_thread(self) -> int:
        """Of the state."""
        return self.together * self.state_block * self.dim_block // (32 * self.num_warps)

    @property
    def states_contiguous(self) -> bool:
        """Whether A is read with the states of a channel next to each other."""
        return self.in_thread or self.dim_block <= 16

    @property
    def width(self) -> int:
        """Channels a group."""
        return self.dim // self.groups

    @property
    def dim_blocks(self) -> int:
        return self.groups * -(-self.width // self.dim_block)

    @property
    def rounds(self) -> int:
        """In which a program goes over its part of the sequence, where that is all of it."""
        return -(-self.seq // (self.segment * self.together))

    @property
    def segments(self) -> int:
        return self.rounds * self.together

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.dim_blocks, self.segments if self.together == 1 else 1, self.batch)


def _power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def segments_together(num_warps: int, dim_block: int, state: int) -> int:
    """Of a forward's program: one, unless it has several warps and a thread can hold all states."""
    if num_warps == 1 or _power_of_two(state) > MAX_STATE_TOGETHER:
        return 1
    return 32 * num_warps // min(32, dim_block)


def fit(config: KernelConfig, ops: Operands, options: Options, *, thread: int, interpret: bool, intervals: bool) -> Cut:
    """Adjusts a configuration to a shape: blocks no larger than the shape, at most `thread` values a thread of a tile.

    With `intervals`, which is the backward, a segment holds whole intervals between saved states, and an interval whole
    chunks. A forward's segments lie side by side where there are several warps, unless the state is too large for it or
    devices exchange summaries, which only kernels of their own can.
    """
    batch, seq, dim, state = ops.sizes
    counts = [x.shape[2] for x in (ops.B, ops.C) if x.ndim == 4]
    groups = int(np.lcm.reduce(counts)) if counts else 1
    state_block = _power_of_two(state)
    chunk = min(config.chunk, MAX_CHUNK, _power_of_two(seq))
    dim_block = min(config.dim_block, _power_of_two(dim // groups))
    num_warps = config.num_warps
    together = 1
    if not intervals and options.axis_name is None:
        together = segments_together(num_warps, dim_block, state)
    if together > 1:
        dim_block = min(dim_block, 32)
        while num_warps > 2 and chunk * together > seq:
            num_warps, together = num_warps // 2, together // 2
        rounds = -(-seq // (together * config.segment))
        segment = -(-seq // (rounds * together * chunk)) * chunk
    else:
        while intervals and options.save_every % chunk:
            chunk //= 2
        while dim_block > 1 and dim_block * state_block > thread * 32 * num_warps:
            dim_block //= 2
        while num_warps > 1 and dim_block * state_block < 32 * num_warps:
            num_warps //= 2
        unit = options.save_every if intervals else chunk
        segment = min(-(-config.segment // unit), -(-seq // unit)) * unit
    in_thread = together > 1 or (not intervals and num_warps == 1 and dim_block == 32 and state_block > TILE_STATES)
    split = in_thread or (not intervals and dim_block >= WIDE * num_warps)
    return Cut(
        batch=batch,
        seq=seq,
        dim=dim,
        state=state,
        groups=groups,
        chunk=chunk,
        dim_block=dim_block,
        num_warps=num_warps,
        segment=segment,
        together=together,
        in_thread=in_thread,
        tile_states=min(TILE_STATES, state_block) if split else state_block,
        save_every=options.save_every,
        reverse=options.reverse,
        delta_softplus=options.delta_softplus,
        interpret=interpret,
    )
