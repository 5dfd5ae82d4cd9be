"""The benchmark tool as a user runs it: a complete file or the old one, and usage errors."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
import types

import pytest
from absl import flags

from pallas_scan import processor
from tools import measurement, recording

DEVICE_KEYS = [
    "jax",
    "backend",
    "devices",
    "python",
    "device_kind",
    "gpu",
    "driver",
    "gpu_memory_gb",
    "torch",
    "torch_cuda",
]
CONFIG_KEYS = ["batch", "state", "dtype", "gpu_scan_config", "note", "note_runs"]
ROW_KEYS = [
    "impl",
    "mode",
    "dtype",
    "shape",
    "xla_temp_mb",
    "xla_arg_mb",
    "xla_out_mb",
    "compile_s",
    "inner",
    "median_ms",
    "q1_ms",
    "q3_ms",
]


def benchmark(*flags, **kwargs):
    command = [sys.executable, "-m", "tools.benchmark", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **kwargs)


def test_writes_the_recorded_schema_and_a_table(tmp_path):
    out = tmp_path / "b.json"
    of_jax = "--implementations=scan,assoc,chunked"
    done = benchmark("--shapes=1x32x8x4", f"--out={out}", "--samples=1", of_jax)
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert list(record) == ["device", "config", "results"]
    assert list(record["device"]) == DEVICE_KEYS and list(record["config"]) == CONFIG_KEYS
    assert f"processor {recording.processor_name()}" in record["config"]["note_runs"]
    assert [(r["impl"], r["mode"]) for r in record["results"]] == [
        (i, m) for m in ("fwd", "fwd_bwd") for i in ("scan", "assoc", "chunked")
    ]
    for row in record["results"]:
        assert list(row) == ROW_KEYS + ["rel_err_vs_scan"] * (row["impl"] != "scan")
        assert row["shape"] == {"batch": 1, "seq": 32, "dim": 8, "state": 4}
        assert row["median_ms"] > 0 and row.get("rel_err_vs_scan", 0.0) < 1e-5
    assert "chunked" in done.stdout and "x scan" in done.stdout

    again = benchmark("--shapes=1x32x8x4", f"--out={out}", "--samples=1", "--modes=fwd", of_jax, f"--compare={out}")
    assert again.returncode == 0 and "other's" in again.stdout, again.stderr


def test_torch_s_implementation_is_measured_beside_the_others(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "b.json"
    done = benchmark(
        "--shapes=1x8x4x2", "--implementations=scan,triton_ref", "--samples=1", "--seconds=0", f"--out={out}"
    )
    assert done.returncode == 0, done.stderr
    rows = {(r["impl"], r["mode"]): r for r in json.loads(out.read_text())["results"]}
    assert len(rows) == 4
    for mode in ("fwd", "fwd_bwd"):
        assert rows["triton_ref", mode]["rel_err_vs_scan"] < 1e-5 and rows["triton_ref", mode]["median_ms"] > 0
        assert rows["triton_ref", mode]["xla_out_mb"] == rows["scan", mode]["xla_out_mb"]


def test_one_without_memory_is_recorded_as_such_and_the_others_are_measured(import_tool, monkeypatch):
    tool = import_tool("benchmark")
    flags.FLAGS(["benchmark", "--shapes=1x32x8x4", "--implementations=scan,assoc", "--modes=fwd"])
    asked = []

    def enough_at_first():
        asked.append(None)
        return math.inf if len(asked) == 1 else 0.0

    monkeypatch.setattr(measurement, "available_bytes", enough_at_first)
    ((cell, programs),) = tool.compiled(tool.plan([(1, 32, 8, 4)]), 1)
    scan, assoc = measurement.measure_cell(cell, programs, samples=1, seconds=0.0, seed=0)
    assert scan["median_ms"] > 0 and "error" not in scan
    assert assoc["median_ms"] is None and assoc["error"].startswith("out of memory")
    assert assoc["xla_temp_mb"] > 0 and "rel_err_vs_scan" not in assoc
    assert "no memory" in tool.table([scan, assoc], [scan, assoc]).columns[4].cells


def test_those_that_free_gigabytes_take_turns_after_the_others():
    calls = []

    class Program:
        def __init__(self, name):
            self.name = name

        def __call__(self, arguments):
            calls.append(self.name)
            return arguments["u"]

        def memory_analysis(self):
            return types.SimpleNamespace(temp_size_in_bytes=0, argument_size_in_bytes=0, output_size_in_bytes=0)

    names = ("scan", "assoc", "chunked")
    programs = [measurement.Candidate(name, Program(name), 0.0) for name in names]
    rows = measurement.measure_cell(
        measurement.Cell((1, 4, 2, 2), "float32", "fwd", names), programs, samples=2, seconds=9.0, seed=0
    )
    assert [row["impl"] for row in rows] == list(names) and rows[1]["rel_err_vs_scan"] == 0.0
    *together, last = (name for name, _ in itertools.groupby(calls))
    assert set(together) == {"scan", "chunked"} and last == "assoc"
    assert together[-4:] == ["scan", "chunked"] * 2  # sample by sample


def test_an_error_other_than_memory_is_not_hidden():
    assert measurement._is_out_of_memory(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes"))
    assert not measurement._is_out_of_memory(RuntimeError("INTERNAL: illegal memory access"))


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--shapes=4x5x6", "expected batch x seq x dim x state"),
        ("--implementations=cuda", "expected any of"),
        ("--modes=bwd", "expected any of"),
        ("--preset=huge", "huge"),
        ("--samples=0", "samples"),
        ("--compare=/nowhere.json", "not a recording"),
    ],
)
def test_a_bad_flag_value_is_a_usage_error(flag, message):
    done = benchmark(flag)
    assert done.returncode == 1
    assert "FATAL Flags parsing error" in done.stderr and message in done.stderr and "Traceback" not in done.stderr


def test_an_interrupt_leaves_the_old_file(tmp_path):
    out = tmp_path / "b.json"
    out.write_text("old")
    command = [sys.executable, "-m", "tools.benchmark", "--preset=seed", f"--out={out}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert any(line.endswith(f"to be written to {out}\n") for line in process.stderr)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "nothing was overwritten" in stderr
    assert out.read_text() == "old" and os.listdir(tmp_path) == ["b.json"]


def test_an_interrupt_leaves_the_rows_so_far(tmp_path):
    out = tmp_path / "b.json"
    flags = ["--shapes=1x64x8x4", "--implementations=scan", "--samples=1000000", "--seconds=2", f"--out={out}"]
    command = [sys.executable, "-m", "tools.benchmark", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert any(line.startswith("1x64x8x4 float32 fwd: ") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and os.listdir(tmp_path) == ["b.json.partial"]
    assert [row["mode"] for row in recording.read_results(f"{out}.partial")] == ["fwd"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    out = tmp_path / "b.json"
    out.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recording.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        recording.write_json(out, {"a": 1})
    assert out.read_text() == "old" and os.listdir(tmp_path) == ["b.json"]


def test_a_gpu_s_rows_have_kernel_times_and_their_ratio_to_the_floor(monkeypatch, import_tool):
    """With the GPU's clocks made up: a kernel time of 2 ms where the floor is 1."""
    from tools import roofline
    from tools.kernel_time import KernelTime

    tool = import_tool("benchmark")
    shape = (1, 16, 8, 4)
    bytes_a_second = 1e3 * roofline.bytes_moved(shape, "fwd", "float32")
    monkeypatch.setattr(tool._compat, "gpu_backend", lambda: True)
    monkeypatch.setattr(roofline, "ceilings", lambda: roofline.Ceilings(1e12, bytes_a_second))
    monkeypatch.setattr(measurement, "copies", lambda x: [x])
    times = [KernelTime(2.0, 1.5, 2.5, {"a kernel": 2.0})]
    monkeypatch.setattr(measurement, "kernel_times", lambda programs, rotation: times * len(programs))
    (cell,) = [measurement.Cell(shape, "float32", "fwd", ("scan", "pallas"))]
    ((_, programs),) = tool.compiled([cell], threads=3)
    scan, pallas = measurement.measure_cell(cell, programs, samples=1, seconds=1.0, seed=0)
    assert "kernel_ms" not in scan and scan["floor_ms"] == pytest.approx(1.0)
    assert pallas["kernel_ms"] == 2.0 and pallas["x_floor"] == pytest.approx(2.0)
    assert pallas["kernels"] == {"a kernel": 2.0} and pallas["rel_err_vs_scan"] < 1e-5
    assert pallas["peak_mb"] == pytest.approx(sum(pallas[f"xla_{k}_mb"] for k in ("temp", "arg", "out")), abs=0.01)
    assert tool.table([scan, pallas]).row_count == 2


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("bfloat16", 2)])
def test_the_floor_counts_every_array_once(dtype, width):
    from tools import roofline

    batch, seq, dim, state = shape = (2, 32, 8, 4)
    u, B = batch * seq * dim * width, batch * seq * state * width
    assert roofline.bytes_moved(shape, "fwd", dtype) == 3 * u + 2 * B  # u, delta, out; B, C
    assert roofline.bytes_moved(shape, "fwd_bwd", dtype) == 8 * u + 6 * B
    assert roofline.exps(shape, "fwd_bwd") == 2 * batch * seq * dim * state


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (
            "processor\t: 0\ncpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel name\t: another\n",
            "AMD EPYC, family 26, model 2",
        ),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", None),  # Arm
        (None, None),
    ],
)
def test_a_recording_names_the_processor_as_linux_does(tmp_path, monkeypatch, text, name):
    monkeypatch.setattr(processor, "PROCESSORS", tmp_path / "cpuinfo")
    if text is not None:
        processor.PROCESSORS.write_text(text)
    monkeypatch.setattr(processor, "fields", processor.fields.__wrapped__)
    assert recording.processor_name() == name
