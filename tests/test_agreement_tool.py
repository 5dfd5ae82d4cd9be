"""`python -m tools.agreement`: a table and JSON when all agree; status 1, the case and a command when one does not."""

import json
import os
import subprocess
import sys
import types

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


def agreement(*flags):
    command = [sys.executable, "-m", "tools.agreement", *flags]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_all_implementations_agree_and_the_errors_are_written(tmp_path):
    out = tmp_path / "agreement.json"
    done = agreement("--cases=one_step,everything,bfloat16", "--seed=1", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert record["disagreements"] == [] and record["seed"] == 1
    implementations = {"scan", "assoc", "chunked", "pallas", "triton_ref"}
    assert {one["implementation"] for one in record["worst"]} == implementations
    tensors = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
    for name in implementations:
        assert {one["tensor"] for one in record["worst"] if one["implementation"] == name} == {
            "out",
            "final_state",
            *(f"d{tensor}" for tensor in tensors),
        }
    assert all(name in done.stdout for name in implementations)


def test_one_that_disagrees_is_named_with_the_command_that_shows_it(tmp_path, monkeypatch, import_tool, capsys):
    tool = import_tool("agreement")
    monkeypatch.setattr(tool.test_agreement, "errors", lambda case, name, seed: {"out": 1e-7, "dA": float("nan")})
    tool.flags.FLAGS(
        ["agreement", "--cases=plain", "--implementations=scan", "--seed=5", f"--out={tmp_path / 'a.json'}"]
    )
    with pytest.raises(SystemExit) as stopped:
        tool.main(["agreement"])
    assert stopped.value.code == 1
    message = capsys.readouterr().err
    assert "scan disagrees in case plain: dA (float32)" in message and "out (" not in message
    assert "python -m tools.agreement --cases=plain --implementations=scan --seed=5" in message
    assert [one["tensor"] for one in json.loads((tmp_path / "a.json").read_text())["disagreements"]] == ["dA"]


def test_mamba_ssm_is_compared_in_its_own_layout_and_without_the_options_it_lacks(monkeypatch, import_tool):
    """The function that stands in for it has its signature."""
    from triton_ref import selective_scan_fn

    tool = import_tool("agreement")
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.selective_scan_interface"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[name].selective_scan_fn = selective_scan_fn
    lacking = ["initial_state", "reverse", "segments", "bfloat16_fixed", "groups_differ"]
    names = ["softplus", "gate", "groups", "fixed_B", *lacking]
    found = [errors for errors in tool.compared(names, ["mamba_ssm"], 0) if errors]
    assert [errors[0].case for errors in found] == names[:4]
    assert all(one.agrees for errors in found for one in errors)
    assert {one.tensor for one in found[0]} == {
        "out",
        "final_state",
        "du",
        "ddelta",
        "dA",
        "dB",
        "dC",
        "dD",
        "ddelta_bias",
    }


def test_an_unknown_case_is_a_usage_error():
    done = agreement("--cases=nonsense")
    assert done.returncode == 1 and "expected any of plain" in done.stderr and "Traceback" not in done.stderr
