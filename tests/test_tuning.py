"""Configurations that were measured: where they are read from, which shapes they serve, and how they are found."""

import concurrent.futures
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import pallas_scan
from pallas_scan import KernelConfig, ScanConfig, _compat, tuning
from pallas_scan.config import RESIDENT, Sizes, rules
from pallas_scan.tuning import Entry
from tools import recording

CARD = "Some Card 12GB (OEM)"
FWD, BWD = KernelConfig(4, 16, 1, 64), KernelConfig(2, 8, 1, 128)
SHAPE = Sizes(4, 2048, 1024, 16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path))
    return tmp_path


def write(folder, *entries):
    path = folder / tuning.file_name(CARD)
    recording.write_json(path, tuning.record(CARD, entries))
    return path


def test_a_measured_configuration_is_used_and_the_other_part_comes_from_the_rules(folder):
    path = write(folder, Entry(SHAPE, "bfloat16", fwd=FWD))
    assert path.name == "some-card-12gb-oem.json"
    by_rule = rules(SHAPE, 100)
    assert tuning.choose(SHAPE, jnp.bfloat16, CARD, 100) == ScanConfig(FWD, by_rule.bwd)
    assert tuning.choose(SHAPE, jnp.float16, CARD, 100).fwd == FWD  # as wide
    assert tuning.choose(SHAPE, jnp.float32, CARD, 100) == by_rule
    assert tuning.choose(SHAPE, jnp.bfloat16, "Another Card", 100) == by_rule


@pytest.mark.parametrize(
    "sizes, near",
    [
        ((4, 2048, 1024, 9), True),  # the same tile
        ((4, 2048, 1024, 17), False),
        ((4, 4096, 1024, 16), True),
        ((4, 512, 1024, 16), False),
        ((8, 2048, 512, 16), True),  # as many rows of channels
        ((4, 2048, 1200, 16), True),
        ((8, 2048, 1024, 16), False),
        ((0, 2048, 1024, 16), False),
    ],
)
def test_an_entry_serves_an_octave_of_steps_and_a_quarter_of_rows(folder, sizes, near):
    write(folder, Entry(SHAPE, "float32", FWD, BWD))
    assert (tuning.nearest(Sizes(*sizes), "float32", CARD, "bwd") == BWD) == near


def test_the_nearest_entry_wins_and_one_segment_stays_one(folder):
    whole = KernelConfig(8, 8, 1, 2048)
    write(folder, Entry(SHAPE, "float32", whole), Entry(SHAPE._replace(batch=5), "float32", FWD))
    assert tuning.nearest(SHAPE._replace(seq=3001), "float32", CARD, "fwd") == KernelConfig(8, 8, 1, 3008)
    assert tuning.nearest(SHAPE._replace(batch=5, dim=1100), "float32", CARD, "fwd") == FWD


@pytest.mark.parametrize(
    "part, state, segment",
    [("fwd", 16, 32), ("fwd", 32, 16), ("bwd", 16, 16)],  # what a backward's program has, and a large state, is one
)
def test_segments_side_by_side_that_cover_the_sequence_cover_a_longer_one(folder, part, state, segment):
    beside = KernelConfig(4, 8, 16, 16)  # 64 segments of 16 steps
    shape = Sizes(1, 1024, 1024, state)
    write(folder, Entry(shape, "float32", beside, beside))
    assert tuning.nearest(shape, "float32", CARD, part) == beside
    assert tuning.nearest(shape._replace(seq=2048), "float32", CARD, part) == KernelConfig(4, 8, 16, segment)


def test_of_entries_with_as_many_rows_the_one_of_like_batch_serves(folder):
    write(folder, Entry(Sizes(1, 2048, 4096, 16), "float32", BWD), Entry(SHAPE, "float32", FWD))
    assert tuning.nearest(SHAPE, "float32", CARD, "fwd") == FWD
    assert tuning.nearest(Sizes(1, 4096, 4096, 16), "float32", CARD, "fwd") == BWD


def test_a_new_measurement_replaces_its_own_part_only():
    entries = tuning.merged((), Entry(SHAPE, "float32", FWD, BWD))
    entries = tuning.merged(entries, Entry(SHAPE, "bfloat16", FWD))
    entries = tuning.merged(entries, Entry(SHAPE, "float32", bwd=FWD))
    assert set(entries) == {Entry(SHAPE, "float32", FWD, FWD), Entry(SHAPE, "bfloat16", FWD)}


@pytest.mark.parametrize("text", ["{", "{}", '{"entries": [{"shape": {"batch": 1}}]}', '{"entries": 3}'])
def test_a_file_that_cannot_be_read_is_an_error_that_names_it(folder, text):
    path = folder / tuning.file_name(CARD)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"some-card-12gb-oem\.json: expected tuned configurations"):
        tuning.choose(SHAPE, "float32", CARD, 100)


