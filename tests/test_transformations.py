"""jit, vmap, jvp, second derivatives, checkpoint, lax.scan around it, eval_shape and export, for every implementation.

Derivatives are held to central differences of the float64 loop, and of its gradient, which are right to about 1e-9.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_scan
from tests import float64
from tests.cases import Case, draw

CASE = Case("transformed", batch=2, seq=19, dim=4, state=3, z=True, initial=True, B=2, bias=True, softplus=True)
ARRAYS = draw(CASE)
LIMIT = 2e-5


@pytest.fixture(params=["scan", "assoc", "chunked", "pallas"])
def implementation(request):
    return request.param


def caller(implementation):
    def call(arrays):
        return pallas_scan.scan(**arrays, return_final_state=True, implementation=implementation, **CASE.options)

    return call


def close(got, want, limit=LIMIT):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert float64.relative_error(a, b) <= limit


def same_bits(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), got, want)


# --- float64 ---


def doubles(arrays):
    return {k: np.asarray(v, np.float64) for k, v in arrays.items()}


def directional(f, arrays, direction, step=1e-5):
    """The derivative of f, a function of a dict of float64 arrays, along a direction."""
    ahead, behind = (f({k: v + sign * step * direction[k] for k, v in arrays.items()}) for sign in (1, -1))
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)


def loss_gradient(arrays):
    """Of `loss` below."""
    out, final = float64.scan(arrays, **CASE.options)
    return float64.scan(arrays, dout=2 * out, dfinal=3 * final**2, **CASE.options)[2]


def loss(call, arrays):
    out, final = call(arrays)
    return jnp.sum(out**2) + jnp.sum(final**3)


# --- derivatives ---


def test_jvp_and_linearize_agree_with_float64(implementation):
    call, tangents = caller(implementation), jax.tree.map(jnp.cos, ARRAYS)
    results, got = jax.jit(lambda a, t: jax.jvp(call, (a,), (t,)))(ARRAYS, tangents)
    close(results, float64.scan(ARRAYS, **CASE.options))
    want = directional(lambda a: float64.scan(a, **CASE.options), doubles(ARRAYS), doubles(tangents))
    close(got, want)
    close(jax.linearize(call, ARRAYS)[1](tangents), want)


def test_hessian_vector_product_agrees_with_float64(implementation):
    call, direction = caller(implementation), jax.tree.map(jnp.sin, ARRAYS)
    got = jax.jit(lambda a, d: jax.jvp(jax.grad(lambda a: loss(call, a)), (a,), (d,))[1])(ARRAYS, direction)
    close(got, directional(loss_gradient, doubles(ARRAYS), doubles(direction)), 1e-4)


def test_gradient_of_a_gradient_agrees_with_float64(implementation):
    call = caller(implementation)

    def penalty(arrays):
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(lambda a: loss(call, a))(arrays)))

    gradient = loss_gradient(ARRAYS)
    want = directional(loss_gradient, doubles(ARRAYS), gradient, step=1e-8)
    close(jax.jit(jax.grad(penalty))(ARRAYS), {k: 2 * v for k, v in want.items()}, 1e-4)


# --- vmap ---


@pytest.mark.parametrize("mapped", [tuple(ARRAYS), ("u", "delta", "A", "D"), ("u",), ("A",), ("B", "z")], ids="+".join)
def test_vmap_over_any_arguments_is_a_loop_over_them(implementation, mapped):
    if implementation == "pallas" and jax.default_backend() != "gpu" and len(mapped) < 4:
        pytest.skip("half a minute each in interpret mode; the GPU's tests run them, and chunked has the same rule")
    call = caller(implementation)
    stacked = {k: jnp.stack([v, 0.5 * v, 0.9 * v], axis=-1) if k in mapped else v for k, v in ARRAYS.items()}
    axes = {k: -1 if k in mapped else None for k in ARRAYS}

    def value_and_gradients(arrays):
        out, pullback = jax.vjp(call, arrays)
        return out, pullback(jax.tree.map(jnp.cos, out))[0]

    got = jax.jit(jax.vmap(value_and_gradients, in_axes=(axes,), out_axes=1))(stacked)
    one = jax.jit(value_and_gradients)
    rows = [{k: v[..., i] if k in mapped else v for k, v in stacked.items()} for i in range(3)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x, axis=1), *map(one, rows)))


def test_vmap_folds_into_batch_without_a_loop(implementation):
    if implementation not in ("chunked", "pallas"):
        pytest.skip("the textbook forms are batched by JAX")
    mapped = jax.vmap(caller(implementation), in_axes=({k: 0 if k == "u" else None for k in ARRAYS},))
    jaxpr = jax.make_jaxpr(mapped)(ARRAYS | {"u": jnp.stack([ARRAYS["u"]] * 3)})
    scans = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "selective_scan"]
    assert [e.outvars[0].aval.shape for e in scans] == [(6, CASE.seq, CASE.dim)]
    assert not [e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("scan", "while")]


def test_nested_vmap_and_per_example_gradients(implementation):
    call = caller(implementation)

    def per_example(A, u):
        return jax.grad(lambda A: jnp.sum(call(ARRAYS | {"A": A, "u": u})[0]))(A)

    A = jnp.stack([ARRAYS["A"], 2 * ARRAYS["A"]])
    u = jnp.stack([ARRAYS["u"], -ARRAYS["u"], 3 * ARRAYS["u"]])
    got = jax.jit(jax.vmap(lambda a: jax.vmap(lambda x: per_example(a, x))(u)))(A)
    one = jax.jit(per_example)
    close(got, jnp.stack([jnp.stack([one(a, x) for x in u]) for a in A]))


# --- control flow, shapes, serialisation ---


def test_checkpoint_and_lax_scan_around_it(implementation):
    call = caller(implementation)

    def layers(u):
        def layer(u, _):
            return jax.checkpoint(lambda u: call(ARRAYS | {"u": u})[0])(u) / 4.0, None

        return jnp.sum(jax.lax.scan(layer, u, None, length=3)[0])

    def unrolled(u):
        for _ in range(3):
            u = call(ARRAYS | {"u": u})[0] / 4.0
        return jnp.sum(u)

    close(jax.jit(jax.grad(layers))(ARRAYS["u"]), jax.jit(jax.grad(unrolled))(ARRAYS["u"]))


def test_eval_shape_and_export_round_trip(implementation):
    call = caller(implementation)
    shapes = jax.eval_shape(call, ARRAYS)
    assert [s.shape for s in shapes] == [(2, CASE.seq, 4), (2, 4, 3)]
    exported = jax.export.export(jax.jit(call), disabled_checks=_own_kernels())(ARRAYS)
    again = jax.export.deserialize(exported.serialize())
    same_bits(again.call(ARRAYS), jax.jit(call)(ARRAYS))


def _own_kernels():
    """jax.export wants to be told that a custom call is known to stay as it is."""
    return [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
