"""The scan's arithmetic as the kernels have it: where an instruction or two do what the library takes more for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_scan.pallas_cut import TILE_STATES, Cut

LOG2_E = float(np.log2(np.e))


def exp2(x: Array, cut: Cut) -> Array:
    """2**x in one instruction: `ex2.approx.ftz` has an error of 2 units in the last place over its whole range."""
    if cut.interpret:  # no rule for inline assembly there
        return jnp.exp2(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    asm = "ex2.approx.ftz.f32 $0, $1;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape])[0]


def fma(a: Array, b: Array, c: Array, cut: Cut) -> Array:
    """a b + c in one instruction, each broadcast to the shape of all: from a product and a sum XLA's compiler makes two
    (it forbids their contraction), which was 2 of 8 instructions a state element in the forward."""
    if cut.interpret:  # no rule for inline assembly there
        return a * b + c
    shape = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    args = [x if x.shape == shape else lax.broadcast_in_dim(x, shape, range(x.ndim)) for x in (a, b, c)]
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    asm = "fma.rn.f32 $0, $1, $2, $3;"
    return plgpu.elementwise_inline_asm(asm, args=args, constraints="=f,f,f,f", pack=1, result_shape_dtypes=[result])[0]


def as_float32(x: Array, cut: Cut, *, row: bool = False) -> Array:
    """x, a vector or a row of B or C, in float32. Of bfloat16, pairs at once, where a thread holds neighbours: two
    instructions, where the compiler's own conversion takes three."""
    paired = cut.tile_states == TILE_STATES if row and cut.together > 1 else cut.num_warps == 1 and x.size > 1
    if x.dtype != jnp.bfloat16 or cut.interpret or not paired:
        return x.astype(jnp.float32)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    asm = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,=f,r", pack=2, result_shape_dtypes=[shape])[0]


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x: Array) -> Array:
    """max(x, 0) + log1p(e), e = exp(-|x|). The library's log1p branches, and its registers spill the scan's. It is
    2 atanh(s) of s = e / (2 + e), at most 1/3: a polynomial in s², relative error 3e-7 of the whole."""
    e = jnp.exp(-jnp.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series: Array | float = 0.2817465662956238
    for coefficient in (0.2796141803264618, 0.40024852752685547, 0.6666631698608398, 2.0):
        series = series * t + coefficient
    return jnp.maximum(x, 0.0) + s * series
