"""What the kernels share: scalar functions, a program's place, loads and stores.

A program owns a tile [state, channels] of one batch row and walks over one segment of the sequence, a chunk of steps
at a time. Positions count in scan order, from the end of the sequence where REVERSE. Triton never moves a load above a
store, so a chunk's loads come before its first store, and a loop carries the next chunk's.

Constants of a kernel, in capitals but for dim (tiles of states are stored with it as a stride, which costs registers
where the compiler does not know it):
  N, S        states, and the power of two that holds them
  CHANNELS    of a tile
  CHUNK       steps whose loads are issued together, before the chunk's first store
  SAVE        steps between saved states
  RAGGED      whether seq is no multiple of CHUNK, so that steps have to be masked
  WIDE        whether offsets in a batch row need 64 bits
  MASKED      whether a tile may have more channels than there are
  ROWS_AHEAD  whether the loop carries the next chunk's rows of B and C too, as it does its u, delta and z
  FAST        whether there is a GPU's assembly, which the interpreter has not
  CHAINED     whether a kernel may start before the one ahead of it has ended (programmatic dependent launch, sm_90 on)
  PAIRS       whether a thread holds two values or more of every vector, so that bfloat16 goes in pairs
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exp(x) is exp2(x log2 e)


# --- scalar functions ---


@triton.jit
def exp2(x, FAST: tl.constexpr):
    if FAST:  # one instruction; 2 units in the last place
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    else:
        return tl.exp2(x)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    # log(1 + e) = 2 atanh(e / (2 + e)), whose series has a quotient of at most 1/9; log(1 + e) itself loses small e.
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    q = s * s
    series = 1.0 / 15.0
    series = series * q + 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + q * series)


@triton.jit
def float32(x, FAST: tl.constexpr):
    """Of bfloat16, where FAST, pairs at once: two instructions, where the compiler's own conversion takes three."""
    if FAST and x.dtype == tl.bfloat16 and x.numel > 1:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], tl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(tl.float32)


# --- kernels of one chain ---


@triton.jit
def next_may_start(CHAINED: tl.constexpr):
    """The next kernel's programs take their places as soon as every program of this one has come here."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(CHAINED: tl.constexpr):
    """What the kernel ahead wrote may be read from here on; before, only what the whole chain was given."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()


# --- places, loads and stores ---


@triton.jit
def time_at(position, seq, REVERSE: tl.constexpr, WIDE: tl.constexpr):
    time = seq - 1 - position if REVERSE else position
    return time.to(tl.int64) if WIDE else time


@triton.jit
def coordinates(blocks, segments):
    """This program's block of channels, segment and batch row."""
    pid = tl.program_id(0)
    return pid % blocks, (pid // blocks) % segments, (pid // (blocks * segments)).to(tl.int64)


@triton.jit
def channel_block(block, width, CHANNELS: tl.constexpr, WIDE: tl.constexpr):
    """The channels of a block, which lies in one group of B and C; which of them there are; and the group."""
    a_group = (width + CHANNELS - 1) // CHANNELS
    group = block // a_group
    inside = (block % a_group) * CHANNELS + tl.arange(0, CHANNELS)
    channels = group * width + inside
    if WIDE:
        channels = channels.to(tl.int64)
    return channels, inside < width, group


@triton.jit
def narrowed(mask, condition):
    """Of a mask and a scalar. The interpreter gives a number for `&` of the two, and refuses that as a mask."""
    return (mask & condition) != 0


@triton.jit
def load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store(pointers, value, mask, MASKED: tl.constexpr):
    if MASKED:
        tl.store(pointers, value, mask=mask)
    else:
        tl.store(pointers, value)


@triton.jit
def vectors(
    x, stride_t, offsets, exists, first, seq, CHUNK: tl.constexpr, REVERSE: tl.constexpr, RAGGED: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A chunk of vectors from position `first` on, as a tuple; of a vector's `offsets` those that `exists`."""
    loaded = ()
    for k in tl.static_range(CHUNK):
        position = first + k
        mask = exists
        if RAGGED:
            mask = narrowed(exists, position < seq)
        pointers = x + time_at(position, seq, REVERSE, WIDE) * stride_t + offsets
        loaded = loaded + (load(pointers, mask, MASKED or RAGGED),)
    return loaded


@triton.jit
def step_size(raw, bias, position, seq, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, RAGGED: tl.constexpr,
               PAIRS: tl.constexpr):  # fmt: skip
    """δ and what it came from. A step that does not exist has δ = 0 and leaves the state as it is."""
    raw = float32(raw, PAIRS)
    if HAS_BIAS:
        raw = raw + bias
    size = raw
    if SOFTPLUS:
        size = softplus(raw)
    if RAGGED:
        size = tl.where(position < seq, size, 0.0)
    return size, raw


@triton.jit
def state_passes(ids, stride_t, position, seq, REVERSE: tl.constexpr, WIDE: tl.constexpr):
    """Whether the state passes into a step: not where another sequence begins. Into the first, the initial state."""
    inner = (position > 0) & (position < seq)
    here = tl.load(ids + time_at(position, seq, REVERSE, WIDE) * stride_t, mask=inner, other=0)
    before = tl.load(ids + time_at(position - 1, seq, REVERSE, WIDE) * stride_t, mask=inner, other=0)
    return here == before


@triton.jit
def gated(dout, z, HAS_Z: tl.constexpr, PAIRS: tl.constexpr):
    """The cotangent of y."""
    dy = float32(dout, PAIRS)
    if HAS_Z:
        z = float32(z, PAIRS)
        dy = dy * z * sigmoid(z)
    return dy


@triton.jit
def matrix_at(rows, fixed, k: tl.constexpr, FIXED: tl.constexpr, PAIRS: tl.constexpr):
    """B or C of a chunk's step k, to multiply a tile with."""
    if FIXED:
        return fixed
    else:
        return float32(rows[k], PAIRS)[:, None]
