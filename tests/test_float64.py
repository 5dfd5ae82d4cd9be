"""The float64 reference itself: its gradients against finite differences."""

import numpy as np
import pytest

from tests import float64
from tests.cases import CASES, cotangents, draw

_SMALL = ("one_step", "everything", "everything_reverse", "everything_fixed", "fixed_B_groups", "segments_initial")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in _SMALL], ids=str)
def test_gradients_match_finite_differences(case):
    arrays = {k: np.asarray(v, np.float64) for k, v in draw(case).items()}
    dout, dfinal = (np.asarray(x, np.float64) for x in cotangents(case))
    _, _, grads = float64.scan(arrays, dout=dout, dfinal=dfinal, **case.options)
    rng = np.random.default_rng(0)

    def loss(arguments):
        out, final = float64.scan(arguments, **case.options)
        return (out * dout).sum() + (final * dfinal).sum()

    for name, grad in grads.items():
        direction = rng.normal(size=grad.shape)
        h = 1e-6
        up = loss(arrays | {name: arrays[name] + h * direction})
        down = loss(arrays | {name: arrays[name] - h * direction})
        np.testing.assert_allclose((grad * direction).sum(), (up - down) / (2 * h), rtol=1e-6, atol=1e-6, err_msg=name)


def test_closed_form_of_one_channel_and_state():
    """Constant δ, u, B, C: h_t is a geometric series."""
    seq, a, delta = 7, -0.5, 0.3
    arguments = {
        "u": np.ones((1, seq, 1)),
        "delta": np.full((1, seq, 1), delta),
        "A": np.array([[a]]),
        "B": np.ones((1, seq, 1)),
        "C": np.full((1, seq, 1), 2.0),
    }
    out, final = float64.scan(arguments)
    ratio = np.exp(a * delta)
    series = delta * (1 - ratio ** np.arange(1, seq + 1)) / (1 - ratio)
    np.testing.assert_allclose(out[0, :, 0], 2.0 * series, rtol=1e-14)
    np.testing.assert_allclose(final[0, 0, 0], series[-1], rtol=1e-14)
