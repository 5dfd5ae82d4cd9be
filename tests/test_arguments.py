"""Every argument error: its type, and that it names the argument, what it was and what it must be."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_scan
from pallas_scan import KernelConfig, ScanConfig

BATCH, SEQ, DIM, STATE = 2, 5, 6, 3


def arguments(**changes):
    base = {
        "u": jnp.ones((BATCH, SEQ, DIM)),
        "delta": jnp.ones((BATCH, SEQ, DIM)),
        "A": -jnp.ones((DIM, STATE)),
        "B": jnp.ones((BATCH, SEQ, STATE)),
        "C": jnp.ones((BATCH, SEQ, STATE)),
    }
    return base | changes


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


TYPE_ERRORS = [
    ("u", [[1.0]], "got list, expected an array"),
    ("u", ones(BATCH, SEQ, DIM, dtype=jnp.int32), "got dtype int32, expected float32 or bfloat16 or float16"),
    ("u", np.ones((BATCH, SEQ, DIM)), "got dtype float64, expected float32"),
    ("delta", ones(BATCH, SEQ, DIM, dtype=jnp.int32), "got dtype int32, expected float32 or"),
    ("A", ones(DIM, STATE, dtype=jnp.bfloat16), "got dtype bfloat16, expected float32"),
    ("A", ones(DIM, STATE, dtype=jnp.complex64), "got dtype complex64, expected float32"),
    ("A", None, "got NoneType, expected an array"),
    ("B", ones(BATCH, SEQ, STATE, dtype=jnp.bfloat16), "got dtype bfloat16, expected float32"),
    ("C", ones(BATCH, SEQ, STATE, dtype=jnp.int32), "got dtype int32, expected float32"),
    ("D", ones(DIM, dtype=jnp.complex64), "got dtype complex64, expected a real number"),
    ("D", 1.0, "got float, expected an array"),
    ("z", ones(BATCH, SEQ, DIM, dtype=jnp.int8), "got dtype int8, expected float32 or"),
    ("delta_bias", ones(DIM, dtype=bool), "got dtype bool, expected a real number"),
    ("initial_state", ones(BATCH, DIM, STATE, dtype=jnp.bfloat16), "got dtype bfloat16, expected float32"),
    ("segment_ids", ones(BATCH, SEQ), "got dtype float32, expected int32"),
    ("delta_softplus", 1, "got 1 of type int, expected a bool"),
    ("return_final_state", None, "got None of type NoneType, expected a bool"),
    ("reverse", "yes", "got 'yes' of type str, expected a bool"),
    ("config", {}, "got {} of type dict, expected a ScanConfig or None"),
]
VALUE_ERRORS = [
    ("u", ones(SEQ, DIM), r"got shape \(5, 6\), expected \(batch, seq, dim\)"),
    ("u", ones(BATCH, 0, DIM), r"got shape \(2, 0, 6\), expected \(batch, seq, dim\) with seq at least 1"),
    ("u", ones(BATCH, SEQ, 0), r"got shape \(2, 5, 0\), expected \(batch, seq, dim\) with dim at least 1"),
    ("A", ones(STATE, DIM), r"got shape \(3, 6\), expected \(dim, state\) = \(6, at least 1\)"),
    ("A", ones(DIM, 0), r"got shape \(6, 0\), expected"),
    ("A", ones(DIM), r"got shape \(6,\), expected"),
    ("delta", ones(BATCH, SEQ, 1), r"got shape \(2, 5, 1\), expected \(batch, seq, dim\) = \(2, 5, 6\)"),
    ("B", ones(BATCH, STATE, SEQ), r"got shape \(2, 3, 5\), expected \(batch, seq, state\) = \(2, 5, 3\), "),
    ("B", ones(1, SEQ, STATE), r"got shape \(1, 5, 3\), expected"),
    ("C", ones(BATCH, SEQ, 4, STATE), r"got 4 groups \(shape \(2, 5, 4, 3\)\), expected a number that divides dim = 6"),
    ("C", ones(BATCH, SEQ, 0, STATE), r"got 0 groups"),
    ("C", ones(STATE, DIM), r"got shape \(3, 6\), expected"),
    ("D", ones(1), r"got shape \(1,\), expected \(dim,\) = \(6,\)"),
    ("z", ones(BATCH, SEQ + 1, DIM), r"got shape \(2, 6, 6\), expected \(batch, seq, dim\) = \(2, 5, 6\)"),
    ("delta_bias", ones(DIM, 1), r"got shape \(6, 1\), expected \(dim,\) = \(6,\)"),
    ("initial_state", ones(BATCH, STATE, DIM), r"got shape \(2, 3, 6\), expected \(batch, dim, state\) = \(2, 6, 3\)"),
    ("segment_ids", ones(SEQ, dtype=jnp.int32), r"got shape \(5,\), expected \(batch, seq\) = \(2, 5\)"),
    ("implementation", "cuda", r"got 'cuda', expected None or one of \('pallas', 'chunked', 'assoc', 'scan'\)"),
]


@pytest.mark.parametrize("name, value, message", TYPE_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_type_is_a_type_error_that_names_the_argument(name, value, message):
    with pytest.raises(TypeError, match=f"^{name}: {message}"):
        pallas_scan.scan(**arguments(**{name: value}))


@pytest.mark.parametrize("name, value, message", VALUE_ERRORS, ids=lambda x: x if isinstance(x, str) else "")
def test_wrong_shape_or_value_is_a_value_error_that_names_the_argument(name, value, message):
    with pytest.raises(ValueError, match=f"^{name}: {message}"):
        pallas_scan.scan(**arguments(**{name: value}))


@pytest.mark.parametrize("name", ["D", "delta_bias"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_vectors_of_other_real_dtypes_are_cast(name, dtype):
    value = jnp.arange(DIM, dtype=dtype)
    got = pallas_scan.scan(**arguments(**{name: value}))
    want = pallas_scan.scan(**arguments(**{name: value.astype(jnp.float32)}))
    np.testing.assert_array_equal(got, want)


def test_activations_may_differ_in_dtype():
    out = pallas_scan.scan(**arguments(delta=ones(BATCH, SEQ, DIM, dtype=jnp.bfloat16)))
    np.testing.assert_array_equal(out, pallas_scan.scan(**arguments()))


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ((3, 32, 2, 256), ValueError, "KernelConfig.chunk: got 3, expected a power of two"),
        ((8, 0, 2, 256), ValueError, "KernelConfig.dim_block: got 0, expected at least 1"),
        ((8, 32, 64, 256), ValueError, "KernelConfig.num_warps: got 64, expected at most 32"),
        ((8, 32, 2, 100), ValueError, "KernelConfig.segment: got 100, expected a multiple of chunk, which is 8"),
        ((8.0, 32, 2, 256), TypeError, "KernelConfig.chunk: got 8.0, expected an int"),
    ],
)
def test_kernel_config_checks_its_fields(fields, error, message):
    with pytest.raises(error, match=message):
        KernelConfig(*fields)


def test_scan_config_checks_its_fields():
    with pytest.raises(TypeError, match=r"ScanConfig.bwd: got None, expected a KernelConfig"):
        ScanConfig(KernelConfig(8, 32, 2, 256), None)
