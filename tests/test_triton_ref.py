"""triton_ref: the float64 loop's numbers for every option and stride, and what torch expects of an operator."""

import os
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import triton_ref  # noqa: E402
from tests import float64  # noqa: E402
from tests.cases import CASES, TOLERANCE, Case, draw  # noqa: E402
from tests.torch_cases import DEVICE, as_numpy, as_torch, check, tensors  # noqa: E402
from triton_ref import launch, ops  # noqa: E402

_EVERYTHING = Case(
    "everything_small",
    seq=11,
    dim=4,
    state=3,
    z=True,
    bias=True,
    softplus=True,
    initial=True,
    segments=True,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case):
    check(case)


@pytest.mark.parametrize("name", ["plain", "everything", "everything_fixed", "reverse_segments", "odd", "bfloat16"])
def test_several_segments_and_blocks_agree_with_float64(monkeypatch, name):
    monkeypatch.setattr(launch, "forward_cut", lambda scan: launch.Cut(4, 2, 1, 8))
    monkeypatch.setattr(launch, "backward_cut", lambda scan: launch.Cut(2, 4, 1, 8))
    check(next(case for case in CASES if case.name == name))


def _strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers with other strides."""
    if how == "seq_last":
        return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() >= 3 else x
    if how == "every_other":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]
    raise ValueError(how)


@pytest.mark.parametrize("how", ["seq_last", "every_other"])
@pytest.mark.parametrize("fixed", [False, True])
def test_inputs_may_have_any_strides(how, fixed):
    case = Case("strides", seq=9, z=True, initial=True, B="fixed" if fixed else 2, C="fixed" if fixed else "vary")
    arguments = tensors(case)
    views = {k: _strided(v.detach(), how).requires_grad_() for k, v in arguments.items()}
    assert how == "every_other" or not views["u"].is_contiguous()
    check(case, views)


def test_a_parameter_that_is_expanded_over_the_batch_gets_the_sum_of_its_gradients():
    case = Case("expanded", seq=7)
    arguments = {k: v.detach() for k, v in tensors(case).items()}
    row = arguments["B"][:1].clone().requires_grad_()
    repeated = row.detach().repeat(2, 1, 1).requires_grad_()
    for B in (row.expand(2, -1, -1), repeated):
        triton_ref.selective_scan(**arguments | {"B": B}).square().sum().backward()
    torch.testing.assert_close(row.grad, repeated.grad.sum(0, keepdim=True))


def test_a_cotangent_may_be_missing_or_expanded():
    arguments = tensors(Case("cotangents", seq=5, initial=True))
    out, final = triton_ref.selective_scan(**arguments, return_final_state=True)
    names = ("u", "initial_state")
    got = torch.autograd.grad(final.sum(), [arguments[k] for k in names])
    out, final = triton_ref.selective_scan(**arguments, return_final_state=True)
    want = torch.autograd.grad((0 * out).sum() + final.sum(), [arguments[k] for k in names])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_without_gradients_no_states_are_saved(monkeypatch):
    saving = []
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda scan, *, save: saving.append(save) or forward(scan, save=save))
    arguments = tensors(Case("saving", seq=4))
    triton_ref.selective_scan(**arguments)
    with torch.no_grad():
        triton_ref.selective_scan(**arguments)
    assert saving == [True, False]


@pytest.mark.parametrize("case", [Case("few", seq=5, D=False), _EVERYTHING], ids=str)
def test_the_operators_pass_opcheck(case):
    from triton_ref import arguments

    given = tensors(case)
    bound = arguments.bind(
        *(given.get(k) for k in ("u", "delta", "A", "B", "C", "D")),
        z=given.get("z"),
        delta_bias=given.get("delta_bias"),
        delta_softplus=case.softplus,
        initial_state=given.get("initial_state"),
        return_final_state=True,
        segment_ids=given.get("segment_ids"),
        reverse=False,
    )
    bound = tuple(x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in bound)
    torch.library.opcheck(ops.selective_scan, (*bound, True))
    state, token = torch.randn(2, 4, 1, 3, device=DEVICE), torch.randn(2, 4, 1, device=DEVICE)
    row = torch.randn(2, 1, 3, device=DEVICE)
    A = -torch.rand(4, 1, 3, device=DEVICE)
    torch.library.opcheck(ops.selective_state_update, (state, token, token, A, row, row, None, None, None, True, None))


def test_torch_compile_needs_no_graph_break():
    case = Case("compiled", seq=6, z=True, bias=True, softplus=True)
    arguments = tensors(case)

    def loss(arguments):
        return triton_ref.selective_scan(**arguments, delta_softplus=True).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(loss(arguments), list(arguments.values()))
    got = torch.autograd.grad(compiled(arguments), list(arguments.values()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_a_second_derivative_is_refused():
    arguments = tensors(Case("second", seq=3))
    out = triton_ref.selective_scan(**arguments)
    (grad,) = torch.autograd.grad(out.sum(), arguments["u"], create_graph=True)
    with pytest.raises(RuntimeError, match="selective_scan_backward"):
        torch.autograd.grad(grad.sum(), arguments["A"])


# --- mamba_ssm's functions ---


@pytest.mark.parametrize("matrix", ["vary", 2, "fixed"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_selective_scan_fn_takes_mamba_ssm_s_layout(matrix, contiguous):
    case = Case("layout", seq=10, B=matrix, C=matrix, z=True, bias=True, softplus=True)
    arrays = draw(case)
    given = {k: as_torch(v) for k, v in arrays.items()}

    def seq_last(x):
        x = x.transpose(1, 2) if x.dim() == 3 else x.permute(0, 2, 3, 1)
        return x.contiguous() if contiguous else x

    moved = {k: seq_last(v) if v.dim() > 2 else v for k, v in given.items()}
    out, last = triton_ref.selective_scan_fn(
        moved["u"], moved["delta"], moved["A"], moved["B"], moved["C"], moved["D"], moved["z"], moved["delta_bias"],
        True, True,
    )  # fmt: skip
    want_out, want_last = float64.scan(arrays, delta_softplus=True)
    assert out.stride() == moved["u"].stride()
    assert float64.relative_error(as_numpy(out.transpose(1, 2)), want_out) < TOLERANCE["float32"]
    assert float64.relative_error(as_numpy(last), want_last) < TOLERANCE["float32"]


def test_selective_scan_fn_hands_its_inputs_over_uncopied(monkeypatch):
    seen = []
    forward = launch.forward
    monkeypatch.setattr(launch, "forward", lambda scan, *, save: seen.append(scan) or forward(scan, save=save))
    u, delta, z = (torch.randn(2, 4, 6, device=DEVICE) for _ in range(3))
    B, C = (torch.randn(2, 2, 3, 6, device=DEVICE) for _ in range(2))
    triton_ref.selective_scan_fn(u, delta, -torch.rand(4, 3, device=DEVICE), B, C, z=z)
    for name, x in (("u", u), ("delta", delta), ("z", z), ("B", B), ("C", C)):
        assert getattr(seen[0], name).data_ptr() == x.data_ptr()


def _update_reference(state, x, dt, A, B, C, D, z, bias):
    """float64; heads' B and C are repeated before."""
    state, x, dt, A, B, C = (as_numpy(v) for v in (state, x, dt, A, B, C))
    size = np.logaddexp(dt + (0 if bias is None else as_numpy(bias)), 0.0)
    state = np.exp(size[..., None] * A) * state + (size * x)[..., None] * B
    y = (state * C).sum(-1) + (0 if D is None else as_numpy(D) * x)
    if z is not None:
        z = as_numpy(z)
        y = y * z / (1 + np.exp(-z))
    return y, state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [None, 6])
