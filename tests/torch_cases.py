"""tests/cases.py's cases for triton_ref and mamba_ssm: errors against the float64 loop, on the GPU if there is one."""

from __future__ import annotations

import numpy as np
import torch

import triton_ref
from tests import float64
from tests.cases import Case, cotangents, draw
from tests.test_agreement import dtype_of, tolerance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def as_torch(x) -> torch.Tensor:
    x = np.asarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).to(DEVICE, torch.bfloat16)
    return torch.from_numpy(x.copy()).to(DEVICE)


def as_numpy(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().double().numpy()


def tensors(case: Case, seed: int = 0) -> dict[str, torch.Tensor]:
    """A case's arguments, those with gradients as leaves."""
    return {
        k: t.requires_grad_(t.is_floating_point()) for k, t in ((k, as_torch(v)) for k, v in draw(case, seed).items())
    }


def errors(case: Case, arguments: dict[str, torch.Tensor] | None = None, *, seed: int = 0) -> dict[str, float]:
    """The relative error of out, the final state and each gradient.

    Args:
      arguments: the case's own as other tensors, views perhaps, that lead back to leaves with gradients.
    """
    given = arguments or tensors(case, seed)
    dout, dfinal = cotangents(case, seed)
    out, final = triton_ref.selective_scan(**given, **case.options, return_final_state=True)
    names = [k for k, v in given.items() if v.is_floating_point()]
    grads = torch.autograd.grad([out, final], [given[k] for k in names], [as_torch(dout), as_torch(dfinal)])
    assert out.dtype == given["u"].dtype and final.dtype == torch.float32
    for name, grad in zip(names, grads, strict=True):
        assert grad.dtype == given[name].dtype and grad.shape == given[name].shape
    want = float64.scan(draw(case, seed), dout=dout, dfinal=dfinal, **case.options)
    return relative_errors(out, final, dict(zip(names, grads, strict=True)), want)


def relative_errors(out, final, grads: dict[str, torch.Tensor], want: tuple) -> dict[str, float]:
    """By tensor; want is what float64.scan returns."""
    pairs = {"out": (out, want[0]), "final_state": (final, want[1])}
    pairs |= {f"d{name}": (grad, want[2][name]) for name, grad in grads.items()}
    return {k: float64.relative_error(as_numpy(got), wanted) for k, (got, wanted) in pairs.items()}


def mamba_ssm_takes(case: Case) -> bool:
    """Whether mamba_ssm's function has the case's options; B and C have as many groups there, and those that do not
    vary it takes in float32 alone."""
    fixed = "fixed" in (case.B, case.C)
    groups = {x if isinstance(x, int) else 1 for x in (case.B, case.C)}
    missing = case.initial or case.segments or case.reverse or case.matrix_dtype or case.batch == 0
    return not missing and len(groups) == 1 and not (fixed and case.dtype != "float32")


def mamba_ssm_errors(case: Case, *, seed: int = 0) -> dict[str, float]:
    """The same of mamba_ssm's function, in its layout. Its final state has no gradient."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    leaves = tensors(case, seed)
    timed = ("u", "delta", "z", *(name for name in ("B", "C") if getattr(case, name) != "fixed"))
    given = {k: v.movedim(1, -1).contiguous() if k in timed else v for k, v in leaves.items()}
    dout, dfinal = cotangents(case, seed)
    out, final = selective_scan_fn(**given, delta_softplus=case.softplus, return_last_state=True)
    out = out.transpose(1, 2)
    grads = torch.autograd.grad(out, list(leaves.values()), as_torch(dout))
    want = float64.scan(draw(case, seed), dout=dout, dfinal=0 * dfinal, **case.options)
    return relative_errors(out, final, dict(zip(leaves, grads, strict=True)), want)


def check(case: Case, arguments: dict[str, torch.Tensor] | None = None) -> dict[str, float]:
    """Asserts every tolerance; returns the errors by "tensor dtype", the dtype being the result's."""
    found = errors(case, arguments)
    for tensor, error in found.items():
        limit = tolerance(case, tensor)
        assert error <= limit, f"{case}: {tensor} of triton_ref is off by {error:.2e}, at most {limit:.2e}"
    return {f"{tensor} {dtype_of(case, tensor)} triton_ref": error for tensor, error in found.items()}
