"""The forward kernels.

    summaries   each segment from a zero state: the state it ends with, and Σδ (exp(A Σδ) is the segment's decay)
    combine     the state that each segment starts from, out of the summaries of those before it (pallas_combine.py)
    scan        each segment again, from that state

One segment needs the last of them alone. Where batch × dim fills the GPU, one is right: two passes double the exps, and
the exp unit is the floor (16 a clock a multiprocessor). Segments that lie side by side in one program go through the
three in one kernel, round by round: nothing is launched between them, and the second pass finds its operands in cache.

Triton knows no aliasing and never moves a load above a store, so a chunk's loads come before its first store, and
the next chunk's activations are carried through the loop.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_scan import sequence_sharding
from pallas_scan.pallas_combine import Lanes, between_devices, combine, summary_shapes
from pallas_scan.pallas_cut import Cut
from pallas_scan.pallas_math import as_float32, exp2, fma, sigmoid
from pallas_scan.pallas_tile import Program, Step, call, carried, kernel_inputs, segment_passes
from pallas_scan.problem import Operands, Options

THREAD = 64  # values of a tile that a thread holds: the state and A take twice as many registers
LARGE = 2**22  # batch x seq x dim, from which on a kernel that converts B and C first costs less than it saves


def scan(ops: Operands, options: Options, cut: Cut, *, save: bool) -> tuple[Array, Array, Array | None]:
    """Returns out, the final state (batch, state, dim) and, with save, the state before every `cut.save_every` steps,
    (batch, rows, state, dim)."""
    inputs = kernel_inputs(ops, cut)
    if _converts_rows(cut):
        inputs |= {name: inputs[name].astype(jnp.float32) for name in ("B", "C")}
    outputs = {
        "out": jax.ShapeDtypeStruct(ops.u.shape, ops.u.dtype),
        "final": jax.ShapeDtypeStruct((cut.batch, cut.state, cut.dim), jnp.float32),
    }
    if save:
        rows = -(-cut.seq // cut.save_every)
        outputs["saved"] = jax.ShapeDtypeStruct((cut.batch, rows, cut.state, cut.dim), jnp.float32)
    if cut.together > 1:
        results = _together(ops, cut, inputs, outputs)
        return results["out"], results["final"], results.get("saved")

    if cut.segments > 1 or options.axis_name is not None:
        initial = inputs.pop("initial_state", None)
        summaries = _summaries(cut, inputs)
        if options.axis_name is not None:
            initial = sequence_sharding.of_first(initial, options)
            before = between_devices(ops, options, cut, summaries, initial, backwards=False)
            initial = before if initial is None else initial + before
        inputs["starts"] = combine(ops, cut, summaries, initial, backwards=False)
    results = call(_scan_kernel, "selective_scan_fwd", cut, inputs, outputs)
    return results["out"], results["final"], results.get("saved")


def _converts_rows(cut: Cut) -> bool:
    """Whether B and C are made float32 before the kernel. Where a thread has all states of its channels, every thread
    converts whole rows: 3 of 15 instructions a state element in bfloat16."""
    return (cut.in_thread or cut.tiles > 1) and cut.batch * cut.seq * cut.dim >= LARGE


def _summaries(cut: Cut, inputs: dict[str, Array]) -> dict[str, Array]:
    read = {k: v for k, v in inputs.items() if k in ("u", "delta", "A", "B", "delta_bias", "keep")}
    return call(_summary_kernel, "selective_scan_fwd_summaries", cut, read, summary_shapes(cut))


def _together(
    ops: Operands, cut: Cut, inputs: dict[str, Array], outputs: dict[str, jax.ShapeDtypeStruct]
) -> dict[str, Array]:
    passes = segment_passes(ops, cut)
    if passes is not None:
        inputs["passes"] = passes
    sides = (cut.batch, cut.dim_blocks, cut.together, cut.dim_block)
    outputs["ends"] = jax.ShapeDtypeStruct((*sides, cut.state_block), jnp.float32)
    outputs["totals"] = jax.ShapeDtypeStruct(sides, jnp.float32)
    return call(_together_kernel, "selective_scan_fwd", cut, inputs, outputs)


def _summary_kernel(program: Program) -> None:
    h, total = _summarise(program, Constants(program, readout=False))
    program.store_tiles("ends", h, program.batch, program.segment)
    program.store_vector("totals", total, program.batch, program.segment)


def _scan_kernel(program: Program) -> None:
    cut, refs = program.cut, program.refs
    constants = Constants(program, readout=True)
    h = _zero(program)
    if "initial_state" in refs:
        h = program.tiles("initial_state", program.batch)
    if "starts" in refs:
        h = program.tiles("starts", program.batch, program.segment)
    h = _scan(program, constants, h)

    @pl.when(program.segment == cut.segments - 1)
    def _store_final() -> None:
        program.store_tiles("final", h, program.batch)


def _together_kernel(program: Program) -> None:
    cut, constants, lanes = program.cut, Constants(program, readout=True), Lanes(program)

    def one_round(number: Array, before: Array) -> Array:
        there = program.in_round(number)
        h, total = _summarise(there, constants)
        there.hand("ends", h)
        there.hand_vector("totals", total)
        _barrier(cut)
        after = lanes.combine(number, before)
        _barrier(cut)
        _scan(there, constants, there.handed("ends"))
        return after

    lanes.store_final(lax.fori_loop(0, cut.rounds, one_round, lanes.initial()))


def _barrier(cut: Cut) -> None:
    """What a program's threads wrote is there for all of them after it."""
    if not cut.interpret:  # no rule there, and no threads
        plgpu.debug_barrier()


