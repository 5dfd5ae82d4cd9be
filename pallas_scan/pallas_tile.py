"""What the forward and the backward kernels share: a program's view of the scan.

A program owns a tile [state, dim_block] of one batch row and walks over one segment of the sequence, chunk by chunk.
Triton's layout of the tile follows the load of A. Of a wide tile A is read with channels contiguous: the lanes of a
warp lie along the channels, and sums over the state stay in a thread where dim_block is 128 a warp. Of a narrow one it
is read with states contiguous: 4 states a thread, or its lanes would lie along the state.

Where segments lie side by side, a program's arrays have an axis of them in front, and the state is in tiles
[together, 4, dim_block]: a thread then holds a channel of a segment with all its states, a vector [together, dim_block]
has one value a thread, a row [together, 4] fewer than threads, and neither changes its layout on the way.

Blocks of channels never straddle a group of B and C: a program reads one row of each.
"""

from __future__ import annotations

import copy
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

from pallas_scan.pallas_cut import TILE_STATES, Cut
from pallas_scan.problem import Operands

LOG2_E = float(np.log2(np.e))


def exp2(x: Array, cut: Cut) -> Array:
    """2**x in one instruction: `ex2.approx.ftz` has an error of 2 units in the last place over its whole range."""
    if cut.interpret:  # no rule for inline assembly there
        return jnp.exp2(x)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    asm = "ex2.approx.ftz.f32 $0, $1;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[shape])[0]


def as_float32(x: Array, cut: Cut, *, row: bool = False) -> Array:
    """x, a vector or a row of B or C, in float32. Of bfloat16, pairs at once, where a thread holds neighbours: two
    instructions, where the compiler's own conversion takes three."""
    paired = cut.tile_states == TILE_STATES if row and cut.together > 1 else cut.num_warps == 1 and x.size > 1
    if x.dtype != jnp.bfloat16 or cut.interpret or not paired:
        return x.astype(jnp.float32)
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    asm = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return plgpu.elementwise_inline_asm(asm, args=[x], constraints="=f,=f,r", pack=2, result_shape_dtypes=[shape])[0]


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x: Array) -> Array:
    """max(x, 0) + log1p(e), e = exp(-|x|). The library's log1p branches, and its registers spill the scan's. It is
    2 atanh(s) of s = e / (2 + e), at most 1/3: a polynomial in s², relative error 3e-7 of the whole."""
    e = jnp.exp(-jnp.abs(x))
    s = e / (2.0 + e)
    t = s * s
    series: Array | float = 0.2817465662956238
    for coefficient in (0.2796141803264618, 0.40024852752685547, 0.6666631698608398, 2.0):
        series = series * t + coefficient
    return jnp.maximum(x, 0.0) + s * series


def load(ref: Any, *index: Any, mask: Array | None) -> Array:
    """Zero where masked."""
    return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0)


