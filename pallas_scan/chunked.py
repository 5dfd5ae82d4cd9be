"""The CPU path: blocks of the recurrence, each one vectorised kernel, in one XLA loop, with a hand-derived backward.

Three things make it fast where a plain `lax.scan` is not (docs/derivation.md has the mathematics):

* `BLOCK` steps of a lane, for a few of its state's elements, are one kernel: the state stays in registers from step to
  step (xla_kernel.py says how XLA is brought to that).
* Inputs are sliced out of their own (batch, seq, dim) arrays and results are written back in place, so nothing is
  transposed to put time first.
* The backward recomputes a block's states inside the kernel that goes back over them.

The forward saves the state before every `options.save_every` steps; the backward recomputes all else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from pallas_scan import sequence_sharding
from pallas_scan.problem import Operands, Options
from pallas_scan.xla_kernel import Exp2, in_buffers, in_one_kernel, twice

BLOCK = 8  # steps in one loop body
# Elements of the state that one lane holds: the first of these that divides it. The backward keeps a block's states,
# decays and cotangents at once, which is more than the registers hold: the narrow one spills less.
WIDTHS = (4, 5, 6, 7, 3, 2, 1)
WIDTHS_BACK = (2, 1)
LOG2_E = np.float32(1.4426950408889634)

Lanes = Float32[Array, "*lanes"]  # (batch, groups, parts, channels of a group) without its axes of one
PerWidth = list[Lanes]  # one a state element that a lane holds


class Block(NamedTuple):
    """Operands of consecutive steps, float32, cut out of their arrays."""

    u: Float32[Array, "batch steps dim"]
    delta: Float32[Array, "batch steps dim"]
    raw_delta: Float32[Array, "batch steps dim"]  # before the softplus, for its derivative
    drive: Float32[Array, "batch steps dim"]  # delta u
    B: Float32[Array, "batch steps groups state"] | None  # None where it does not vary
    C: Float32[Array, "batch steps groups state"] | None
    z: Float32[Array, "batch steps dim"] | None
    keep: Float32[Array, "batch steps"] | None  # 1 or 0


class _Layout:
    """Cuts operands into blocks and lanes and puts results back, in scan order, whichever way the scan runs.

    A lane is one (batch row, channel, part of the state): state = width parts, and element j parts + part is the
    lane's element j. An axis of one anywhere makes XLA's index arithmetic up to ten times slower, so lanes have none.
    """

    def __init__(self, ops: Operands, options: Options, *, back: bool = False) -> None:
        self.ops, self.options = ops, options
        self.sizes = ops.sizes
        batch, _, dim, state = self.sizes
        self.width = next(width for width in (WIDTHS_BACK if back else WIDTHS) if state % width == 0)
        self.groups = math.lcm(*(x.shape[2] for x in (ops.B, ops.C) if x.ndim == 4))  # those of both
        self.parts = state // self.width
        self.full = (batch, self.groups, self.parts, dim // self.groups)
        self.padding = _padding(math.prod(self.full[:3]), self.full[3]) if back else 0
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
        return _of_bits(self.slice(_bits(x), position, steps), x.dtype).astype(jnp.float32)

    def write(self, into: Array, x: Array, position: Array | int, like: Array) -> Array:
        """`into`, the bits of an array of `like`'s dtype, with a block written."""
        x = _bits(x.astype(like.dtype))
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


