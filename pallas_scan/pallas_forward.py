"""The forward kernels.

    summaries   each segment from a zero state: the state it ends with, and Σδ (exp(A Σδ) is the segment's decay)
    scan        each segment again, from the initial state with the summaries of the segments before it folded in

One segment needs no summaries. Where batch × dim fills the GPU, one is right: two passes double the exps, and the exp
unit is the floor (16 a clock a multiprocessor).

Triton knows no aliasing and never moves a load above a store, so a chunk's loads come before its first store, and
the next chunk's activations are carried through the loop.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_scan.pallas_tile import (
    Cut,
    Program,
    Step,
    as_tile,
    call,
    carried,
    exp2,
    kernel_inputs,
    segment_passes,
    sigmoid,
)
from pallas_scan.problem import Operands

Activations = list[Step]


def scan(ops: Operands, cut: Cut, *, save: bool) -> tuple[Array, Array, Array | None]:
    """Returns out, the final state (batch, state, dim) and, with save, the state before every `cut.save_every` steps,
    (batch, rows, state, dim)."""
    inputs = kernel_inputs(ops)
    if cut.segments > 1:
        inputs |= summaries(ops, cut, inputs)
    states = (cut.state, cut.dim)
    outputs = {
        "out": jax.ShapeDtypeStruct(ops.u.shape, ops.u.dtype),
        "final": jax.ShapeDtypeStruct((cut.batch, *states), jnp.float32),
    }
    if save:
        rows = -(-cut.seq // cut.save_every)
        outputs["saved"] = jax.ShapeDtypeStruct((cut.batch, rows, *states), jnp.float32)
    results = call(_scan_kernel, "selective_scan_fwd", cut, inputs, outputs)
    return results["out"], results["final"], results.get("saved")


def summaries(ops: Operands, cut: Cut, inputs: dict[str, Array]) -> dict[str, Array]:
    """The segments' ends from a zero state (batch, segments, state, dim), their Σδ and whether they let a state by."""
    outputs = {
        "ends": jax.ShapeDtypeStruct((cut.batch, cut.segments, cut.state, cut.dim), jnp.float32),
        "totals": jax.ShapeDtypeStruct((cut.batch, cut.segments, cut.dim), jnp.float32),
    }
    read = {k: v for k, v in inputs.items() if k in ("u", "delta", "A", "B", "delta_bias", "keep")}
    results = call(_summary_kernel, "selective_scan_fwd_summaries", cut, read, outputs)
    passes = segment_passes(ops, cut)
    return results if passes is None else results | {"passes": passes}


def _chunk_activations(program: Program, chunk: Array, *, z: bool) -> Activations:
    """A chunk's activations; of the last chunk where there is none after it, as the loop loads one ahead."""
    cut = program.cut
    chunk = jnp.minimum(chunk, cut.segment // cut.chunk - 1)
    return [program.activations(program.position(chunk * cut.chunk + k), z=z) for k in range(cut.chunk)]


def _advance(program: Program, h: Array, A: Array, B: Array | None, step: Step, delta: Array) -> Array:
    drive = delta * step.u.astype(jnp.float32)
    decayed = carried(exp2(delta[None, :] * A, program.cut) * h, step.keep)
    return decayed + drive[None, :] * as_tile(step.B, B)


def _summary_kernel(program: Program) -> None:
    cut = program.cut
    A, B = program.decay_rates(), program.fixed_matrix("B")
    bias = program.parameter_vector("delta_bias")

    def body(chunk, carry):
        h, total, steps = carry
        following = _chunk_activations(program, chunk + 1, z=False)
        positions = [program.position(chunk * cut.chunk + k) for k in range(cut.chunk)]
        steps = [program.matrices(s, p, B=True, C=False) for s, p in zip(steps, positions, strict=True)]
        for step, position in zip(steps, positions, strict=True):
            delta, _ = program.step_size(step.delta, bias, position)
            h = _advance(program, h, A, B, step, delta)
            total = total + delta
        return h, total, following

    zero = jnp.zeros((cut.state_block, cut.dim_block), jnp.float32)
    first = _chunk_activations(program, 0, z=False)
    carry = (zero, jnp.zeros((cut.dim_block,), jnp.float32), first)
    h, total, _ = lax.fori_loop(0, cut.segment // cut.chunk, body, carry)
    program.store_tile("ends", h, program.batch, program.segment)
    program.store_vector("totals", total, program.batch, program.segment)


def fold(program: Program, h: Array, A: Array, first: Array | int, last: Array | int, *, downwards: bool) -> Array:
    """The state after the segments first..last - 1 whose summaries are known, in that order or the opposite one."""

    def body(i, h):
        segment = last - 1 - i + first if downwards else i
        total = program.vector("totals", program.batch, segment)
        keep = program.refs["passes"][program.batch, segment] if "passes" in program.refs else None
        decayed = carried(exp2(total[None, :] * A, program.cut) * h, keep)
        return decayed + program.tile("ends", program.batch, segment)

    return lax.fori_loop(first, last, body, h)


def _scan_kernel(program: Program) -> None:
    cut, refs = program.cut, program.refs
    A, B, C = program.decay_rates(), program.fixed_matrix("B"), program.fixed_matrix("C")
    bias, skip = (program.parameter_vector(name) for name in ("delta_bias", "D"))
    h = jnp.zeros((cut.state_block, cut.dim_block), jnp.float32)
    if "initial_state" in refs:
        h = program.tile("initial_state", program.batch)
    if cut.segments > 1:
        h = fold(program, h, A, 0, program.segment, downwards=False)

    def body(chunk, carry):
        h, steps = carry
        following = _chunk_activations(program, chunk + 1, z=True)
        positions = [program.position(chunk * cut.chunk + k) for k in range(cut.chunk)]
        steps = [program.matrices(s, p, B=True, C=True) for s, p in zip(steps, positions, strict=True)]
        before = h
        outs = []
        for step, position in zip(steps, positions, strict=True):
            delta, _ = program.step_size(step.delta, bias, position)
            h = _advance(program, h, A, B, step, delta)
            y = jnp.sum(h * as_tile(step.C, C), axis=0)
            if skip is not None:
                y = y + skip * step.u.astype(jnp.float32)
            if step.z is not None:
                z = step.z.astype(jnp.float32)
                y = y * z * sigmoid(z)
            outs.append(y)
        if "saved" in refs:
            _save(program, before, positions[0])
        for y, position in zip(outs, positions, strict=True):
            program.store_vector("out", y, program.batch, program.time(position), inside=program.inside(position))
        return h, following

    carry = (h, _chunk_activations(program, 0, z=True))
    h, _ = lax.fori_loop(0, cut.segment // cut.chunk, body, carry)

    @pl.when(program.segment == cut.segments - 1)
    def _():
        program.store_tile("final", h, program.batch)


def _save(program: Program, h: Array, position: Array) -> None:
    due = position % program.cut.save_every == 0
    if program.ragged:
        due = due & (position < program.cut.seq)

    @pl.when(due)
    def _():
        program.store_tile("saved", h, program.batch, position // program.cut.save_every)
