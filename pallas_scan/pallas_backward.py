"""The backward kernels (docs/derivation.md has the mathematics).

    summaries   each segment from the back with a zero cotangent: the cotangent that leaves at its front, and Σδ
    combine     pallas_combine.py's, from the last segment to the first: the cotangent that enters each at its end
    gradients   each segment again, from there
    sums        pallas_sums.py's, of the partial gradients that the programs leave

The forward saved the state before every `save_every` steps. From there a program recomputes a chunk's states into
registers and runs the cotangent g back over them; where an interval holds several chunks, it first finds the state
before each of them. Gradients that sum over channels (dB, dC) or over time (dA, dD, ddelta_bias) are written as one
partial result a program and summed afterwards, in a fixed order: the same bits on every run, which atomics would not
give.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_scan import sequence_sharding
from pallas_scan.pallas_combine import between_devices, combine, summary_shapes
from pallas_scan.pallas_cut import Cut
from pallas_scan.pallas_layout import Flat, Spread
from pallas_scan.pallas_math import LOG2_E, as_float32, exp2, fma, sigmoid
from pallas_scan.pallas_sums import Partial, over_rows
from pallas_scan.pallas_tile import Program, Step, call, carried, kernel_inputs
from pallas_scan.problem import Operands, Options

THREAD = 16  # values of a tile that a thread holds: a chunk's states, A, dA and the cotangent are 8 tiles and more

KEPT = 32  # values a thread of a chunk's decays, up to which keeping them does not spill; more are computed twice


def _keeps_decays(cut: Cut) -> bool:
    return cut.chunk * cut.values_a_thread <= KEPT


def _layout(cut: Cut, *, gated: bool) -> type[Flat] | type[Spread]:
    """Of the gradients. A spread tile has each vector's value in several lanes, which costs little but for softplus and
    gates: those are 34 instructions a state element flat and 40 spread, with spills, at 16 values a thread."""
    return Flat if gated and not _keeps_decays(cut) else Spread


def gradients(ops: Operands, options: Options, cut: Cut, saved: Array, dout: Array, dfinal: Array | None) -> Operands:
    """Gradients of a scan, those of parameters one a batch row.

    Args:
      saved: (batch, rows, state, dim) float32, from `pallas_forward.scan`.
      dout: (batch, seq, dim) in u's dtype.
      dfinal: (batch, dim, state) float32; None where it is zero.
    """
    inputs = kernel_inputs(ops, cut) | {"dout": dout}
    dfinal = None if dfinal is None else jnp.swapaxes(dfinal, 1, 2)
    if cut.segments > 1 or options.axis_name is not None:
        summaries = _summaries(cut, inputs)
        if options.axis_name is not None:
            entering = between_devices(ops, options, cut, summaries, dfinal, backwards=True)
            dfinal = entering if dfinal is None else dfinal + entering
        inputs |= {"starts": combine(ops, cut, summaries, dfinal, backwards=True)}
    elif dfinal is not None:
        inputs |= {"dfinal": dfinal}
    inputs |= {"saved": saved, "one": jnp.ones((1,), jnp.float32)}
    layout = _layout(cut, gated=cut.delta_softplus or ops.z is not None)
    results = call(_gradient_kernel, "selective_scan_bwd", cut, inputs, _outputs(ops, cut), layout)

    sums = _sums(ops, cut, results)

    def matrix(name: str, operand: Array) -> Array:
        if operand.ndim == 3:
            return jnp.swapaxes(sums[name].reshape(cut.batch, cut.state, cut.dim), 1, 2)
        return jnp.moveaxis(sums[name].reshape(operand.shape[2], cut.batch, cut.seq, cut.state), 0, 2)

    dinitial = None
    if ops.initial_state is not None:
        dinitial = jnp.swapaxes(results["dinitial_state"], 1, 2)
        if options.axis_name is not None:
            dinitial = sequence_sharding.of_first(dinitial, options)
    return Operands(
        u=results["du"],
        delta=results["ddelta"],
        A=matrix("dA", ops.A),
        B=matrix("dB", ops.B),
        C=matrix("dC", ops.C),
        D=sums.get("dD"),
        z=results.get("dz"),
        delta_bias=sums.get("ddelta_bias"),
        initial_state=dinitial,
    )


def _sums(ops: Operands, cut: Cut, results: dict[str, Array]) -> dict[str, Array]:
    """Gradients of parameters (batch, columns), summed over segments, and of B and C that vary, (groups, columns),
    over a group's blocks of channels."""
    partials: dict[str, Partial] = {}
    for name in ("dB", "dC", "dA", "dD", "ddelta_bias"):  # the largest first
        if name not in results:
            continue
        operand = getattr(ops, name.removeprefix("d"))
        varies = operand.ndim == 4
        outer = operand.shape[2] if varies else cut.batch
        rows = cut.dim_blocks // outer if varies else cut.segments
        array = results[name].reshape(outer, rows, -1)
        partials[name] = Partial(array, operand.dtype if varies else jnp.float32)
    return over_rows(partials, interpret=cut.interpret)


