"""How a scan is cut into programs, and the launches of the kernels: plain tensors in, plain tensors out.

Sizes follow from the device alone: a multiprocessor's registers hold 8 one-warp programs that use all 255 they can,
and segments are so many that such programs fill it, since two passes cost twice the exps of one.
"""

from __future__ import annotations

import dataclasses
import math
import os

import torch
import triton

from triton_ref import backward as backward_kernels
from triton_ref import forward as forward_kernels
from triton_ref import update as update_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SAVE = 8  # steps between the states that the forward saves: at 16 states two activations' bytes in float32
FORWARD_VALUES = 64  # of a tile, a thread: the state and A take twice as many registers
BACKWARD_VALUES = 16  # the backward holds a chunk's states, A, dA and the cotangent
KEPT_VALUES = 32  # of a chunk's decays, a thread, up to which keeping them does not spill
COMBINED_LANES = 128  # of a program of `combine`, one a thread
COMBINED = 32  # segments whose summaries such a program loads together
RESIDENT = 8  # programs of a multiprocessor


@dataclasses.dataclass(frozen=True)
class Scan:
    """A call in canonical form. u, delta, z are (batch, seq, dim) of any strides; B and C (batch, seq, groups, state),
    or (dim, state) where they do not vary; A (dim, state), D and bias (dim,), initial (batch, state, dim), float32.

    States are (batch, state, dim), contiguous: a tile that is read or written the other way round is held the other way
    round, for which the loop's registers do not suffice."""

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    bias: torch.Tensor | None
    initial: torch.Tensor | None
    ids: torch.Tensor | None
    softplus: bool
    reverse: bool

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        batch, seq, dim = self.u.shape
        return batch, seq, dim, self.A.shape[1]

    @property
    def groups(self) -> int:
        """Groups of channels within which a program reads one row each of B and of C."""
        return math.lcm(*(x.shape[2] for x in (self.B, self.C) if x.dim() == 4))


@dataclasses.dataclass(frozen=True)
class Cut:
    """chunk steps at a time of `channels` channels on `warps` warps, in segments of `segment` steps."""

    chunk: int
    channels: int
    warps: int
    segment: int

    @property
    def narrow(self) -> bool:
        """Of a narrow tile A is read as it lies, and the rows of B and C of the next chunk are few registers."""
        return self.channels <= 16


