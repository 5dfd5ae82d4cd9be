"""`step`: the same numbers as `scan`, one token at a time, from states or from a cache of slots."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import pallas_scan
from tests.cases import Case, draw

CASES = [
    Case("plain", D=False),
    Case("everything", z=True, bias=True, softplus=True, initial=True),
    Case("groups", B=3, C=2, initial=True, z=True),
    Case("bfloat16", z=True, bias=True, softplus=True, initial=True, dtype="bfloat16"),
    Case("float16", z=True, dtype="float16", matrix_dtype="float32"),
    Case("batch_is_dim", batch=6),  # (batch, state) of B is (dim, state) too
]


def split(case):
    """What every token has of its own, what all share, and the state before the first."""
    arrays = draw(case)
    timed = {k: arrays[k] for k in ("u", "delta", "B", "C", "z") if k in arrays}
    shared = {k: arrays[k] for k in ("A", "D", "delta_bias") if k in arrays}
    return timed, shared, arrays.get("initial_state", jnp.zeros((case.batch, case.dim, case.state)))


def at(timed, t):
    return {name: x[:, t] for name, x in timed.items()}


@pytest.fixture(params=["scan", "assoc", "chunked", "pallas"])
def implementation(request):
    return request.param


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_and_steps_are_one_longer_scan(case, implementation):
    if implementation == "pallas" and jax.default_backend() != "gpu" and case not in CASES[1:4:2]:
        pytest.skip("slow in interpret mode; the GPU's tests run it")
    timed, shared, state = split(case)
    prompt = 12

    def scan(part, state):
        options = {"return_final_state": True, "implementation": implementation}
        return pallas_scan.scan(**part, **shared, initial_state=state, delta_softplus=case.softplus, **options)

    want, last = scan(timed, state)
    out, state = scan({name: x[:, :prompt] for name, x in timed.items()}, state)
    outs = [out]
    one = jax.jit(lambda state, token: pallas_scan.step(state, **token, **shared, delta_softplus=case.softplus))
    for t in range(prompt, case.seq):
        out, state = one(state, at(timed, t))
        assert out.dtype == want.dtype and state.dtype == jnp.float32
        outs.append(out[:, None])
    got = jnp.concatenate(outs, axis=1)
    # The kernels' exp is the GPU's, the step's is XLA's: there, the library's float32 tolerance.
    near = 2e-5 if implementation == "pallas" else 2e-6
    np.testing.assert_allclose(state, last, rtol=near, atol=near)
    rounding = {"float32": near, "bfloat16": 2**-7, "float16": 2**-10}[case.dtype]  # of out, one unit in its last place
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), rtol=rounding, atol=near / 2)


def test_a_step_is_the_same_bits_as_a_scan_of_one_token():
    case = CASES[1]
    timed, shared, state = split(case)
    out, after = pallas_scan.step(state, **at(timed, 0), **shared, delta_softplus=True)
    first = {name: x[:, :1] for name, x in timed.items()}
    options = {"delta_softplus": True, "return_final_state": True, "implementation": "scan"}
    want, last = pallas_scan.scan(**first, **shared, initial_state=state, **options)
    np.testing.assert_array_equal(out, want[:, 0])
    np.testing.assert_array_equal(after, last)


def test_a_cache_of_slots_is_read_and_written_where_the_indices_say():
    case = Case("slots", batch=4, z=True, softplus=True)
    timed, shared, _ = split(case)
    token = at(timed, 0)
    cache = jax.random.normal(jax.random.key(1), (7, case.dim, case.state))
    indices = jnp.array([5, -1, 0, 7], jnp.int32)  # the second and the last row are no slot's

    @jax.jit
    def run(cache, indices):
        return pallas_scan.step(cache, **token, **shared, delta_softplus=True, state_indices=indices)

    out, after = run(cache, indices)
    want, states = pallas_scan.step(cache[jnp.array([5, 0, 0, 0])], **token, **shared, delta_softplus=True)
    np.testing.assert_allclose(out[0], want[0], rtol=2e-6)
    np.testing.assert_array_equal(out[jnp.array([1, 3])], 0.0)
    np.testing.assert_allclose(after[5], states[0], rtol=2e-6)
    np.testing.assert_allclose(after[0], states[2], rtol=2e-6)
    untouched = jnp.array([1, 2, 3, 4, 6])
    np.testing.assert_array_equal(after[untouched], cache[untouched])


def test_what_a_skipped_slot_holds_does_not_reach_anyone():
    case = Case("nan", batch=2)
    timed, shared, _ = split(case)
    cache = jnp.full((3, case.dim, case.state), jnp.nan).at[1].set(0.0)
    out, after = pallas_scan.step(cache, **at(timed, 0), **shared, state_indices=jnp.array([-1, 1], jnp.int32))
    assert jnp.isfinite(out).all() and jnp.isfinite(after[1]).all()
    assert jnp.isnan(after[0]).all() and jnp.isnan(after[2]).all()


def test_it_is_differentiable_and_maps():
    case = CASES[1]
    timed, shared, state = split(case)
    token = at(timed, 0)

    def loss(state, token, shared):
        out, after = pallas_scan.step(state, **token, **shared, delta_softplus=True)
        return jnp.sum(out**2) + jnp.sum(after**2)

    check_grads(loss, (state, token, shared), order=1, modes=["fwd", "rev"], rtol=2e-2)
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (state, token))
    mapped, _ = jax.vmap(lambda s, t: pallas_scan.step(s, **t, **shared, delta_softplus=True))(*stacked)
    for i in range(2):
        states, tokens = jax.tree.map(operator.itemgetter(i), stacked)
        one, _ = pallas_scan.step(states, **tokens, **shared, delta_softplus=True)
        np.testing.assert_allclose(mapped[i], one, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"u": jnp.zeros((2, 3, 6))}, ValueError, r"u: got shape \(2, 3, 6\), expected \(batch, dim\)"),
        ({"u": jnp.zeros((2, 6), jnp.int32)}, TypeError, "u: got dtype int32"),
        ({"delta": jnp.zeros((2, 5))}, ValueError, r"delta: got shape \(2, 5\), expected \(batch, dim\) = \(2, 6\)"),
        ({"A": jnp.zeros((5, 4))}, ValueError, "A: got shape"),
        ({"A": jnp.zeros((6, 4), jnp.bfloat16)}, TypeError, "A: got dtype bfloat16"),
        ({"B": jnp.zeros((6, 4))}, ValueError, r"B: got shape \(6, 4\), expected \(batch, state\) = \(2, 4\)"),
        ({"C": jnp.zeros((2, 4, 4))}, ValueError, r"C: got shape \(2, 4, 4\)"),
        ({"C": jnp.zeros((2, 4), jnp.bfloat16)}, TypeError, "C: got dtype bfloat16"),
        ({"D": jnp.zeros(5)}, ValueError, "D: got shape"),
        ({"z": jnp.zeros((2, 6, 1))}, ValueError, "z: got shape"),
        ({"delta_bias": jnp.zeros((2, 6))}, ValueError, "delta_bias: got shape"),
        ({"delta_softplus": 1}, TypeError, "delta_softplus: got 1 of type int, expected a bool"),
        ({"state": jnp.zeros((3, 6, 4))}, ValueError, r"state: got shape \(3, 6, 4\), expected \(batch, dim, state\)"),
        ({"state": jnp.zeros((2, 6, 4), jnp.bfloat16)}, TypeError, "state: got dtype bfloat16, expected float32"),
        ({"state_indices": jnp.zeros(3, jnp.int32)}, ValueError, r"state_indices: got shape \(3,\)"),
        ({"state_indices": jnp.zeros(2)}, TypeError, "state_indices: got dtype float32, expected int32"),
        (
            {"state_indices": jnp.zeros(2, jnp.int32), "state": jnp.zeros((9, 5, 4))},
            ValueError,
            r"state: got shape \(9, 5, 4\), expected \(slots, dim, state\)",
        ),
    ],
)
def test_a_bad_argument_is_named(change, error, message):
    timed, shared, state = split(Case("errors"))
    with pytest.raises(error, match=message):
        pallas_scan.step(**{"state": state, **at(timed, 0), **shared} | change)
