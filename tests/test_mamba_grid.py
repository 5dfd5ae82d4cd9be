"""A seeded sample of mamba_ssm's published grid; `python -m tools.mamba_grid` runs all of it."""

import random

import numpy as np
import pytest
from absl import app

from tests.mamba_grid import GRID, Margin, limits, margins

_SAMPLE = random.Random(0).sample(GRID, 300)
# Where dA is a sum of 4,096 large terms that cancel to a small one: it failed when the sum was taken step by step.
_NAME = "bfloat16-seq4096-D-delta_bias-delta_softplus-last_state-vary_B-vary_C-groups2"
_HARDEST = next(case for case in GRID if str(case) == _NAME)
# The interpreters run a step of a program at a time: short sequences of the same sample.
_SHORT = [case for case in _SAMPLE if case.seq <= 32]


def test_the_grid_is_the_published_one():
    assert len(GRID) == len({str(case) for case in GRID}) == 6240
    assert sum(case.groups == 2 for case in GRID) == 6240 // 5
    assert all(case.vary_B and case.vary_C for case in GRID if case.groups == 2)


@pytest.mark.parametrize("case", [*_SAMPLE, _HARDEST], ids=str)
def test_chunked(case):
    _check(case, "chunked")


@pytest.mark.parametrize("case", _SHORT[::2], ids=str)
def test_pallas(case):
    _check(case, "pallas")


@pytest.mark.parametrize("case", _SHORT[1::2], ids=str)
def test_triton_ref(case):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    _check(case, "triton_ref")


def _check(case, implementation):
    failed = {tensor: margin for tensor, margin in margins(case, implementation).items() if margin.verdict == "failed"}
    assert not failed, f"{case}: {implementation} is outside the tolerance of {failed}"


def test_an_error_beyond_the_tolerance_fails_and_one_of_rounding_alone_is_told_apart():
    assert Margin(0.9, 0.1).verdict == "passed"
    assert Margin(1.1, 0.1).verdict == "failed" and Margin(float("inf"), 0.1).verdict == "failed"
    assert Margin(1.2, 1.1).verdict == "rounding"


def test_tolerances_of_weights_widen_with_a_gate():
    case = next(case for case in GRID if case.dtype == "bfloat16" and case.z and not case.vary_B)
    np.testing.assert_allclose(limits(case, "dA"), (3e-2, 0.25))
    np.testing.assert_allclose(limits(case, "dB"), (3e-2, 5e-2))
    case = next(case for case in GRID if case.dtype == "bfloat16" and not case.z and not case.vary_B)
    np.testing.assert_allclose(limits(case, "dA"), (1e-3, 5e-3))
    np.testing.assert_allclose(limits(case, "dB"), (1e-3, 1e-3))


@pytest.mark.parametrize(
    "kept", ['{"seed": 0}', "[]", "not JSON", '{"seed": 1, "device": {"device_kind": "x", "jax": "0"}}']
)
def test_a_file_that_is_not_this_run_s_is_refused_and_left(import_tool, tmp_path, kept):
    path = tmp_path / "grid.json"
    path.write_text(kept)
    tool = import_tool("mamba_grid")
    with pytest.raises(app.UsageError, match="not counts of this grid"):
        tool._kept(str(path), 0)
    assert path.read_text() == kept
