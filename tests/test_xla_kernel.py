import jax
import jax.numpy as jnp
import numpy as np

from pallas_scan.xla_kernel import Exp2, in_one_kernel, twice


def test_exp2_is_a_power_of_two_to_float32s_precision():
    y = np.linspace(-126, 127, 200_001, dtype=np.float32)
    got = np.asarray(jax.jit(lambda y: Exp2.create()(y))(y), np.float64)
    np.testing.assert_allclose(got, 2.0 ** y.astype(np.float64), rtol=2e-7)


def test_exp2_underflows_overflows_and_keeps_nan():
    y = np.array([-np.inf, -1e30, -128.0, 128.0, 1e30, np.inf, np.nan, 0.0], np.float32)
    got = jax.jit(lambda y: Exp2.create()(y))(y)
    np.testing.assert_array_equal(got, np.array([0, 0, 0, np.inf, np.inf, np.inf, np.nan, 1], np.float32))


def test_one_kernel_computes_every_result_and_changes_none():
    x = jnp.array([1.0, -0.5, np.nan, np.inf, -np.inf, 0.0], jnp.float32)

    def results(x):
        (x,) = twice([x])
        return in_one_kernel([x * scale for scale in (1.0, -2.0, 3.0)])

    for got, scale in zip(jax.jit(results)(x), (1.0, -2.0, 3.0), strict=True):
        np.testing.assert_array_equal(got, np.asarray(x) * np.float32(scale))
    optimised = jax.jit(results).lower(x).compile().as_text()
    assert optimised.count(" fusion(") == 1