@pytest.mark.parametrize("groups", [None, 1, 3])
def test_selective_state_update_is_one_step_in_place(dtype, heads, groups):
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, dtype)

    def draw_tensor(*shape, of=dtype):
        return torch.randn(*shape, generator=generator).to(DEVICE, of)

    channels = (6,) if heads is None else (heads, 5)
    state, x, dt, z = (draw_tensor(2, *channels, *s) for s in ((7,), (), (), ()))
    A = -draw_tensor(*channels, 7, of=torch.float32).abs()
    B, C = (draw_tensor(2, *(() if groups is None else (groups,)), 7) for _ in range(2))
    D, bias = draw_tensor(*channels), draw_tensor(*channels, of=torch.float32)

    def repeated(m):  # (batch, heads, [1,] state)
        m = m.reshape(2, -1, 7).repeat_interleave(6 // (groups or 1), 1)
        return m if heads is None else m[:, :, None]

    want, want_state = _update_reference(state, x, dt, A, repeated(B), repeated(C), D, z, bias)
    out = triton_ref.selective_state_update(state, x, dt, A, B, C, D, z, bias, dt_softplus=True)
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    assert out.dtype == dtype and state.dtype == dtype
    assert float64.relative_error(as_numpy(out), want) <= tolerance
    assert float64.relative_error(as_numpy(state), want_state) <= tolerance


def test_slots_are_updated_where_they_lie_and_negative_ones_skipped():
    torch.manual_seed(0)
    cache = torch.randn(5, 4, 3, device=DEVICE)
    x, dt = torch.randn(3, 4, device=DEVICE), torch.rand(3, 4, device=DEVICE)
    A, B, C = -torch.rand(4, 3, device=DEVICE), torch.randn(3, 3, device=DEVICE), torch.randn(3, 3, device=DEVICE)
    slots = torch.tensor([4, -1, 1], dtype=torch.int32, device=DEVICE)
    states = cache[[4, 0, 1]].clone()
    want = triton_ref.selective_state_update(states, x, dt, A, B, C)
    before = cache.clone()
    out = triton_ref.selective_state_update(cache, x, dt, A, B, C, state_batch_indices=slots)
    torch.testing.assert_close(out[[0, 2]], want[[0, 2]])
    assert (out[1] == 0).all()
    torch.testing.assert_close(cache[[4, 1]], states[[0, 2]])
    assert torch.equal(cache[[0, 2, 3]], before[[0, 2, 3]])


# --- errors ---

_F = {"device": DEVICE}


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"u": torch.zeros(2, 3, **_F)}, ValueError, r"u: got shape \(2, 3\), expected \(batch, seq, dim\)"),
        ({"u": torch.zeros(2, 0, 6, **_F)}, ValueError, "seq at least 1"),
        ({"u": torch.zeros(2, 19, 6, dtype=torch.float64, **_F)}, TypeError, "u: got dtype float64, expected float32"),
        ({"u": np.zeros((2, 19, 6))}, TypeError, "u: got ndarray, expected a torch.Tensor"),
        ({"delta": torch.zeros(2, 19, 5, **_F)}, ValueError, r"delta: got shape \(2, 19, 5\), expected \(batch, seq,"),
        ({"A": torch.zeros(6, 4, dtype=torch.complex64, **_F)}, TypeError, "A: got dtype complex64, expected float32"),
        ({"A": torch.zeros(5, 4, **_F)}, ValueError, r"A: got shape \(5, 4\), expected \(dim, state\)"),
        (
            {"B": torch.zeros(2, 19, 4, dtype=torch.bfloat16, **_F)},
            TypeError,
            "B: got dtype bfloat16, expected float32",
        ),
        ({"B": torch.zeros(2, 19, 4, 4, **_F)}, ValueError, "B: got 4 groups"),
        ({"C": torch.zeros(2, 18, 4, **_F)}, ValueError, r"C: got shape \(2, 18, 4\)"),
        ({"D": torch.zeros(5, **_F)}, ValueError, r"D: got shape \(5,\), expected \(dim,\) = \(6,\)"),
        ({"z": torch.zeros(2, 19, **_F)}, ValueError, "z: got shape"),
        ({"delta_bias": torch.zeros(6, dtype=torch.complex64, **_F)}, TypeError, "delta_bias: got dtype complex64"),
        ({"delta_softplus": 1}, TypeError, "delta_softplus: got 1 of type int, expected a bool"),
        ({"reverse": None}, TypeError, "reverse: got None"),
        ({"initial_state": torch.zeros(2, 4, 6, **_F)}, ValueError, r"initial_state: got shape \(2, 4, 6\)"),
        ({"segment_ids": torch.zeros(2, 19, **_F)}, TypeError, "segment_ids: got dtype float32, expected int32"),
        ({"z": torch.zeros(2, 19, 6, device="meta")}, ValueError, "z: got device meta"),
    ],
)
def test_a_bad_argument_is_named(change, error, message):
    with pytest.raises(error, match=message):
        triton_ref.selective_scan(**{**tensors(Case("errors")), **change})