def _bits(x: Array) -> Array:
    """Half precision as integers. XLA's CPU compiler has no slices of bfloat16 and float16: each block would convert the
    whole array to float32 and back."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def _of_bits(x: Array, dtype: np.dtype) -> Array:
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def _padding(rows: int, channels: int) -> int:
    """Channels that are added to every row of the lanes.

    A kernel reads and writes dozens of arrays of lanes side by side. Where their size is a multiple of 4,096 bytes, the
    same element of each falls into the same set of the caches, which hold eight to a set.
    """
    for padding in (4, 2, 1):
        if 4 * rows * channels % 1024 == 0 and channels % padding == 0 and 4 * rows * padding <= 512:
            return padding
    return 0


def _loop(
    position: int, steps: int, block: int, body: Callable, carry, *, backwards: bool = False, pairs: bool = False
):
    """Runs body(position, steps, carry) over `steps` steps from `position`, `block` at a time; the rest is one more.

    Args:
      pairs: two blocks a turn, where they come out even: XLA then copies no carried state, and cuts the second block
        while the first is computed. It compiles twice as much.
    """
    count, rest = divmod(steps, block)

    def main(carry):
        if count < 2:
            return body(position, block, carry) if count else carry
        at = (lambda i: position + (count - 1 - i) * block) if backwards else (lambda i: position + i * block)
        unroll = 2 if pairs and count % 2 == 0 else 1

        def turn(i, carry):
            for k in range(unroll):
                carry = body(at(unroll * i + k), block, carry)
            return carry

        return lax.fori_loop(0, count // unroll, turn, carry)

    def remainder(carry):
        return body(position + count * block, rest, carry) if rest else carry

    return main(remainder(carry)) if backwards else remainder(main(carry))


class _Step:
    """What a step of the recurrence needs, spread over the lanes."""

    def __init__(self, layout: _Layout, block: Block, step: int) -> None:
        ops = layout.ops
        self.exp2 = layout.exp2
        self.delta, self.drive = twice([layout.of_channels(x[:, step]) for x in (block.delta, block.drive)])
        self.keep = None if block.keep is None else twice([layout.of_rows(block.keep[:, step])])[0] > 0
        self.B = twice(layout.of_state(ops.B) if block.B is None else layout.of_matrix(block.B[:, step]))
        self.C = twice(layout.of_state(ops.C) if block.C is None else layout.of_matrix(block.C[:, step]))

    def carried(self, x: Lanes) -> Lanes:
        """What passes the border before the step: nothing where a sequence begins."""
        return x if self.keep is None else lax.select(self.keep, x, jnp.zeros_like(x))

    def decays(self, A: PerWidth) -> PerWidth:
        """exp(δ A)"""
        return [self.exp2(self.delta * (a * LOG2_E)) for a in A]

    def advance(self, h: PerWidth, decays: PerWidth) -> PerWidth:
        """The state after the step."""
        return [self.carried(decay * x) + self.drive * b for decay, x, b in zip(decays, h, self.B, strict=True)]

    def readout(self, h: PerWidth) -> Lanes:
        return _dot(h, self.C)


def _dot(x: PerWidth, y: PerWidth) -> Lanes:
    return functools.reduce(operator.add, map(operator.mul, x, y))


def _together(results: Sequence[PerWidth]) -> list[PerWidth]:
    """Lists of lanes, computed in one kernel."""
    flat = iter(in_one_kernel([x for lanes in results for x in lanes]))
    return [[next(flat) for _ in lanes] for lanes in results]


def forward(ops: Operands, options: Options, *, save: bool) -> tuple[Array, Array, Array | None]:
    """The scan.

    Returns:
      out (batch, seq, dim) in u's dtype, the final state (batch, dim, state) float32 and, with `save`, the state before
      every `options.save_every` steps in scan order, (batch, ceil(seq / save_every), state, dim) float32.
    """
    if options.axis_name is not None:
        ops, options = sequence_sharding.own_part(lambda *of: forward(*of, save=False)[:2], ops, options)
    layout = _Layout(ops, options)
    batch, seq, dim, state = layout.sizes

    def block_body(position, steps, carry):
        h, out = carry
        block = layout.block(position, steps)
        A, h = twice(layout.of_state(ops.A)), twice(h)
        readouts = []
        for step in layout.order(steps):
            at = _Step(layout, block, step)
            h = at.advance(h, at.decays(A))
            readouts.append(at.readout(h))
        readouts, h = _together([readouts, h])
        y = layout.by_time(readouts)
        if ops.D is not None:
            y = y + ops.D[:, None] * block.u
        if block.z is not None:
            y = y * jax.nn.silu(block.z)
        return h, layout.write(out, y, position, ops.u)

    def interval_body(position, steps, carry):
        h, out, saved = carry
        if saved is not None:
            saved = layout.save(saved, h, position // options.save_every)
        h, out = _loop(position, steps, BLOCK, block_body, (h, out), pairs=True)
        return h, out, saved

    every = options.save_every if save else max(seq, 1)
    saved = jnp.zeros((batch, -(-seq // every), state, dim), jnp.float32) if save else None
    out = _bits(jnp.zeros_like(ops.u))
    h, out, saved = _loop(0, seq, every, interval_body, (_initial_state(layout), out, saved))
    return _of_bits(out, ops.u.dtype), layout.to_state(h), saved


def _initial_state(layout: _Layout) -> PerWidth:
    if layout.ops.initial_state is None:
        return layout.zeros()
    return layout.of_state(layout.ops.initial_state)


def backward(ops: Operands, options: Options, saved: Array, dout: Array, dfinal: Array) -> Operands:
    """The hand-derived gradient (docs/derivation.md), from the states that `forward` saved.

    Args:
      dout: cotangent of out, (batch, seq, dim) in u's dtype.
      dfinal: cotangent of the final state, (batch, dim, state) float32.

    Returns:
      Gradients; those of parameters are one a batch row, float32, still to be summed where the batch shares them.
    """
    if options.axis_name is not None:
        return _backward_of_part(ops, options, saved, dout, dfinal)
    layout = _Layout(ops, options, back=True)
    batch, seq, dim, _ = layout.sizes

    def block_body(position, steps, carry, h):
        g, grads = carry
        grads = dict(grads)
        block = layout.block(position, steps)
        dy = layout.channels(dout, position, steps)
        dy_gated = _gated(dy, block)
        grads, g, to_drive, to_exponent, readouts = _back_over_block(layout, block, dy_gated, h, g, grads, position)

        if block.z is not None:
            gate = jax.nn.sigmoid(block.z)
            y = readouts if ops.D is None else readouts + ops.D[:, None] * block.u
            grads["z"] = layout.write(grads["z"], dy * y * gate * (1.0 + block.z * (1.0 - gate)), position, ops.z)
        du = layout.of_groups(block.delta) * to_drive
        if ops.D is not None:
            du = du + ops.D[:, None] * dy_gated
            grads["D"] = grads["D"] + jnp.sum(dy_gated * block.u, axis=1)
        ddelta = block.u * to_drive + to_exponent
        if options.delta_softplus:
            ddelta = ddelta * jax.nn.sigmoid(block.raw_delta)
        if ops.delta_bias is not None:
            grads["delta_bias"] = grads["delta_bias"] + jnp.sum(ddelta, axis=1)
        grads["u"] = layout.write(grads["u"], du, position, ops.u)
        grads["delta"] = layout.write(grads["delta"], ddelta, position, ops.delta)
        return g, grads

    def interval_body(position, steps, carry):
        starts = [in_buffers(layout.saved(saved, position // options.save_every))]
        for offset in range(0, steps - BLOCK, BLOCK):
            starts.append(_state_after(layout, position + offset, BLOCK, starts[-1]))
        for i in reversed(range(len(starts))):
            offset = i * BLOCK
            carry = block_body(position + offset, min(BLOCK, steps - offset), carry, starts[i])
        return carry

    def zeros(name):
        operand = getattr(ops, name)
        if operand is None:
            return None
        if not ops.is_parameter(name):
            return _bits(jnp.zeros_like(operand))
        if operand.ndim == 3:
            return layout.zeros()
        return jnp.zeros((batch, dim), jnp.float32)

    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    grads = {name: zeros(name) for name in names if zeros(name) is not None}
    g, grads = _loop(0, seq, options.save_every, interval_body, (layout.of_state(dfinal), grads), backwards=True)
    for name in grads:
        operand = getattr(ops, name)
        if not ops.is_parameter(name):
            grads[name] = _of_bits(grads[name], operand.dtype)
        elif operand.ndim == 3:
            grads[name] = layout.to_state(grads[name])
    dh0 = None if ops.initial_state is None else layout.to_state(g)
    return Operands(**grads, initial_state=dh0)


def _gated(dy: Array, block: Block) -> Float32[Array, "batch steps dim"]:
    """The cotangent of the readout with its skip, before the gate."""
    return dy if block.z is None else dy * jax.nn.silu(block.z)


def _back_over_block(layout: _Layout, block: Block, cotangent: Array, h: PerWidth, g: PerWidth, grads: dict, position):
    """The recurrence back over one block: its states again, then the cotangents, in one kernel.

    Args:
      cotangent: `_gated`, (batch, steps, dim).

    Returns:
      grads with A, B and C brought forward, g before the block, the cotangents of δ u and, through the exponent, of δ,
      and the readouts, (batch, steps, dim) each.
    """
    ops, order = layout.ops, layout.order(cotangent.shape[1])
    A, h, g = (twice(x) for x in (layout.of_state(ops.A), h, g))
    at = {step: _Step(layout, block, step) for step in order}
    (cotangent,) = in_buffers([layout.by_group(cotangent)])
    dy = dict(zip(order, twice([layout.of_channels(cotangent[:, step]) for step in order]), strict=True))
    before, decays, after = {}, {}, {}
    for step in order:
        before[step], decays[step] = h, at[step].decays(A)
        after[step] = h = at[step].advance(h, decays[step])

    # A block's own sum first: added step by step to a long scan's total, terms that cancel lose eight times the digits.
    dA = [jnp.zeros_like(x) for x in h]
    to_B, to_C, to_drive, to_exponent = {}, {}, {}, {}
    for step in reversed(order):
        to_C[step] = [x * dy[step] for x in after[step]]
        g = [x + c * dy[step] for x, c in zip(g, at[step].C, strict=True)]
        to_B[step] = [x * at[step].drive for x in g]
        to_drive[step] = _dot(g, at[step].B)
        g = [x * decay for x, decay in zip(g, decays[step], strict=True)]
        exponent = [at[step].carried(x * y) for x, y in zip(g, before[step], strict=True)]
        g = [at[step].carried(x) for x in g]
        to_exponent[step] = _dot(exponent, A)
        dA = [x + y * at[step].delta for x, y in zip(dA, exponent, strict=True)]

    wanted: dict[str | tuple[str, int], PerWidth]
    dA = [x + y for x, y in zip(twice(grads["A"]), dA, strict=True)]
    wanted = {"g": g, "A": dA, "drive": [to_drive[s] for s in order], "exponent": [to_exponent[s] for s in order]}
    if block.z is not None:
        wanted["readouts"] = [at[step].readout(after[step]) for step in order]
    for name, by_step in (("B", to_B), ("C", to_C)):
        if getattr(block, name) is None:
            wanted[name] = [sum(each) for each in zip(twice(grads[name]), *by_step.values(), strict=True)]
        else:
            wanted |= {(name, step): by_step[step] for step in order}
    got = dict(zip(wanted, _together(list(wanted.values())), strict=True))

    grads = grads | {"A": got["A"]}
    for name in ("B", "C"):
        if getattr(block, name) is None:
            grads[name] = got[name]
        else:
            groups = getattr(ops, name).shape[2]
            summed = [layout.over_channels(got[name, step], groups) for step in range(len(order))]
            grads[name] = layout.write(grads[name], jnp.stack(summed, axis=1), position, getattr(ops, name))

    readouts = layout.by_time(got["readouts"]) if "readouts" in got else None
    return grads, got["g"], layout.by_time(got["drive"]), layout.by_time(got["exponent"]), readouts


def _state_after(layout: _Layout, position: Array | int, steps: int, h: PerWidth) -> PerWidth:
    block = layout.block(position, steps)
    A, h = twice(layout.of_state(layout.ops.A)), twice(h)
    for step in layout.order(steps):
        at = _Step(layout, block, step)
        h = at.advance(h, at.decays(A))
    return in_one_kernel(h)


def _backward_of_part(ops: Operands, options: Options, saved: Array, dout: Array, dfinal: Array) -> Operands:
    """`backward` on one of the devices that a sequence is split over."""
    alone = dataclasses.replace(options, axis_name=None)
    leaving = _cotangent_of_start(ops, alone, dout, dfinal)
    dfinal = dfinal + sequence_sharding.incoming(ops, options, leaving, backwards=True)
    grads = backward(ops, alone, saved, dout, dfinal)
    return grads._replace(initial_state=sequence_sharding.of_first(grads.initial_state, options))


def _cotangent_of_start(ops: Operands, options: Options, dout: Array, dfinal: Array) -> Array:
    """The cotangent of the state before the first step: g of `backward`, which needs no states."""
    layout = _Layout(ops, options)

    def body(position, steps, g):
        block = layout.block(position, steps)
        A, g = twice(layout.of_state(ops.A)), twice(g)
        (dy,) = in_buffers([layout.by_group(_gated(layout.channels(dout, position, steps), block))])
        for step in reversed(layout.order(steps)):
            at = _Step(layout, block, step)
            (into,) = twice([layout.of_channels(dy[:, step])])
            g = [x + c * into for x, c in zip(g, at.C, strict=True)]
            g = [at.carried(x * decay) for x, decay in zip(g, at.decays(A), strict=True)]
        return in_one_kernel(g)

    return layout.to_state(_loop(0, layout.sizes.seq, BLOCK, body, layout.of_state(dfinal), backwards=True))
