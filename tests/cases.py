"""The grid that every implementation runs through: one list of cases, each a shape and the options in use."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    batch: int = 2
    seq: int = 19
    dim: int = 6
    state: int = 4
    B: str | int = "vary"  # "vary", "fixed" or a number of groups
    C: str | int = "vary"
    D: bool = True
    z: bool = False
    bias: bool = False
    softplus: bool = False
    initial: bool = False
    segments: bool = False
    reverse: bool = False
    dtype: str = "float32"
    matrix_dtype: str | None = None  # B's and C's, where it is not dtype

    def __str__(self) -> str:
        return self.name

    @property
    def options(self) -> dict:
        return {"delta_softplus": self.softplus, "reverse": self.reverse}


_EVERYTHING = {"z": True, "bias": True, "softplus": True, "initial": True, "segments": True}

CASES = [
    Case("plain", D=False),
    Case("skip"),
    Case("gate", z=True),
    Case("bias", bias=True),
    Case("softplus", bias=True, softplus=True),
    Case("initial_state", initial=True),
    Case("segments", segments=True),
    Case("segments_initial", segments=True, initial=True),
    Case("reverse", reverse=True, initial=True),
    Case("reverse_segments", reverse=True, segments=True, z=True),
    Case("groups", B=3, C=3),
    Case("groups_differ", B=3, C=2),
    Case("groups_of_one_channel", B=6, C=1),
    Case("fixed_B", B="fixed"),
    Case("fixed_C", C="fixed"),
    Case("fixed_both", B="fixed", C="fixed", initial=True),
    Case("fixed_B_groups", B="fixed", C=2, reverse=True),
    Case("everything", **_EVERYTHING),
    Case("everything_reverse", **_EVERYTHING, reverse=True, B=2, C=3),
    Case("everything_fixed", **_EVERYTHING, B="fixed", C="fixed"),
    Case("one_step", seq=1, initial=True, z=True),
    Case("one_of_each", batch=1, seq=1, dim=1, state=1),
    Case("one_channel", dim=1, state=3, seq=33),
    Case("one_state", state=1, seq=40),
    Case("odd", batch=3, seq=37, dim=5, state=7, **_EVERYTHING),
    Case("powers_of_two", batch=1, seq=64, dim=32, state=16, z=True),
    Case("long", batch=1, seq=301, dim=3, state=2, initial=True),
    Case("long_reverse", batch=1, seq=130, dim=3, state=2, segments=True, reverse=True),
    Case("wide", batch=1, seq=9, dim=70, state=3, initial=True),
    Case("many_states", batch=1, seq=11, dim=4, state=33, initial=True),
    Case("empty_batch", batch=0, seq=5, **_EVERYTHING),
    Case("empty_batch_bfloat16_fixed", batch=0, seq=5, B="fixed", C="fixed", dtype="bfloat16"),
    Case("bfloat16", dtype="bfloat16", **_EVERYTHING),
    Case("float16", dtype="float16", **_EVERYTHING),
    Case("bfloat16_with_float32_matrices", dtype="bfloat16", matrix_dtype="float32", B=2, C="fixed"),
    Case("bfloat16_fixed", dtype="bfloat16", B="fixed", C="fixed", initial=True),
]

# What a result may differ by, relative to its largest value. In half precision the inputs are as rounded in the
# reference too, so what is left is the rounding of the result: half a unit in the last place of 8 or 11 bits.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}


def draw(case: Case, seed: int = 0) -> dict:
    """The arguments of one call, as float32 NumPy arrays rounded to the case's dtypes (then jnp arrays of those)."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    batch, seq, dim, state = case.batch, case.seq, case.dim, case.state

    def normal(*shape):
        return rng.normal(size=shape)

    def matrix(kind):
        if kind == "fixed":
            return normal(dim, state)
        return normal(batch, seq, state) if kind == "vary" else normal(batch, seq, kind, state)

    step = normal(batch, seq, dim) - 1.0 if case.softplus else np.exp(rng.uniform(np.log(1e-2), 0.0, (batch, seq, dim)))
    arguments = {
        "u": normal(batch, seq, dim),
        "delta": step,
        "A": -np.exp(0.5 * normal(dim, state)),
        "B": matrix(case.B),
        "C": matrix(case.C),
        "D": normal(dim) if case.D else None,
        "z": normal(batch, seq, dim) if case.z else None,
        "delta_bias": 0.3 * normal(dim) if case.bias else None,
        "initial_state": normal(batch, dim, state) if case.initial else None,
    }
    dtypes = {"u": case.dtype, "delta": case.dtype, "z": case.dtype}
    dtypes |= dict.fromkeys(("B", "C"), case.matrix_dtype or case.dtype)
    arrays = {k: jnp.asarray(v, dtypes.get(k, "float32")) for k, v in arguments.items() if v is not None}
    if case.segments:
        arrays["segment_ids"] = jnp.asarray(np.cumsum(rng.random((batch, seq)) < 0.2, axis=1), jnp.int32)
    return arrays


def cotangents(case: Case, seed: int = 0):
    rng = np.random.default_rng([seed + 1, *case.name.encode()])
    dout = jnp.asarray(rng.normal(size=(case.batch, case.seq, case.dim)), case.dtype)
    dfinal = jnp.asarray(rng.normal(size=(case.batch, case.dim, case.state)), jnp.float32)
    return dout, dfinal