def test_a_bad_argument_of_mamba_ssm_s_functions_is_named():
    x = torch.zeros(2, 6, 5, **_F)
    A, B = torch.zeros(6, 4, **_F), torch.zeros(2, 4, 5, **_F)
    with pytest.raises(ValueError, match=r"B: got shape \(2, 5, 4, 4, 1\)"):
        triton_ref.selective_scan_fn(x, x, A, torch.zeros(2, 5, 4, 4, 1, **_F), B)
    with pytest.raises(TypeError, match="A: got dtype complex64"):
        triton_ref.selective_scan_fn(x, x, A.to(torch.complex64), B, B)
    token, row = torch.zeros(2, 6, **_F), torch.zeros(2, 4, **_F)
    with pytest.raises(ValueError, match=r"state: got shape \(2, 6, 5\), expected \(2, 6, 4\)"):
        triton_ref.selective_state_update(torch.zeros(2, 6, 5, **_F), token, token, A, row, row)
    with pytest.raises(ValueError, match=r"B: got shape \(2, 4, 4\)"):
        triton_ref.selective_state_update(torch.zeros(2, 6, 4, **_F), token, token, A, torch.zeros(2, 4, 4, **_F), row)
    with pytest.raises(TypeError, match="state_batch_indices: got dtype float32"):
        triton_ref.selective_state_update(
            torch.zeros(2, 6, 4, **_F), token, token, A, row, row, state_batch_indices=torch.zeros(2, **_F)
        )


@pytest.mark.skipif(DEVICE != "cpu", reason="about the CPU")
def test_tensors_on_the_cpu_need_the_interpreter_and_jax_is_not_imported():
    program = """
import sys, torch, triton_ref
assert "jax" not in sys.modules and "pallas_scan" not in sys.modules
x = torch.zeros(1, 2, 3)
try:
    triton_ref.selective_scan(x, x, torch.zeros(3, 2), torch.zeros(1, 2, 2), torch.zeros(1, 2, 2))
except RuntimeError as error:
    assert "TRITON_INTERPRET=1" in str(error)
else:
    raise SystemExit("no error")
"""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
