"""Strict promotion everywhere: a silent cast or a broadcast by rank in the library is an error in every test.

The CPU is eight devices, for the tests of sharding; the others use the first. Without a GPU triton_ref runs in Triton's
interpreter.

With `--record=FILE` a run leaves its counts, versions and the worst relative error of each tensor in FILE; with
`--every=4` it takes a quarter of each test's parameters.
"""

import collections
import importlib
import os
import sys

import jax
import pytest
from absl import flags

jax.config.update("jax_num_cpu_devices", 8)  # before anything asks for a device

if jax.default_backend() != "gpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption("--every", type=int, default=1, help="of a test's parameters, run every so manieth, the first too")
    parser.addoption("--record", default=None, help="write counts, versions and worst errors to this JSON file")


def pytest_collection_modifyitems(config, items):
    if (every := config.getoption("--every")) > 1:
        seen = collections.Counter()
        for item in items[:]:
            key = item.nodeid.partition("[")[0]
            if seen[key] % every:
                items.remove(item)
            seen[key] += 1


@pytest.fixture
def import_tool():
    """Imports a program of tools/ anew, its flags in place of those of another that the process has imported."""

    def load(name):
        for flag in [f.name for m, fs in flags.FLAGS.flags_by_module_dict().items() if "tools" in m for f in fs]:
            delattr(flags.FLAGS, flag)
        sys.modules.pop(f"tools.{name}", None)
        return importlib.import_module(f"tools.{name}")

    return load


@pytest.fixture
def record_errors(record_property):
    """Keeps a test's relative errors for the recording: a dict by "tensor dtype", as `check` returns it."""

    def record(errors):
        record_property("errors", errors)

    return record


class Recorder:
    def __init__(self, path):
        self.path = path
        self.counts = collections.Counter()
        self.worst = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
        for name, errors in report.user_properties:
            if name == "errors" and report.when == "call":
                for tensor, error in errors.items():
                    if error >= self.worst.get(tensor, {"error": -1.0})["error"]:
                        self.worst[tensor] = {"error": error, "case": report.nodeid.partition("::")[2]}

    def pytest_sessionfinish(self):
        from tools import recording

        record = {"device": recording.device_record(), "counts": dict(self.counts)}
        record["worst_relative_error"] = dict(sorted(self.worst.items()))
        recording.write_json(self.path, record)


def pytest_configure(config):
    path = config.getoption("--record")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))
