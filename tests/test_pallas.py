"""The Pallas kernels where the grid does not reach: odd configurations, many states, what they allocate."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import pallas_scan
from pallas_scan import KernelConfig, ScanConfig, _compat, config, pallas_cut, pallas_math, tuning
from pallas_scan.config import Sizes
from pallas_scan.problem import Options
from tests.cases import Case
from tests.test_agreement import check
from tools import inputs

_CONFIGS = [
    KernelConfig(1, 1, 1, 1),
    KernelConfig(1, 64, 4, 7),
    KernelConfig(2, 8, 32, 22),
    KernelConfig(8, 128, 1, 8),
    KernelConfig(16, 16, 2, 4096),
    KernelConfig(64, 1024, 1, 64),
    KernelConfig(4, 8, 1, 16),
    KernelConfig(2, 8, 2, 2),
]
_EVERYTHING = {"z": True, "bias": True, "softplus": True, "initial": True, "segments": True}
_SHAPES = [
    Case("tiny", batch=1, seq=1, dim=1, state=1, **_EVERYTHING),
    Case("primes", batch=2, seq=37, dim=7, state=5, **_EVERYTHING),
    Case("groups_of_three", batch=1, seq=33, dim=9, state=2, B=3, C="fixed", reverse=True, **_EVERYTHING),
    Case("ends_early", batch=1, seq=44, dim=9, state=4, **_EVERYTHING),  # in whole chunks of 4
    Case("ends_early_half", batch=1, seq=44, dim=9, state=4, dtype="bfloat16", reverse=True, **_EVERYTHING),
    Case("half", batch=1, seq=70, dim=5, state=3, dtype="bfloat16", **_EVERYTHING),
]


@pytest.mark.parametrize("case", _SHAPES, ids=str)
@pytest.mark.parametrize("kernel", _CONFIGS, ids=lambda k: f"{k.chunk}x{k.dim_block}x{k.num_warps}x{k.segment}")
def test_any_configuration_is_adjusted_to_any_shape(case, kernel):
    check(case, "pallas", config=ScanConfig(kernel, kernel))


@pytest.mark.parametrize(
    "case",
    [
        Case("states_300", batch=1, seq=5, dim=3, state=300, **_EVERYTHING),
        Case("states_1024", batch=1, seq=3, dim=2, state=1024, B=2, C="fixed", dtype="bfloat16", z=True),
        Case("states_65", batch=1, seq=20, dim=3, state=65, reverse=True),
    ],
    ids=str,
)
def test_states_beyond_a_tile_are_split(case):
    check(case, "pallas")


def test_segments_side_by_side_are_one_kernel_and_whole_rounds():
    ops = jax.eval_shape(functools.partial(inputs.operands, (1, 1000, 24, 16)))
    fit = functools.partial(pallas_cut.fit, ops=ops, thread=64, interpret=False, intervals=False)
    cut = fit(KernelConfig(4, 8, 4, 16), options=Options(save_every=8))
    assert (cut.together, cut.rounds, cut.grid) == (16, 4, (3, 1, 1))
    assert cut.segment == 16 and cut.segments * cut.segment >= 1000
    over_devices = fit(KernelConfig(4, 8, 4, 16), options=Options(save_every=8, axis_name="seq"))
    assert over_devices.together == 1  # devices exchange summaries between kernels


@pytest.mark.parametrize("place", ["interpreted", pytest.param("compiled", marks=pytest.mark.gpu)])
def test_softplus_and_sigmoid_keep_their_relative_error_where_they_are_small(place):
    interpret = place == "interpreted"
    ops = jax.eval_shape(functools.partial(inputs.operands, (1, 8, 8, 8)))
    options = Options(save_every=8)
    cut = pallas_cut.fit(KernelConfig(4, 8, 1, 8), ops, options, thread=64, interpret=interpret, intervals=False)
    x = jnp.concatenate([jnp.linspace(-80.0, 80.0, 2**16 - 3), jnp.array([-jnp.inf, jnp.inf, jnp.nan])])

    def kernel(x_ref, softplus_ref, sigmoid_ref):
        softplus_ref[:] = pallas_math.softplus(x_ref[:], cut)
        sigmoid_ref[:] = pallas_math.sigmoid(x_ref[:], cut)

    block = pl.BlockSpec((1024,), lambda i: (i,))
    call = pl.pallas_call(
        kernel, grid=(x.size // 1024,), in_specs=[block], out_specs=[block] * 2, out_shape=[x] * 2, interpret=interpret
    )
    softplus, sigmoid = (np.asarray(y, np.float64) for y in call(x))
    given = np.asarray(x[:-3], np.float64)
    np.testing.assert_allclose(softplus[:-3], np.logaddexp(0.0, given), rtol=1e-6)
    np.testing.assert_array_equal(softplus[-3:], [0.0, np.inf, np.nan])
    near = given > -20.0  # beyond, where a gate is 1e-9, the rounding of x log2 e shows
    np.testing.assert_allclose(sigmoid[:-3][near], 1.0 / (1.0 + np.exp(-given[near])), rtol=1.5e-6)
    np.testing.assert_allclose(sigmoid[:-3], 1.0 / (1.0 + np.exp(-given)), rtol=1e-5)
    np.testing.assert_array_equal(sigmoid[-3:], [0.0, 1.0, np.nan])


def _arguments(shape, dtype):
    batch, seq, dim, state = shape
    activation, matrix = (
        jax.ShapeDtypeStruct((batch, seq, dim), dtype),
        jax.ShapeDtypeStruct((batch, seq, state), dtype),
    )
    rates, skip = jax.ShapeDtypeStruct((dim, state), jnp.float32), jax.ShapeDtypeStruct((dim,), jnp.float32)
    return {"u": activation, "delta": activation, "A": rates, "B": matrix, "C": matrix, "D": skip}


def _lowered_for_gpu(f, *arguments) -> str:
    with _compat.lowering_for_gpu():
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def _bytes(tensor: str) -> int:
    *sizes, dtype = tensor.split("x")
    width = {"f32": 4, "bf16": 2, "f16": 2, "i32": 4, "i1": 1}[dtype]
    return width * int(np.prod([int(s) for s in sizes], initial=1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 3090", "NVIDIA H200"])
def test_what_a_gpu_program_allocates(dtype, device):
    """Read off the program lowered for a GPU: every result of a kernel, and no array over (batch, seq, dim, state)."""
    shape = batch, seq, dim, state = 4, 2048, 1024, 16
    chosen = tuning.choose(Sizes(*shape), dtype, device, 132)

    def forward(a):
        return pallas_scan.scan(**a, implementation="pallas", config=chosen)

    def both(a, dy):
        return jax.vjp(forward, a)[1](dy)

    arguments = _arguments(shape, dtype)
    activation = batch * seq * dim * jnp.dtype(dtype).itemsize
    for name, text in (
        ("forward", _lowered_for_gpu(forward, arguments)),
        ("backward", _lowered_for_gpu(both, arguments, arguments["u"])),
    ):
        sizes = [_bytes(t) for t in re.findall(r"tensor<((?:\d+x)+(?:f32|bf16|f16|i32|i1))>", text)]
        assert max(sizes) < batch * seq * dim * state * jnp.dtype(dtype).itemsize
        results = re.findall(r"stablehlo.custom_call @__gpu\$xla.gpu.triton.*-> (.*)", text)
        kernels = [sum(map(_bytes, re.findall(r"tensor<([^>]*)>", r))) for r in results]
        together = chosen.fwd.num_warps > 1  # one kernel where three follow each other
        first = 1 if together else 3
        assert len(kernels) == (first if name == "forward" else first + 4)
        sides = 32 * chosen.fwd.num_warps // chosen.fwd.dim_block
        scratch = sides * (state + 1) if together else seq // chosen.fwd.segment * (2 * state + 1)
        if name == "forward":  # out, the final state and the segments' summaries
            assert sum(kernels) == activation + 4 * batch * dim * (state + scratch)
        else:  # saved states; then, out being gone, of summaries, combine, gradients and sums each and the one after it
            saved = kernels[first - 1] - activation
            if together:  # what a forward's threads hand each other is gone too
                saved -= 4 * batch * dim * scratch
            live = saved + max(a + b for a, b in itertools.pairwise(kernels[first:]))
            assert live <= 1.5 * 5 * activation, live / activation


def test_a_device_that_batch_and_dim_fill_gets_one_segment():
    wide = config.rules(Sizes(64, 4096, 8192, 16), 100)
    assert wide.fwd.segment >= 4096
    narrow = config.rules(Sizes(1, 65536, 256, 16), 100)
    assert narrow.fwd.segment < 4096
    assert narrow.bwd.segment < 4096
