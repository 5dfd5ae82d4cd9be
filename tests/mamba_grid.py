"""The grid that mamba_ssm's own tests publish, with its sizes, distributions and tolerances: 6,240 cases.

A tolerance is elementwise, |got - want| <= atol + rtol |want|. `want` is a float64 loop on the inputs as rounded to the
case's dtype. Where `want` rounded to the result's dtype would itself be outside, no implementation can be inside: such
a tensor counts as "rounding", not as passed.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pallas_scan
from tests import float64

BATCH, DIM, STATE = 2, 4, 8
SEQS = (8, 16, 32, 64, 128, 256, 372, 512, 784, 1024, 1134, 2048, 4096)
# (rtol, atol) of out and the last state.
TOLERANCE = {"float32": (6e-4, 2e-3), "float16": (3e-3, 5e-3), "bfloat16": (3e-2, 5e-2)}
WEIGHT_TOLERANCE = (1e-3, 1e-3)


@dataclasses.dataclass(frozen=True)
class GridCase:
    dtype: str
    D: bool
    z: bool
    delta_bias: bool
    delta_softplus: bool
    last_state: bool
    vary_B: bool
    vary_C: bool
    groups: int
    seq: int

    def __str__(self) -> str:
        flags = ("D", "z", "delta_bias", "delta_softplus", "last_state", "vary_B", "vary_C")
        given = [flag for flag in flags if getattr(self, flag)]
        return "-".join([self.dtype, f"seq{self.seq}", *given, *(["groups2"] if self.groups == 2 else [])])


def _matrices() -> list[tuple[bool, bool, int]]:
    return [*((B, C, 1) for B, C in itertools.product((False, True), repeat=2)), (True, True, 2)]


GRID = [
    GridCase(dtype, *options, *matrices, seq)
    for dtype in TOLERANCE
    for *options, matrices in itertools.product(*[(False, True)] * 5, _matrices())
    for seq in SEQS
]


class Margin(NamedTuple):
    """The largest of |got - want| / (atol + rtol |want|), and the same of want rounded to the result's dtype."""

    got: float
    rounded: float

    @property
    def verdict(self) -> str:
        if self.got <= 1.0:
            return "passed"
        return "rounding" if self.rounded > 1.0 else "failed"


def limits(case: GridCase, tensor: str) -> tuple[float, float]:
    """rtol and atol."""
    rtol, atol = TOLERANCE[case.dtype]
    weight_rtol, weight_atol = WEIGHT_TOLERANCE
    if case.z:
        weight_rtol, weight_atol = max(weight_rtol, rtol), max(weight_atol, atol)
    if tensor in ("out", "final_state") or (tensor == "dB" and case.vary_B) or (tensor == "dC" and case.vary_C):
        return rtol, atol
    return {"du": (2 * rtol, 2 * atol), "ddelta": (5 * rtol, 10 * atol), "dA": (weight_rtol, 5 * weight_atol)}.get(
        tensor, (weight_rtol, weight_atol)
    )


def draw(case: GridCase, seed: int = 0) -> tuple[dict[str, jax.Array], jax.Array]:
    """The arguments of `pallas_scan.scan` and out's cotangent."""
    rng = np.random.default_rng([seed, *str(case).encode()])
    active = (BATCH, case.seq, DIM)

    def matrix(vary):
        if not vary:
            return jnp.asarray(rng.normal(size=(DIM, STATE)), jnp.float32)
        groups = (case.groups,) if case.groups > 1 else ()
        return jnp.asarray(rng.normal(size=(BATCH, case.seq, *groups, STATE)), case.dtype)

    arguments = {
        "u": jnp.asarray(rng.normal(size=active), case.dtype),
        "delta": jnp.asarray(0.5 * rng.random(active), case.dtype),
        "A": jnp.asarray(-0.5 * rng.random((DIM, STATE)), jnp.float32),
        "B": matrix(case.vary_B),
        "C": matrix(case.vary_C),
    }
    if case.D:
        arguments["D"] = jnp.asarray(rng.normal(size=DIM), jnp.float32)
    if case.z:
        arguments["z"] = jnp.asarray(rng.normal(size=active), case.dtype)
    if case.delta_bias:
        arguments["delta_bias"] = jnp.asarray(0.5 * rng.random(DIM), jnp.float32)
    return arguments, jnp.asarray(rng.normal(size=active), case.dtype)


def with_jax(case: GridCase, implementation: str, arguments: dict, dout: jax.Array) -> dict[str, jax.Array]:
    """out, the final state where the case asks for it, and every gradient, of one of `pallas_scan`'s."""

    @jax.jit
    def run(arguments, dout):
        def scan(arguments):
            result = pallas_scan.scan(
                **arguments,
                delta_softplus=case.delta_softplus,
                return_final_state=case.last_state,
                implementation=implementation,
            )
            return result if case.last_state else (result, None)

        out, pullback, final = jax.vjp(scan, arguments, has_aux=True)
        return out, final, pullback(dout)[0]

    out, final, grads = run(arguments, dout)
    results = {"out": out} | ({"final_state": final} if case.last_state else {})
    return results | {f"d{name}": grad for name, grad in grads.items()}


def with_triton_ref(case: GridCase, arguments: dict, dout: jax.Array) -> dict[str, np.ndarray]:
    """The same of `triton_ref.selective_scan_fn`, in mamba_ssm's layout."""
    import torch

    import triton_ref
    from tests.torch_cases import as_numpy, as_torch

    def seq_last(x):
        return x.movedim(1, -1) if x.dim() > 2 else x

    leaves = {name: as_torch(x).requires_grad_() for name, x in arguments.items()}
    result = triton_ref.selective_scan_fn(
        **{name: seq_last(x) for name, x in leaves.items()},
        delta_softplus=case.delta_softplus,
        return_last_state=case.last_state,
    )
    out, final = result if case.last_state else (result, None)
    grads = torch.autograd.grad(out, list(leaves.values()), seq_last(as_torch(dout)))
    results = {"out": out.movedim(-1, 1)} | ({"final_state": final} if case.last_state else {})
    results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: as_numpy(x) for name, x in results.items()}


def margins(case: GridCase, implementation: str, seed: int = 0) -> dict[str, Margin]:
    """By tensor."""
    arguments, dout = draw(case, seed)
    if implementation == "triton_ref":
        results = with_triton_ref(case, arguments, dout)
    else:
        results = with_jax(case, implementation, arguments, dout)
    out, final, grads = float64.scan(arguments, delta_softplus=case.delta_softplus, dout=dout)
    wanted = {"out": out, "final_state": final} | {f"d{name}": grad for name, grad in grads.items()}
    dtypes = {f"d{name}": x.dtype for name, x in arguments.items()} | {"out": dout.dtype, "final_state": jnp.float32}
    return {
        tensor: Margin(
            _margin(got, wanted[tensor], *limits(case, tensor)),
            _margin(wanted[tensor].astype(dtypes[tensor]), wanted[tensor], *limits(case, tensor)),
        )
        for tensor, got in results.items()
    }


def _margin(got, want: np.ndarray, rtol: float, atol: float) -> float:
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if not np.isfinite(got).all():
        return float("inf")
    return float((np.abs(got - want) / (atol + rtol * np.abs(want))).max())
