"""What holds at any shape: hypothesis draws shapes and options; then ranges, carried states, packed sequences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pallas_scan
from tests import float64
from tests.cases import Case, draw
from tests.test_agreement import IMPLEMENTATIONS, errors, tolerance


@st.composite
def any_case(draw_):
    groups = draw_(st.integers(1, 3))
    kinds = st.sampled_from(["vary", "fixed", groups])
    flags = {f: draw_(st.booleans()) for f in ("D", "z", "bias", "softplus", "initial", "segments", "reverse")}
    return Case(
        "drawn",
        batch=draw_(st.integers(0, 3)),
        seq=draw_(st.integers(1, 40)),
        dim=groups * draw_(st.integers(1, 5)),
        state=draw_(st.integers(1, 9)),
        B=draw_(kinds),
        C=draw_(kinds),
        dtype=draw_(st.sampled_from(["float32", "bfloat16", "float16"])),
        **flags,
    )


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(any_case())
def test_any_shape_and_options_agree_with_float64(case):
    for tensor, error in errors(case, "chunked").items():
        # One drawn gradient can be a sum that nearly cancels: its largest value, the scale of the error, is then small.
        assert error <= 3 * tolerance(case, tensor), (case, tensor, error)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("exponent", [0.0, -1e-3, -50.0, -90.0, -1e4])
def test_any_decay_is_finite_and_right(implementation, exponent):
    """δ A from no decay at all to one that underflows at once."""
    case = Case("range", batch=1, seq=21, dim=3, state=2, initial=True)
    arrays = draw(case)
    arrays["delta"] = jnp.full_like(arrays["delta"], 1.0)
    arrays["A"] = jnp.full_like(arrays["A"], exponent)
    _check_gradients(arrays, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_delta_of_zero_keeps_the_state(implementation):
    case = Case("zero_delta", batch=1, seq=21, dim=3, state=2, initial=True, D=False)
    arrays = draw(case)
    arrays["delta"] = jnp.zeros_like(arrays["delta"])
    _, final = pallas_scan.scan(**arrays, return_final_state=True, implementation=implementation)
    np.testing.assert_array_equal(final, arrays["initial_state"])
    _check_gradients(arrays, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_steps_through_softplus_are_finite_and_right(implementation):
    case = Case("large_steps", batch=1, seq=9, dim=3, state=2, bias=True, softplus=True, z=True)
    arrays = draw(case)
    arrays["delta"] = 60.0 * arrays["delta"]
    arrays["z"] = 100.0 * arrays["z"]
    _check_gradients(arrays, implementation, delta_softplus=True)


def _check_gradients(arrays, implementation, **options):
    @jax.jit
    def run(arrays):
        def f(arrays):
            return pallas_scan.scan(**arrays, return_final_state=True, implementation=implementation, **options)

        results, pullback = jax.vjp(f, arrays)
        return results, pullback(jax.tree.map(jnp.ones_like, results))[0]

    (out, final), grads = run(arrays)
    ones = np.ones(out.shape), np.ones(final.shape)
    want_out, want_final, want = float64.scan(arrays, dout=ones[0], dfinal=ones[1], **options)
    for name, got, wanted in [("out", out, want_out), ("final", final, want_final)] + [
        (k, grads[k], want[k]) for k in grads
    ]:
        assert float64.relative_error(got, wanted) <= 2e-5, name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("cut", [1, 8, 13, 30])
def test_two_halves_with_the_carried_state_equal_one_scan(implementation, cut):
    """Both ways: outputs and final state, and the gradient that passes back through the carried state."""
    arrays = draw(Case("halves", seq=31, z=True, initial=True))
    timed = ("u", "delta", "B", "C", "z")

    def whole(arrays):
        return pallas_scan.scan(**arrays, return_final_state=True, implementation=implementation)

    def halves(arrays):
        first = arrays | {k: arrays[k][:, :cut] for k in timed}
        out_1, state = pallas_scan.scan(**first, return_final_state=True, implementation=implementation)
        second = arrays | {k: arrays[k][:, cut:] for k in timed} | {"initial_state": state}
        out_2, final = pallas_scan.scan(**second, return_final_state=True, implementation=implementation)
        return jnp.concatenate([out_1, out_2], axis=1), final

    results = []
    for f in (whole, halves):
        value, pullback = jax.vjp(f, arrays)
        results.append((value, pullback(jax.tree.map(jnp.ones_like, value))))
    for got, want in zip(jax.tree.leaves(results[1]), jax.tree.leaves(results[0]), strict=True):
        assert float64.relative_error(got, want) <= 2e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reverse", [False, True])
def test_packed_sequences_equal_separate_scans(implementation, reverse):
    case = Case("packed", batch=1, seq=30, z=True)
    arrays = draw(case)
    bounds = [0, 7, 8, 19, 30]
    ids = np.repeat([5, 3, 9, 4], np.diff(bounds))[None].astype(np.int32)
    options = {"reverse": reverse, "implementation": implementation}
    packed = pallas_scan.scan(**arrays, segment_ids=jnp.asarray(ids), **options)
    for start, stop in itertools.pairwise(bounds):
        part = arrays | {k: arrays[k][:, start:stop] for k in ("u", "delta", "B", "C", "z")}
        alone = pallas_scan.scan(**part, **options)
        assert float64.relative_error(packed[:, start:stop], alone) <= 1e-6


@pytest.mark.parametrize("implementation", ["scan", "chunked"])
def test_an_overflow_stays_in_its_own_sequence(implementation):
    """A growing system may overflow; the sequence packed after it starts clean, and so do its gradients."""
    arrays = draw(Case("overflow", batch=1, seq=24, D=False))
    arrays["A"] = jnp.full_like(arrays["A"], 60.0)
    arrays["delta"] = jnp.ones_like(arrays["delta"]).at[:, 12:].set(1e-3)
    ids = jnp.asarray(np.repeat([0, 1], 12)[None], jnp.int32)

    def second(u):
        return pallas_scan.scan(**arrays | {"u": u}, segment_ids=ids, implementation=implementation)[:, 12:]

    out, pullback = jax.vjp(second, arrays["u"])
    assert jnp.isfinite(out).all()
    assert jnp.isfinite(pullback(jnp.ones_like(out))[0][:, 12:]).all()


def test_outputs_do_not_depend_on_the_batch_they_are_in():
    case = Case("rows", batch=3, z=True, initial=True)
    arrays = draw(case)
    together = pallas_scan.scan(**arrays)
    alone = {k: v[1:2] if v.ndim == 3 else v for k, v in arrays.items()}
    np.testing.assert_array_equal(together[1:2], pallas_scan.scan(**alone))
