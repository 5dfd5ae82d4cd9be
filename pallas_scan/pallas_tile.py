"""What the forward and the backward kernels share: a program's view of the scan.

A program owns a tile of states and channels of one batch row and walks over one segment of the sequence, chunk by
chunk. How its values lie over threads is its layout's (pallas_layout.py). Of a flat tile Triton follows the load of A.
Of a wide one A is read with channels contiguous: the lanes of a warp lie along the channels, and sums over the state
stay in a thread where dim_block is 128 a warp. Of a narrow one it is read with states contiguous: 4 states a thread, or
its lanes would lie along the state.

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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_scan.pallas_cut import Cut
from pallas_scan.pallas_layout import Flat, Layout, along, both
from pallas_scan.pallas_math import LOG2_E, as_float32, softplus
from pallas_scan.problem import Operands


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

    def __init__(self, refs: dict[str, Any], cut: Cut, layout: Layout) -> None:
        self.refs, self.cut, self.layout = refs, cut, layout
        self.block, self.segment, self.batch = (pl.program_id(axis) for axis in range(3))
        per_group = -(-cut.width // cut.dim_block)
        self.group = self.block // per_group
        self.first = (self.block % per_group) * cut.dim_block  # channel, of its group
        inside = self.first + layout.channels
        self.channels = self.group * cut.width + inside
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
        """Of an array whose last axis is dim."""
        return self.load(name, *self._vector_index(index), mask=self._vector_mask(inside))

    def store_vector(self, name: str, value: Array, *index: Any, inside: Array | None = None) -> None:
        mask = both(self._vector_mask(inside), self.layout.once_in_vector, self.layout.vector)
        self._store(name, value, self._vector_index(index), mask)

    def tile(self, name: str, *index: Any, number: int = 0) -> Array:
        """Of an array whose last axes are state, dim."""
        return self.load(name, *index, *self._tile_index(number), mask=self._tile_mask(number))

    def tiles(self, name: str, *index: Any) -> list[Array]:
        """The state, out of an array whose last axes are state, dim."""
        if not self.cut.in_thread:
            return [self.tile(name, *index, number=number) for number in range(self.cut.tiles)]
        # State by state: of a tile the layout would follow the load, and the whole loop's cross shared memory.
        tiles = [jnp.zeros(self.layout.tile, jnp.float32)] * self.cut.tiles
        for state in range(self.cut.state):
            number, row = divmod(state, self.cut.tile_states)
            value = self.layout.of_vector(self.vector(name, *index, jnp.int32(state)))
            tiles[number] = jnp.where(self._row_of_tile(row), value, tiles[number])
        return tiles

    def store_tile(self, name: str, value: Array, *index: Any, number: int = 0) -> None:
        self._store(name, value, (*index, *self._tile_index(number)), self._tile_mask(number))

    def store_tiles(self, name: str, tiles: list[Array], *index: Any, inside: Array | None = None) -> None:
        """The state into an array whose last axes are state, dim."""
        if not self.cut.in_thread:
            for number, tile in enumerate(tiles):
                self.store_tile(name, tile, *index, number=number)
            return
        # State by state: of a tile the layout would follow the store, and cross shared memory.
        for state in range(self.cut.state):
            number, row = divmod(state, self.cut.tile_states)
            value = jnp.sum(jnp.where(self._row_of_tile(row), tiles[number], -0.0), axis=-2)
            self.store_vector(name, value, *index, jnp.int32(state), inside=inside)

    def _row_of_tile(self, row: int) -> Array:
        return self.layout.states(self.layout.tile) == row

    def store_column(self, name: str, value: Array, *index: Any, inside: Array | None = None) -> None:
        """A value a state, as sums over channels are, into an array whose last axis is state."""
        layout = self.layout
        states = layout.states(layout.column)
        mask = both(self._exist(states), layout.once_in_column, layout.column)
        self._store(name, value, (*index, states), both(mask, inside, layout.column))

    def _store(self, name: str, value: Array, index: tuple[Any, ...], mask: Array | None) -> None:
        ref = self.refs[name]
        if self.cut.interpret and mask is not None:  # what is masked is written back there, over another's value
            index = (*index[:-1], jnp.where(mask, index[-1], jnp.int32(2**30)))
        plgpu.store(ref.at[index], value.astype(ref.dtype), mask=mask)

    def decay_rates(self) -> list[Array]:
        """A log2 e in tiles: exp(δ A) is exp2 of δ times this."""
        return [A * LOG2_E for A in self.parameter_tiles("A", states_contiguous=self.layout.states_contiguous)]

    def parameter_tiles(self, name: str, *, states_contiguous: bool) -> list[Array]:
        """Of an array (rows, dim, state), or (rows, state, dim) where its channels are contiguous."""

        def load(number: int) -> Array:
            states, channels = self._tile_index(number)
            index = (channels, states) if states_contiguous else (states, channels)
            return self.load(name, self.row(name), *index, mask=self._tile_mask(number))

        return [load(number) for number in range(self.cut.tiles)]

    # --- what a program's threads hand each other, where segments lie side by side ---

    def handed(self, name: str) -> list[Array]:
        """The state, out of an array (batch, blocks, together, dim_block, state)."""
        return [self.load(name, *self._place(number)) for number in range(self.cut.tiles)]

    def hand(self, name: str, tiles: list[Array]) -> None:
        for number, tile in enumerate(tiles):
            plgpu.store(self.refs[name].at[self._place(number)], tile)

    def hand_vector(self, name: str, value: Array) -> None:
        """Into an array (batch, blocks, together, dim_block)."""
        place = (along(x, value.shape, axis) for axis, x in enumerate((self._sides(), self.layout.channels)))
        plgpu.store(self.refs[name].at[(self.batch, self.block, *place)], value)

    def _sides(self) -> Array:
        return lax.iota(jnp.int32, self.cut.together)

    def _place(self, number: int) -> tuple[Any, ...]:
        shape = self.layout.tile
        sides, channels = along(self._sides(), shape, 0), self.layout.on_tile(self.layout.channels)
        return (self.batch, self.block, sides, channels, self.layout.states(shape, number))

    # --- indices and masks ---

    def _vector_index(self, index: tuple[Any, ...]) -> tuple[Any, ...]:
        lead = (along(x, self.layout.vector, 0) if jnp.ndim(x) else x for x in index)
        return (*lead, self.layout.on_vector(self.channels))

    def _vector_mask(self, inside: Array | None) -> Array | None:
        channels = None if self.channel_mask is None else self.layout.on_vector(self.channel_mask)
        return both(channels, self._over(inside, self.layout.vector), self.layout.vector)

    def _tile_index(self, number: int = 0) -> tuple[Array, Array]:
        return self.layout.states(self.layout.tile, number), self.layout.on_tile(self.channels)

    def _tile_mask(self, number: int = 0) -> Array | None:
        shape = self.layout.tile
        states = None if self.cut.together > 1 else self._exist(self.layout.states(shape, number))  # there A is whole
        channels = None if self.channel_mask is None else self.layout.on_tile(self.channel_mask)
        return both(states, channels, shape)

    def _exist(self, states: Array) -> Array | None:
        """Which of them the scan has: a tile's are a power of two."""
        return None if self.cut.state == self.cut.state_block else states < self.cut.state

    def _over(self, of_segments: Array | None, shape: tuple[int, ...]) -> Array | None:
        """One scalar, or one for each of the segments side by side, over a shape."""
        return along(of_segments, shape, 0) if of_segments is not None and of_segments.ndim else of_segments

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
            shape = self.layout.row
            states = self.layout.states(shape, number)
            mask = both(self._exist(states), self._over(inside, shape), shape)
            return self.load(name, self.batch, self._over(time, shape), group, states, mask=mask)

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
        return self.layout.states_contiguous and not self.cut.in_thread

    def _with_matrices(self, steps: list[Step], positions: list[Array], B: bool, C: bool) -> list[Step]:
        return [self.matrices(s, p, B=B, C=C) for s, p in zip(steps, positions, strict=True)]

    def step_size(self, delta: Array, bias: Array | None, position: Array) -> tuple[Array, Array]:
        """δ, and delta with its bias, in float32. Steps that do not exist have δ = 0: they leave the state as it is."""
        raw = as_float32(delta, self.cut)
        raw = raw if bias is None else raw + bias
        size = softplus(raw, self.cut) if self.cut.delta_softplus else raw
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
        return self.parameter_tiles(name, states_contiguous=self.cut.in_thread)

    def matrix_tiles(self, rows: list[Array] | None, fixed: list[Array] | None) -> list[Array]:
        """B or C so that they multiply tiles: one step's rows, or the tiles where it does not vary."""
        if fixed is not None:
            return fixed
        assert rows is not None
        return [self.layout.of_row(as_float32(row, self.cut, row=True)) for row in rows]


