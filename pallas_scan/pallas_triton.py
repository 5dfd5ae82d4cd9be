"""`implementation="pallas"`: GPU kernels written in Pallas, lowered to Triton; in interpret mode on the CPU.

Chooses the configuration, fits it to the shape and launches the kernels of pallas_forward.py and pallas_backward.py.
More states than a tile holds are split over several scans, whose outputs add up.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_scan import _compat, pallas_backward, pallas_cut, pallas_forward, reference, tuning
from pallas_scan.config import ScanConfig, rules
from pallas_scan.problem import Operands, Options


def forward(
    ops: Operands, options: Options, *, save: bool, interpret: bool = False
) -> tuple[Array, Array, Array | None]:
    """As `chunked.forward`."""
    if ops.sizes.batch == 0:
        return _empty_forward(ops, options, save=save)
    if ops.sizes.state > pallas_cut.MAX_STATE:
        return _forward_by_state(ops, options, save=save, interpret=interpret)
    config = _configuration(ops, options).fwd
    if options.axis_name is not None and options.config is None:  # devices exchange between kernels: no measured ones
        config = rules(ops.sizes, _compat.gpu()[1]).fwd
    cut = pallas_cut.fit(config, ops, options, thread=pallas_forward.THREAD, interpret=interpret, intervals=False)
    out, final, saved = pallas_forward.scan(ops, options, cut, save=save)
    return out, jnp.swapaxes(final, 1, 2), saved


def backward(
    ops: Operands, options: Options, saved: Array, dout: Array, dfinal: Array | None, *, interpret: bool = False
) -> Operands:
    """As `chunked.backward`."""
    batch, _, _, state = ops.sizes
    if batch == 0:
        return jax.tree.map(jnp.zeros_like, ops.rows()._replace(keep=None))
    if state > pallas_cut.MAX_STATE:
        return _backward_by_state(ops, options, saved, dout, dfinal, interpret=interpret)
    config = _configuration(ops, options).bwd
    cut = pallas_cut.fit(config, ops, options, thread=pallas_backward.THREAD, interpret=interpret, intervals=True)
    return pallas_backward.gradients(ops, options, cut, saved, dout, dfinal)


def _configuration(ops: Operands, options: Options) -> ScanConfig:
    return options.config or tuning.choose(ops.sizes, ops.u.dtype, *_compat.gpu())


def _empty_forward(ops: Operands, options: Options, *, save: bool) -> tuple[Array, Array, Array | None]:
    _, seq, dim, state = ops.sizes
    saved = jnp.zeros((0, -(-seq // options.save_every), state, dim), jnp.float32) if save else None
    return jnp.zeros_like(ops.u), jnp.zeros((0, dim, state), jnp.float32), saved


# --- more states than a tile holds ---


def _by_block(x: Array) -> Array:
    """The last axis, state, in blocks, which come first; filled up with zeros, which contribute nothing."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % pallas_cut.MAX_STATE)])
    return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, pallas_cut.MAX_STATE), -2, 0)


def _joined(blocks: Array, state: int) -> Array:
    """`_by_block`'s inverse."""
    x = jnp.moveaxis(blocks, 0, -2)
    return x.reshape(*x.shape[:-2], -1)[..., :state]


def _blocks(ops: Operands) -> dict[str, Array]:
    names = ("A", "B", "C", "initial_state")
    return {name: _by_block(getattr(ops, name)) for name in names if getattr(ops, name) is not None}


def _bare(ops: Operands, options: Options) -> tuple[Operands, Options]:
    """The scan without what comes before and after the recurrence, in float32: a block of states' part in it."""
    inner = ops._replace(
        u=ops.u.astype(jnp.float32),
        delta=reference.step_size(ops, options),
        D=None,
        z=None,
        delta_bias=None,
    )
    return inner, dataclasses.replace(options, delta_softplus=False)


def _forward_by_state(ops: Operands, options: Options, *, save: bool, interpret: bool):
    inner, inner_options = _bare(ops, options)

    def body(y, block):
        out, final, saved = forward(inner._replace(**block), inner_options, save=save, interpret=interpret)
        return y + out, (final, saved)

    y, (finals, saveds) = lax.scan(body, jnp.zeros(inner.u.shape, jnp.float32), _blocks(inner))
    state = ops.sizes.state
    if save:  # (blocks, batch, rows, block's states, dim)
        saveds = jnp.swapaxes(_joined(jnp.swapaxes(saveds, 3, 4), state), 2, 3)
    return reference.gate(y, ops), _joined(finals, state), saveds


def _backward_by_state(
    ops: Operands, options: Options, saved: Array, dout: Array, dfinal: Array | None, *, interpret: bool
) -> Operands:
    state = ops.sizes.state
    inner, inner_options = _bare(ops, options)
    blocks = _blocks(inner)

    def readout(y, block):
        out, _, _ = forward(inner._replace(**block), inner_options, save=False, interpret=interpret)
        return y + out, None

    # What surrounds the recurrence is differentiated by JAX, parameters one a row.
    outside = {
        k: v for k, v in ops.rows()._asdict().items() if k in ("u", "delta", "D", "z", "delta_bias") and v is not None
    }
    y, _ = lax.scan(readout, jnp.zeros(inner.u.shape, jnp.float32), blocks)
    _, pull_gate = jax.vjp(lambda y, x: reference.gate(y, ops._replace(**x)), y, outside)
    dy, through_gate = pull_gate(dout)

    saved = jnp.swapaxes(saved, 2, 3)

    def body(carry, block):
        du, ddelta = carry
        operands, saved, dfinal = block
        saved = jnp.swapaxes(saved, 2, 3)
        grads = backward(inner._replace(**operands), inner_options, saved, dy, dfinal, interpret=interpret)
        per_block = {name: getattr(grads, name) for name in operands}
        return (du + grads.u, ddelta + grads.delta), per_block

    zeros = jnp.zeros(inner.u.shape, jnp.float32)
    entering = None if dfinal is None else _by_block(dfinal)
    (du, ddelta), per_block = lax.scan(body, (zeros, zeros), (blocks, _by_block(saved), entering))

    def surroundings(x):
        inner, _ = _bare(ops._replace(**x), options)
        return inner.u, inner.delta

    (through_inputs,) = jax.vjp(surroundings, outside)[1]((du, ddelta))
    grads = jax.tree.map(jnp.add, through_gate, through_inputs)
    return Operands(**grads, **{name: _joined(x, state) for name, x in per_block.items()})
