"""The selective scan and its gradient as float64 NumPy loops over time, written apart from the library.

Everything is (batch, dim, state); B and C are expanded to that, and gradients are summed back to the shapes given.
"""

from __future__ import annotations

import numpy as np


def _softplus(x):
    return np.logaddexp(x, 0.0)


def _sigmoid(x):
    return np.exp(-np.logaddexp(0.0, -x))


def _at(x, t, dim):
    """B or C at time t as (batch or 1, dim, state)."""
    if x.ndim == 2:
        return x[None]
    if x.ndim == 3:
        return x[:, t, None, :]
    return np.repeat(x[:, t], dim // x.shape[2], axis=1)


def _add_at(grad, t, g):
    """Adds g (batch, dim, state) to the gradient of B or C, in B's or C's own shape."""
    if grad.ndim == 2:
        grad += g.sum(0)
    elif grad.ndim == 3:
        grad[:, t] += g.sum(1)
    else:
        batch, dim, state = g.shape
        groups = grad.shape[2]
        grad[:, t] += g.reshape(batch, groups, dim // groups, state).sum(2)


def scan(args, *, delta_softplus=False, reverse=False, dout=None, dfinal=None):
    """args: a dict of the arguments of `pallas_scan.scan`, absent or None where not given.

    Returns (out, final_state), and the dict of gradients too where dout is given.
    """
    a = {k: np.asarray(v, np.float64) for k, v in args.items() if v is not None}
    u, A, B, C = a["u"], a["A"], a["B"], a["C"]
    batch, seq, dim = u.shape
    raw = a["delta"] + a.get("delta_bias", 0.0)
    delta = _softplus(raw) if delta_softplus else raw
    times = list(range(seq))[:: -1 if reverse else 1]
    ids = a.get("segment_ids", np.zeros((batch, seq)))
    h = a.get("initial_state", np.zeros((batch, dim, A.shape[1]))).copy()

    y = np.zeros_like(u)
    before, decays = {}, {}
    previous = None
    for t in times:
        r = np.ones((batch, 1, 1)) if previous is None else (ids[:, t] == ids[:, previous])[:, None, None] * 1.0
        previous = t
        before[t] = h
        decays[t] = r * np.exp(delta[:, t, :, None] * A)
        h = decays[t] * h + (delta[:, t] * u[:, t])[..., None] * _at(B, t, dim)
        y[:, t] = (_at(C, t, dim) * h).sum(-1)
    y = y + a.get("D", 0.0) * u
    gate = a["z"] * _sigmoid(a["z"]) if "z" in a else 1.0
    if dout is None:
        return y * gate, h

    dout = np.asarray(dout, np.float64)
    grads = {k: np.zeros_like(v) for k, v in a.items() if k != "segment_ids"}
    dy = dout * gate
    if "z" in a:
        s = _sigmoid(a["z"])
        grads["z"] = dout * y * (s + a["z"] * s * (1 - s))
    if "D" in a:
        grads["D"] = (dy * u).sum((0, 1))
        grads["u"] += a["D"] * dy
    ddelta = np.zeros_like(u)
    g = np.zeros_like(h) if dfinal is None else np.asarray(dfinal, np.float64).copy()
    for t in reversed(times):
        after = decays[t] * before[t] + (delta[:, t] * u[:, t])[..., None] * _at(B, t, dim)
        g = g + _at(C, t, dim) * dy[:, t, :, None]
        _add_at(grads["C"], t, after * dy[:, t, :, None])
        _add_at(grads["B"], t, g * (delta[:, t] * u[:, t])[..., None])
        gB = (g * _at(B, t, dim)).sum(-1)
        grads["u"][:, t] += delta[:, t] * gB
        carried = g * before[t] * decays[t]
        ddelta[:, t] = u[:, t] * gB + (carried * A).sum(-1)
        grads["A"] += (carried * delta[:, t, :, None]).sum(0)
        g = decays[t] * g
    if "initial_state" in a:
        grads["initial_state"] = g
    grads["delta"] = ddelta * _sigmoid(raw) if delta_softplus else ddelta
    if "delta_bias" in a:
        grads["delta_bias"] = grads["delta"].sum((0, 1))
    return y * gate, h, grads


def relative_error(got, want) -> float:
    """max |got - want| / max |want|; inf where got is not finite. What float32 flushes to zero counts as zero."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, (got.shape, want.shape)
    if got.size == 0:
        return 0.0
    if not np.isfinite(got).all():
        return np.inf
    error, scale = np.abs(got - want).max(), np.abs(want).max()
    return 0.0 if error < np.finfo(np.float32).tiny else float(error / (scale if scale > 0 else 1.0))
