"""The CPU path: unrolled blocks of the recurrence in one XLA loop, with a hand-derived backward.

Three things make it fast where a plain `lax.scan` is not (docs/derivation.md has the mathematics):

* Inputs are sliced out of their own (batch, seq, dim) arrays and results are written back in place, so nothing is
  transposed to put time first.
* The state is (batch, state, dim): the long axis last, which is the one that XLA vectorises. An axis of one anywhere
  in it made XLA's index arithmetic ten times slower, so groups are expanded to dim rather than given an axis.
* `BLOCK` steps are unrolled into one loop body. In the backward that keeps the recomputed states of a block as values
  of the loop body: a buffer for them, updated in place, would be written by one core only.

The forward saves the state before every `options.save_every` steps; the backward recomputes all else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_scan import sequence_sharding
from pallas_scan.problem import Operands, Options

BLOCK = 8  # steps in one loop body; 4 and 16 were slower in the backward and 16 compiles for twice as long


class Block(NamedTuple):
    """Operands of consecutive steps, in float32, shaped to combine with a state (batch, state, dim)."""

    u: Float[Array, "batch steps dim"]
    delta: Float[Array, "batch steps dim"]
    raw_delta: Float[Array, "batch steps dim"]  # before the softplus, for its derivative
    B: Float[Array, "batch steps groups state"] | Float[Array, "b state dim"]  # the latter does not vary
    C: Float[Array, "batch steps groups state"] | Float[Array, "b state dim"]
    z: Float[Array, "batch steps dim"] | None
    keep: Bool[Array, "batch steps"] | None


class _Layout:
    """Cuts operands into blocks and puts results back, in scan order, whichever way the scan runs."""

    def __init__(self, ops: Operands, options: Options) -> None:
        self.ops, self.options = ops, options
        self.sizes = ops.sizes

    def start(self, position: Array | int, steps: int) -> Array | int:
        """The first time of the block whose first step in scan order is `position`."""
        return self.sizes.seq - steps - position if self.options.reverse else position

    def order(self, steps: int) -> list[int]:
        """Indices into a block, in scan order."""
        return list(range(steps))[:: -1 if self.options.reverse else 1]

    def slice(self, x: Array, position: Array | int, steps: int) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start(position, steps), steps, axis=1)

    def write(self, into: Array, x: Array, position: Array | int) -> Array:
        return lax.dynamic_update_slice_in_dim(into, x.astype(into.dtype), self.start(position, x.shape[1]), axis=1)

    def block(self, position: Array | int, steps: int) -> Block:
        ops = self.ops

        def channels(x: Array) -> Array:
            return self.slice(x, position, steps).astype(jnp.float32)

        def matrix(x: Array) -> Array:
            return channels(x) if x.ndim == 4 else _long_axis_last(x.astype(jnp.float32))

        raw_delta = channels(ops.delta)
        if ops.delta_bias is not None:
            raw_delta = raw_delta + ops.delta_bias[:, None]
        return Block(
            u=channels(ops.u),
            delta=jax.nn.softplus(raw_delta) if self.options.delta_softplus else raw_delta,
            raw_delta=raw_delta,
            B=matrix(ops.B),
            C=matrix(ops.C),
            z=None if ops.z is None else channels(ops.z),
            keep=None if ops.keep is None else self.slice(ops.keep, position, steps),
        )

    def initial_state(self) -> Array:
        batch, _, dim, state = self.sizes
        if self.ops.initial_state is None:
            return jnp.zeros((batch, state, dim), jnp.float32)
        return _long_axis_last(self.ops.initial_state)


def _long_axis_last(x: Float[Array, "b dim state"]) -> Float[Array, "b state dim"]:
    return jnp.swapaxes(x, 1, 2)


_long_axis_inside = _long_axis_last  # its own inverse


def _loop(position: int, steps: int, block: int, body: Callable, carry, *, backwards: bool = False):
    """Runs body(position, steps, carry) over `steps` steps from `position`, `block` at a time; the rest is one more."""
    count, rest = divmod(steps, block)

    def main(carry):
        if count == 1:
            return body(position, block, carry)
        at = (lambda i: position + (count - 1 - i) * block) if backwards else (lambda i: position + i * block)
        return lax.fori_loop(0, count, lambda i, carry: body(at(i), block, carry), carry) if count else carry

    def remainder(carry):
        return body(position + count * block, rest, carry) if rest else carry

    return main(remainder(carry)) if backwards else remainder(main(carry))


def _at(x: Array, step: int, dim: int) -> Float[Array, "b state dim"]:
    """A block's B or C at one step; its last axis is 1 where one group holds every channel."""
    if x.ndim == 3:
        return x
    x = x[:, step]
    if x.shape[1] == 1:
        return x[:, 0, :, None]
    return jnp.repeat(_long_axis_last(x), dim // x.shape[1], axis=2)


def _carried(x: Array, block: Block, step: int) -> Array:
    """What passes the border before `step`: nothing where a sequence begins."""
    return x if block.keep is None else jnp.where(block.keep[:, step, None, None], x, 0.0)


def _advance(h: Array, A: Array, block: Block, step: int) -> tuple[Array, Array]:
    """The state after `step`, and exp(δ A)."""
    decay = jnp.exp(block.delta[:, step, None] * A)
    drive = (block.delta[:, step] * block.u[:, step])[:, None] * _at(block.B, step, A.shape[2])
    return _carried(decay * h, block, step) + drive, decay


def _readout(h: Array, block: Block, step: int) -> Array:
    return jnp.sum(h * _at(block.C, step, h.shape[2]), axis=1)


def _over_groups(x: Float[Array, "batch state dim"], groups: int) -> Float[Array, "batch groups state"]:
    if groups == 1:
        return jnp.sum(x, axis=-1)[:, None]
    batch, state, dim = x.shape
    return jnp.swapaxes(jnp.sum(x.reshape(batch, state, groups, dim // groups), axis=-1), 1, 2)


def _stack(by_step: dict[int, Array]) -> Array:
    return jnp.stack([by_step[step] for step in sorted(by_step)], axis=1)


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
    A = _long_axis_last(ops.A)
    skip = None if ops.D is None else ops.D[:, None]

    def block_body(position, steps, carry):
        h, out = carry
        block = layout.block(position, steps)
        by_step = {}
        for step in layout.order(steps):
            h, _ = _advance(h, A, block, step)
            by_step[step] = _readout(h, block, step)
        y = _stack(by_step)
        if skip is not None:
            y = y + skip * block.u
        if block.z is not None:
            y = y * jax.nn.silu(block.z)
        return h, layout.write(out, y, position)

    def interval_body(position, steps, carry):
        h, out, saved = carry
        if saved is not None:
            row = h.reshape(batch, 1, state * dim)
            saved = lax.dynamic_update_slice_in_dim(saved, row, position // options.save_every, axis=1)
        h, out = _loop(position, steps, BLOCK, block_body, (h, out))
        return h, out, saved

    every = options.save_every if save else seq
    saved = jnp.zeros((batch, -(-seq // every), state * dim), jnp.float32) if save else None
    out = jnp.zeros(ops.u.shape, ops.u.dtype)
    h, out, saved = _loop(0, seq, every, interval_body, (layout.initial_state(), out, saved))
    return out, _long_axis_inside(h), None if saved is None else saved.reshape(*saved.shape[:2], state, dim)


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
    layout = _Layout(ops, options)
    batch, seq, dim, state = layout.sizes
    A = _long_axis_last(ops.A)
    skip = None if ops.D is None else ops.D[:, None]
    full = (batch, state, dim)
    saved = saved.reshape(*saved.shape[:2], state * dim)

    def block_body(position, steps, carry, h):
        g, grads = carry
        block = layout.block(position, steps)
        order = layout.order(steps)
        dy = layout.slice(dout, position, steps).astype(jnp.float32)
        before, decays, after = {}, {}, {}
        for step in order:
            before[step] = h
            h, decays[step] = _advance(h, A, block, step)
            after[step] = h

        grads = dict(grads)
        if block.z is not None:
            y = _stack({step: _readout(after[step], block, step) for step in order})
            y = y if skip is None else y + skip * block.u
            sigmoid = jax.nn.sigmoid(block.z)
            dz = dy * y * sigmoid * (1.0 + block.z * (1.0 - sigmoid))
            grads["z"] = layout.write(grads["z"], dz, position)
            dy = dy * block.z * sigmoid

        drive = block.delta * block.u
        dB, dC, drive_cts, delta_cts = {}, {}, {}, {}
        dA = grads["A"]
        for step in reversed(order):
            g = g + _at(block.C, step, dim) * dy[:, step, None]
            dC[step] = after[step] * dy[:, step, None]
            dB[step] = g * drive[:, step, None]
            drive_cts[step] = jnp.sum(g * _at(block.B, step, dim), axis=1)
            g = _carried(decays[step] * g, block, step)
            to_exponent = _carried(g * before[step], block, step)
            delta_cts[step] = jnp.sum(to_exponent * A, axis=1)
            dA = dA + to_exponent * block.delta[:, step, None]
        grads["A"] = dA
        for name, per_step, operand in (("B", dB, ops.B), ("C", dC, ops.C)):
            if operand.ndim == 3:
                grads[name] = grads[name] + sum(per_step.values())
            else:
                summed = _stack({step: _over_groups(x, operand.shape[2]) for step, x in per_step.items()})
                grads[name] = layout.write(grads[name], summed, position)

        to_drive = _stack(drive_cts)
        du = block.delta * to_drive
        if skip is not None:
            du = du + skip * dy
            grads["D"] = grads["D"] + jnp.sum(dy * block.u, axis=1)
        ddelta = block.u * to_drive + _stack(delta_cts)
        if options.delta_softplus:
            ddelta = ddelta * jax.nn.sigmoid(block.raw_delta)
        if ops.delta_bias is not None:
            grads["delta_bias"] = grads["delta_bias"] + jnp.sum(ddelta, axis=1)
        grads["u"] = layout.write(grads["u"], du, position)
        grads["delta"] = layout.write(grads["delta"], ddelta, position)
        return g, grads

    def interval_body(position, steps, carry):
        row = lax.dynamic_index_in_dim(saved, position // options.save_every, axis=1, keepdims=False)
        h = row.reshape(full)
        if steps <= BLOCK:
            return block_body(position, steps, carry, h)

        # A longer interval first finds the state before each of its blocks.
        def find(start, steps, carry):
            h, starts = carry
            starts = lax.dynamic_update_index_in_dim(starts, h, (start - position) // BLOCK, axis=0)
            block = layout.block(start, steps)
            for step in layout.order(steps):
                h, _ = _advance(h, A, block, step)
            return h, starts

        _, starts = _loop(position, steps, BLOCK, find, (h, jnp.zeros((-(-steps // BLOCK), *full), jnp.float32)))

        def body(start, steps, carry):
            return block_body(start, steps, carry, starts[(start - position) // BLOCK])

        return _loop(position, steps, BLOCK, body, carry, backwards=True)

    def zeros(name):
        operand = getattr(ops, name)
        if operand is None:
            return None
        if not ops.is_parameter(name):
            return jnp.zeros(operand.shape, operand.dtype)
        return jnp.zeros(full if operand.ndim == 3 else (batch, dim), jnp.float32)

    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    grads = {name: zeros(name) for name in names if zeros(name) is not None}
    g = _long_axis_last(dfinal)
    g, grads = _loop(0, seq, options.save_every, interval_body, (g, grads), backwards=True)
    for name in grads:
        if ops.is_parameter(name) and getattr(ops, name).ndim == 3:
            grads[name] = _long_axis_inside(grads[name])
    dh0 = None if ops.initial_state is None else _long_axis_inside(g)
    return Operands(**grads, initial_state=dh0)


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
    A = _long_axis_last(ops.A)

    def body(position, steps, g):
        block = layout.block(position, steps)
        dy = layout.slice(dout, position, steps).astype(jnp.float32)
        if block.z is not None:
            dy = dy * jax.nn.silu(block.z)
        for step in reversed(layout.order(steps)):
            g = g + _at(block.C, step, layout.sizes.dim) * dy[:, step, None]
            g = _carried(jnp.exp(block.delta[:, step, None] * A) * g, block, step)
        return g

    return _long_axis_inside(_loop(0, layout.sizes.seq, BLOCK, body, _long_axis_last(dfinal), backwards=True))
