"""What keeps the CPU form fast: a compiler's or a cache's rule that a change could break without changing a result."""

import math

import jax
import jax.numpy as jnp
import pytest

import pallas_scan
from pallas_scan import lanes, processor
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
def test_arrays_of_a_kernel_do_not_share_their_sets_of_a_cache(batch, dim):
    rows = 8 * batch
    size = 4 * rows * (dim + lanes.padding(rows, dim, "AuthenticAMD"))
    assert math.gcd(size, 4096) <= 512


def test_rows_stay_aligned_on_intel():
    assert lanes.padding(32, 1024, "GenuineIntel") == 0


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_gradients_are_right_on_either_processor(monkeypatch, vendor):
    monkeypatch.setattr(processor, "fields", lambda: {"vendor_id": vendor})
    case = Case(vendor, seq=20, dim=64, state=16, z=True, initial=True)
    rows = case.batch * case.state // lanes.WIDTHS_BACK[0]
    assert (lanes.padding(rows, case.dim, vendor) > 0) == (vendor == "AuthenticAMD")
    jax.clear_caches()  # the vendor is read while tracing
    check(case, "chunked")


@pytest.mark.parametrize(
    ("text", "vendor"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n", "GenuineIntel"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", ""),  # Arm
        (None, ""),
    ],
)
def test_vendor_is_read_from_linux(tmp_path, monkeypatch, text, vendor):
    monkeypatch.setattr(processor, "PROCESSORS", tmp_path / "cpuinfo")
    if text is not None:
        processor.PROCESSORS.write_text(text)
    assert processor.fields.__wrapped__().get("vendor_id", "") == vendor
