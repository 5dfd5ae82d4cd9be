"""Hugging Face transformers' Mamba-1 models on triton_ref's kernels, with no mamba_ssm installed.

From version 5 on those models call two functions of their own module, which are mamba_ssm's where that is installed
and a loop over time in PyTorch where it is not. `use_in_transformers` puts triton_ref's in their place.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from triton_ref.mamba_ssm_api import selective_scan_fn, selective_state_update

MODULES = ("mamba", "falcon_mamba", "jamba")


def use_in_transformers() -> Callable[[], None]:
    """Makes transformers' Mamba, FalconMamba and Jamba models, those that are and those that will be made, scan with
    `selective_scan_fn` and decode with `selective_state_update`.

        restore = triton_ref.use_in_transformers()
        model = transformers.AutoModelForCausalLM.from_pretrained("state-spaces/mamba-130m-hf").cuda()

    Returns:
      A function that puts back what was there before.

    Raises:
      ImportError: transformers is not installed.
      RuntimeError: none of its model modules has the functions that this replaces: a version this does not know.
    """
    replaced: list[tuple[Any, str, Any]] = []
    for name in MODULES:
        path = f"transformers.models.{name}.modeling_{name}"
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and path.startswith(error.name) and error.name != "transformers":
                continue  # a version without this model
            raise
        for attribute, function in (("mamba_selective_scan", _scan), ("mamba_selective_state_update", _update)):
            if hasattr(module, attribute):
                replaced.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, function)
    if not replaced:
        import transformers

        raise RuntimeError(
            f"transformers: got version {transformers.__version__}, whose {', '.join(MODULES)} have no "
            "mamba_selective_scan; expected 5.16 or later"
        )

    def restore() -> None:
        for module, attribute, before in replaced:
            setattr(module, attribute, before)

    return restore


def _scan(
    hidden_states,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    **_,
):
    """As transformers calls it; what is left over chooses among its own implementations."""
    return selective_scan_fn(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def _update(state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **_):
    return selective_state_update(state, hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus)
