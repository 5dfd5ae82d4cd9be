"""The textbook forms: a `lax.scan` over time and an associative scan, both differentiated by JAX.

They share one signature with the chunked and the Pallas forms, so that they can be read line by line beside them:

    h_t = r_t exp(δ_t A) ⊙ h_{t-1} + δ_t u_t B_t,    y_t = Σ_n C_t h_t + D u_t,    out_t = y_t silu(z_t)

(Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023, arXiv 2312.00752, algorithm 2.)
The state is (batch, dim, state), as in the paper; float32 whatever the inputs' dtype.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_scan import _compat
from pallas_scan.problem import Operands, Options


def step_size(ops: Operands, options: Options) -> Float[Array, "batch seq dim"]:
    """δ in float32: delta, its bias and its softplus."""
    delta = ops.delta.astype(jnp.float32)
    if ops.delta_bias is not None:
        delta = delta + ops.delta_bias[:, None, :]
    return jax.nn.softplus(delta) if options.delta_softplus else delta


def initial_state(ops: Operands) -> Float[Array, "batch dim state"]:
    """The state before the first step."""
    if ops.initial_state is not None:
        return ops.initial_state
    batch, _, dim, state = ops.sizes
    return _compat.zeros(_compat.typed(ops.u, (batch, dim, state), jnp.float32, (0, 2, None)))


def gate(y: Float[Array, "batch seq dim"], ops: Operands) -> Float[Array, "batch seq dim"]:
    """The skip D u, the gate silu(z) and the cast to u's dtype."""
    if ops.D is not None:
        y = y + ops.D[:, None, :] * ops.u.astype(jnp.float32)
    if ops.z is not None:
        y = y * jax.nn.silu(ops.z.astype(jnp.float32))
    return y.astype(ops.u.dtype)


def linear_scan(ops: Operands, options: Options) -> tuple[Array, Array]:
    """One step of `lax.scan` a token. Returns out (batch, seq, dim) and the final state (batch, dim, state)."""
    dim = ops.sizes.dim
    delta = step_size(ops, options)
    by_time = {"u": ops.u, "delta": delta, "keep": ops.keep}
    # What does not vary is cast once, outside: inside, its gradient would be summed over time in its own dtype.
    fixed: dict[str, Array] = {}
    for name, x in (("B", ops.B), ("C", ops.C)):
        (by_time if x.ndim == 4 else fixed)[name] = x if x.ndim == 4 else x.astype(jnp.float32)
    xs = {name: jnp.moveaxis(x, 1, 0) for name, x in by_time.items() if x is not None}

    def step(h: Array, x: dict[str, Array]) -> tuple[Array, Array]:
        decay = jnp.exp(x["delta"][..., None] * ops.A) * h
        if "keep" in x:  # a select, not a product: an inf of the sequence before must not become a nan in this one
            decay = jnp.where(x["keep"][:, None, None], decay, 0.0)
        drive = (x["delta"] * x["u"].astype(jnp.float32))[..., None]
        x = x | fixed
        h = decay + drive * _over_dim(x["B"], dim)
        return h, jnp.sum(h * _over_dim(x["C"], dim), axis=-1)

    final, y = lax.scan(step, initial_state(ops), xs, reverse=options.reverse)
    return gate(jnp.moveaxis(y, 0, 1), ops), final


def associative_scan(ops: Operands, options: Options) -> tuple[Array, Array]:
    """Blelloch's form over (decay, drive) pairs: logarithmic depth, and (batch, seq, dim, state) memory."""
    _batch, _, dim, _state = ops.sizes
    delta = step_size(ops, options)
    decay = jnp.exp(delta[..., None] * ops.A[:, None])
    keep = jnp.ones(delta.shape[:2], bool) if ops.keep is None else ops.keep
    decay = jnp.where(keep[..., None, None], decay, 0.0)
    drive = (delta * ops.u.astype(jnp.float32))[..., None] * _over_dim(ops.B, dim, seq_axis=True)
    if ops.initial_state is not None:
        first = -1 if options.reverse else 0
        drive = drive.at[:, first].add(decay[:, first] * ops.initial_state)

    def combine(earlier: tuple[Array, Array], later: tuple[Array, Array]) -> tuple[Array, Array]:
        return earlier[0] * later[0], later[0] * earlier[1] + later[1]

    _, h = lax.associative_scan(combine, (decay, drive), axis=1, reverse=options.reverse)
    y = jnp.sum(h * _over_dim(ops.C, dim, seq_axis=True), axis=-1)
    return gate(y, ops), h[:, 0 if options.reverse else -1]


def _over_dim(x: Array, dim: int, *, seq_axis: bool = False) -> Array:
    """B or C, in float32, so that it multiplies a state: (..., dim or 1, state)."""
    x = x.astype(jnp.float32)
    if seq_axis and x.ndim == 3:  # does not vary
        return x[:, None]
    groups = x.shape[-2]
    return x if groups in (1, dim) else jnp.repeat(x, dim // groups, axis=-2)
