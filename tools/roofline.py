"""The least time that a GPU needs for a selective scan: the larger of its exps and of its bytes.

One exp a state element forward, and one more backward, from a unit that does 16 a clock and multiprocessor; every
activation read and written once. A kernel that recomputes does more of both, so a ratio of 1 is out of reach.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess

import jax
import jax.numpy as jnp

from pallas_scan import _compat
from tools.inputs import Shape
from tools.kernel_time import kernel_times

EXPS_A_CLOCK = 16  # of a multiprocessor, compute capability 7 to 9
COPIED = 2**29  # bytes of the copy that bandwidth is measured with, many times the L2 cache


@dataclasses.dataclass(frozen=True)
class Ceilings:
    exps_a_second: float
    bytes_a_second: float  # read and written


@functools.cache
def ceilings() -> Ceilings:
    """This GPU's: exps from its multiprocessors and its highest clock, bandwidth measured on a copy.

    Raises:
      RuntimeError: nvidia-smi does not name the clock.
    """
    query = ["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        hertz = float(done.stdout.splitlines()[0]) * 1e6
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RuntimeError(f"nvidia-smi did not name the highest clock of the GPU: {error!r}") from error
    _, multiprocessors = _compat.gpu()
    x = jnp.ones(COPIED // 4, jnp.float32)
    (copy,) = kernel_times([jax.jit(lambda x: x + 1.0)], [x], calls=5)
    return Ceilings(EXPS_A_CLOCK * multiprocessors * hertz, 2 * COPIED / (copy.median_ms / 1e3))


def exps(shape: Shape, mode: str) -> int:
    batch, seq, dim, state = shape
    return batch * seq * dim * state * (1 if mode == "fwd" else 2)


def bytes_moved(shape: Shape, mode: str, dtype: str) -> int:
    """u, delta, B, C and out; backward the first four again, out's cotangent, and the gradients."""
    batch, seq, dim, state = shape
    activation, matrix = (batch * seq * n * jnp.dtype(dtype).itemsize for n in (dim, state))
    forward = 3 * activation + 2 * matrix
    return forward if mode == "fwd" else forward + 5 * activation + 4 * matrix


def floor_ms(shape: Shape, mode: str, dtype: str, of: Ceilings) -> float:
    return 1e3 * max(exps(shape, mode) / of.exps_a_second, bytes_moved(shape, mode, dtype) / of.bytes_a_second)
