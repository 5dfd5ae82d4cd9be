"""A few steps of training a small model over several processes: `python -m tests.two_processes RANK COUNT PORT`.

Each process has two CPU devices. The mesh is (data, seq), laid so that a sequence crosses from one process to the
other. Process 0 prints the losses as JSON.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_scan

BATCH, SEQ, DIM, STATE, STEPS = 4, 32, 8, 4, 4


def parameters():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    return {
        "A": -jnp.exp(normal(DIM, STATE)),
        "D": jnp.ones(DIM),
        "delta_bias": jnp.full(DIM, -1.0),
        "to_delta": normal(DIM, DIM),
        "to_B": normal(DIM, STATE),
        "to_C": normal(DIM, STATE),
        "out": normal(DIM, DIM),
    }


def data():
    """Inputs and targets, (batch, seq, dim); and three packed sequences a row, one of which crosses every border."""
    rng = np.random.default_rng(1)
    x, target = rng.normal(size=(2, BATCH, SEQ, DIM)).astype(np.float32)
    ids = np.broadcast_to((np.arange(SEQ) >= 5).astype(np.int32) + (np.arange(SEQ) >= 29), (BATCH, SEQ))
    return {"x": x, "target": target, "segment_ids": ids.astype(np.int32)}


def squared_error(p, x, target, segment_ids, *, axis_name=None):
    """Summed over what is here: a device's part, or everything."""
    delta, B, C = x @ p["to_delta"], x @ p["to_B"], x @ p["to_C"]
    y = pallas_scan.scan(
        x, delta, p["A"], B, C, p["D"], delta_bias=p["delta_bias"], delta_softplus=True, segment_ids=segment_ids,
        axis_name=axis_name,
    )  # fmt: skip
    return jnp.sum((y @ p["out"] - target) ** 2)


def train(loss, arrays):
    """Losses of a few steps of gradient descent."""

    @jax.jit
    def step(p, arrays):
        value, gradient = jax.value_and_grad(loss)(p, arrays)
        return jax.tree.map(lambda x, g: x - 0.05 * g, p, gradient), value

    p, losses = parameters(), []
    for _ in range(STEPS):
        p, value = step(p, arrays)
        losses.append(float(value))
    return losses


def mean(total):
    return total / (BATCH * SEQ * DIM)


def on_one_device():
    return train(lambda p, arrays: mean(squared_error(p, **arrays)), data())


def on_the_mesh():
    devices = np.array(sorted(jax.devices(), key=lambda d: (d.id % 2, d.process_index)))
    mesh = Mesh(devices.reshape(2, -1), ("data", "seq"), axis_types=(AxisType.Auto, AxisType.Auto))
    assert len({d.process_index for d in mesh.devices[0]}) == jax.process_count()
    part = NamedSharding(mesh, P("data", "seq"))
    arrays = {k: jax.make_array_from_callback(v.shape, part, v.__getitem__) for k, v in data().items()}

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data", "seq")), out_specs=P())
    def loss(p, arrays):
        return mean(jax.lax.psum(squared_error(p, **arrays, axis_name="seq"), ("data", "seq")))

    return train(loss, arrays)


if __name__ == "__main__":
    rank, count, port = map(int, sys.argv[1:])
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", count, rank, initialization_timeout=60)
    losses = on_the_mesh()
    if rank == 0:
        print(json.dumps(losses))
    jax.distributed.shutdown()