def forward_cut(scan: Scan) -> Cut:
    batch, seq, dim, state = scan.sizes
    width, resident = dim // scan.groups, _resident(scan.u.device)
    narrow = max(1, 256 // _power(state))  # 8 values a thread: few enough for a chunk of 8 steps to be loaded ahead
    if 16 * batch * scan.groups * -(-width // narrow) >= 15 * resident:
        return _fitted(8, narrow, -(-seq // 8) * 8, state, width, FORWARD_VALUES)
    channels = 128 if 2 * batch * (dim // 128) * (seq // 32) >= resident else 32
    if channels == 32:
        resident *= 2
    # In half precision a chunk of 4 wide rows spills: its conversions are done ahead.
    chunk = 2 if channels == 128 and scan.u.element_size() == 2 else 4
    return _fitted(chunk, channels, _segment(scan, channels, resident), state, width, FORWARD_VALUES)


def backward_cut(scan: Scan) -> Cut:
    batch, seq, dim, state = scan.sizes
    resident = _resident(scan.u.device)
    channels = 32 if 2 * batch * (dim // 32) * (seq // 32) >= resident else 16
    cut = _fitted(4, channels, _segment(scan, channels, resident), state, dim // scan.groups, BACKWARD_VALUES)
    return dataclasses.replace(cut, segment=-(-cut.segment // SAVE) * SAVE)


def _segment(scan: Scan, channels: int, resident: int) -> int:
    """Segments whose programs fill whole waves of `resident`: a wave's last programs take as long as its first."""
    batch, seq, dim, _ = scan.sizes
    rows = max(1, batch * scan.groups * -(-dim // scan.groups // channels))

    def cost(count: int) -> float:
        steps = -(-seq // (16 * count)) * 16
        waves = -(-rows * -(-seq // steps) // resident)
        return waves * (steps + 4.0) + count * (0.1 + 2.5 * rows / resident)

    most = max(1, min(seq // 16, 8 * resident // rows))
    return -(-seq // (16 * min(range(1, most + 1), key=cost))) * 16


def _fitted(chunk: int, channels: int, segment: int, state: int, width: int, values: int) -> Cut:
    """No more channels than there are, and on so many warps that no thread has more than `values` of a tile."""
    chunk = min(chunk, _power(segment))
    channels = min(channels, _power(width))
    tile = _power(state)
    while channels > 1 and channels * tile > 32 * values:
        channels //= 2
    warps = min(32, max(1, channels * tile // (32 * values)))
    return Cut(chunk, channels, warps, segment)


def _power(x: int) -> int:
    return triton.next_power_of_2(max(1, x))


def _resident(device: torch.device) -> int:
    """How many programs run at a time. The interpreter runs one."""
    if device.type != "cuda":
        return 1
    return RESIDENT * torch.cuda.get_device_properties(device).multi_processor_count


def _chains(device: torch.device) -> bool:
    """Whether a kernel can be launched before the one ahead of it has ended."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


# --- launches ---


class _Launch:
    """What every kernel of one scan and cut is told."""

    def __init__(self, scan: Scan, cut: Cut) -> None:
        batch, seq, dim, state = scan.sizes
        self.scan, self.cut, self.batch, self.seq, self.dim, self.state = scan, cut, batch, seq, dim, state
        self.width = dim // scan.groups
        self.blocks = scan.groups * triton.cdiv(self.width, cut.channels)
        self.segments = triton.cdiv(seq, cut.segment)
        self.grid = (self.blocks * self.segments * batch,)
        if self.grid[0] >= 2**31:
            raise ValueError(
                f"u: got shape {tuple(scan.u.shape)}, expected fewer than 2**31 programs, not {self.grid[0]}"
            )
        self.chained, self.started = _chains(scan.u.device), False
        # Of a batch row: of each input, and of what is stored, which is strided as an input or dense.
        inputs = [x for x in (scan.u, scan.delta, scan.z, scan.B, scan.C, scan.ids) if x is not None]
        extents = [sum((n - 1) * s for n, s in zip(x.shape[1:], x.stride()[1:], strict=True)) for x in inputs]
        self.shared = {
            "N": state,
            "S": _power(state),
            "CHANNELS": cut.channels,
            "CHUNK": cut.chunk,
            "REVERSE": scan.reverse,
            "SOFTPLUS": scan.softplus,
            "HAS_BIAS": scan.bias is not None,
            "HAS_IDS": scan.ids is not None,
            "RAGGED": seq % cut.chunk != 0,
            "MASKED": self.width % cut.channels != 0,
            "WIDE": max(*extents, max(seq, state) * max(dim, state)) >= 2**31,
            "FAST": not INTERPRETED,
            "PAIRS": not INTERPRETED and cut.warps == 1,
            "CHAINED": self.chained,
            "num_warps": cut.warps,
            "num_stages": 1,
        }
        self.sizes = (seq, dim, self.width, self.blocks, self.segments, cut.segment)
        # Of a wide tile A is read with channels contiguous, so that sums over the state stay in a thread.
        self.A = scan.A if cut.narrow or batch == 0 else self.turned(scan.A)
        self.rates = (self.A.stride(1), self.A.stride(0))

    def links(self) -> dict[str, bool]:
        """The launch option of the chain's next kernel. Its first waits for whatever was launched before."""
        option = {"launch_pdl": self.started} if self.chained else {}
        self.started = True
        return option

    def turned(self, A: torch.Tensor) -> torch.Tensor:
        """A, (dim, state), stored as (state, dim)."""
        turned, constants = self.new(self.state, self.dim), {k: self.shared[k] for k in ("N", "S", "CHAINED")}
        forward_kernels.turn[(triton.cdiv(self.dim, 32),)](
            A, turned, A.stride(1), A.stride(0), self.dim, CHANNELS=32, num_warps=4, **constants, **self.links()
        )
        return turned.t()

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.scan.u.device)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """A result in x's shape, strides where those are dense, and dtype; `rounded` finishes it."""
        return torch.empty_like(x, dtype=torch.float32 if INTERPRETED else x.dtype)

    def given(self, x: torch.Tensor | None) -> torch.Tensor:
        """A pointer for an argument that is not there: it is not followed."""
        return self.scan.A if x is None else x

    def share(self, x: torch.Tensor) -> int:
        """Groups of channels that read one row of B or C."""
        return self.scan.groups // x.shape[2] if x.dim() == 4 else 1

    def summaries(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ends = self.new(self.batch, self.segments, self.state, self.dim)
        totals = self.new(self.batch, self.segments, self.dim)
        return ends, totals, self.new(self.batch, self.segments, dtype=torch.int32)

    def combine(self, summaries, boundary: torch.Tensor | None, *, backwards: bool) -> torch.Tensor:
        """What each segment starts from, (batch, segments, state, dim)."""
        ends, totals, passes = summaries
        starts = torch.empty_like(ends)
        plane = self.state * self.dim
        blocks = triton.cdiv(plane, COMBINED_LANES)
        constants = {k: self.shared[k] for k in ("HAS_IDS", "WIDE", "FAST", "CHAINED")}
        forward_kernels.combine[(blocks * self.batch,)](
            self.A, ends, totals, passes, self.given(boundary), starts, *self.rates, *_strides(boundary, 3),
            self.dim, plane, blocks, self.segments,
            LANES=COMBINED_LANES, TOGETHER=min(COMBINED, _power(self.segments)), BACKWARDS=backwards,
            HAS_BOUNDARY=boundary is not None, num_warps=COMBINED_LANES // 32, num_stages=1, **constants,
            **self.links(),
        )  # fmt: skip
        return starts

    def starting(self, summaries, boundary: torch.Tensor | None, *, backwards: bool):
        """What segments start from, and its strides (batch, segment, state, dim)."""
        if self.segments > 1:
            starts = self.combine(summaries(), boundary, backwards=backwards)
            return starts, starts.stride()
        if boundary is None:
            return None, (0, 0, 0, 0)
        return boundary, (boundary.stride(0), 0, *boundary.stride()[1:])


def _rounded(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A result in its dtype. Triton's interpreter cuts bfloat16 off where a GPU rounds, so there torch does it."""
    return x.to(like.dtype)


def _strides(x: torch.Tensor | None, count: int) -> tuple[int, ...]:
    return (0,) * count if x is None else x.stride()


def _matrix_strides(x: torch.Tensor) -> tuple[int, ...]:
    """(batch, seq, group, state) of B or C; where it does not vary, the channel's in the group's place."""
    return x.stride() if x.dim() == 4 else (0, 0, *x.stride())


def forward(scan: Scan, *, save: bool, cut: Cut | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out, with u's strides where those are dense; the final state (batch, state, dim) and, with save, the state before
    every `SAVE` steps, (batch, rows, state, dim), else an empty tensor."""
    launch = _Launch(scan, cut or forward_cut(scan))
    batch, seq, dim, state = scan.sizes
    rows = triton.cdiv(seq, SAVE) if save else 0
    out, final = launch.like(scan.u), launch.new(batch, state, dim)
    saved = launch.new(batch, rows, state, dim)
    if batch == 0:
        return _rounded(out, scan.u), final, saved
    matrices = {"B_FIXED": scan.B.dim() == 2, "ROWS_AHEAD": launch.cut.narrow}

    def summaries():
        results = launch.summaries()
        forward_kernels.forward_summaries[launch.grid](
            scan.u, scan.delta, launch.A, scan.B, launch.given(scan.bias), launch.given(scan.ids), *results,
            *scan.u.stride(), *scan.delta.stride(), *launch.rates, *_matrix_strides(scan.B), *_strides(scan.ids, 2),
            *launch.sizes, launch.share(scan.B), **matrices, **launch.shared, **launch.links(),
        )  # fmt: skip
        return results

    starts, start_strides = launch.starting(summaries, scan.initial, backwards=False)
    forward_kernels.forward_scan[launch.grid](
        scan.u, scan.delta, launch.A, scan.B, scan.C, launch.given(scan.D), launch.given(scan.z),
        launch.given(scan.bias), launch.given(scan.ids), launch.given(starts), out, final, saved,
        *scan.u.stride(), *scan.delta.stride(), *launch.rates, *_matrix_strides(scan.B), *_matrix_strides(scan.C),
        *_strides(scan.z, 3), *_strides(scan.ids, 2), *start_strides, *out.stride(),
        *launch.sizes, rows, launch.share(scan.B), launch.share(scan.C),
        SAVE=SAVE if save else 0, HAS_D=scan.D is not None, HAS_Z=scan.z is not None, HAS_START=starts is not None,
        C_FIXED=scan.C.dim() == 2, **matrices, **launch.shared, **launch.links(),
    )  # fmt: skip
    return _rounded(out, scan.u), final, saved


@dataclasses.dataclass
class Gradients:
    """Of each tensor of a `Scan`, in its dtype and shape."""

    u: torch.Tensor
    delta: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    D: torch.Tensor | None
    z: torch.Tensor | None
    bias: torch.Tensor | None
    initial: torch.Tensor | None


def backward(
    scan: Scan, saved: torch.Tensor, dout: torch.Tensor, dfinal: torch.Tensor | None, cut: Cut | None = None
) -> Gradients:
    """Gradients, from what `forward` saved; dfinal is (batch, state, dim) float32, contiguous."""
    launch = _Launch(scan, cut or backward_cut(scan))
    batch, seq, dim, state = scan.sizes
    per_program = (batch, launch.segments)

    def matrix(x: torch.Tensor) -> torch.Tensor:
        return launch.new(*per_program, state, dim) if x.dim() == 2 else launch.new(launch.blocks, batch, seq, state)

    du, ddelta = launch.like(scan.u), launch.like(scan.delta)
    dz = None if scan.z is None else launch.like(scan.z)
    dA, dB, dC = launch.new(*per_program, state, dim), matrix(scan.B), matrix(scan.C)
    dD = None if scan.D is None else launch.new(*per_program, dim)
    dbias = None if scan.bias is None else launch.new(*per_program, dim)
    dinitial = None if scan.initial is None else launch.new(batch, state, dim)
    if batch > 0:

        def summaries():
            results = launch.summaries()
            backward_kernels.backward_summaries[launch.grid](
                scan.delta, launch.A, scan.C, launch.given(scan.z), launch.given(scan.bias), launch.given(scan.ids),
                dout, *results,
                *scan.delta.stride(), *launch.rates, *_matrix_strides(scan.C), *_strides(scan.z, 3),
                *_strides(scan.ids, 2), *dout.stride(),
                *launch.sizes, launch.share(scan.C),
                HAS_Z=scan.z is not None, C_FIXED=scan.C.dim() == 2, **launch.shared, **launch.links(),
            )  # fmt: skip
            return results

        starts, start_strides = launch.starting(summaries, dfinal, backwards=True)
        values = launch.shared["S"] * launch.cut.channels // (32 * launch.cut.warps)
        backward_kernels.backward_scan[launch.grid](
            scan.u, scan.delta, launch.A, scan.B, scan.C, launch.given(scan.D), launch.given(scan.z),
            launch.given(scan.bias), launch.given(scan.ids), dout, launch.given(starts), saved,
            du, ddelta, dA, dB, dC, launch.given(dD), launch.given(dz), launch.given(dbias), launch.given(dinitial),
            *scan.u.stride(), *scan.delta.stride(), *launch.rates, *_matrix_strides(scan.B), *_matrix_strides(scan.C),
            *_strides(scan.z, 3), *_strides(scan.ids, 2), *dout.stride(), *start_strides,
            *du.stride(), *ddelta.stride(), *_strides(dz, 3),
            batch, *launch.sizes, saved.shape[1], launch.share(scan.B), launch.share(scan.C), 1.0,
            SAVE=SAVE, HAS_D=scan.D is not None, HAS_Z=scan.z is not None, HAS_START=starts is not None,
            HAS_INITIAL=dinitial is not None, B_FIXED=scan.B.dim() == 2, C_FIXED=scan.C.dim() == 2,
            KEEP_DECAYS=launch.cut.chunk * values <= KEPT_VALUES, **launch.shared, **launch.links(),
        )  # fmt: skip

    def summed(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.sum((0, 1))

    def matrix_gradient(partial: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            return partial.sum((0, 1)).t().to(x.dtype).contiguous()
        groups = partial.unflatten(0, (x.shape[2], -1)).sum(1)  # (groups, batch, seq, state)
        return groups.permute(1, 2, 0, 3).to(x.dtype).contiguous()

    return Gradients(
        u=_rounded(du, scan.u),
        delta=_rounded(ddelta, scan.delta),
        A=dA.sum((0, 1)).t().contiguous(),
        B=matrix_gradient(dB, scan.B),
        C=matrix_gradient(dC, scan.C),
        D=summed(dD),
        z=None if scan.z is None or dz is None else _rounded(dz, scan.z),
        bias=summed(dbias),
        initial=dinitial,
    )


def state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    bias: torch.Tensor | None,
    softplus: bool,
    slots: torch.Tensor | None,
) -> torch.Tensor:
    """One token: state (batch or slots, heads, dim, state) is changed in place, x (batch, heads, dim), B and C (batch,
    groups, state)."""
    batch, heads, width = x.shape
    size = A.shape[2]
    held = state.float() if INTERPRETED else state
    out = torch.empty_like(x, dtype=torch.float32 if INTERPRETED else x.dtype)
    tile = _power(size)
    channels = min(_power(heads * width), max(1, 1024 // tile))
    blocks = triton.cdiv(heads * width, channels)
    if batch > 0 and x.numel() > 0:
        update_kernel.state_update[(blocks * batch,)](
            held, x, dt, A, B, C, *(A if v is None else v for v in (D, z, bias, slots)), out,
            *held.stride(), *x.stride(), *dt.stride(), *A.stride(), *B.stride(), *C.stride(), *_strides(D, 2),
            *_strides(z, 3), *_strides(bias, 2), *_strides(slots, 1), *out.stride(),
            heads, width, blocks, heads // B.shape[1], heads // C.shape[1],
            N=size, S=tile, CHANNELS=channels, SOFTPLUS=softplus, HAS_D=D is not None, HAS_Z=z is not None,
            HAS_BIAS=bias is not None, HAS_SLOTS=slots is not None, FAST=not INTERPRETED, num_warps=4,
        )  # fmt: skip
    if held is not state:
        state.copy_(held)
    return _rounded(out, x)