class Constants:
    """What does not vary with time: B and C where they are tiles, None where they are rows."""

    def __init__(self, program: Program, *, readout: bool) -> None:
        self.A, self.B = program.decay_rates(), program.fixed_matrix("B")
        self.bias = program.parameter_vector("delta_bias")
        self.C = program.fixed_matrix("C") if readout else None
        self.skip = program.parameter_vector("D") if readout else None


def _zero(program: Program) -> list[Array]:
    return [jnp.zeros(program.layout.tile, jnp.float32)] * program.cut.tiles


def _advance(program: Program, constants: Constants, h: list[Array], step: Step, delta: Array) -> list[Array]:
    cut, layout = program.cut, program.layout
    drive = delta * as_float32(step.u, cut)
    rows = program.matrix_tiles(step.B, constants.B) if cut.tiles > 1 else None
    after = []
    for number, (tile, A) in enumerate(zip(h, constants.A, strict=True)):
        passed = carried(exp2(layout.of_vector(delta) * A, cut) * tile, step.keep)
        if rows is None:  # of one tile, after its exps: ptxas kept to 168 registers on sm_86 otherwise, and spilled 60
            rows = program.matrix_tiles(step.B, constants.B)
        after.append(fma(layout.of_vector(drive), rows[number], passed, cut))
    return after


def _summarise(program: Program, constants: Constants) -> tuple[list[Array], Array]:
    """The state after the segment from zero, and Σδ."""

    def body(chunk, carry):
        h, total, steps = carry
        steps = program.arrived(steps, chunk, B=True)
        following = program.ahead(chunk + 1, B=True)
        for step, position in steps:
            delta, _ = program.step_size(step.delta, constants.bias, position)
            h = _advance(program, constants, h, step, delta)
            total = total + delta
        return h, total, following

    carry = (_zero(program), jnp.zeros(program.layout.vector, jnp.float32), program.ahead(0, B=True))
    h, total, _ = lax.fori_loop(0, program.chunks, body, carry)
    return h, total


def _scan(program: Program, constants: Constants, h: list[Array]) -> list[Array]:
    """The segment from h: writes out, and states where they are saved."""
    cut = program.cut
    saving = math.gcd(cut.chunk, cut.save_every) if "saved" in program.refs else 0  # steps between those maybe due

    def body(chunk, carry):
        h, steps = carry
        if saving:  # before the loads: after them it would wait for all, and keep them in registers
            _save(program, h, chunk * cut.chunk)
        steps = program.arrived(steps, chunk, B=True, C=True)
        following = program.ahead(chunk + 1, z=True, B=True, C=True)
        outs = []
        for k, (step, position) in enumerate(steps):
            if saving and k and k % saving == 0:
                _save(program, h, chunk * cut.chunk + k)
            delta, _ = program.step_size(step.delta, constants.bias, position)
            h = _advance(program, constants, h, step, delta)
            y = _read_out(program, h, program.matrix_tiles(step.C, constants.C))
            if constants.skip is not None:
                y = fma(constants.skip, as_float32(step.u, cut), y, cut)
            if step.z is not None:
                z = as_float32(step.z, cut)
                y = y * z * sigmoid(z, cut)
            outs.append(y)
        for y, (_, position) in zip(outs, steps, strict=True):
            program.store_vector("out", y, program.batch, program.time(position), inside=program.inside(position))
        return h, following

    h, _ = lax.fori_loop(0, program.chunks, body, (h, program.ahead(0, z=True, B=True, C=True)))
    return h


def _read_out(program: Program, h: list[Array], C: list[Array]) -> Array:
    """Σ over the state of h C; over tiles first, where a multiply and an add are one instruction."""
    products = h[0] * C[0]
    for tile, row in zip(h[1:], C[1:], strict=True):
        products = fma(tile, row, products, program.cut)
    return program.layout.over_states(products)


def _save(program: Program, h: list[Array], local: Array | int) -> None:
    """Where it is due at the segment's `local` step."""
    cut, position, every = program.cut, program.position(local), jnp.int32(program.cut.save_every)
    row, inside = lax.div(position, every), program.inside(position)
    if cut.together > 1 and cut.segment % cut.save_every:  # due in some of the segments
        due = lax.rem(position, every) == 0
        program.store_tiles("saved", h, program.batch, row, inside=due if inside is None else due & inside)
        return
    due = lax.rem(local if cut.together > 1 else position, every) == 0
    if cut.together == 1 and inside is not None:
        due = due & inside

    @pl.when(due)
    def _():
        program.store_tiles("saved", h, program.batch, row, inside=inside)
