"""The forward kernels.

    turn                A with channels contiguous, where the tiles are wide
    forward_summaries   each segment from a zero state: the state it ends with, and Σδ (its decay is exp(A Σδ))
    combine             the state that each segment starts from, out of the summaries of those before it
    forward_scan        each segment again, from that state

One segment needs the last of them alone. Each kernel's programs may take their places while the one ahead still runs:
they load what the caller gave, then wait for it. tile.py explains the constants.
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
    state_passes,
    step_size,
    store,
    time_at,
    vectors,
)


@triton.jit
def turn(A, turned, A_n, A_d, dim, N: tl.constexpr, S: tl.constexpr, CHANNELS: tl.constexpr, CHAINED: tl.constexpr):
    next_may_start(CHAINED)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    states = tl.arange(0, S)
    mask = (channels < dim)[:, None] & (states < N)[None, :]
    values = tl.load(A + channels[:, None] * A_d + states[None, :] * A_n, mask=mask)
    tl.store(turned + states[None, :] * dim + channels[:, None], values, mask=mask)


@triton.jit
def forward_summaries(
    u, delta, A, B, bias, ids, ends, totals, passes,
    u_b, u_t, u_d, delta_b, delta_t, delta_d, A_n, A_d, B_b, B_t, B_g, B_n, ids_b, ids_t,
    seq, dim: tl.constexpr, width, blocks, segments, segment_steps, B_share,
    N: tl.constexpr, S: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr,
    SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_IDS: tl.constexpr, B_FIXED: tl.constexpr,
    RAGGED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS_AHEAD: tl.constexpr, FAST: tl.constexpr,
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
    u += batch * u_b
    delta += batch * delta_b
    B += batch * B_b + (group // B_share) * B_g if not B_FIXED else 0
    ids += batch * ids_b

    start = segment * segment_steps
    chunks = (tl.minimum(segment_steps, seq - start) + CHUNK - 1) // CHUNK
    h = tl.zeros((S, CHANNELS), tl.float32)
    total = tl.zeros((CHANNELS,), tl.float32)
    whole = segment >= 0
    ahead = vectors(u, u_t, channels * u_d, exists, start, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
    ahead = ahead + vectors(
        delta, delta_t, channels * delta_d, exists, start, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
    )
    if ROWS_AHEAD and not B_FIXED:
        ahead = ahead + vectors(B, B_t, states * B_n, states < N, start, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
    await_previous(CHAINED)
    rates = load(A + states[:, None] * A_n + channels[None, :] * A_d, tile_mask, TILE_MASKED) * LOG2_E
    fixed = rates
    if B_FIXED:
        fixed = load(B + states[:, None] * B_n + channels[None, :] * B_g, tile_mask, TILE_MASKED).to(tl.float32)
    for chunk in range(chunks):
        first = start + chunk * CHUNK
        now = ahead
        if B_FIXED:
            rows = now
        elif ROWS_AHEAD:
            rows = now[2 * CHUNK :]
        else:
            rows = vectors(B, B_t, states * B_n, states < N, first, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
        following = start + tl.minimum(chunk + 1, chunks - 1) * CHUNK
        ahead = vectors(u, u_t, channels * u_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
        ahead = ahead + vectors(
            delta, delta_t, channels * delta_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
        )
        if ROWS_AHEAD and not B_FIXED:
            ahead = ahead + vectors(
                B, B_t, states * B_n, states < N, following, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE
            )
        for k in tl.static_range(CHUNK):
            size, _ = step_size(now[CHUNK + k], offset, first + k, seq, HAS_BIAS, SOFTPLUS, RAGGED, PAIRS)
            h = exp2(size[None, :] * rates, FAST) * h
            if HAS_IDS:
                kept = state_passes(ids, ids_t, first + k, seq, REVERSE, WIDE)
                h = tl.where(kept, h, 0.0)
                whole = whole & kept
            drive = size * float32(now[k], PAIRS)
            h += drive[None, :] * matrix_at(rows, fixed, k, B_FIXED, PAIRS)
            total += size
    row = batch * segments + segment
    store(ends + row * N * dim + states[:, None] * dim + channels[None, :], h, tile_mask, TILE_MASKED)
    store(totals + row * dim + channels, total, exists, MASKED)
    if HAS_IDS:
        tl.store(passes + row, whole.to(tl.int32))


@triton.jit
def combine(
    A, ends, totals, passes, boundary, starts, A_n, A_d, boundary_b, boundary_n, boundary_d,
    dim: tl.constexpr, plane, blocks, segments,
    LANES: tl.constexpr, TOGETHER: tl.constexpr, BACKWARDS: tl.constexpr, HAS_IDS: tl.constexpr,
    HAS_BOUNDARY: tl.constexpr, WIDE: tl.constexpr, FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """What each segment starts from, out of the summaries of those before it (behind it, where BACKWARDS).

    State elements do not meet here: a program's lanes are neighbours in the plane of (state, dim). Of a tile the layout
    would follow the load of A, and stores cross shared memory."""
    next_may_start(CHAINED)
    block, _, batch = coordinates(blocks, 1)
    lanes = block * LANES + tl.arange(0, LANES)
    exists = lanes < plane
    if WIDE:
        lanes = lanes.to(tl.int64)
    states = lanes // dim
    channels = lanes % dim
    h = tl.zeros((LANES,), tl.float32)
    if HAS_BOUNDARY:
        places = boundary + batch * boundary_b + states * boundary_n + channels * boundary_d
        h = tl.load(places, mask=exists, other=0.0)
    await_previous(CHAINED)
    rates = tl.load(A + states * A_n + channels * A_d, mask=exists, other=0.0) * LOG2_E
    for round in range((segments + TOGETHER - 1) // TOGETHER):
        loaded = ()
        for i in tl.static_range(TOGETHER):  # one load waits as long as all of them
            place = round * TOGETHER + i
            mask = narrowed(exists, place < segments)
            row = batch * segments + (segments - 1 - place if BACKWARDS else place)
            loaded = loaded + (tl.load(ends + row * plane + lanes, mask=mask, other=0.0),)
            loaded = loaded + (tl.load(totals + row * dim + channels, mask=mask, other=0.0),)
        for i in tl.static_range(TOGETHER):
            place = round * TOGETHER + i
            there = place < segments
            row = batch * segments + (segments - 1 - place if BACKWARDS else place)
            tl.store(starts + row * plane + lanes, h, mask=narrowed(exists, there))
            h = exp2(loaded[2 * i + 1] * rates, FAST) * h
            if HAS_IDS:
                h = tl.where(tl.load(passes + row, mask=there, other=1) != 0, h, 0.0)
            h += loaded[2 * i]


@triton.jit
def forward_scan(
    u, delta, A, B, C, D, z, bias, ids, starts, out, final, saved,
    u_b, u_t, u_d, delta_b, delta_t, delta_d, A_n, A_d, B_b, B_t, B_g, B_n, C_b, C_t, C_g, C_n, z_b, z_t, z_d,
    ids_b, ids_t, starts_b, starts_s, starts_n, starts_d, out_b, out_t, out_d,
    seq, dim: tl.constexpr, width, blocks, segments, segment_steps, rows_saved, B_share, C_share,
    N: tl.constexpr, S: tl.constexpr, CHANNELS: tl.constexpr, CHUNK: tl.constexpr, SAVE: tl.constexpr,
    REVERSE: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_START: tl.constexpr, B_FIXED: tl.constexpr, C_FIXED: tl.constexpr,
    RAGGED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS_AHEAD: tl.constexpr, FAST: tl.constexpr,
    PAIRS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """SAVE = 0 saves no states."""
    block, segment, batch = coordinates(blocks, segments)
    channels, exists, group = channel_block(block, width, CHANNELS, WIDE)
    states = tl.arange(0, S)
    tile_mask = (states < N)[:, None] & exists[None, :]
    TILE_MASKED: tl.constexpr = MASKED or S != N
    tile = states[:, None] * dim + channels[None, :]
    CARRIED: tl.constexpr = 3 * CHUNK if HAS_Z else 2 * CHUNK

    offset = channels.to(tl.float32)
    skip = offset
    if HAS_BIAS:
        offset = load(bias + channels, exists, MASKED)
    if HAS_D:
        skip = load(D + channels, exists, MASKED)
    u += batch * u_b
    delta += batch * delta_b
    z += batch * z_b
    out += batch * out_b
    B += batch * B_b + (group // B_share) * B_g if not B_FIXED else 0
    C += batch * C_b + (group // C_share) * C_g if not C_FIXED else 0
    ids += batch * ids_b

    start = segment * segment_steps
    chunks = (tl.minimum(segment_steps, seq - start) + CHUNK - 1) // CHUNK
    ahead = vectors(u, u_t, channels * u_d, exists, start, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
    ahead = ahead + vectors(
        delta, delta_t, channels * delta_d, exists, start, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
    )
    if HAS_Z:
        ahead = ahead + vectors(z, z_t, channels * z_d, exists, start, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
    if ROWS_AHEAD and not B_FIXED:
        ahead = ahead + vectors(B, B_t, states * B_n, states < N, start, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
    if ROWS_AHEAD and not C_FIXED:
        ahead = ahead + vectors(C, C_t, states * C_n, states < N, start, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
    await_previous(CHAINED)
    rates = load(A + states[:, None] * A_n + channels[None, :] * A_d, tile_mask, TILE_MASKED) * LOG2_E
    fixed_B = rates
    fixed_C = rates
    if B_FIXED:
        fixed_B = load(B + states[:, None] * B_n + channels[None, :] * B_g, tile_mask, TILE_MASKED).to(tl.float32)
    if C_FIXED:
        fixed_C = load(C + states[:, None] * C_n + channels[None, :] * C_g, tile_mask, TILE_MASKED).to(tl.float32)
    h = tl.zeros((S, CHANNELS), tl.float32)
    if HAS_START:
        places = starts + batch * starts_b + segment.to(tl.int64) * starts_s
        h = load(places + states[:, None] * starts_n + channels[None, :] * starts_d, tile_mask, TILE_MASKED)
    for chunk in range(chunks):
        first = start + chunk * CHUNK
        if SAVE > 0:
            if first % SAVE == 0:  # before the loads: after them it would wait for all of them
                store(saved + (batch * rows_saved + first // SAVE) * N * dim + tile, h, tile_mask, TILE_MASKED)
        now = ahead
        rows_B = now
        rows_C = now
        if not B_FIXED:
            if ROWS_AHEAD:
                rows_B = now[CARRIED : CARRIED + CHUNK]
            else:
                rows_B = vectors(B, B_t, states * B_n, states < N, first, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
        if not C_FIXED:
            if ROWS_AHEAD:
                rows_C = now[CARRIED if B_FIXED else CARRIED + CHUNK :]
            else:
                rows_C = vectors(C, C_t, states * C_n, states < N, first, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE)
        following = start + tl.minimum(chunk + 1, chunks - 1) * CHUNK
        ahead = vectors(u, u_t, channels * u_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE)
        ahead = ahead + vectors(
            delta, delta_t, channels * delta_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
        )
        if HAS_Z:
            ahead = ahead + vectors(
                z, z_t, channels * z_d, exists, following, seq, CHUNK, REVERSE, RAGGED, MASKED, WIDE
            )
        if ROWS_AHEAD and not B_FIXED:
            ahead = ahead + vectors(
                B, B_t, states * B_n, states < N, following, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE
            )
        if ROWS_AHEAD and not C_FIXED:
            ahead = ahead + vectors(
                C, C_t, states * C_n, states < N, following, seq, CHUNK, REVERSE, RAGGED, S != N, WIDE
            )
        results = ()
        for k in tl.static_range(CHUNK):
            x = float32(now[k], PAIRS)
            size, _ = step_size(now[CHUNK + k], offset, first + k, seq, HAS_BIAS, SOFTPLUS, RAGGED, PAIRS)
            h = exp2(size[None, :] * rates, FAST) * h
            if HAS_IDS:
                h = tl.where(state_passes(ids, ids_t, first + k, seq, REVERSE, WIDE), h, 0.0)
            h += (size * x)[None, :] * matrix_at(rows_B, fixed_B, k, B_FIXED, PAIRS)
            y = tl.sum(h * matrix_at(rows_C, fixed_C, k, C_FIXED, PAIRS), axis=0)
            if HAS_D:
                y += skip * x
            y = gated(y, now[2 * CHUNK + k] if HAS_Z else 0.0, HAS_Z, PAIRS)
            results = results + (y,)
        for k in tl.static_range(CHUNK):
            position = first + k
            mask = narrowed(exists, position < seq) if RAGGED else exists
            to = out + time_at(position, seq, REVERSE, WIDE) * out_t + channels * out_d
            store(to, results[k].to(out.dtype.element_ty), mask, MASKED or RAGGED)
    if segment == segments - 1:
        store(final + batch * N * dim + tile, h, tile_mask, TILE_MASKED)
