"""How a program's values lie over its threads. A vector has a value a channel, a row one a state, a tile one of each.

Triton gives an array's layout to registers, lanes and warps by its axes and by the loads and stores it meets; where two
uses of a value want it differently, it crosses shared memory between two barriers. There are two forms:

    Flat     tile [state, channel], vector [channel], row [state]. Where segments lie side by side, an axis of them in
             front of each, and the state in tiles of 4.
    Spread   tile [So, Si, Cl, Co], vector [Si, Cl, Co], row [So, Si]: a thread has the So states and Co channels, the
             lanes are Si x Cl. A vector's value is in every one of the Si lanes that need it: u, delta and dout are
             loaded as they are used, and sums over the state or over channels are shuffles within a warp. For the
             gradients of small tiles, which have both sums; the forward, which has the first alone, is as fast without.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_scan.pallas_cut import Cut

SPREAD_CHANNELS = 4  # that are neighbours in a thread: 16 bytes a load in float32


def along(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """A vector as the `axis` of a shape."""
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, (axis % len(shape),))


def both(a: Array | None, b: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Two masks of a shape, the second of which may be one scalar; None is true everywhere."""
    if b is not None and b.ndim == 0:
        b = lax.broadcast(b, shape)
    if a is None or b is None:
        return b if a is None else a
    return a & b


class Flat:
    """Every value is in one place."""

    def __init__(self, cut: Cut) -> None:
        self.vector = (*cut.lead, cut.dim_block)
        self.tile = (*cut.lead, cut.tile_states, cut.dim_block)
        self.row = self.column = (*cut.lead, cut.tile_states)  # a column is what a sum over channels gives
        self.channels = lax.iota(jnp.int32, cut.dim_block)  # of the block
        self.states_contiguous = cut.states_contiguous
        self.once_in_vector = self.once_in_column = None  # where a value is stored, if not everywhere

    def on_vector(self, of_channels: Array) -> Array:
        return along(of_channels, self.vector, -1)

    def on_tile(self, of_channels: Array) -> Array:
        return along(of_channels, self.tile, -1)

    def states(self, shape: tuple[int, ...], number: int = 0) -> Array:
        """Indices of the numbered tile's states over the shape of a tile, a row or a column."""
        count = self.row[-1]
        states = lax.iota(jnp.int32, count)
        states = states if number == 0 else states + number * count
        return along(states, shape, -2 if shape == self.tile else -1)

    def of_vector(self, x: Array) -> Array:
        """So that it multiplies tiles."""
        return x[..., None, :]

    def of_row(self, x: Array) -> Array:
        """So that it multiplies tiles."""
        return x[..., :, None]

    def over_states(self, tile: Array) -> Array:
        return jnp.sum(tile, axis=-2)

    def over_channels(self, tile: Array) -> Array:
        return jnp.sum(tile, axis=-1)


class Spread:
    """Values are in every lane that needs them."""

    def __init__(self, cut: Cut) -> None:
        neighbours = min(SPREAD_CHANNELS, cut.dim_block)
        lanes = cut.dim_block // neighbours
        over = max(1, min(cut.state_block, 32 * cut.num_warps // lanes))  # lanes over the state
        self.each = cut.state_block // over  # states that a thread has
        self.vector = (over, lanes, neighbours)
        self.tile = (self.each, *self.vector)
        self.row = (self.each, over)
        self.column = (self.each, over, lanes)
        lane = along(lax.iota(jnp.int32, lanes), self.vector, 1)
        self.channels = lane * neighbours + along(lax.iota(jnp.int32, neighbours), self.vector, 2)
        self.states_contiguous = cut.states_contiguous
        self.once_in_vector = along(lax.iota(jnp.int32, over), self.vector, 0) == 0
        self.once_in_column = along(lax.iota(jnp.int32, lanes), self.column, 2) == 0

    def on_vector(self, of_channels: Array) -> Array:
        return of_channels

    def on_tile(self, of_channels: Array) -> Array:
        return lax.broadcast_in_dim(of_channels, self.tile, (1, 2, 3))

    def states(self, shape: tuple[int, ...], number: int = 0) -> Array:
        over = along(lax.iota(jnp.int32, self.row[1]), shape, 1)
        return over * self.each + along(lax.iota(jnp.int32, self.each), shape, 0)

    def of_vector(self, x: Array) -> Array:
        return x[None]

    def of_row(self, x: Array) -> Array:
        return x[:, :, None, None]

    def over_states(self, tile: Array) -> Array:
        return lax.broadcast_in_dim(jnp.sum(jnp.sum(tile, axis=0), axis=0), self.vector, (1, 2))

    def over_channels(self, tile: Array) -> Array:
        return lax.broadcast_in_dim(jnp.sum(jnp.sum(tile, axis=3), axis=2), self.column, (0, 1))


Layout = Flat | Spread
