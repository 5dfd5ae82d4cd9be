"""The kernels' machine code, read on a machine with no GPU."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


# The H200's tuned forward has its segments side by side in one kernel, and pays for it in instructions. Its bfloat16
# backward moves a few registers of 2,500 instructions to memory between an interval's loops (XLA's own compiler two).
@pytest.mark.parametrize(
    "device, architecture, forward, most, spills",
    [
        ("NVIDIA GeForce RTX 3090", 86, ("fwd", "fwd_summaries"), {"float32": 6.0, "bfloat16": 6.2}, 0),
        ("NVIDIA H200", 90, ("fwd",), {"float32": 7.0, "bfloat16": 7.2}, 16),
    ],
)
def test_a_card_s_kernels_spill_no_more_than_known_and_the_table_is_written(
    tmp_path, device, architecture, forward, most, spills
):
    out = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "tools.inspect_kernels", f"--devices={device}"]
    command += [f"--architectures={architecture}", f"--out={out}"] + ["--fail_on_spill"] * (spills == 0)
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["kernels"]
    kernels = (*forward, "bwd", "bwd_summaries", "bwd_sums", "combine")
    assert {r["kernel"] for r in rows} == {f"selective_scan_{k}" for k in kernels}
    assert {r["architecture"] for r in rows} == {architecture}
    for row in rows:
        assert row["spills"] <= spills
        assert 0 < row["registers"] <= 255
        if row["kernel"] not in ("selective_scan_combine", "selective_scan_bwd_sums"):  # no steps there
            exps = 2 if row["kernel"] == "selective_scan_bwd" else 1  # ptxas computes a few twice to free a register
            assert exps <= row["exps_per_element"] < 1.25 * exps
        if row["kernel"] == "selective_scan_fwd":
            assert row["instructions_per_element"] <= most[row["dtype"]]


@pytest.mark.parametrize("flag", ["--architectures=sm_86", "--devices=Voodoo", "--shape=1x2", "--dtypes=float64"])
def test_a_bad_flag_value_is_a_usage_error(flag):
    command = [sys.executable, "-m", "tools.inspect_kernels", flag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "FATAL Flags parsing error" in done.stderr
    assert "Traceback" not in done.stderr
