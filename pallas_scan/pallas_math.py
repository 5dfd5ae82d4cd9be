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
_LOG2_E_REST = LOG2_E - float(np.float32(LOG2_E))
_LN_2 = float(np.log(2.0))


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
    paired = cut.tile_states == TILE_STATES if row and cut.in_thread else cut.num_warps == 1 and x.size > 1
    if x.dtype != jnp.bfloat16 or cut.interpret or not paired:
        return x.astype(jnp.float32)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    asm = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,=f,r", pack=2, result_shape_dtypes=[shape])[0]


def _reciprocal(x: Array, cut: Cut) -> Array:
    """1 / x in one instruction, to a unit in the last place. A division is ten, and a call for rare operands: with a
    gate and softplus they were two thirds of the backward's instructions at 8 values a thread."""
    if cut.interpret:
        return 1.0 / x
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    asm = "rcp.approx.ftz.f32 $0, $1;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape])[0]


def _exp(x: Array, cut: Cut) -> Array:
    """To 3 units in the last place, where x is finite: exp2 alone multiplies the rounding of x log2 e by x."""
    if cut.interpret:
        return jnp.exp(x)
    exponent = x * LOG2_E
    rest = fma(x, jnp.full_like(x, LOG2_E), -exponent, cut)
    rest = fma(x, jnp.full_like(x, _LOG2_E_REST), rest, cut)
    power = exp2(exponent, cut)
    return fma(power, rest * _LN_2, power, cut)


def sigmoid(x: Array, cut: Cut) -> Array:
    return _reciprocal(1.0 + exp2(x * -LOG2_E, cut), cut)


def softplus(x: Array, cut: Cut) -> Array:
    """max(x, 0) + log1p(e), e = exp(-|x|). The library's log1p branches, and its registers spill the scan's. It is
    2 atanh(s) of s = e / (2 + e), at most 1/3: a polynomial in s², relative error 3e-7 of the whole."""
    e = _exp(-jnp.minimum(jnp.abs(x), 128.0), cut)  # exp(-128) is 0
    s = e * _reciprocal(2.0 + e, cut)
    t = s * s
    series = jnp.full_like(t, 0.2817465662956238)
    for coefficient in (0.2796141803264618, 0.40024852752685547, 0.6666631698608398, 2.0):
        series = fma(series, t, jnp.full_like(t, coefficient), cut)
    return fma(s, series, jnp.maximum(x, 0.0), cut)
