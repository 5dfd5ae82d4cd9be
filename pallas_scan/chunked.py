"""The CPU path: blocks of the recurrence, each one vectorised kernel, in one XLA loop, with a hand-derived backward.

Three things make it fast where a plain `lax.scan` is not (docs/derivation.md has the mathematics):

* `BLOCK` steps of a lane, for a few of its state's elements, are one kernel: the state stays in registers from step to
  step (xla_kernel.py says how XLA is brought to that, lanes.py what a lane is).
* Inputs are sliced out of their own (batch, seq, dim) arrays and results are written back in place, so nothing is
  transposed to put time first.
* The backward recomputes a block's states inside the kernel that goes back over them.

The forward saves the state before every `options.save_every` steps; the backward recomputes all else.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

from pallas_scan import sequence_sharding
from pallas_scan.lanes import Block, Lanes, Layout, PerWidth, bits, from_bits
from pallas_scan.problem import Operands, Options
from pallas_scan.xla_kernel import in_buffers, in_one_kernel, twice

BLOCK = 8  # steps in one loop body
LOG2_E = np.float32(1.4426950408889634)


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

    def __init__(self, layout: Layout, block: Block, step: int) -> None:
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
    layout = Layout(ops, options)
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
        return h, layout.write(out, y, position, "u")

    def interval_body(position, steps, carry):
        h, out, saved = carry
        if saved is not None:
            saved = layout.save(saved, h, position // options.save_every)
        h, out = _loop(position, steps, BLOCK, block_body, (h, out), pairs=True)
        return h, out, saved

    every = options.save_every if save else max(seq, 1)
    saved = jnp.zeros((batch, -(-seq // every), state, dim), jnp.float32) if save else None
    out = bits(jnp.zeros_like(ops.u))
    h, out, saved = _loop(0, seq, every, interval_body, (_of_state(layout, ops.initial_state), out, saved))
    return from_bits(out, ops.u.dtype), layout.to_state(h), saved


def _of_state(layout: Layout, x: Array | None) -> PerWidth:
    return layout.zeros() if x is None else layout.of_state(x)


def backward(ops: Operands, options: Options, saved: Array, dout: Array, dfinal: Array | None) -> Operands:
    """The hand-derived gradient (docs/derivation.md), from the states that `forward` saved.

    Args:
      dout: cotangent of out, (batch, seq, dim) in u's dtype.
      dfinal: cotangent of the final state, (batch, dim, state) float32; None where it is zero.

    Returns:
      Gradients; those of parameters are one a batch row, float32, still to be summed where the batch shares them.
    """
    if options.axis_name is not None:
        return _backward_of_part(ops, options, saved, dout, dfinal)
    layout = Layout(ops, options, back=True)
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
            grads["z"] = layout.write(grads["z"], dy * y * gate * (1.0 + block.z * (1.0 - gate)), position, "z")
        du = layout.of_groups(block.delta) * to_drive
        if ops.D is not None:
            du = du + ops.D[:, None] * dy_gated
            grads["D"] = grads["D"] + jnp.sum(dy_gated * block.u, axis=1)
        ddelta = block.u * to_drive + to_exponent
        if options.delta_softplus:
            ddelta = ddelta * jax.nn.sigmoid(block.raw_delta)
        if ops.delta_bias is not None:
            grads["delta_bias"] = grads["delta_bias"] + jnp.sum(ddelta, axis=1)
        grads["u"] = layout.write(grads["u"], du, position, "u")
        grads["delta"] = layout.write(grads["delta"], ddelta, position, "delta")
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
            return bits(jnp.zeros_like(operand))
        if operand.ndim == 3:
            return layout.zeros()
        return jnp.zeros((batch, dim), jnp.float32)

    names = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")
    grads = {name: zeros(name) for name in names if zeros(name) is not None}
    g, grads = _loop(0, seq, options.save_every, interval_body, (_of_state(layout, dfinal), grads), backwards=True)
    for name in grads:
        operand = getattr(ops, name)
        if not ops.is_parameter(name):
            grads[name] = from_bits(grads[name], operand.dtype)
        elif operand.ndim == 3:
            grads[name] = layout.to_state(grads[name])
    dh0 = None if ops.initial_state is None else layout.to_state(g)
    return Operands(**grads, initial_state=dh0)


def _gated(dy: Array, block: Block) -> Float32[Array, "batch steps dim"]:
    """The cotangent of the readout with its skip, before the gate."""
    return dy if block.z is None else dy * jax.nn.silu(block.z)


def _back_over_block(layout: Layout, block: Block, cotangent: Array, h: PerWidth, g: PerWidth, grads: dict, position):
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
            grads[name] = layout.write(grads[name], jnp.stack(summed, axis=1), position, name)

    readouts = layout.by_time(got["readouts"]) if "readouts" in got else None
    return grads, got["g"], layout.by_time(got["drive"]), layout.by_time(got["exponent"]), readouts


def _state_after(layout: Layout, position: Array | int, steps: int, h: PerWidth) -> PerWidth:
    block = layout.block(position, steps)
    A, h = twice(layout.of_state(layout.ops.A)), twice(h)
    for step in layout.order(steps):
        at = _Step(layout, block, step)
        h = at.advance(h, at.decays(A))
    return in_one_kernel(h)


def _backward_of_part(ops: Operands, options: Options, saved: Array, dout: Array, dfinal: Array | None) -> Operands:
    """`backward` on one of the devices that a sequence is split over."""
    alone = dataclasses.replace(options, axis_name=None)
    leaving = _cotangent_of_start(ops, alone, dout, dfinal)
    entering = sequence_sharding.incoming(ops, options, leaving, backwards=True)
    grads = backward(ops, alone, saved, dout, entering if dfinal is None else dfinal + entering)
    return grads._replace(initial_state=sequence_sharding.of_first(grads.initial_state, options))


def _cotangent_of_start(ops: Operands, options: Options, dout: Array, dfinal: Array | None) -> Array:
    """The cotangent of the state before the first step: g of `backward`, which needs no states."""
    layout = Layout(ops, options)

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

    return layout.to_state(_loop(0, layout.sizes.seq, BLOCK, body, _of_state(layout, dfinal), backwards=True))
