"""tools.plot: a panel a dtype and mode, a line an implementation, the roofline."""

import subprocess
import sys

import pytest

from tools import recording


@pytest.fixture
def plot(import_tool):
    pytest.importorskip("matplotlib")
    return import_tool("plot")


def _row(impl, seq, ms, *, batch=1, dim=8, mode="fwd", dtype="float32", **more):
    shape = {"batch": batch, "seq": seq, "dim": dim, "state": 4}
    return {"impl": impl, "mode": mode, "dtype": dtype, "shape": shape, "median_ms": ms, **more}


def _lines(panel):
    return {line.get_label(): line for line in panel.get_lines()}


def test_a_line_goes_through_the_kernel_times_of_one_size(plot):
    rows = [_row("pallas", seq, 9.0, kernel_ms=seq / 100, floor_ms=seq / 1000) for seq in (256, 64, 128)]
    rows += [_row("scan", seq, 5.0, floor_ms=1.0) for seq in (64, 128)]
    rows += [_row("assoc", 64, None, floor_ms=0.064, error="out of memory"), _row("pallas", 64, 1.0, batch=2)]
    figure = plot.draw(rows, (1, 8, 4))
    (panel,) = figure.get_axes()
    drawn = [[list(axis) for axis in line.get_data()] for line in panel.get_lines()]
    assert [[64, 128, 256], [0.64, 1.28, 2.56]] in drawn
    assert [[64, 128], [5.0, 5.0]] in drawn and len(drawn) == 3  # and the roofline
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["pallas", "scan (host's time)", "roofline"]
    assert panel.get_xscale() == panel.get_yscale() == "log"


def test_the_size_with_the_most_lengths_is_drawn_in_a_panel_for_each_dtype_and_mode(plot):
    rows = recording.read_json("results/nvidia-h200.json")["results"]
    assert plot.longest_series(rows) == (1, 1024, 16)
    rows += recording.read_json("results/nvidia-h200-peers.json")["results"]
    figure = plot.draw(rows, (1, 1024, 16))
    assert [panel.get_title() for panel in figure.get_axes()] == [
        f"{dtype}, {mode}" for dtype in ("float32", "bfloat16") for mode in ("forward", "forward + backward")
    ]
    assert "mamba_ssm" in [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--recordings=/nowhere.json", "--recordings=/nowhere.json: not a recording"),
        ("--size=4x5", "expected batch x dim x state"),
        ("--size=3x3x3", "expected one that is recorded"),
    ],
)
def test_a_bad_flag_value_is_a_usage_error(tmp_path, flag, message):
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "tools.plot", f"--out={tmp_path / 'plot.png'}", flag]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "plot.png").exists()
