"""Every implementation against the float64 loop, on one grid: out, final state and all gradients."""

import jax
import jax.numpy as jnp
import pytest

import pallas_scan
from pallas_scan import KernelConfig, ScanConfig
from tests import float64
from tests.cases import CASES, TOLERANCE, Case, cotangents, draw

IMPLEMENTATIONS = ("scan", "assoc", "chunked", "pallas")
# Blocks so small that every case has several segments, blocks of channels and chunks an interval.
SMALL = ScanConfig(fwd=KernelConfig(4, 2, 1, 16), bwd=KernelConfig(2, 4, 1, 16))


def errors(case: Case, implementation: str, *, seed: int = 0, **options) -> dict[str, float]:
    """The relative error of out, the final state and each gradient."""
    arrays = draw(case, seed)
    dout, dfinal = cotangents(case, seed)
    ids = arrays.get("segment_ids")
    floats = {k: v for k, v in arrays.items() if k != "segment_ids"}

    @jax.jit
    def run(floats, cotangent):
        def f(floats):
            return pallas_scan.scan(
                **floats,
                segment_ids=ids,
                return_final_state=True,
                implementation=implementation,
                **case.options,
                **options,
            )

        results, pullback = jax.vjp(f, floats)
        return results, pullback(cotangent)[0]

    (out, final), grads = run(floats, (dout, dfinal))
    want_out, want_final, want = float64.scan(arrays, dout=dout, dfinal=dfinal, **case.options)
    assert out.dtype == arrays["u"].dtype and final.dtype == jnp.float32
    assert all(grads[k].dtype == floats[k].dtype for k in floats)
    pairs = {"out": (out, want_out), "final_state": (final, want_final)}
    pairs |= {f"d{k}": (grads[k], want[k]) for k in floats}
    return {k: float64.relative_error(got, wanted) for k, (got, wanted) in pairs.items()}


def dtype_of(case: Case, tensor: str) -> str:
    if tensor in ("final_state", "dA", "dD", "ddelta_bias", "dinitial_state"):
        return "float32"
    if tensor in ("dB", "dC"):
        return case.matrix_dtype or case.dtype
    return case.dtype


def tolerance(case: Case, tensor: str) -> float:
    """float32 results of half-precision inputs are held to float32's tolerance."""
    return TOLERANCE[dtype_of(case, tensor)]


def check(case: Case, implementation: str, **options) -> dict[str, float]:
    """Asserts every tolerance; returns the errors by "tensor dtype", the dtype being the result's."""
    found = errors(case, implementation, **options)
    for tensor, error in found.items():
        limit = tolerance(case, tensor)
        assert error <= limit, f"{case}: {tensor} of {implementation} is off by {error:.2e}, at most {limit:.2e}"
    return {f"{tensor} {dtype_of(case, tensor)}": error for tensor, error in found.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_blocks_agree_with_float64(case):
    check(case, "pallas", config=SMALL)
