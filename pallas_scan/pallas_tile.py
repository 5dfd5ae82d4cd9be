"""What the forward and the backward kernels share: how a scan is cut into programs, and a program's view of it.

A program owns a tile [state, dim_block] of one batch row and walks over one segment of the sequence, chunk by chunk.
Triton's layout of the tile follows the load of A. Of a wide tile A is read with channels contiguous: the lanes of a
warp lie along the channels, and sums over the state stay in a thread where dim_block is 128 a warp. Of a narrow one it
is read with states contiguous: 4 states a thread, or its lanes would lie along the state.

Blocks of channels never straddle a group of B and C: a program reads one row of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_scan.config import KernelConfig
from pallas_scan.problem import Operands, Options

LOG2_E = float(np.log2(np.e))
MAX_CHUNK = 16  # steps unrolled in a loop body; the compiler's time grows faster than their number
MAX_STATE = 256  # states of one tile; more are split over several scans (pallas_triton.py)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A configuration fitted to a shape; everything static that a kernel needs."""

    batch: int
    seq: int
    dim: int
    state: int
    groups: int  # of channels; B and C may each have a divisor of them
    chunk: int
    dim_block: int
    num_warps: int
    segment: int
    save_every: int
    reverse: bool
    delta_softplus: bool
    interpret: bool

    @property
    def state_block(self) -> int:
        return _power_of_two(self.state)

    @property
    def values_a_thread(self) -> int:
        """Of a tile."""
        return self.state_block * self.dim_block // (32 * self.num_warps)

    @property
    def states_contiguous(self) -> bool:
        """Whether A is read with the states of a channel next to each other."""
        return self.dim_block <= 16

    @property
    def width(self) -> int:
        """Channels a group."""
        return self.dim // self.groups

    @property
    def dim_blocks(self) -> int:
        return self.groups * -(-self.width // self.dim_block)

    @property
    def segments(self) -> int:
        return -(-self.seq // self.segment)

    @property
    def grid(self) -> tuple[int, int, int]:
        return (self.dim_blocks, self.segments, self.batch)


def _power_of_two(x: int) -> int:
    return 1 << max(0, x - 1).bit_length()


def fit(config: KernelConfig, ops: Operands, options: Options, *, thread: int, interpret: bool, intervals: bool) -> Cut:
    """Adjusts a configuration to a shape: blocks no larger than the shape, at most `thread` values a thread of a tile.

    With `intervals` a segment holds whole intervals between saved states, and an interval whole chunks.
    """
    batch, seq, dim, state = ops.sizes
    counts = [x.shape[2] for x in (ops.B, ops.C) if x.ndim == 4]
    groups = int(np.lcm.reduce(counts)) if counts else 1
    save_every = options.save_every
    chunk = min(config.chunk, MAX_CHUNK, _power_of_two(seq))
    while intervals and save_every % chunk:
        chunk //= 2
    state_block = _power_of_two(state)
    dim_block = min(config.dim_block, _power_of_two(dim // groups))
    while dim_block > 1 and dim_block * state_block > thread * 32 * config.num_warps:
        dim_block //= 2
    num_warps = config.num_warps
    while num_warps > 1 and dim_block * state_block < 32 * num_warps:
        num_warps //= 2
    unit = save_every if intervals else chunk
    segment = min(-(-config.segment // unit), -(-seq // unit)) * unit
    return Cut(
        batch=batch,
        seq=seq,
        dim=dim,
        state=state,
        groups=groups,
        chunk=chunk,
        dim_block=dim_block,
        num_warps=num_warps,
        segment=segment,
        save_every=save_every,
        reverse=options.reverse,
        delta_softplus=options.delta_softplus,
        interpret=interpret,
    )


def exp2(x: Array, cut: Cut) -> Array:
    """2**x in one instruction: `ex2.approx.ftz` has an error of 2 units in the last place over its whole range."""
    if cut.interpret:  # no rule for inline assembly there
        return jnp.exp2(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    asm = "ex2.approx.ftz.f32 $0, $1;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape])[0]


def as_float32(x: Array, cut: Cut) -> Array:
    """x in float32. Of bfloat16, pairs at once: two instructions, where the compiler's own conversion takes three.
    Where a thread may hold one value (a vector on several warps, or of one channel), the compiler's own."""
    if x.dtype != jnp.bfloat16 or cut.interpret or cut.num_warps > 1 or x.size == 1:
        return x.astype(jnp.float32)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    asm = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,=f,r", pack=2, result_shape_dtypes=[shape])[0]


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x: Array) -> Array:
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def load(ref: Any, *index: Any, mask: Array | None) -> Array:
    """Zero where masked."""
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)


@dataclasses.dataclass
class Step:
    """Operands of one step: [dim_block] vectors, and B and C as [state] vectors. As stored, not yet float32."""

    u: Array
    delta: Array
    z: Array | None
    B: Array | None
    C: Array | None
    keep: Array | None
    dout: Array | None


jax.tree_util.register_dataclass(Step, [f.name for f in dataclasses.fields(Step)], [])


class Program:
    """One program's place in the grid, its loads and its stores, masked where the shape is no multiple of a block."""

    def __init__(self, refs: dict[str, Any], cut: Cut) -> None:
        self.refs, self.cut = refs, cut
        self.block, self.segment, self.batch = (pl.program_id(axis) for axis in range(3))
        per_group = -(-cut.width // cut.dim_block)
        self.group = self.block // per_group
        inside = (self.block % per_group) * cut.dim_block + lax.iota(jnp.int32, cut.dim_block)
        self.channels = self.group * cut.width + inside  # [dim_block]
        self.states = lax.iota(jnp.int32, cut.state_block)  # [state]
        self.channel_mask = None if cut.width % cut.dim_block == 0 else inside < cut.width
        self.state_mask = None if cut.state == cut.state_block else self.states < cut.state
        self.ragged = cut.seq % cut.chunk != 0  # elsewhere the last segment has fewer chunks, and no masks

    # --- positions ---

    def position(self, local: Array | int) -> Array:
        """Position in scan order of the segment's `local` step."""
        return self.segment * self.cut.segment + local

    @property
    def chunks(self) -> Array | int:
        """How many chunks the segment has."""
        return self.chunks_from(0, self.cut.segment // self.cut.chunk)

    def chunks_from(self, local: Array | int, most: int) -> Array | int:
        """How many, at most `most`, from the segment's `local` step on, before the sequence ends."""
        if self.cut.seq % (most * self.cut.chunk) == 0:
            return most
        left = self.cut.seq - self.position(local)
        return jnp.minimum(most, (left + self.cut.chunk - 1) // self.cut.chunk)

    def time(self, position: Array) -> Array:
        return self.cut.seq - 1 - position if self.cut.reverse else position

    def inside(self, position: Array) -> Array | None:
        """Whether a position exists: None where every one does."""
        return position < self.cut.seq if self.ragged else None

    # --- loads and stores ---

    def row(self, name: str) -> Array | int:
        """The leading index of an operand that a batch may share."""
        return self.batch if self.refs[name].shape[0] > 1 else 0

    def load(self, name: str, *index: Any, mask: Array | None = None) -> Array:
        return load(self.refs[name], *index, mask=mask)

    def vector(self, name: str, *index: Any, inside: Array | None = None) -> Array:
        """[dim_block] of an array whose last axis is dim."""
        return self.load(name, *index, self.channels, mask=_both(self.channel_mask, inside, self.channels.shape))

    def tile(self, name: str, *index: Any) -> Array:
        """[state, dim_block] of an array whose last axes are state, dim."""
        return self.load(name, *index, *self._tile_index(), mask=self._tile_mask())

    def store_vector(self, name: str, value: Array, *index: Any, inside: Array | None = None) -> None:
        ref = self.refs[name]
        mask = _both(self.channel_mask, inside, self.channels.shape)
        plgpu.store(ref.at[(*index, self.channels)], value.astype(ref.dtype), mask=mask)

    def store_tile(self, name: str, value: Array, *index: Any) -> None:
        plgpu.store(self.refs[name].at[(*index, *self._tile_index())], value, mask=self._tile_mask())

    def store_states(self, name: str, value: Array, *index: Any, inside: Array | None = None) -> None:
        """[state] into an array whose last axis is state."""
        mask = _both(self.state_mask, inside, self.states.shape)
        plgpu.store(self.refs[name].at[(*index, self.states)], value, mask=mask)

    def decay_rates(self) -> Array:
        """A log2 e, [state, dim_block]: exp(δ A) is exp2 of δ times this."""
        index = self._tile_index()
        index = index[::-1] if self.cut.states_contiguous else index
        return self.load("A", self.row("A"), *index, mask=self._tile_mask()) * LOG2_E

    def segment_start(self) -> Array:
        """What the segment starts from, where there are several."""
        return self.tile("starts", self.batch, self.segment)

    def _tile_index(self) -> tuple[Array, Array]:
        shape = (self.cut.state_block, self.cut.dim_block)
        return (
            lax.broadcast_in_dim(self.states, shape, (0,)),
            lax.broadcast_in_dim(self.channels, shape, (1,)),
        )

    def _tile_mask(self) -> Array | None:
        shape = (self.cut.state_block, self.cut.dim_block)
        states = None if self.state_mask is None else lax.broadcast_in_dim(self.state_mask, shape, (0,))
        channels = None if self.channel_mask is None else lax.broadcast_in_dim(self.channel_mask, shape, (1,))
        return _both(states, channels, shape)

    # --- the scan's own operands ---

    def activations(self, position: Array, *, z: bool, dout: bool = False) -> Step:
        """u, delta and, where asked, z and dout of one step: what comes from memory once, and is worth prefetching."""
        inside, time = self.inside(position), self.time(position)
        return Step(
            u=self.vector("u", self.batch, time, inside=inside),
            delta=self.vector("delta", self.batch, time, inside=inside),
            z=self.vector("z", self.batch, time, inside=inside) if z and "z" in self.refs else None,
            dout=self.vector("dout", self.batch, time, inside=inside) if dout else None,
            B=None,
            C=None,
            keep=None,
        )

    def matrices(self, step: Step, position: Array, *, B: bool, C: bool) -> Step:
        """The step with its B, C and keep: small rows that every block of channels reads, so they come from a cache."""
        inside, time = self.inside(position), self.time(position)

        def row(name):
            ref = self.refs[name]
            if len(ref.shape) == 3:
                return None
            group = self.group // (self.cut.groups // ref.shape[2])
            mask = _both(self.state_mask, inside, self.states.shape)
            return self.load(name, self.batch, time, group, self.states, mask=mask)

        keep = None
        if "keep" in self.refs:
            if inside is None:
                keep = self.refs["keep"][self.batch, time]
            else:
                keep = self.refs["keep"][self.batch, jnp.clip(time, 0, self.cut.seq - 1)]
                keep = jnp.where(inside, keep, 1)
        return dataclasses.replace(step, B=row("B") if B else None, C=row("C") if C else None, keep=keep)

    def positions(self, chunk: Array | int) -> list[Array]:
        """Of a chunk's steps, in scan order."""
        return [self.position(chunk * self.cut.chunk + k) for k in range(self.cut.chunk)]

    def ahead(self, chunk: Array | int, **which: bool) -> list[Step]:
        """What the loop carries of its next chunk: activations, and in a narrow tile, whose programs are too few to
        hide a load behind each other, B and C too. Of the nearest chunk where there is none."""
        chunk = jnp.clip(chunk, 0, self.chunks - 1)
        z, dout, B, C = (which.get(name, False) for name in ("z", "dout", "B", "C"))
        positions = self.positions(chunk)
        steps = [self.activations(p, z=z, dout=dout) for p in positions]
        return self._with_matrices(steps, positions, B, C) if self.cut.states_contiguous else steps

    def arrived(self, steps: list[Step], chunk: Array | int, **which: bool) -> list[tuple[Step, Array]]:
        """What `ahead` loaded, now that it is this chunk's turn, complete and with the steps' positions."""
        positions = self.positions(chunk)
        if not self.cut.states_contiguous:
            steps = self._with_matrices(steps, positions, which.get("B", False), which.get("C", False))
        return list(zip(steps, positions, strict=True))

    def _with_matrices(self, steps: list[Step], positions: list[Array], B: bool, C: bool) -> list[Step]:
        return [self.matrices(s, p, B=B, C=C) for s, p in zip(steps, positions, strict=True)]

    def step_size(self, delta: Array, bias: Array | None, position: Array) -> tuple[Array, Array]:
        """δ, and delta with its bias, in float32. Steps that do not exist have δ = 0: they leave the state as it is."""
        raw = as_float32(delta, self.cut)
        raw = raw if bias is None else raw + bias
        size = softplus(raw) if self.cut.delta_softplus else raw
        inside = self.inside(position)
        if inside is not None and (bias is not None or self.cut.delta_softplus):
            size = jnp.where(inside, size, 0.0)
        return size, raw

    def parameter_vector(self, name: str) -> Array | None:
        return self.vector(name, self.row(name)) if name in self.refs else None

    def fixed_matrix(self, name: str) -> Array | None:
        """B or C where it does not vary; None where it does."""
        return self.tile(name, self.row(name)) if len(self.refs[name].shape) == 3 else None


def as_tile(row: Array | None, fixed: Array | None, cut: Cut) -> Array:
    """B or C so that it multiplies a tile: one step's row, or the tile where it does not vary."""
    if fixed is not None:
        return fixed
    assert row is not None
    return as_float32(row, cut)[:, None]


def carried(x: Array, keep: Array | None) -> Array:
    """What passes into a step: nothing where a sequence begins."""
    return x if keep is None else jnp.where(keep != 0, x, 0.0)


def _both(a: Array | None, b: Array | None, shape: tuple[int, ...]) -> Array | None:
    if b is not None and b.ndim == 0:
        b = lax.broadcast(b, shape)
    if a is None or b is None:
        return b if a is None else a
    return a & b


def kernel_inputs(ops: Operands, cut: Cut) -> dict[str, Array]:
    """Operands as the kernels read them: tiles as (..., state, dim), keep as int32."""

    def tiled(x: Array) -> Array:
        return jnp.swapaxes(x, -1, -2)

    inputs = {
        "u": ops.u,
        "delta": ops.delta,
        "A": ops.A if cut.states_contiguous else tiled(ops.A),
        "B": ops.B if ops.B.ndim == 4 else tiled(ops.B.astype(jnp.float32)),
        "C": ops.C if ops.C.ndim == 4 else tiled(ops.C.astype(jnp.float32)),
        "D": ops.D,
        "z": ops.z,
        "delta_bias": ops.delta_bias,
        "initial_state": None if ops.initial_state is None else tiled(ops.initial_state),
        "keep": None if ops.keep is None else ops.keep.astype(jnp.int32),
    }
    return {name: x for name, x in inputs.items() if x is not None}


def segment_passes(ops: Operands, cut: Cut) -> Array | None:
    """(batch, segments) int32: whether anything of the state before a segment is left after it."""
    if ops.keep is None:
        return None
    keep = ops.keep[:, ::-1] if cut.reverse else ops.keep
    keep = jnp.pad(keep, ((0, 0), (0, cut.segments * cut.segment - cut.seq)), constant_values=True)
    return jnp.all(keep.reshape(cut.batch, cut.segments, cut.segment), axis=2).astype(jnp.int32)


def launch(
    kernel: Callable,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: tuple[int, ...],
    num_warps: int,
    interpret: bool,
) -> dict[str, Array]:
    """Runs a kernel that takes one dict of refs, its inputs' and its outputs'. Returns a dict of the outputs."""
    names = [*inputs, *outputs]
    results = pl.pallas_call(
        lambda *refs: kernel(dict(zip(names, refs, strict=True))),
        out_shape=list(outputs.values()),
        grid=grid,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        name=name,
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def call(
    kernel: Callable[[Program], None],
    name: str,
    cut: Cut,
    inputs: dict[str, Array],
    outputs: dict[str, jax.ShapeDtypeStruct],
) -> dict[str, Array]:
    """Runs a kernel that takes a `Program` of the cut."""
    return launch(
        lambda refs: kernel(Program(refs, cut)),
        inputs,
        outputs,
        name=name,
        grid=cut.grid,
        num_warps=cut.num_warps,
        interpret=cut.interpret,
    )