def carried(x: Array, keep: Array | None) -> Array:
    """What passes into a step: nothing where a sequence begins."""
    if keep is None:
        return x
    return jnp.where((along(keep, x.shape, 0) if keep.ndim else keep) != 0, x, 0.0)


def kernel_inputs(ops: Operands, cut: Cut) -> dict[str, Array]:
    """Operands as the kernels read them: tiles as (..., state, dim), keep as int32."""

    def tiled(x: Array) -> Array:
        return jnp.swapaxes(x, -1, -2)

    def whole(x: Array) -> Array:
        """With all states of a tile, so that its rows are aligned."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, cut.state_block - cut.state)])

    def fixed(x: Array) -> Array:
        x = x.astype(jnp.float32)
        return whole(x) if cut.in_thread else tiled(x)

    A = ops.A if cut.states_contiguous else tiled(ops.A)
    inputs = {
        "u": ops.u,
        "delta": ops.delta,
        "A": whole(A) if cut.in_thread else A,
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
    layout: Callable[[Cut], Layout] = Flat,
) -> dict[str, Array]:
    """Runs a kernel that takes a `Program` of the cut."""
    return launch(
        lambda refs: kernel(Program(refs, cut, layout(cut))),
        inputs,
        outputs,
        name=name,
        grid=cut.grid,
        num_warps=cut.num_warps,
        interpret=cut.interpret,
    )
