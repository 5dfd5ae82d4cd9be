"""The backward kernels; docs/derivation.md has the mathematics.

    backward_summaries  each segment from the back with a zero cotangent: the cotangent that leaves at its front, and Σδ
    combine             forward.py's, from the last segment to the first
    backward_scan       each segment again, from the cotangent that enters at its end

The forward saved the state before every SAVE steps; from there a program computes a chunk's states again. Sums over
channels (dB, dC) or over time (dA, dD, the bias's) leave one partial result a program and are added up afterwards in a
fixed order: the same bits on every run, which atomics would not give.
"""

import triton
import triton.language as tl

from triton_ref.tile import (
    LOG2_E,
    await_previous,
    channel_block,
    coordinates,
    exp2,
    float32,
    gated,
    load,
    matrix_at,
    narrowed,
    next_may_start,
    sigmoid,
    state_passes,
    step_size,
    store,
    time_at,
    vectors,
)


@triton.jit
def backward_summaries(
    delta, A, C, z, bias, ids, dout, ends, totals, passes,
    delta_b, delta_t, delta_d, A_n, A_d, C_b, C_t, C_g, C_n, z_b, z_t, z_d, ids_b, ids_t, dout_b, dout_t, dout_d,
    seq, dim: tl.constexpr, width, blocks, segments, segment_steps, C_share,
    N: tl.constexpr, S: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_IDS: tl.constexpr,
    C_FIXED: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr,
    PAIRS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    next_may_start(CHAINED)
    block, segment, batch = coordinates(blocks, segments)
    channels, exists, group = channel_block(block, width, CHANNELS, WIDE)
    states = tl.arange(0, S)
    tile_mask = (states < N)[:, None] & exists[None, :]
    TILE_MASKED: tl.constexpr = MASKED or S != N

    offset = channels.to(tl.float32)
    if HAS_BIAS:
        offset = load(bias + channels, exists, MASKED)
    delta += batch * delta_b
    dout += batch * dout_b
    z += batch * z_b
    C += batch * C_b + (group // C_share) * C_g if not C_FIXED else 0
    ids += batch * ids_b

    start = segment * segment_steps
    chunks = (tl.minimum(segment_steps, seq - start) + CHUNK - 1) // CHUNK
    g = tl.zeros((S, CHANNELS), tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    whole = segment >= 0
    last = start + (chunks - 1) * CHUNK
    ahead = vectors(delta, delta_t, channels * delta_d, exists, last, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
    ahead = ahead + vectors(dout, dout_t, channels * dout_d, exists, last, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
    if HAS_Z:
        ahead = ahead + vectors(z, z_t, channels * z_d, exists, last, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
    await_previous(CHAINED)
    rates = load(A + states[:, None] * A_n + channels[None, :] * A_d, tile_mask, TILE_MASKED) * LOG2_E
    fixed = rates
    if C_FIXED:
        fixed = load(C + states[:, None] * C_n + channels[None, :] * C_g, tile_mask, TILE_MASKED).to(tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        first = start + chunk * CHUNK
        now = ahead
        if C_FIXED:
            rows = now
        else:
            rows = vectors(C, C_t, states * C_n, states < N, first, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
        following = start + tl.maximum(chunk - 1, 0) * CHUNK
        ahead = vectors(
            delta, delta_t, channels * delta_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
        )
        ahead = ahead + vectors(
            dout, dout_t, channels * dout_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
        )
        if HAS_Z:
            ahead = ahead + vectors(
                z, z_t, channels * z_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
            )
        for k in tl.static_range(CHUNK - 1, -1, -1):
            size, _ = step_size(now[k], offset, first + k, seq, HAS_BIAS, SOFTPLUS, RAGGED, PAIRS)
            dy = gated(now[CHUNK + k], now[2 * CHUNK + k] if HAS_Z else 0.0, HAS_Z, PAIRS)
            g += matrix_at(rows, fixed, k, C_FIXED, PAIRS) * dy[None, :]
            g = exp2(size[None, :] * rates, FAST) * g
            if HAS_IDS:
                kept = state_passes(ids, ids_t, first + k, seq, REVERSE, WIDE)
                g = tl.where(kept, g, 0.0)
                whole = whole & kept
            total += size
    row = batch * segments + segment
    store(ends + row * N * dim + states[:, None] * dim + channels[None, :], g, tile_mask, TILE_MASKED)
    store(totals + row * dim + channels, total, exists, MASKED)
    if HAS_IDS:
        tl.store(passes + row, whole.to(tl.int32))


@triton.jit
def backward_scan(
    u, delta, A, B, C, D, z, bias, ids, dout, starts, saved,
    du, ddelta, dA, dB, dC, dD, dz, dbias, dinitial,
    u_b, u_t, u_d, delta_b, delta_t, delta_d, A_n, A_d, B_b, B_t, B_g, B_n, C_b, C_t, C_g, C_n, z_b, z_t, z_d,
    ids_b, ids_t, dout_b, dout_t, dout_d, starts_b, starts_s, starts_n, starts_d,
    du_b, du_t, du_d, ddelta_b, ddelta_t, ddelta_d, dz_b, dz_t, dz_d,
    batches, seq, dim: tl.constexpr, width, blocks, segments, segment_steps, rows_saved, B_share, C_share, one,
    N: tl.constexpr, S: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, SAVE: tl.constexpr,
    REVERSE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_START: tl.constexpr, HAS_INITIAL: tl.constexpr, B_FIXED: tl.constexpr,
    C_FIXED: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    KEEP_DECAYS: tl.constexpr, FAST: tl.constexpr, PAIRS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """`one` is 1.0, which the compiler does not know: with it decays are computed twice, not kept where that spills."""
    block, segment, batch = coordinates(blocks, segments)
    channels, exists, group = channel_block(block, width, CHANNELS, WIDE)
    states = tl.arange(0, S)
    tile_mask = (states < N)[:, None] & exists[None, :]
    TILE_MASKED: tl.constexpr = MASKED or S != N
    tile = states[:, None] * dim + channels[None, :]

    await_previous(CHAINED)
    rates = load(A + states[:, None] * A_n + channels[None, :] * A_d, tile_mask, TILE_MASKED) * LOG2_E
    fixed_B = rates
    fixed_C = rates
    if B_FIXED:
        fixed_B = load(B + states[:, None] * B_n + channels[None, :] * B_g, tile_mask, TILE_MASKED).to(tl.float32)
    if C_FIXED:
        fixed_C = load(C + states[:, None] * C_n + channels[None, :] * C_g, tile_mask, TILE_MASKED).to(tl.float32)
    offset = channels.to(tl.float32)
    skip = offset
    if HAS_BIAS:
        offset = load(bias + channels, exists, MASKED)
    if HAS_D:
        skip = load(D + channels, exists, MASKED)
    g = tl.zeros((S, CHANNELS), tl.float32)
    if HAS_START:
        places = starts + batch * starts_b + segment.to(tl.int64) * starts_s
        g = load(places + states[:, None] * starts_n + channels[None, :] * starts_d, tile_mask, TILE_MASKED)
    # Each program's row of dB and dC, as (blocks, batch, seq, N).
    partial = (block.to(tl.int64) * batches + batch) * seq * N + states
    u += batch * u_b
    delta += batch * delta_b
    z += batch * z_b
    dout += batch * dout_b
    du += batch * du_b
    ddelta += batch * ddelta_b
    dz += batch * dz_b
    B += batch * B_b + (group // B_share) * B_g if not B_FIXED else 0
    C += batch * C_b + (group // C_share) * C_g if not C_FIXED else 0
    ids += batch * ids_b

    sum_A = tl.zeros((S, CHANNELS), tl.float32)
    sum_B = tl.zeros((S, CHANNELS), tl.float32)
    sum_C = tl.zeros((S, CHANNELS), tl.float32)
    sum_D = tl.zeros((CHANNELS,), tl.float32)
    sum_bias = tl.zeros((CHANNELS,), tl.float32)

    start = segment * segment_steps
    chunks = (tl.minimum(segment_steps, seq - start) + CHUNK - 1) // CHUNK
    for back in range(chunks):
        first = start + (chunks - 1 - back) * CHUNK
        h = tl.load(saved + (batch * rows_saved + first // SAVE) * N * dim + tile, mask=tile_mask, other=0.0)
        for step in range(first % SAVE):  # from the saved state to the chunk's first step
            position = first // SAVE * SAVE + step
            time = time_at(position, seq, REVERSE, WIDE)
            x = load(u + time * u_t + channels * u_d, exists, MASKED)
            x = float32(x, PAIRS)
            raw = load(delta + time * delta_t + channels * delta_d, exists, MASKED)
            size, _ = step_size(raw, offset, position, seq, HAS_BIAS, SOFTPLUS, False, PAIRS)
            h = exp2(size[None, :] * rates, FAST) * h
            if HAS_IDS:
                h = tl.where(state_passes(ids, ids_t, position, seq, REVERSE, WIDE), h, 0.0)
            if B_FIXED:
                h += (size * x)[None, :] * fixed_B
            else:
                row = load(B + time * B_t + states * B_n, states < N, S != N)
                h += (size * x)[None, :] * float32(row, PAIRS)[:, None]

        us = vectors(u, u_t, channels * u_d, exists, first, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
        deltas = vectors(delta, delta_t, channels * delta_d, exists, first, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
        douts = vectors(dout, dout_t, channels * dout_d, exists, first, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
        zs = us
        rows_B = us
        rows_C = us
        if HAS_Z:
            zs = vectors(z, z_t, channels * z_d, exists, first, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
        if not B_FIXED:
            rows_B = vectors(B, B_t, states * B_n, states < N, first, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
        if not C_FIXED:
            rows_C = vectors(C, C_t, states * C_n, states < N, first, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
        hs = (h,)
        decays = ()
        for k in tl.static_range(CHUNK):
            size, _ = step_size(deltas[k], offset, first + k, seq, HAS_BIAS, SOFTPLUS, RAGGED, PAIRS)
            decay = exp2(size[None, :] * rates, FAST)
            h = decay * h
            if HAS_IDS:
                h = tl.where(state_passes(ids, ids_t, first + k, seq, REVERSE, WIDE), h, 0.0)
            h += (size * float32(us[k], PAIRS))[None, :] * matrix_at(rows_B, fixed_B, k, B_FIXED, PAIRS)
            hs = hs + (h,)
            decays = decays + (decay,)

        for k in tl.static_range(CHUNK - 1, -1, -1):
            position = first + k
            time = time_at(position, seq, REVERSE, WIDE)
            mask = narrowed(exists, position < seq) if RAGGED else exists
            row_mask = narrowed(states < N, position < seq) if RAGGED else states < N
            x = float32(us[k], PAIRS)
            size, raw = step_size(deltas[k], offset, position, seq, HAS_BIAS, SOFTPLUS, RAGGED, PAIRS)
            drive = size * x
            dy = gated(douts[k], zs[k], HAS_Z, PAIRS)
            B_now = matrix_at(rows_B, fixed_B, k, B_FIXED, PAIRS)
            C_now = matrix_at(rows_C, fixed_C, k, C_FIXED, PAIRS)

            if HAS_Z:
                y = tl.sum(hs[k + 1] * C_now, axis=0)
                if HAS_D:
                    y += skip * x
                gate = float32(zs[k], PAIRS)
                s = sigmoid(gate)
                grad = float32(douts[k], PAIRS) * y * s * (1.0 + gate * (1.0 - s))
                store(dz + time * dz_t + channels * dz_d, grad.to(dz.dtype.element_ty), mask, MASKED or RAGGED)
            g += C_now * dy[None, :]
            if C_FIXED:
                sum_C += hs[k + 1] * dy[None, :]
            else:
                store(dC + partial + time * N, tl.sum(hs[k + 1] * dy[None, :], axis=1), row_mask, S != N or RAGGED)
            if B_FIXED:
                sum_B += g * drive[None, :]
            else:
                store(dB + partial + time * N, tl.sum(g * drive[None, :], axis=1), row_mask, S != N or RAGGED)
            to_drive = tl.sum(g * B_now, axis=0)
            if KEEP_DECAYS:
                g = decays[k] * g
            else:
                g = exp2((one * size)[None, :] * rates, FAST) * g
            to_exponent = g * hs[k]
            if HAS_IDS:
                kept = state_passes(ids, ids_t, position, seq, REVERSE, WIDE)
                g = tl.where(kept, g, 0.0)
                to_exponent = tl.where(kept, to_exponent, 0.0)
            sum_A += to_exponent * size[None, :]
            grad_size = x * to_drive + tl.sum(to_exponent * rates, axis=0) * (1.0 / LOG2_E)
            grad_u = size * to_drive
            if HAS_D:
                grad_u += skip * dy
                sum_D += dy * x
            if SOFTPLUS:
                grad_size = grad_size * sigmoid(raw)
            if HAS_BIAS:
                sum_bias += tl.where(position < seq, grad_size, 0.0) if RAGGED else grad_size
            store(du + time * du_t + channels * du_d, grad_u.to(du.dtype.element_ty), mask, MASKED or RAGGED)
            to = ddelta + time * ddelta_t + channels * ddelta_d
            store(to, grad_size.to(ddelta.dtype.element_ty), mask, MASKED or RAGGED)

    row = batch * segments + segment
    store(dA + row * N * dim + tile, sum_A, tile_mask, TILE_MASKED)
    if B_FIXED:
        store(dB + row * N * dim + tile, sum_B, tile_mask, TILE_MASKED)
    if C_FIXED:
        store(dC + row * N * dim + tile, sum_C, tile_mask, TILE_MASKED)
    if HAS_D:
        store(dD + row * dim + channels, sum_D, exists, MASKED)
    if HAS_BIAS:
        store(dbias + row * dim + channels, sum_bias, exists, MASKED)
    if HAS_INITIAL:
        if segment == 0:
            store(dinitial + batch * N * dim + tile, g, tile_mask, TILE_MASKED)
