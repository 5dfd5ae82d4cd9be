"""On an NVIDIA GPU, `make test-gpu`: the grid, transformations, the same bits each run, memory, 64-bit offsets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import pallas_scan
from pallas_scan import _compat, tuning
from pallas_scan.config import Sizes
from tests import float64
from tests.cases import CASES, Case, draw
from tests.test_agreement import SMALL, check
from tests.test_decoding import test_prefill_and_steps_are_one_longer_scan  # noqa: F401
from tests.test_pallas import _CONFIGS, _SHAPES
from tests.test_sharding import SEQUENCES, border, close, pulled_back, split, with_gradients
from tests.test_transformations import (  # noqa: F401  collected here too, with this module's implementation
    test_checkpoint_and_lax_scan_around_it,
    test_eval_shape_and_export_round_trip,
    test_gradient_of_a_gradient_agrees_with_float64,
    test_hessian_vector_product_agrees_with_float64,
    test_jvp_and_linearize_agree_with_float64,
    test_nested_vmap_and_per_example_gradients,
    test_vmap_folds_into_batch_without_a_loop,
    test_vmap_over_any_arguments_is_a_loop_over_them,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU"),
]

_LARGER = [
    Case("mamba_layer", batch=2, seq=515, dim=320, state=16, z=True, bias=True, softplus=True, initial=True),
    Case("packed_layer", batch=2, seq=1000, dim=192, state=16, segments=True, initial=True, z=True),
    Case("reverse_layer", batch=1, seq=777, dim=130, state=16, B=2, C=2, reverse=True, z=True),
    Case("bfloat16_layer", batch=2, seq=515, dim=320, state=16, z=True, bias=True, softplus=True, dtype="bfloat16"),
    Case("states_64", batch=1, seq=300, dim=64, state=64, initial=True),
    Case("states_256", batch=1, seq=100, dim=24, state=256, initial=True),
    Case("states_1024", batch=1, seq=40, dim=8, state=1024, z=True, initial=True),
]


@pytest.fixture
def implementation():
    return "pallas"


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("case", SEQUENCES, ids=str)
def test_a_sequence_over_a_mesh_of_this_gpu_equals_one_scan(case, check_vma):
    """The exchange between the kernels, of one part: its collectives compile and leave the result as it is."""
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    arrays = border(case, draw(case))
    run = split(case, mesh, check_vma=check_vma, implementation="pallas")
    got = jax.jit(functools.partial(with_gradients, run))(arrays)
    want = jax.jit(functools.partial(pulled_back, implementation="pallas", **case.options))(arrays)
    close(got, want, 2.0**-8 if case.dtype == "bfloat16" else 2e-5)


@pytest.mark.parametrize("blocks", ["default", "small"])
@pytest.mark.parametrize("case", CASES + _LARGER, ids=str)
def test_agrees_with_float64(case, blocks, record_errors):
    record_errors(check(case, "pallas", config=SMALL if blocks == "small" else None))


@pytest.mark.parametrize("case", _SHAPES, ids=str)
@pytest.mark.parametrize("kernel", _CONFIGS, ids=lambda k: f"{k.chunk}x{k.dim_block}x{k.num_warps}x{k.segment}")
def test_any_configuration_is_adjusted_to_any_shape(case, kernel, record_errors):
    record_errors(check(case, "pallas", config=pallas_scan.ScanConfig(kernel, kernel)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_the_same_bits_on_ten_runs(dtype):
    case = Case("bits", batch=4, seq=1024, dim=512, state=16, z=True, bias=True, softplus=True, dtype=dtype)
    arrays = draw(case)

    @jax.jit
    def run(arrays):
        out, pullback = jax.vjp(lambda a: pallas_scan.scan(**a, implementation="pallas", **case.options), arrays)
        return out, pullback(jnp.cos(out))[0]

    first = run(arrays)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(first))
    for _ in range(9):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), first, run(arrays))


@pytest.mark.parametrize("case", CASES + _LARGER, ids=str)
def test_triton_ref_agrees_with_float64(case, record_errors):
    from tests import torch_cases

    record_errors(torch_cases.check(case))


@pytest.mark.parametrize("cut", [(4, 2, 1, 16), (1, 1, 1, 1), (8, 128, 1, 8), (4, 8, 2, 16)], ids=str)
@pytest.mark.parametrize("case", _SHAPES, ids=str)
def test_any_cut_of_triton_ref_agrees_with_float64(monkeypatch, case, cut, record_errors):
    from tests import torch_cases
    from triton_ref import launch

    chunk, channels, warps, segment = cut
    backward = launch.Cut(chunk, min(channels, 32), warps, -(-segment // launch.SAVE) * launch.SAVE)
    monkeypatch.setattr(launch, "forward_cut", lambda scan: launch.Cut(*cut))
    monkeypatch.setattr(launch, "backward_cut", lambda scan: backward)
    record_errors(torch_cases.check(case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_ref_s_gradients_are_the_same_bits_on_ten_runs(dtype):
    import torch

    import triton_ref
    from tests import torch_cases

    case = Case("bits", batch=4, seq=1024, dim=512, state=16, z=True, bias=True, softplus=True, dtype=dtype)
    arguments = torch_cases.tensors(case)

    def run():
        out = triton_ref.selective_scan(**arguments, **case.options)
        return out, *torch.autograd.grad(out, list(arguments.values()), out.detach().cos())

    first = run()
    assert all(x.isfinite().all() for x in first)
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


def test_triton_ref_is_right_beyond_two_to_the_31_elements():
    import torch

    import triton_ref

    batch, seq, dim = 1, 2**21 + 8, 1024 + 8  # every batch row is larger
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)

    u, delta = normal(batch, seq, dim, dtype=torch.bfloat16), 2.0 + normal(batch, seq, dim, dtype=torch.bfloat16).abs()
    A, B, C = -1.0 - normal(dim, 1).abs(), normal(batch, seq, 1), normal(batch, seq, 1)
    out = triton_ref.selective_scan(u, delta, A, B, C)
    for start in (0, seq // 2, seq - 64):  # what is 64 steps behind has decayed to less than exp(-128)
        window = slice(max(0, start - 64), start + 64)
        want = triton_ref.selective_scan(
            *(x[:, window].contiguous() for x in (u, delta)), A, B[:, window], C[:, window]
        )
        torch.testing.assert_close(out[:, start : start + 64], want[:, -64:], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_of_the_compiled_program(dtype):
    batch, seq, dim = shape = 4, 2048, 1024
    case = Case("memory", *shape, state=16, dtype=dtype)
    arrays = draw(case)
    activation = batch * seq * dim * jnp.dtype(dtype).itemsize

    def forward(arrays):
        return pallas_scan.scan(**arrays, implementation="pallas")

    def both(arrays, dy):
        return jax.vjp(forward, arrays)[1](dy)

    memory = jax.jit(forward).lower(arrays).compile().memory_analysis()
    # The segments' summaries, A transposed, the final state that was not asked for, and XLA's rounding up.
    segments = seq // tuning.choose(Sizes(batch, seq, dim, 16), dtype, *_compat.gpu()).fwd.segment
    summaries = 4 * batch * dim * 33 * (segments if segments > 1 else 0)
    assert memory.temp_size_in_bytes <= summaries + 4 * batch * dim * 16 + 2 * 4 * dim * 16 + 2**12
    memory = jax.jit(both).lower(arrays, arrays["u"]).compile().memory_analysis()
    # Saved states, partial sums, the unused out, and the gradients themselves.
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes <= 1.5 * 5 * activation


@pytest.mark.parametrize("shape", [(1, 3, 70_000, 2), (70_000, 3, 2, 2)], ids=["dim", "batch"])
def test_dim_and_batch_beyond_16_bits(shape, record_errors):
    record_errors(check(Case("many", *shape, z=True, initial=True), "pallas"))


def test_arrays_of_more_than_two_to_the_31_elements():
    """Spot checks of out and of every activation's gradient against float64, on windows long enough to forget."""
    batch, seq, dim, state = 1, 2_100_000, 1024, 2
    assert batch * seq * dim > 2**31
    time = jnp.arange(seq, dtype=jnp.float32)[None, :, None]
    channel = jnp.arange(dim, dtype=jnp.float32)[None, None, :]

    @jax.jit
    def arrays():
        u = jnp.broadcast_to(jnp.sin(0.37 * time + 0.011 * channel), (batch, seq, dim)).astype(jnp.bfloat16)
        delta = jnp.broadcast_to(0.5 + 0.2 * jnp.cos(0.13 * time + 0.07 * channel), (batch, seq, dim))
        n = jnp.arange(state, dtype=jnp.float32)[None, None, :]
        return {
            "u": u,
            "delta": delta.astype(jnp.bfloat16),
            "A": -jnp.ones((dim, state)) * (1.0 + n[0]),
            "B": jnp.broadcast_to(jnp.cos(0.11 * time + n), (batch, seq, state)).astype(jnp.bfloat16),
            "C": jnp.broadcast_to(jnp.sin(0.23 * time - n), (batch, seq, state)).astype(jnp.bfloat16),
            "D": jnp.ones(dim),
        }

    @jax.jit
    def run(arrays):
        out, pullback = jax.vjp(lambda a: pallas_scan.scan(**a, implementation="pallas"), arrays)
        return out, pullback(out)[0]

    arrays = arrays()
    out, grads = run(arrays)
    window = 120  # exp(-0.3 * 60) forgets to 1e-8 on either side of the middle
    channels = np.array([0, 1, 500, dim - 1])
    for start in (0, 1_048_576 - 60, 2_097_152 - 60, seq - window):
        timed = {k: v[:, start : start + window] for k, v in arrays.items() if v.ndim > 2}
        part = {k: np.asarray(v.astype(jnp.float32)) for k, v in timed.items()}
        part = {k: v[..., channels] if k in ("u", "delta") else v for k, v in part.items()}
        part |= {"A": np.asarray(arrays["A"])[channels], "D": np.ones(len(channels))}
        dout = np.asarray(out[:, start : start + window].astype(jnp.float32))[..., channels]
        want_out, _, want = float64.scan(part, dout=dout)
        middle = slice(0 if start == 0 else 55, window if start == seq - window else 65)
        for got, wanted in ((out, want_out), (grads["u"], want["u"]), (grads["delta"], want["delta"])):
            got = np.asarray(got[:, start : start + window].astype(jnp.float32))[:, middle][..., channels]
            assert float64.relative_error(got, wanted[:, middle]) <= 2.0**-7, start


def test_none_picks_the_kernels():
    arrays = draw(Case("auto"))
    assert "triton" in jax.jit(lambda a: pallas_scan.scan(**a)).lower(arrays).as_text()
    kernels, auto = (pallas_scan.scan(**arrays, implementation=i) for i in ("pallas", None))
    np.testing.assert_array_equal(kernels, auto)


def test_results_do_not_depend_on_what_memory_held_before():
    """Every element of every result is written: memory full of nan before the run leaves no trace."""
    arrays = draw(Case("poison", batch=2, seq=333, dim=70, state=5, z=True, initial=True))

    @jax.jit
    def run(arrays):
        out, pullback = jax.vjp(lambda a: pallas_scan.scan(**a, implementation="pallas"), arrays)
        return out, pullback(jnp.cos(out))[0]

    first = jax.tree.map(np.asarray, run(arrays))
    poison = [jnp.full((2**26,), jnp.nan) for _ in range(16)]
    jax.block_until_ready(poison)
    del poison
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)), first, run(arrays))