def _outputs(ops: Operands, cut: Cut) -> dict[str, jax.ShapeDtypeStruct]:
    def partial(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((cut.batch, *shape), jnp.float32)

    def matrix(operand: Array) -> jax.ShapeDtypeStruct:
        if operand.ndim == 3:
            return partial(cut.segments, cut.state, cut.dim)
        return jax.ShapeDtypeStruct((cut.dim_blocks, cut.batch, cut.seq, cut.state), jnp.float32)

    outputs = {
        "du": jax.ShapeDtypeStruct(ops.u.shape, ops.u.dtype),
        "ddelta": jax.ShapeDtypeStruct(ops.delta.shape, ops.delta.dtype),
        "dA": partial(cut.segments, cut.state, cut.dim),
        "dB": matrix(ops.B),
        "dC": matrix(ops.C),
    }
    if ops.D is not None:
        outputs["dD"] = partial(cut.segments, cut.dim)
    if ops.z is not None:
        outputs["dz"] = jax.ShapeDtypeStruct(ops.z.shape, ops.z.dtype)
    if ops.delta_bias is not None:
        outputs["ddelta_bias"] = partial(cut.segments, cut.dim)
    if ops.initial_state is not None:
        outputs["dinitial_state"] = partial(cut.state, cut.dim)
    return outputs


def _summaries(cut: Cut, inputs: dict[str, Array]) -> dict[str, Array]:
    read = {k: v for k, v in inputs.items() if k in ("u", "delta", "A", "C", "z", "delta_bias", "keep", "dout")}
    return call(_summary_kernel, "selective_scan_bwd_summaries", cut, read, summary_shapes(cut))


def _cotangent_of_y(step: Step, cut: Cut) -> Array:
    assert step.dout is not None
    dy = as_float32(step.dout, cut)
    if step.z is not None:
        z = as_float32(step.z, cut)
        dy = dy * z * sigmoid(z, cut)
    return dy


def _summary_kernel(program: Program) -> None:
    cut, layout = program.cut, program.layout
    (A,), C = program.decay_rates(), program.fixed_matrix("C")
    bias = program.parameter_vector("delta_bias")
    chunks = program.chunks

    def body(i, carry):
        g, total, steps = carry
        chunk = chunks - 1 - i
        steps = program.arrived(steps, chunk, C=True)
        following = program.ahead(chunk - 1, z=True, dout=True, C=True)
        for step, position in reversed(steps):
            delta, _ = program.step_size(step.delta, bias, position)
            (C_t,) = program.matrix_tiles(step.C, C)
            g = fma(C_t, layout.of_vector(_cotangent_of_y(step, cut)), g, cut)
            g = carried(exp2(layout.of_vector(delta) * A, cut) * g, step.keep)
            total = total + delta
        return g, total, following

    zero = jnp.zeros(layout.tile, jnp.float32)
    first = program.ahead(chunks - 1, z=True, dout=True, C=True)
    carry = (zero, jnp.zeros(layout.vector, jnp.float32), first)
    g, total, _ = lax.fori_loop(0, chunks, body, carry)
    program.store_tile("ends", g, program.batch, program.segment)
    program.store_vector("totals", total, program.batch, program.segment)


def _gradient_kernel(program: Program) -> None:
    cut, refs, layout = program.cut, program.refs, program.layout
    (A,), B, C = program.decay_rates(), program.fixed_matrix("B"), program.fixed_matrix("C")
    bias, skip = (program.parameter_vector(name) for name in ("delta_bias", "D"))
    zero, zero_vector = jnp.zeros(layout.tile, jnp.float32), jnp.zeros(layout.vector, jnp.float32)

    g = zero
    if "starts" in refs or "dfinal" in refs:
        entering = ("starts", program.batch, program.segment) if "starts" in refs else ("dfinal", program.batch)
        g = program.tile(*entering)
    sums = {"dA": zero}
    sums |= {name: zero for name, fixed in (("dB", B), ("dC", C)) if fixed is not None}
    sums |= {f"d{name}": zero_vector for name in ("D", "delta_bias") if name in refs}

    one = refs["one"][0]
    per_interval = cut.save_every // cut.chunk

    def load(position, *, back):
        step = program.activations(position, z=back, dout=back)
        return program.matrices(step, position, B=True, C=back)

    def advance(h, step, position):
        delta, _ = program.step_size(step.delta, bias, position)
        decay = exp2(layout.of_vector(delta) * A, cut)
        drive = delta * as_float32(step.u, cut)
        (B_t,) = program.matrix_tiles(step.B, B)
        return fma(layout.of_vector(drive), B_t, carried(decay * h, step.keep), cut), decay

    def chunk_body(chunk, h, g, sums):
        positions = program.positions(chunk)
        states = [h]
        steps = [(load(p, back=True), p) for p in positions]  # all of them before the first store
        decays = []
        for step, position in steps:
            h, decay = advance(states[-1], step, position)
            states.append(h)
            decays.append(decay)

        sums = dict(sums)
        for k, (step, position) in reversed(list(enumerate(steps))):
            before, after = states[k : k + 2]
            inside, time = program.inside(position), program.time(position)
            u = as_float32(step.u, cut)
            delta, raw_delta = program.step_size(step.delta, bias, position)
            drive = delta * u
            dy = _cotangent_of_y(step, cut)
            (B_t,), (C_t,) = program.matrix_tiles(step.B, B), program.matrix_tiles(step.C, C)

            if step.z is not None:
                y = layout.over_states(after * C_t)
                y = y if skip is None else fma(skip, u, y, cut)
                z, dout = as_float32(step.z, cut), as_float32(step.dout, cut)
                s = sigmoid(z, cut)
                dz = dout * y * s * (1.0 + z * (1.0 - s))
                program.store_vector("dz", dz, program.batch, time, inside=inside)
            g = fma(C_t, layout.of_vector(dy), g, cut)
            _matrix_gradient(program, sums, "dC", after * layout.of_vector(dy), time, inside)
            _matrix_gradient(program, sums, "dB", g * layout.of_vector(drive), time, inside)
            to_drive = layout.over_states(g * B_t)
            # A factor of one that the compiler does not know, or it would keep the decays where that spills.
            decay = decays[k] if _keeps_decays(cut) else exp2(layout.of_vector(one * delta) * A, cut)
            g = carried(decay * g, step.keep)
            to_exponent = carried(g * before, step.keep)
            sums["dA"] = fma(to_exponent, layout.of_vector(delta), sums["dA"], cut)
            ddelta = u * to_drive + layout.over_states(to_exponent * A) * (1.0 / LOG2_E)
            du = delta * to_drive
            if skip is not None:
                du = fma(skip, dy, du, cut)
                sums["dD"] = fma(dy, u, sums["dD"], cut)
            if cut.delta_softplus:
                ddelta = ddelta * sigmoid(raw_delta, cut)
            if bias is not None:
                inner = ddelta if inside is None else jnp.where(inside, ddelta, 0.0)
                sums["ddelta_bias"] = sums["ddelta_bias"] + inner
            program.store_vector("du", du, program.batch, time, inside=inside)
            program.store_vector("ddelta", ddelta, program.batch, time, inside=inside)
        return g, sums

    def interval_body(interval, carry):
        start = interval * cut.save_every

        def first_state():
            return program.tile("saved", program.batch, program.position(start) // cut.save_every)

        first_chunk = interval * per_interval
        if per_interval == 1:
            return chunk_body(first_chunk, first_state(), *carry)

        # The states before the interval's later chunks, in registers; that before its first is read again.
        def find(k, carry):
            h, later = carry
            for step, position in [(load(p, back=False), p) for p in program.positions(first_chunk + k)]:
                h, _ = advance(h, step, position)
            return h, [jnp.where(k == i, h, kept) for i, kept in enumerate(later)]

        chunks = program.chunks_from(start, per_interval)
        _, later = lax.fori_loop(0, chunks - 1, find, (first_state(), [zero] * (per_interval - 1)))

        def back(j, carry):
            k = chunks - 1 - j
            h = first_state()
            for i, kept in enumerate(later):
                h = jnp.where(k == i + 1, kept, h)
            return chunk_body(first_chunk + k, h, *carry)

        return lax.fori_loop(0, chunks, back, carry)

    intervals = (program.chunks + per_interval - 1) // per_interval
    g, sums = lax.fori_loop(0, intervals, lambda i, carry: interval_body(intervals - 1 - i, carry), (g, sums))

    for name, value in sums.items():
        store = program.store_tile if value.shape == layout.tile else program.store_vector
        store(name, value, program.batch, program.segment)
    if "initial_state" in refs:

        @pl.when(program.segment == 0)
        def _():
            program.store_tile("dinitial_state", g, program.batch)


def _matrix_gradient(program, sums, name, product, time, inside) -> None:
    """Adds a step's product, a tile, to dB or dC: summed over channels, or kept where B or C is fixed."""
    if name in sums:
        sums[name] = sums[name] + product
    else:
        summed = program.layout.over_channels(product)
        program.store_column(name, summed, program.block, program.batch, time, inside=inside)