@dataclasses.dataclass
class Step:
    """Operands of one step: vectors, and of B and C a row for each tile. As stored, not yet float32."""

    u: Array
    delta: Array
    z: Array | None
    B: list[Array] | None
    C: list[Array] | None
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
        self.first = (self.block % per_group) * cut.dim_block  # channel, of its group
        self.lanes = lax.iota(jnp.int32, cut.dim_block)
        inside = self.first + self.lanes
        self.channels = self.group * cut.width + inside  # [dim_block]
        self.states = lax.iota(jnp.int32, cut.tile_states)  # of the first tile
        self.channel_mask = None if cut.width % cut.dim_block == 0 else inside < cut.width
        # Where each segment has a program, the last has fewer chunks, and no masks.
        self.ragged = cut.seq % (cut.chunk if cut.together == 1 else cut.segments * cut.segment) != 0

    def in_round(self, number: Array | int) -> Program:
        """The program at its segments of a round."""
        there = copy.copy(self)
        there.segment = number * self.cut.together + lax.iota(jnp.int32, self.cut.together)
        return there

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
        if self.cut.together > 1 or self.cut.seq % (most * self.cut.chunk) == 0:
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
        """[*lead, dim_block] of an array whose last axis is dim."""
        return self.load(name, *self._vector_index(index), mask=self._vector_mask(inside))

    def store_vector(self, name: str, value: Array, *index: Any, inside: Array | None = None) -> None:
        ref, mask = self.refs[name], self._vector_mask(inside)
        if self.cut.interpret and inside is not None:  # what is masked is written back there, over another's value
            index = tuple(jnp.where(inside, x, jnp.int32(2**30)) if jnp.ndim(x) else x for x in index)
        plgpu.store(ref.at[self._vector_index(index)], value.astype(ref.dtype), mask=mask)

    def tile(self, name: str, *index: Any) -> Array:
        """[state, dim_block] of an array whose last axes are state, dim."""
        return self.load(name, *index, *self._tile_index(), mask=self._tile_mask())

    def store_tile(self, name: str, value: Array, *index: Any) -> None:
        plgpu.store(self.refs[name].at[(*index, *self._tile_index())], value, mask=self._tile_mask())

    def store_tiles(self, name: str, tiles: list[Array], *index: Any, inside: Array | None = None) -> None:
        """The state into an array whose last axes are state, dim."""
        if self.cut.together == 1:
            self.store_tile(name, tiles[0], *index)
            return
        # State by state: of a tile the layout would follow the store, and cross shared memory.
        for state in range(self.cut.state):
            tile, row = divmod(state, self.cut.tile_states)
            here = along(self.states, tiles[tile].shape, 1) == row
            value = jnp.sum(jnp.where(here, tiles[tile], -0.0), axis=-2)
            self.store_vector(name, value, *index, jnp.int32(state), inside=inside)

    def store_states(self, name: str, value: Array, *index: Any, inside: Array | None = None) -> None:
        """[state] into an array whose last axis is state."""
        mask = _both(self._state_mask(0), inside, self.states.shape)
        plgpu.store(self.refs[name].at[(*index, self.states)], value, mask=mask)

    def decay_rates(self) -> list[Array]:
        """A log2 e in tiles: exp(δ A) is exp2 of δ times this."""
        return [A * LOG2_E for A in self.parameter_tiles("A", states_contiguous=self.cut.states_contiguous)]

    def parameter_tiles(self, name: str, *, states_contiguous: bool) -> list[Array]:
        """Of an array (rows, dim, state), or (rows, state, dim) where its channels are contiguous."""

        def load(number: int) -> Array:
            states, channels = self._tile_index(number)
            index = (channels, states) if states_contiguous else (states, channels)
            return self.load(name, self.row(name), *index, mask=self._tile_mask(number))

        return [load(number) for number in range(self.cut.tiles)]

    def segment_start(self) -> Array:
        """What the segment starts from, where there are several."""
        return self.tile("starts", self.batch, self.segment)

    # --- what a program's threads hand each other, where segments lie side by side ---

    def handed(self, name: str) -> list[Array]:
        """The state, out of an array (batch, blocks, together, dim_block, state)."""
        return [self.load(name, *self._place(number)) for number in range(self.cut.tiles)]

    def hand(self, name: str, tiles: list[Array]) -> None:
        for number, tile in enumerate(tiles):
            plgpu.store(self.refs[name].at[self._place(number)], tile)

    def hand_vector(self, name: str, value: Array) -> None:
        """Into an array (batch, blocks, together, dim_block)."""
        place = (along(x, value.shape, axis) for axis, x in enumerate((self._sides(), self.lanes)))
        plgpu.store(self.refs[name].at[(self.batch, self.block, *place)], value)

    def _sides(self) -> Array:
        return lax.iota(jnp.int32, self.cut.together)

    def _place(self, number: int) -> tuple[Any, ...]:
        shape = (*self.cut.lead, self.cut.tile_states, self.cut.dim_block)
        states = self.states + number * self.cut.tile_states
        return (
            self.batch,
            self.block,
            along(self._sides(), shape, 0),
            along(self.lanes, shape, 2),
            along(states, shape, 1),
        )

    # --- indices and masks ---

    def _vector_index(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        shape = (*self.cut.lead, self.cut.dim_block)
        lead = (along(x, shape, 0) if jnp.ndim(x) else x for x in index)
        return (*lead, along(self.channels, shape, -1))

    def _vector_mask(self, inside: Array | None) -> Array | None:
        shape = (*self.cut.lead, self.cut.dim_block)
        channels = None if self.channel_mask is None else along(self.channel_mask, shape, -1)
        return _both(channels, inside if inside is None or inside.ndim == 0 else along(inside, shape, 0), shape)

    def _state_mask(self, number: int) -> Array | None:
        """Which states of a tile exist."""
        if self.cut.state == self.cut.state_block:
            return None
        return self.states + number * self.cut.tile_states < self.cut.state

    def _tile_index(self, number: int = 0) -> tuple[Array, Array]:
        shape = (*self.cut.lead, self.cut.tile_states, self.cut.dim_block)
        states = self.states if number == 0 else self.states + number * self.cut.tile_states
        return along(states, shape, -2), along(self.channels, shape, -1)

    def _tile_mask(self, number: int = 0) -> Array | None:
        shape = (*self.cut.lead, self.cut.tile_states, self.cut.dim_block)
        states = self._state_mask(number) if self.cut.together == 1 else None  # there A is filled up
        states = None if states is None else along(states, shape, -2)
        channels = None if self.channel_mask is None else along(self.channel_mask, shape, -1)
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

        def rows(name: str) -> list[Array] | None:
            ref = self.refs[name]
            if len(ref.shape) == 3:
                return None
            group = self.group // (self.cut.groups // ref.shape[2])
            return [row(name, group, number) for number in range(self.cut.tiles)]

        def row(name: str, group: Array, number: int) -> Array:
            shape = (*self.cut.lead, self.cut.tile_states)
            states = along(self.states if number == 0 else self.states + number * self.cut.tile_states, shape, -1)
            exist = self._state_mask(number)
            mask = _both(
                None if exist is None else along(exist, shape, -1),
                inside if inside is None or inside.ndim == 0 else along(inside, shape, 0),
                shape,
            )
            return self.load(name, self.batch, along(time, shape, 0) if time.ndim else time, group, states, mask=mask)

        keep = None
        if "keep" in self.refs:
            keep = self._keep(time, inside)
        return dataclasses.replace(step, B=rows("B") if B else None, C=rows("C") if C else None, keep=keep)

    def _keep(self, time: Array, inside: Array | None) -> Array:
        if self.cut.together > 1:
            keep = self.load("keep", self.batch, time, mask=inside)
        elif inside is None:
            return self.refs["keep"][self.batch, time]
        else:
            keep = self.refs["keep"][self.batch, jnp.clip(time, 0, self.cut.seq - 1)]
        return keep if inside is None else jnp.where(inside, keep, 1)

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
        return self._with_matrices(steps, positions, B, C) if self._rows_ahead else steps

    def arrived(self, steps: list[Step], chunk: Array | int, **which: bool) -> list[tuple[Step, Array]]:
        """What `ahead` loaded, now that it is this chunk's turn, complete and with the steps' positions."""
        positions = self.positions(chunk)
        if not self._rows_ahead:
            steps = self._with_matrices(steps, positions, which.get("B", False), which.get("C", False))
        return list(zip(steps, positions, strict=True))

    @property
    def _rows_ahead(self) -> bool:
        return self.cut.together == 1 and self.cut.states_contiguous

    def _with_matrices(self, steps: list[Step], positions: list[Array], B: bool, C: bool) -> list[Step]:
        return [self.matrices(s, p, B=B, C=C) for s, p in zip(steps, positions, strict=True)]

    def step_size(self, delta: Array, bias: Array | None, position: Array) -> tuple[Array, Array]:
        """δ, and delta with its bias, in float32. Steps that do not exist have δ = 0: they leave the state as it is."""
        raw = as_float32(delta, self.cut)
        raw = raw if bias is None else raw + bias
        size = softplus(raw) if self.cut.delta_softplus else raw
        inside = self.inside(position)
        if inside is not None and (bias is not None or self.cut.delta_softplus):
            size = jnp.where(along(inside, size.shape, 0) if inside.ndim else inside, size, 0.0)
        return size, raw

    def parameter_vector(self, name: str) -> Array | None:
        return self.vector(name, self.row(name)) if name in self.refs else None

    def fixed_matrix(self, name: str) -> list[Array] | None:
        """B or C in tiles where it does not vary; None where it does."""
        if len(self.refs[name].shape) != 3:
            return None
        return self.parameter_tiles(name, states_contiguous=self.cut.together > 1)


def as_tiles(rows: list[Array] | None, fixed: list[Array] | None, cut: Cut) -> list[Array]:
    """B or C so that they multiply tiles: one step's rows, or the tiles where it does not vary."""
    if fixed is not None:
        return fixed
    assert rows is not None
    return [as_float32(row, cut, row=True)[..., :, None] for row in rows]


def along(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A vector as the `axis` of a shape."""
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, (axis % len(shape),))


def carried(x: Array, keep: Array | None) -> Array:
    """What passes into a step: nothing where a sequence begins."""
    if keep is None:
        return x
    return jnp.where((along(keep, x.shape, 0) if keep.ndim else keep) != 0, x, 0.0)


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

    def whole(x: Array) -> Array:
        """With all states of a tile, so that its rows are aligned."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, cut.state_block - cut.state)])

    def fixed(x: Array) -> Array:
        x = x.astype(jnp.float32)
        return tiled(x) if cut.together == 1 else whole(x)

    A = ops.A if cut.states_contiguous else tiled(ops.A)
    inputs = {
        "u": ops.u,
        "delta": ops.delta,
        "A": A if cut.together == 1 else whole(A),
        "B": ops.B if ops.B.ndim == 4 else fixed(ops.B),
        "C": ops.C if ops.C.ndim == 4 else fixed(ops.C),
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
