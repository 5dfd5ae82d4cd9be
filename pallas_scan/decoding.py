"""`step`, the recurrence of one token: what a serving loop calls once the prompt has gone through `scan`.

The state is carried by the caller: one a row, or a cache of slots that requests come to and leave.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Real

from pallas_scan import arguments, reference
from pallas_scan.problem import Options


def step(
    state: Float32[Array, "batch dim state"] | Float32[Array, "slots dim state"],
    u: Float[Array, "batch dim"],
    delta: Float[Array, "batch dim"],
    A: Float32[Array, "dim state"],
    B: Float[Array, "batch state"] | Float[Array, "batch groups state"],
    C: Float[Array, "batch state"] | Float[Array, "batch groups state"],
    D: Real[Array, " dim"] | None = None,
    *,
    z: Float[Array, "batch dim"] | None = None,
    delta_bias: Real[Array, " dim"] | None = None,
    delta_softplus: bool = False,
    state_indices: Int32[Array, " batch"] | None = None,
) -> tuple[Float[Array, "batch dim"], Float32[Array, "batch dim state"] | Float32[Array, "slots dim state"]]:
    """One token of the selective scan: what `scan` does with seq = 1, from `state` as the initial state.

    Args:
      state: the state before the token, float32; with `state_indices` a cache of states, one a slot.
      u: input, float32, bfloat16 or float16.
      delta: step size before bias and softplus, float32, bfloat16 or float16.
      A: state matrix, float32, real.
      B: input matrix of this token, u's dtype or float32; groups divide dim.
      C: output matrix of this token, as B.
      D: skip connection; cast to float32. None leaves it out.
      z: gate, float32, bfloat16 or float16. None leaves it out.
      delta_bias: added to delta; cast to float32.
      delta_softplus: whether δ goes through softplus.
      state_indices: each row's slot in the cache. A row with an index that is no slot's (negative, or slots and more)
        is skipped: its out is 0 and it writes no state. Two rows must not name the same slot.

    Returns:
      out, in u's dtype, and the state after the token, or the cache with the rows' slots replaced: in place, inside a
      `jax.jit` that the cache is donated to.

    Raises:
      TypeError: an argument has a dtype that is not allowed.
      ValueError: an argument has a shape that does not fit.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023), arXiv 2312.00752,
    section 3.
    """
    ops = arguments.bind_step(
        state,
        u,
        delta,
        A,
        B,
        C,
        D,
        z=z,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        state_indices=state_indices,
    )
    options = Options(delta_softplus=delta_softplus)
    if state_indices is None:
        out, after = reference.linear_scan(ops, options)
        return out[:, 0], after
    cache = jnp.asarray(state)
    slots = cache.shape[0]
    indices = jnp.asarray(state_indices)
    taken = (indices >= 0) & (indices < slots)
    row_slots = jnp.where(taken, indices, slots)  # beyond the cache, where reads are filled and writes dropped
    before = cache.at[row_slots].get(mode="fill", fill_value=0.0)
    out, after = reference.linear_scan(ops._replace(initial_state=before), options)
    out = jnp.where(taken[:, None], out[:, 0], jnp.zeros((), out.dtype))
    return out, cache.at[row_slots].set(after, mode="drop")
