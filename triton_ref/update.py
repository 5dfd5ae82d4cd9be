"""The kernel of `selective_state_update`: one token of every channel, its state changed in place."""

import triton
import triton.language as tl

from triton_ref.tile import LOG2_E, exp2, sigmoid, softplus


@triton.jit
def state_update(
    state, x, dt, A, B, C, D, z, bias, slots, out,
    state_b, state_h, state_d, state_n, x_b, x_h, x_d, dt_b, dt_h, dt_d, A_h, A_d, A_n, B_b, B_g, B_n, C_b, C_g, C_n,
    D_h, D_d, z_b, z_h, z_d, bias_h, bias_d, slots_b, out_b, out_h, out_d,
    heads, width, blocks, B_share, C_share,
    N: tl.constexpr, S: tl.constexpr, CHANNELS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SLOTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """B_share, C_share: heads that read one row of B or C."""
    pid = tl.program_id(0)
    batch = (pid // blocks).to(tl.int64)
    flat = (pid % blocks) * CHANNELS + tl.arange(0, CHANNELS)
    exists = flat < heads * width
    head, inner = flat // width, flat % width
    states = tl.arange(0, S)
    mask = exists[:, None] & (states < N)[None, :]

    slot = batch
    taken = batch >= 0
    if HAS_SLOTS:
        slot = tl.load(slots + batch * slots_b).to(tl.int64)
        taken = slot >= 0
        mask = (mask & taken) != 0  # a mask again, for the interpreter
    places = state + slot * state_b + (head * state_h + inner * state_d)[:, None] + (states * state_n)[None, :]
    h = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(x + batch * x_b + head * x_h + inner * x_d, mask=exists, other=0.0).to(tl.float32)
    size = tl.load(dt + batch * dt_b + head * dt_h + inner * dt_d, mask=exists, other=0.0).to(tl.float32)
    if HAS_BIAS:
        size += tl.load(bias + head * bias_h + inner * bias_d, mask=exists, other=0.0).to(tl.float32)
    if SOFTPLUS:
        size = softplus(size)
    rates = tl.load(A + (head * A_h + inner * A_d)[:, None] + (states * A_n)[None, :], mask=mask, other=0.0)
    rates = rates.to(tl.float32) * LOG2_E
    row = tl.load(B + batch * B_b + (head // B_share * B_g)[:, None] + (states * B_n)[None, :], mask=mask, other=0.0)
    h = exp2(size[:, None] * rates, FAST) * h + (size * u)[:, None] * row.to(tl.float32)
    tl.store(places, h.to(state.dtype.element_ty), mask=mask)

    row = tl.load(C + batch * C_b + (head // C_share * C_g)[:, None] + (states * C_n)[None, :], mask=mask, other=0.0)
    y = tl.sum(h * row.to(tl.float32), axis=1)
    if HAS_D:
        y += tl.load(D + head * D_h + inner * D_d, mask=exists, other=0.0).to(tl.float32) * u
    if HAS_Z:
        gate = tl.load(z + batch * z_b + head * z_h + inner * z_d, mask=exists, other=0.0).to(tl.float32)
        y = y * gate * sigmoid(gate)
    y = tl.where(taken, y, 0.0)
    tl.store(out + batch * out_b + head * out_h + inner * out_d, y.to(out.dtype.element_ty), mask=exists)
