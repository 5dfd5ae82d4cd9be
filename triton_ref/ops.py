"""The scan as operators of torch.library, so that autograd, fake tensors and torch.compile know it.

`triton_ref::selective_scan` runs the forward and saves states if asked; `triton_ref::selective_scan_backward` is its
derivative. Neither checks its arguments: arguments.py has done so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triton_ref import launch


@torch.library.custom_op("triton_ref::selective_scan", mutates_args=())
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    initial: Tensor | None,
    ids: Tensor | None,
    softplus: bool,
    reverse: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, the final state and the saved states, as `launch.forward` returns them."""
    return launch.forward(launch.Scan(u, delta, A, B, C, D, z, bias, initial, ids, softplus, reverse), save=save)


@selective_scan.register_fake
def _(u, delta, A, B, C, D, z, bias, initial, ids, softplus, reverse, save):
    batch, seq, dim = u.shape
    rows = (seq + launch.SAVE - 1) // launch.SAVE if save else 0
    final = torch.empty((batch, A.shape[1], dim), dtype=torch.float32, device=u.device)
    saved = torch.empty((batch, rows, A.shape[1], dim), dtype=torch.float32, device=u.device)
    return torch.empty_like(u), final, saved


@torch.library.custom_op("triton_ref::selective_scan_backward", mutates_args=())
def selective_scan_backward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    initial: Tensor | None,
    ids: Tensor | None,
    softplus: bool,
    reverse: bool,
    saved: Tensor,
    dout: Tensor,
    dfinal: Tensor | None,
) -> list[Tensor]:
    """The gradients of those of u, delta, A, B, C, D, z, bias and initial that are there."""
    scan = launch.Scan(u, delta, A, B, C, D, z, bias, initial, ids, softplus, reverse)
    grads = launch.backward(scan, saved, dout, dfinal)
    every = (grads.u, grads.delta, grads.A, grads.B, grads.C, grads.D, grads.z, grads.bias, grads.initial)
    return [x for x in every if x is not None]


@selective_scan_backward.register_fake
def _(u, delta, A, B, C, D, z, bias, initial, ids, softplus, reverse, saved, dout, dfinal):
    def dense(*given: Tensor | None) -> list[Tensor]:
        return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given if x is not None]

    gate = [] if z is None else [torch.empty_like(z)]
    return [torch.empty_like(u), torch.empty_like(delta), *dense(A, B, C, D), *gate, *dense(bias, initial)]


def _setup_context(ctx, inputs, output):
    *tensors, softplus, reverse, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.options = softplus, reverse
    ctx.set_materialize_grads(False)


def _backward(ctx, dout, dfinal, _):
    *tensors, saved = ctx.saved_tensors
    if dout is None and dfinal is None:
        return (None,) * (len(tensors) + 3)
    if saved.shape[1] == 0:
        raise RuntimeError("triton_ref.selective_scan: the forward ran without gradients enabled; no states were saved")
    dout = torch.zeros_like(tensors[0]) if dout is None else dout
    dfinal = None if dfinal is None else dfinal.contiguous()
    grads = iter(selective_scan_backward(*tensors, *ctx.options, saved, dout, dfinal))
    # The operator returns those of tensors that are there; ids, the last, have none.
    return (*(None if x is None else next(grads) for x in tensors[:-1]), None, None, None, None)


selective_scan.register_autograd(_backward, setup_context=_setup_context)


@torch.library.custom_op("triton_ref::selective_state_update", mutates_args=("state",))
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    softplus: bool,
    slots: Tensor | None,
) -> Tensor:
    """`launch.state_update`; without a derivative."""
    return launch.state_update(state, x, dt, A, B, C, D, z, bias, softplus, slots)


@selective_state_update.register_fake
def _(state, x, dt, A, B, C, D, z, bias, softplus, slots):
    return torch.empty_like(x)