def test_the_folders_in_order_of_precedence(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv(tuning.VARIABLE, raising=False)
    assert tuning.user_folder() == tmp_path / "xdg" / "pallas_scan"
    monkeypatch.setenv(tuning.VARIABLE, str(tmp_path / "own"))
    assert tuning.user_folder() == tmp_path / "own"


def test_what_the_package_brings_can_be_read():
    for path in tuning.PACKAGED.glob("*.json"):
        assert path.name == tuning.file_name(json.loads(path.read_text())["device_kind"])
        assert tuning.read(path)


@pytest.mark.parametrize("multiprocessors", [82, 132])
@pytest.mark.parametrize("seq", [100, 512, 2048, 8192, 65536])
@pytest.mark.parametrize("rows", [(1, 256), (4, 1024), (8, 1536), (8, 5120)], ids=str)
def test_the_rules_leave_no_wave_of_the_backward_half_empty(multiprocessors, seq, rows):
    """Where there are several waves; a wave is what the registers hold."""
    batch, dim = rows
    bwd = rules(Sizes(batch, seq, dim, 16), multiprocessors).bwd
    waves = batch * -(-dim // bwd.dim_block) * -(-seq // bwd.segment) / (RESIDENT * multiprocessors)
    assert waves <= 1 or waves / -(-waves // 1) >= 0.6


# --- the tool ---


@pytest.fixture
def tune(monkeypatch, import_tool):
    """The tool on a card of one multiprocessor, with times that are made up: the later, the faster."""
    from tools.kernel_time import KernelTime

    tune = import_tool("tune")
    monkeypatch.setattr(_compat, "gpu", lambda: ("none", 1))

    def times(programs, rotation, *, calls):
        assert len(rotation) > 1 and calls == 3
        return [KernelTime(1.0 / (1 + i), 0.0, 0.0, {}) for i in range(len(programs))]

    monkeypatch.setattr(tune, "kernel_times", times)
    monkeypatch.setattr(tune, "copies", lambda x: [x, x])
    return tune


def outcomes(tune, part, sweep, dtype="float32"):
    (search,) = tune.plan([(4, 20, 8, 4)], [dtype], [part], sweep)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(tune.run(search, pool, 3))
    assert {o.config for o in found} == set(search.candidates) and len(found) == len(search.candidates)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", ["fwd", "bwd"])
def test_every_candidate_is_checked_and_timed(tune, part, dtype):
    found = outcomes(tune, part, tune.Sweep((2, 4), (4, 8), (1,), (8, None)), dtype)
    assert len(found) > 4 and all(o.failure is None for o in found)
    assert [o.ms for o in found] == [1.0 / (1 + i) for i in range(len(found))]


def test_a_candidate_that_fails_or_disagrees_is_left_out(tune, monkeypatch):
    program = tune.Problem.program

    def faulty(self, config):
        run = program(self, config)
        if config.chunk == 2:
            return lambda given: run(given)["no such thing"]
        if config.dim_block == 4:
            return lambda given: jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.nan), run(given))
        return run

    monkeypatch.setattr(tune.Problem, "program", faulty)
    found = outcomes(tune, "fwd", tune.Sweep((2, 4), (4, 8), (1,), (8, 16)))
    for outcome in found:
        if outcome.config.chunk == 2:
            assert "KeyError" in outcome.failure and outcome.ms is None
        elif outcome.config.dim_block == 4:
            assert outcome.failure == "final is off by nan, out is off by nan" and outcome.ms is None
        else:
            assert outcome.failure is None and outcome.ms is not None


def test_configurations_that_fit_to_the_same_are_one_candidate(tune):
    sweep = tune.Sweep((4,), (8,), (1,), (24, 32, None))  # seq is 20, in saved intervals of 8: 24
    (search,) = tune.plan([(4, 20, 8, 4)], ["float32"], ["fwd"], sweep)
    assert len(search.candidates) <= 2


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--shapes=1x2", "expected batch x seq x dim x state"),
        ("--chunk=3", "expected powers of two"),
        ("--segment=some", "expected steps"),
        ("--parts=forward", "expected any of"),
        ("--dtypes=float64", "expected any of"),
    ],
)
def test_a_bad_flag_value_is_a_usage_error(flag, message):
    done = subprocess.run([sys.executable, "-m", "tools.tune", flag], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "FATAL Flags parsing error" in done.stderr and message in done.stderr and "Traceback" not in done.stderr


def test_without_a_gpu_it_says_so():
    if pallas_scan._compat.gpu_backend():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, "-m", "tools.tune"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "expected an NVIDIA GPU" in done.stderr
