"""How to make XLA's CPU compiler emit one vectorised kernel for many results, from array operations alone.

XLA fuses what leads to one result. A block of the recurrence has dozens (the state's parts, a step's readouts, a
step's gradients), and a fusion for each repeats the work that they share or sends it through memory. Three rules make
them one loop over the lanes, with everything between in registers:

* One operation with many results: a variadic reduce. `in_one_kernel` reduces two equal copies by their maximum, which
  changes nothing: LLVM computes one, before the loop over both, and removes the other.
* An exp that is cheaper than XLA's and as exact: `Exp2`, additions and multiplications.
* Reads of plain buffers only. A dynamic slice fused into the kernel has no alias information, and then LLVM does not
  vectorise: `in_buffers` has another kernel write the operands first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

# 2^f for |f| <= 1/2 to 9.2e-8: a polynomial of least relative error among those that are 1 at 0.
_POWER_OF_TWO = tuple(
    np.float32(c) for c in (1.0, 0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647261)
)
_ROUNDER = np.float32(1.5 * 2**23)  # adding it to |y| < 2^22 leaves y's nearest integer in the lowest bits
_BIAS = np.float32(127)  # of a float32's exponent, which begins at bit 23


class Exp2(NamedTuple):
    """2^y for float32 y of any shape, to 2e-7: 0 below -127, infinite from 128, NaN for NaN.

    The two fields are one number. XLA must not know, or it cancels adding and subtracting it.
    """

    rounder: Float32[Array, ""]
    again: Float32[Array, ""]

    @classmethod
    def create(cls) -> Exp2:
        rounder = jnp.asarray(_ROUNDER + _BIAS)
        return cls(*lax.optimization_barrier((rounder, rounder)))

    def __call__(self, y: Float32[Array, "*lanes"]) -> Float32[Array, "*lanes"]:
        # Comparisons that keep NaN, each one instruction; lax.clamp takes four.
        y = lax.select(y < -_BIAS, jnp.full_like(y, -_BIAS), y)
        y = lax.select(y > _BIAS + 1, jnp.full_like(y, _BIAS + 1), y)
        rounded = y + self.rounder
        rest = y - (rounded - self.again)
        power = jnp.full_like(y, _POWER_OF_TWO[-1])
        for coefficient in _POWER_OF_TWO[-2::-1]:
            power = power * rest + coefficient
        exponent = lax.shift_left(lax.bitcast_convert_type(rounded, jnp.int32), jnp.full_like(y, 23, jnp.int32))
        return power * lax.bitcast_convert_type(exponent, jnp.float32)


def twice(inputs: Sequence[Array]) -> list[Array]:
    """A kernel's inputs, as `in_one_kernel` wants what it is given to begin: (2, *lanes), two equal copies."""
    return [jnp.broadcast_to(x[None], (2, *x.shape)) for x in inputs]


def in_one_kernel(results: Sequence[Float32[Array, "2 ..."]]) -> list[Float32[Array, "*lanes"]]:
    """One copy of each, computed together. The inputs doubled and not the results: XLA counts how often it would emit
    what leads to each of several broadcasts, and fuses nothing that comes to more than 15."""

    def later_of_equals(one: Sequence[Array], other: Sequence[Array]) -> list[Array]:
        return [lax.select(y < x, x, y) for x, y in zip(one, other, strict=True)]

    least = [np.float32(-np.inf)] * len(results)
    return list(lax.reduce(results, least, later_of_equals, (0,)))


def in_buffers(arrays: Sequence[Float32[Array, "*shape"]]) -> list[Float32[Array, "*shape"]]:
    """The same arrays from a kernel of their own, so that another reads them from buffers."""
    return in_one_kernel(twice(arrays))
