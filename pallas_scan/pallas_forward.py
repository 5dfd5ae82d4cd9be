"""The forward kernels.

    summaries   each segment from a zero state: the state it ends with, and Σδ (exp(A Σδ) is the segment's decay)
    combine     the state that each segment starts from, out of the summaries of those before it (pallas_combine.py)
    scan        each segment again, from that state

One segment needs the last of them alone. Where batch × dim fills the GPU, one is right: two passes double the exps, and
the exp unit is the floor (16 a clock a multiprocessor).

Triton knows no aliasing and never moves a load above a store, so a chunk's loads come before its first store, and
the next chunk's activations are carried through the loop.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_scan import sequence_sharding
from pallas_scan.pallas_combine import between_devices, combine, summary_shapes
from pallas_scan.pallas_tile import (
    Cut,
    Program,
    Step,
    as_float32,
    as_tile,
    call,
    carried,
    exp2,
    kernel_inputs,
    sigmoid,
)
from pallas_scan.problem import Operands, Options

THREAD = 64  # values of a tile that a thread holds: the state and A take twice as many registers


def scan(ops: Operands, options: Options, cut: Cut, *, save: bool) -> tuple[Array, Array, Array | None]:
    """Returns out, the final state (batch, state, dim) and, with save, the state before every `cut.save_every` steps,
    (batch, rows, state, dim)."""
    inputs = kernel_inputs(ops, cut)
    if cut.segments > 1 or options.axis_name is not None:
        initial = inputs.pop("initial_state", None)
        summaries = _summaries(cut, inputs)
        if options.axis_name is not None:
            initial = sequence_sharding.of_first(initial, options)
            before = between_devices(ops, options, cut, summaries, initial, backwards=False)
            initial = before if initial is None else initial + before
        inputs["starts"] = combine(ops, cut, summaries, initial, backwards=False)
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


def _summaries(cut: Cut, inputs: dict[str, Array]) -> dict[str, Array]:
    read = {k: v for k, v in inputs.items() if k in ("u", "delta", "A", "B", "delta_bias", "keep")}
    return call(_summary_kernel, "selective_scan_fwd_summaries", cut, read, summary_shapes(cut))


def _advance(program: Program, h: Array, A: Array, B: Array | None, step: Step, delta: Array) -> Array:
    cut = program.cut
    drive = delta * as_float32(step.u, cut)
    decayed = carried(exp2(delta[None, :] * A, cut) * h, step.keep)
    return decayed + drive[None, :] * as_tile(step.B, B, cut)


def _summary_kernel(program: Program) -> None:
    cut = program.cut
    A, B = program.decay_rates(), program.fixed_matrix("B")
    bias = program.parameter_vector("delta_bias")

    def body(chunk, carry):
        h, total, steps = carry
        steps = program.arrived(steps, chunk, B=True)
        following = program.ahead(chunk + 1, B=True)
        for step, position in steps:
            delta, _ = program.step_size(step.delta, bias, position)
            h = _advance(program, h, A, B, step, delta)
            total = total + delta
        return h, total, following

    zero = jnp.zeros((cut.state_block, cut.dim_block), jnp.float32)
    carry = (zero, jnp.zeros((cut.dim_block,), jnp.float32), program.ahead(0, B=True))
    h, total, _ = lax.fori_loop(0, program.chunks, body, carry)
    program.store_tile("ends", h, program.batch, program.segment)
    program.store_vector("totals", total, program.batch, program.segment)


def _scan_kernel(program: Program) -> None:
    cut, refs = program.cut, program.refs
    A, B, C = program.decay_rates(), program.fixed_matrix("B"), program.fixed_matrix("C")
    bias, skip = (program.parameter_vector(name) for name in ("delta_bias", "D"))
    h = jnp.zeros((cut.state_block, cut.dim_block), jnp.float32)
    if "initial_state" in refs:
        h = program.tile("initial_state", program.batch)
    if "starts" in refs:
        h = program.segment_start()

    saving = math.gcd(cut.chunk, cut.save_every) if "saved" in refs else 0  # steps between those that may be due

    def body(chunk, carry):
        h, steps = carry
        if saving:  # before the loads: after them it would wait for all, and keep them in registers
            _save(program, h, program.positions(chunk)[0])
        steps = program.arrived(steps, chunk, B=True, C=True)
        following = program.ahead(chunk + 1, z=True, B=True, C=True)
        outs = []
        for k, (step, position) in enumerate(steps):
            if saving and k and k % saving == 0:
                _save(program, h, position)
            delta, _ = program.step_size(step.delta, bias, position)
            h = _advance(program, h, A, B, step, delta)
            y = jnp.sum(h * as_tile(step.C, C, cut), axis=0)
            if skip is not None:
                y = y + skip * as_float32(step.u, cut)
            if step.z is not None:
                z = as_float32(step.z, cut)
                y = y * z * sigmoid(z)
            outs.append(y)
        for y, (_, position) in zip(outs, steps, strict=True):
            program.store_vector("out", y, program.batch, program.time(position), inside=program.inside(position))
        return h, following

    carry = (h, program.ahead(0, z=True, B=True, C=True))
    h, _ = lax.fori_loop(0, program.chunks, body, carry)

    @pl.when(program.segment == cut.segments - 1)
    def _store_final() -> None:
        program.store_tile("final", h, program.batch)


def _save(program: Program, h: Array, position: Array) -> None:
    due = position % program.cut.save_every == 0
    if program.ragged:
        due = due & (position < program.cut.seq)

    @pl.when(due)
    def _():
        program.store_tile("saved", h, program.batch, position // program.cut.save_every)
