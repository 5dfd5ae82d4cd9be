"""How the CPU form cuts operands into blocks of steps and lanes of vectors, and puts results back.

A lane is one (batch row, channel, part of the state): state = width parts, and element j parts + part is the lane's
element j. All lanes of one element are an array, with channels innermost, which kernels read and write from one end to
the other.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from pallas_scan import processor
from pallas_scan.problem import Operands, Options
from pallas_scan.xla_kernel import Exp2, in_buffers

# Elements of the state that one lane holds: the first of these that divides it. The backward keeps a block's states,
# decays and cotangents at once, which is more than the registers hold: the narrow one spills less.
WIDTHS = (4, 5, 6, 7, 3, 2, 1)
WIDTHS_BACK = (2, 1)

Lanes = Float32[Array, "*lanes"]  # (batch, groups, parts, channels of a group) without its axes of one
PerWidth = list[Lanes]  # one a state element that a lane holds


class Block(NamedTuple):
    """Operands of consecutive steps, float32, cut out of their arrays."""

    u: Float32[Array, "batch steps dim"]
    delta: Float32[Array, "batch steps groups channels"]  # padded, as `by_group` does
    raw_delta: Float32[Array, "batch steps dim"]  # before the softplus, for its derivative
    drive: Float32[Array, "batch steps groups channels"]  # delta u, padded
    B: Float32[Array, "batch steps groups state"] | None  # None where it does not vary
    C: Float32[Array, "batch steps groups state"] | None
    z: Float32[Array, "batch steps dim"] | None
    keep: Float32[Array, "batch steps"] | None  # 1 or 0


class Layout:
    """Cuts operands into blocks and lanes and puts results back, in scan order, whichever way the scan runs.

    An axis of one anywhere makes XLA's index arithmetic up to ten times slower, so lanes have none.

    Args:
      back: for the backward, whose lanes are narrow and padded. The forward's kernel has fewer arrays than the caches
        have room for, and would lose by the padding.
    """

    def __init__(self, ops: Operands, options: Options, *, back: bool = False) -> None:
        self.ops, self.options = ops, options
        self.sizes = ops.sizes
        batch, _, dim, state = self.sizes
        self.width = next(width for width in (WIDTHS_BACK if back else WIDTHS) if state % width == 0)
        self.groups = math.lcm(*(x.shape[2] for x in (ops.B, ops.C) if x.ndim == 4))  # those of both
        self.parts = state // self.width
        self.full = (batch, self.groups, self.parts, dim // self.groups)
        vendor = processor.fields().get("vendor_id", "")
        self.padding = padding(math.prod(self.full[:3]), self.full[3], vendor) if back else 0
        self.kept = [axis for axis in range(3) if self.full[axis] != 1]
        self.lanes = (*(self.full[axis] for axis in self.kept), self.full[3] + self.padding)
        self.exp2 = Exp2.create()

    # Time

    def start(self, position: Array | int, steps: int) -> Array | int:
        """The first time of the block whose first step in scan order is `position`."""
        return self.sizes.seq - steps - position if self.options.reverse else position

    def order(self, steps: int) -> list[int]:
        """Indices into a block, in scan order."""
        return list(range(steps))[:: -1 if self.options.reverse else 1]

    def slice(self, x: Array, position: Array | int, steps: int) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start(position, steps), steps, axis=1)

    def channels(self, x: Array, position: Array | int, steps: int) -> Float32[Array, "batch steps dim"]:
        return from_bits(self.slice(bits(x), position, steps), x.dtype).astype(jnp.float32)

    def write(self, into: Array, x: Array, position: Array | int, operand: str) -> Array:
        """`into`, the bits of an array of the operand's dtype, with a block written."""
        x = bits(x.astype(getattr(self.ops, operand).dtype))
        return lax.dynamic_update_slice_in_dim(into, x, self.start(position, x.shape[1]), axis=1)

    def block(self, position: Array | int, steps: int) -> Block:
        ops = self.ops
        cut = functools.partial(self.channels, position=position, steps=steps)
        u, raw_delta = cut(ops.u), cut(ops.delta)
        if ops.delta_bias is not None:
            raw_delta = raw_delta + ops.delta_bias[:, None]
        delta = jax.nn.softplus(raw_delta) if self.options.delta_softplus else raw_delta
        apart, drive = in_buffers([self.by_group(x) for x in (delta, delta * u)])
        return Block(
            u=u,
            delta=apart,
            raw_delta=raw_delta,
            drive=drive,
            B=cut(ops.B) if ops.B.ndim == 4 else None,
            C=cut(ops.C) if ops.C.ndim == 4 else None,
            z=None if ops.z is None else cut(ops.z),
            keep=None if ops.keep is None else in_buffers([cut(ops.keep)])[0],
        )

    # Lanes

    def by_group(self, x: Float32[Array, "... dim"]) -> Float32[Array, "... groups channels"]:
        """Channels by group, padded."""
        return self._pad(x.reshape(*x.shape[:-1], self.groups, self.full[3]))

    def of_groups(self, x: Float32[Array, "... groups channels"]) -> Float32[Array, "... dim"]:
        """`by_group`'s inverse."""
        x = self._cut(x)
        return x.reshape(*x.shape[:-2], self.sizes.dim)

    def _pad(self, x: Array) -> Array:
        if not self.padding:
            return x
        # Padded where it begins anew after `padding` channels: an inner loop without a branch is vectorised.
        *rows, channels = x.shape
        x = x.reshape(*rows, channels // self.padding, self.padding)
        x = jnp.pad(x, [(0, 0)] * len(rows) + [(0, 1), (0, 0)])
        return x.reshape(*rows, channels + self.padding)

    def _cut(self, x: Array) -> Array:
        return x[..., : self.full[3]]

    def _lanes(self, x: Array) -> Lanes:
        """(batch, groups, parts, channels), any of which may be 1, spread over the lanes."""
        kept = x.reshape(*(x.shape[axis] for axis in self.kept), x.shape[3])
        return jnp.broadcast_to(kept, self.lanes)

    def whole(self, x: Lanes) -> Float32[Array, "batch groups parts channels"]:
        return self._cut(x).reshape(self.full)

    def zeros(self) -> PerWidth:
        return [jnp.zeros(self.lanes, jnp.float32)] * self.width

    def of_channels(self, x: Float32[Array, "batch groups channels"]) -> Lanes:
        return self._lanes(x[:, :, None])

    def of_rows(self, x: Array) -> Array:
        """(batch,)"""
        return self._lanes(x[:, None, None, None])

    def of_state(self, x: Float32[Array, "b dim state"]) -> PerWidth:
        """A state, or a parameter shaped as one."""
        rows = jnp.moveaxis(
            x.astype(jnp.float32).reshape(x.shape[0], self.groups, self.full[3], self.width, self.parts), 2, -1
        )
        return [self._lanes(self._pad(rows[:, :, j])) for j in range(self.width)]

    def of_matrix(self, x: Float32[Array, "batch groups state"]) -> PerWidth:
        """B or C at one step."""
        x = jnp.repeat(x, self.groups // x.shape[1], axis=1)
        rows = x.reshape(*x.shape[:2], self.width, self.parts)
        return [self._lanes(rows[:, :, j, :, None]) for j in range(self.width)]

    def to_state(self, lanes: PerWidth) -> Float32[Array, "batch dim state"]:
        batch, _, dim, state = self.sizes
        stacked = jnp.stack([self.whole(x) for x in lanes], axis=2)  # (batch, groups, width, parts, channels)
        return jnp.moveaxis(stacked, -1, 2).reshape(batch, dim, state)

    def save(self, saved: Array, lanes: PerWidth, row: Array | int) -> Array:
        """`saved` (batch, rows, state, dim) with one row written."""
        batch, _, dim, state = self.sizes
        stacked = jnp.stack([jnp.swapaxes(self.whole(x), 1, 2) for x in lanes], axis=1)
        return lax.dynamic_update_slice_in_dim(saved, stacked.reshape(batch, 1, state, dim), row, axis=1)

    def saved(self, saved: Array, row: Array | int) -> PerWidth:
        x = lax.dynamic_index_in_dim(saved, row, axis=1, keepdims=False)
        x = x.reshape(x.shape[0], self.width, self.parts, self.groups, self.full[3])
        return [self._lanes(self._pad(jnp.swapaxes(x[:, j], 1, 2))) for j in range(self.width)]

    def over_parts(self, x: Lanes) -> Float32[Array, "batch dim"]:
        x = self.whole(x)
        if self.parts <= 16:  # part by part it is fused into what follows
            x = functools.reduce(operator.add, (x[:, :, part] for part in range(self.parts)))
        else:
            x = jnp.sum(x, axis=2)
        return x.reshape(x.shape[0], self.sizes.dim)

    def by_time(self, in_scan_order: Sequence[Lanes]) -> Float32[Array, "batch steps dim"]:
        """Each step's lanes, summed over the parts of the state."""
        order = self.order(len(in_scan_order))  # its own inverse
        return jnp.stack([self.over_parts(in_scan_order[i]) for i in order], axis=1)

    def over_channels(self, lanes: PerWidth, groups: int) -> Float32[Array, "batch groups state"]:
        sums = jnp.stack([jnp.sum(x, axis=-1).reshape(self.full[:3]) for x in lanes], axis=2)
        by_group = sums.reshape(sums.shape[0], groups, self.groups // groups, self.sizes.state)
        return by_group[:, :, 0] if groups == self.groups else jnp.sum(by_group, axis=2)


def bits(x: Array) -> Array:
    """Half precision as integers. XLA's CPU compiler has no slices of bfloat16 and float16: for each block it would
    convert the whole array to float32 and back."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: np.dtype) -> Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def padding(rows: int, channels: int, vendor: str) -> int:
    """Channels that are added to every row of the lanes, on a processor of this vendor.

    A kernel reads and writes dozens of arrays of lanes side by side. Where their size is a multiple of 4,096 bytes, the
    same element of each falls into one set of the first-level cache; where it is a multiple of 1,024, into one of four.
    A row's padding comes to 512 bytes an array or less, which makes it eight sets or more. But then most rows begin
    inside a cache line, and their vectors cross lines. On AMD's EPYC (Zen 5, 12 lines to a set) the padded backward
    takes 0.50 times as long as the other at (4, 2048, 1024, 16); on Intel's Xeon, with as many, 1.36 times.
    """
    if vendor == "GenuineIntel":
        return 0
    for added in (4, 2, 1):
        if 4 * rows * channels % 1024 == 0 and channels % added == 0 and 4 * rows * added <= 512:
            return added
    return 0
