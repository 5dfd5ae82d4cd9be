"""What keeps the CPU form fast: a compiler's or a cache's rule that a change could break without changing a result."""

import math
import pathlib

import jax
import jax.numpy as jnp
import pytest

import pallas_scan
from pallas_scan import lanes
from tests.cases import Case
from tests.test_agreement import check


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_array_of_half_precision_is_never_converted_whole(dtype):
    """XLA does it for each block where it slices such an array: time in the square of seq."""
    batch, seq, dim, state = 1, 72, 24, 4
    active = jax.ShapeDtypeStruct((batch, seq, dim), dtype)
    matrix = jax.ShapeDtypeStruct((batch, seq, state), dtype)
    A = jax.ShapeDtypeStruct((dim, state), jnp.float32)

    def forward(*arguments):
        return pallas_scan.scan(*arguments, implementation="chunked")

    def backward(*arguments):
        out, pullback = jax.vjp(forward, *arguments)
        return pullback(out)

    for function in (forward, backward):
        compiled = jax.jit(function).lower(active, active, A, matrix, matrix).compile().as_text()
        assert "u16[1,72,24]" in compiled and "f32[1,72,24]" not in compiled


@pytest.mark.parametrize("dim", [64, 256, 768, 1024, 4096])
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_arrays_of_a_kernel_do_not_share_their_sets_of_a_cache_with_few_ways(batch, dim):
    rows = 8 * batch
    size = 4 * rows * (dim + lanes.padding(rows, dim, ways=8))
    assert math.gcd(size, 4096) <= 512


def test_rows_stay_aligned_where_the_cache_has_ways_enough():
    assert lanes.padding(32, 1024, ways=12) == 0


@pytest.mark.parametrize("ways", [8, 12])
def test_gradients_are_right_for_either_cache(monkeypatch, ways):
    monkeypatch.setattr(lanes, "cache_ways", lambda: ways)
    case = Case(f"{ways}_ways", seq=19 + ways, dim=64, state=16, z=True, initial=True)  # its own trace: another seq
    rows = case.batch * case.state // lanes.WIDTHS_BACK[0]
    assert (lanes.padding(rows, case.dim, ways) > 0) == (ways == 8)
    check(case, "chunked")


def caches_of(folder: pathlib.Path, *levels: tuple[str, str, str]) -> pathlib.Path:
    for index, (level, kind, ways) in enumerate(levels):
        cache = folder / f"index{index}"
        cache.mkdir()
        for name, text in (("level", level), ("type", kind), ("ways_of_associativity", ways)):
            (cache / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("levels", "ways"),
    [
        ([("1", "Instruction", "16"), ("1", "Data", "12"), ("2", "Unified", "20")], 12),
        ([("2", "Unified", "20")], lanes.FEW_WAYS),
        ([("1", "Data", "")], lanes.FEW_WAYS),
        ([], lanes.FEW_WAYS),
    ],
)
def test_ways_are_those_of_the_first_data_cache(tmp_path, monkeypatch, levels, ways):
    monkeypatch.setattr(lanes, "CACHES", caches_of(tmp_path, *levels))
    assert lanes.cache_ways.__wrapped__() == ways
