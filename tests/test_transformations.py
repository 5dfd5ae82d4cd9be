"""jit, vmap, jvp, second derivatives, checkpoint and lax.scan around the chunked form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_scan
from tests import float64
from tests.cases import Case, draw

CASE = Case("transformed", batch=2, seq=70, dim=4, state=3, z=True, initial=True, B=2)
ARRAYS = draw(CASE)


def call(arrays, implementation="chunked", **options):
    return pallas_scan.scan(**arrays, return_final_state=True, implementation=implementation, **options)


def close(got, want, limit=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert float64.relative_error(a, b) <= limit


def test_jvp_matches_that_of_lax_scan():
    tangents = jax.tree.map(jnp.cos, ARRAYS)
    got = jax.jvp(call, (ARRAYS,), (tangents,))
    close(got, jax.jvp(lambda a: call(a, "scan"), (ARRAYS,), (tangents,)))
    close(jax.linearize(call, ARRAYS)[1](tangents), got[1])


def test_hessian_vector_product_matches_that_of_lax_scan():
    direction = jax.tree.map(jnp.sin, ARRAYS)

    def hvp(implementation):
        def loss(arrays):
            out, final = call(arrays, implementation)
            return jnp.sum(out**2) + jnp.sum(final**3)

        return jax.jvp(jax.grad(loss), (ARRAYS,), (direction,))[1]

    close(jax.jit(hvp, static_argnums=0)("chunked"), hvp("scan"), 1e-4)


def test_gradient_of_a_gradient_matches_that_of_lax_scan():
    def penalty(implementation):
        def loss(arrays):
            return jnp.sum(call(arrays, implementation)[0] ** 2)

        return jax.grad(lambda a: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(a))))(ARRAYS)

    close(penalty("chunked"), penalty("scan"), 1e-4)


@pytest.mark.parametrize("mapped", [("u",), ("A",), ("B", "z"), ("u", "delta", "A", "D"), tuple(ARRAYS)], ids="+".join)
def test_vmap_over_any_arguments_equals_a_loop(mapped):
    stacked = {k: jnp.stack([v, 0.5 * v, 0.9 * v], axis=-1) if k in mapped else v for k, v in ARRAYS.items()}
    axes = {k: -1 if k in mapped else None for k in ARRAYS}

    def value_and_gradients(arrays):
        out, pullback = jax.vjp(call, arrays)
        return out, pullback(jax.tree.map(jnp.cos, out))[0]

    got = jax.jit(jax.vmap(value_and_gradients, in_axes=(axes,)))(stacked)
    rows = [{k: v[..., i] if k in mapped else v for k, v in stacked.items()} for i in range(3)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *map(value_and_gradients, rows))
    close(got, want)


def test_vmap_folds_into_batch_without_a_loop():
    mapped = jax.vmap(call, in_axes=({k: 0 if k == "u" else None for k in ARRAYS},))
    jaxpr = jax.make_jaxpr(mapped)(ARRAYS | {"u": jnp.stack([ARRAYS["u"]] * 3)})
    scans = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "selective_scan"]
    assert [e.outvars[0].aval.shape for e in scans] == [(6, 70, 4)]
    assert not [e for e in jaxpr.jaxpr.eqns if e.primitive.name in ("scan", "while")]


def test_nested_vmap_and_per_example_gradients():
    def per_example(A, u):
        return jax.grad(lambda A: jnp.sum(call(ARRAYS | {"A": A, "u": u})[0]))(A)

    A = jnp.stack([ARRAYS["A"], 2 * ARRAYS["A"]])
    u = jnp.stack([ARRAYS["u"], -ARRAYS["u"], 3 * ARRAYS["u"]])
    got = jax.vmap(lambda a: jax.vmap(lambda x: per_example(a, x))(u))(A)
    want = jnp.stack([jnp.stack([per_example(a, x) for x in u]) for a in A])
    close(got, want)


def test_checkpoint_and_lax_scan_around_it():
    def layers(u):
        def layer(u, _):
            return jax.checkpoint(lambda u: call(ARRAYS | {"u": u})[0])(u) / 4.0, None

        return jnp.sum(jax.lax.scan(layer, u, None, length=3)[0])

    def unrolled(u):
        for _ in range(3):
            u = call(ARRAYS | {"u": u})[0] / 4.0
        return jnp.sum(u)

    close(jax.jit(jax.grad(layers))(ARRAYS["u"]), jax.grad(unrolled)(ARRAYS["u"]))


def test_eval_shape_and_export_round_trip():
    shapes = jax.eval_shape(call, ARRAYS)
    assert [s.shape for s in shapes] == [(2, 70, 4), (2, 4, 3)]
    exported = jax.export.export(jax.jit(call))(ARRAYS)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(ARRAYS)[0], jax.jit(call)(ARRAYS)[0])
