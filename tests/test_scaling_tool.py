"""tools.scaling on forced devices, and its estimate on paper."""

import json

import pytest
from absl import app, flags

from tools import link_model


def run(import_tool, *arguments):
    scaling = import_tool("scaling")
    flags.FLAGS(["scaling", *arguments])
    scaling.main(["scaling"])
    return scaling


def test_forced_devices_are_checked_timed_and_recorded(import_tool, tmp_path, capsys):
    out, picture = tmp_path / "scaling.json", tmp_path / "scaling.png"
    run(
        import_tool, "--parts=1,2", "--dtypes=float32", "--dim=8", "--state=2", "--strong=64", "--weak=32",
        "--seconds=0", f"--out={out}", f"--plot={picture}",
    )  # fmt: skip
    record = json.loads(out.read_text())
    assert record["shared_cores"]
    assert [c["parts"] for c in record["checks"]] == [2]
    assert all(0 <= error <= 2e-5 for c in record["checks"] for error in c["worst_relative_error"].values())
    rows = {(r["scaling"], r["parts"], r["mode"]): r for r in record["results"]}
    assert set(rows) == {(s, p, m) for s in ("strong", "weak") for p in (1, 2) for m in ("fwd", "fwd_bwd")}
    alone, both = rows["strong", 1, "fwd"], rows["strong", 2, "fwd"]
    assert both["efficiency"] == pytest.approx(alone["median_ms"] / both["median_ms"])
    assert rows["weak", 2, "fwd"]["shape"]["seq"] == 64
    assert both["exchange_ms"] > 0
    assert picture.stat().st_size > 1000
    assert "efficiency" in capsys.readouterr().out


def test_a_layout_that_disagrees_is_an_error(import_tool, monkeypatch):
    scaling = import_tool("scaling")
    flags.FLAGS(["scaling", "--parts=1"])
    monkeypatch.setattr(scaling, "_checked", lambda layout, parts, dtype, reverse: {"out": 1.0 + 1e-3 * (parts > 1)})
    monkeypatch.setattr(scaling, "relative_errors", lambda a, b: {"out": abs(a["out"] - b["out"])})
    with pytest.raises(RuntimeError, match=r"batch over 2 devices, float32: off by 1\.0e-03, at most 2\.0e-05"):
        scaling.check(2, "float32")


def test_lengths_that_parts_do_not_divide_are_refused(import_tool):
    with pytest.raises(app.UsageError, match=r"expected numbers of devices that divide \[65\]"):
        run(import_tool, "--parts=1,2", "--strong=65", "--weak=32")


def test_the_estimate_follows_the_recorded_times():
    times = [(1024, 1e-5), (65536, 1e-3), (131072, 2e-3)]
    assert link_model.seconds(times, 262144) == pytest.approx(4e-3)
    assert link_model.seconds(times, 8192) == pytest.approx(1e-4, rel=0.01)
    free = link_model.Cluster("free", 8, 1e30, 0.0)
    assert link_model.efficiency(times, free, 2**30, 1) == pytest.approx(1.0)
    slow = link_model.Cluster("slow", 8, 1e30, 1e-3)
    assert link_model.efficiency(times, slow, 131072, 1) == pytest.approx(2e-3 / (8 * (1e-3 + 2.33e-4)), rel=0.05)
    assert link_model.efficiency(times, slow, link_model.least_length(times, slow, 1, 0.9), 1) >= 0.9
