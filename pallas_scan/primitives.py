"""How the scan is attached to JAX: three primitives, so that every transformation has a rule.

    scan        operands -> out, final state (and the states that the backward needs)
    tangent     operands, saved states, tangents -> tangents of out and final state; linear in the tangents
    backward    operands, saved states, cotangents -> cotangents of the operands: tangent's transpose

`jax.grad` meets scan's jvp rule, then tangent's transpose rule, and so runs the hand-derived backward. `jax.jvp` lowers
tangent itself, through the plain form below. Second derivatives differentiate tangent and backward, again through the
plain form. A `custom_vjp` would refuse the last two.

Saved states are a function of the operands that only a faster backward reads: their own tangent is zero by definition,
as the rules of tangent and backward account for the operands in full.

Lowering forgets the types that JAX keeps of meshes (sharding, varying axes), and partitions what is left over batch and
dim (partitioning.py). A sequence split over a mesh axis is an option of the forms themselves, whose collectives stand
between their passes (sequence_sharding.py).

Batching folds the mapped axis into batch. Operands that a batch shares have a leading axis of 1 (problem.py), which
becomes the batch's where the mapped axis holds them, and backward returns one gradient a batch row for them, so that
per-example gradients come out of the same fold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from pallas_scan import _compat, chunked, pallas_triton, partitioning, reference, sequence_sharding
from pallas_scan.problem import Operands, Options

PLAIN_CHUNK = 64  # steps that the plain form recomputes at once when it is differentiated


TEXTBOOK = {"scan": reference.linear_scan, "assoc": reference.associative_scan}  # which JAX differentiates itself


def scan(ops: Operands, options: Options) -> tuple[Array, Array]:
    """The scan of checked operands, with every derivative. Returns out and the final state."""
    if options.implementation in TEXTBOOK:
        local = TEXTBOOK[options.implementation]
        return local(ops, options) if options.axis_name is None else sequence_sharding.scan(local, ops, options)
    present, arrays = _flatten(ops)
    out, final = scan_p.bind(*arrays, present=present, options=options, save=False)
    return out, final


# --- the forms that the primitives stand for ---


def _forward(*arrays: Array, present, options, save, on_gpu=False) -> list[Array]:
    ops = _unflatten(present, arrays)
    forward, _ = _implementation(options, on_gpu)
    out, final, saved = forward(ops, options, save=save)
    return [out, final, saved] if save else [out, final]


def _tangent(*arrays: Array, present, live, options) -> list[Array]:
    ops = _unflatten(present, arrays)
    tangents = dict(zip(live, arrays[len(present) + 1 :], strict=True))

    def of_live(*values):
        return _plain(ops._replace(**dict(zip(live, values, strict=True))), options)

    primals = tuple(getattr(ops, name) for name in live)
    return list(jax.jvp(of_live, primals, tuple(tangents.values()))[1])


def _backward(*arrays: Array, present, cotangents, live, options, on_gpu=False) -> list[Array]:
    ops = _unflatten(present, arrays)
    saved, *given = arrays[len(present) :]
    dout, dfinal = _of_results(cotangents, given)
    _, backward = _implementation(options, on_gpu)
    grads = backward(ops, options, saved, dout, dfinal)
    return [getattr(grads, name) for name in live]


def _of_results(cotangents: Sequence[str], given: Sequence[Array]) -> tuple[Array, Array | None]:
    """Those of out and, where anything depends on it, of the final state."""
    by_name = dict(zip(cotangents, given, strict=True))
    return by_name["out"], by_name.get("final")


def _backward_plain(*arrays: Array, present, cotangents, live, options) -> list[Array]:
    """_backward by JAX's own differentiation, so that it can be differentiated again."""
    ops = _unflatten(present, arrays)
    _, *given = arrays[len(present) :]
    dout, dfinal = _of_results(cotangents, given)
    dfinal = jnp.zeros((ops.sizes.batch, *ops.A.shape[1:]), jnp.float32) if dfinal is None else dfinal

    def of_live(*values):
        return _plain(ops._replace(**dict(zip(live, values, strict=True))), options)

    rows = ops.rows()
    return list(jax.vjp(of_live, *(getattr(rows, name) for name in live))[1]((dout, dfinal)))


def _implementation(options: Options, on_gpu: bool) -> tuple[Callable, Callable]:
    """Forward and backward of the implementation, for the platform that is lowered for."""
    if options.implementation == "chunked" or (options.implementation == "auto" and not on_gpu):
        return chunked.forward, chunked.backward
    interpret = not on_gpu
    return (
        functools.partial(pallas_triton.forward, interpret=interpret),
        functools.partial(pallas_triton.backward, interpret=interpret),
    )


def _plain(ops: Operands, options: Options) -> tuple[Array, Array]:
    """`reference.linear_scan` in chunks that JAX recomputes, so that differentiating it stores no state a step."""
    if options.axis_name is not None:
        return sequence_sharding.scan(_plain, ops, options)
    batch, seq, dim, _ = ops.sizes
    count, rest = divmod(seq, PLAIN_CHUNK)
    timed = {name: x for name, x in ops._asdict().items() if x is not None and _has_seq(ops, name)}

    @jax.checkpoint
    def piece(h: Array, part: dict[str, Array]) -> tuple[Array, Array]:
        out, final = reference.linear_scan(ops._replace(initial_state=h, **part), options)
        return final, out

    h = reference.initial_state(ops)
    body = slice(rest, None) if options.reverse else slice(None, count * PLAIN_CHUNK)
    tail = slice(None, rest) if options.reverse else slice(count * PLAIN_CHUNK, None)
    outs = []
    if count:

        def by_chunk(x):
            return jnp.moveaxis(x[:, body].reshape(batch, count, PLAIN_CHUNK, *x.shape[2:]), 1, 0)

        h, out = lax.scan(piece, h, {name: by_chunk(x) for name, x in timed.items()}, reverse=options.reverse)
        outs.append(jnp.moveaxis(out, 0, 1).reshape(batch, count * PLAIN_CHUNK, dim))
    if rest:
        h, out = piece(h, {name: x[:, tail] for name, x in timed.items()})
        outs.append(out)
    return jnp.concatenate(outs[::-1] if options.reverse else outs, axis=1), h


def _has_seq(ops: Operands, name: str) -> bool:
    return name != "initial_state" and not ops.is_parameter(name)


def _flatten(ops: Operands) -> tuple[tuple[str, ...], list[Array]]:
    pairs = [(name, x) for name, x in ops._asdict().items() if x is not None]
    return tuple(name for name, _ in pairs), [x for _, x in pairs]


def _unflatten(present: Sequence[str], arrays: Sequence[Array]) -> Operands:
    by_name = dict(zip(present, arrays, strict=False))
    return Operands(**{name: by_name.get(name) for name in Operands._fields})


# --- the primitives and their rules ---


def _define(name: str, form: Callable, abstract: Callable, gpu_form: Callable | None = None) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)

    @functools.lru_cache(maxsize=1024)
    def compiled(**params):
        return jax.jit(lambda *arrays: primitive.bind(*arrays, **params))

    def lowering(of: Callable) -> Callable:
        def partitioned(*arrays, **params):
            names = _names(primitive, **params)
            outputs = ("out", "final", "saved")[: 2 + params.get("save", False)]
            results = params["live"] if primitive is backward_p else outputs
            return partitioning.partitioned(functools.partial(of, **params), names, results)(*arrays)

        def rule(ctx, *arrays, **params):
            bare = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
            # Elsewhere there is nothing to cut; or, with axes left to jit by a shard_map over others, which
            # custom_partitioning does not know, XLA cuts what it can look into.
            form = partitioned if _compat.partitioned_by_xla(ctx) else of
            with _compat.untyped(), _compat.without_deprecation_of_triton():
                return mlir.lower_fun(form, multiple_results=True)(ctx.replace(avals_in=bare), *arrays, **params)

        return rule

    _compat.knows_devices_when_lowered(primitive)
    primitive.def_impl(lambda *arrays, **params: compiled(**params)(*arrays))
    mlir.register_lowering(primitive, lowering(form))
    if gpu_form is not None:
        mlir.register_lowering(primitive, lowering(gpu_form), platform="cuda")
    return primitive


def _names(primitive: Primitive, *, present, **params) -> list[str]:
    """Of a primitive's arrays: the operands, then saved states and tangents or cotangents."""
    if primitive is scan_p:
        return list(present)
    rest = params["live"] if primitive is tangent_p else params["cotangents"]
    return [*present, "saved", *rest]


def _typed(u, letters: str, shape: Sequence[int], dtype) -> jax.core.ShapedArray:
    """The type of a result: sharded over batch and dim as u is, and varying over the mesh axes that u varies over."""
    return _compat.typed(u, shape, dtype, [{"b": 0, "d": 2}.get(letter) for letter in letters])


def _results(ops: Operands) -> list[jax.core.ShapedArray]:
    batch, _, dim, state = ops.sizes
    return [_typed(ops.u, "bsd", ops.u.shape, ops.u.dtype), _typed(ops.u, "bdn", (batch, dim, state), jnp.float32)]


def _scan_abstract(*avals, present, options, save):
    ops = _unflatten(present, avals)
    batch, seq, dim, state = ops.sizes
    rows = -(-seq // options.save_every)
    saved = _typed(ops.u, "brnd", (batch, rows, state, dim), jnp.float32)
    return _results(ops) + [saved] * save


def _tangent_abstract(*avals, present, live, options):
    return _results(_unflatten(present, avals))


def _backward_abstract(*avals, present, cotangents, live, options):
    ops = _unflatten(present, avals)
    batch = ops.sizes.batch

    def gradient(name):
        x = getattr(ops, name)
        shape, dtype = ((batch, *x.shape[1:]), jnp.float32) if ops.is_parameter(name) else (x.shape, x.dtype)
        return _typed(ops.u, partitioning.axes_of(name, x.ndim, batch), shape, dtype)

    return [gradient(name) for name in live]


scan_p = _define("selective_scan", _forward, _scan_abstract, functools.partial(_forward, on_gpu=True))
tangent_p = _define("selective_scan_tangent", _tangent, _tangent_abstract)
backward_p = _define(
    "selective_scan_backward", _backward, _backward_abstract, functools.partial(_backward, on_gpu=True)
)


def _scan_jvp(primals, tangents, *, present, options, save):
    out, final, saved = scan_p.bind(*primals, present=present, options=options, save=True)
    moving = [(n, t) for n, t in zip(present, tangents, strict=True) if type(t) is not ad.Zero and n != "keep"]
    results = [out, final] + [saved] * save
    if not moving:
        return results, [ad.Zero(jax.typeof(x)) for x in results]
    live = tuple(name for name, _ in moving)
    dots = tangent_p.bind(*primals, saved, *(t for _, t in moving), present=present, live=live, options=options)
    return results, list(dots) + [ad.Zero(jax.typeof(saved))] * save


def _tangent_transpose(cotangents, *arrays, present, live, options):
    given = arrays[: len(present) + 1]
    by_name = {"out": ad.instantiate_zeros(cotangents[0])}
    if type(cotangents[1]) is not ad.Zero:
        by_name["final"] = cotangents[1]
    params = {"present": present, "cotangents": tuple(by_name), "live": live, "options": options}
    grads = backward_p.bind(*given, *by_name.values(), **params)
    ops = _unflatten(present, given)

    def summed(name, grad):  # over the rows that share the operand
        x = getattr(ops, name)
        if ops.is_parameter(name) and x.shape[0] == 1:
            grad = jnp.sum(grad, axis=0, keepdims=True)
        return grad.astype(x.dtype)

    return [None] * len(given) + [summed(name, grad) for name, grad in zip(live, grads, strict=True)]


def _jvp_through(form: Callable):
    """The jvp of a primitive through a form that JAX can differentiate; the saved states are not an input of it."""

    def rule(primals, tangents, **params):
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(form, **params), tuple(primals), tuple(tangents))

    return rule


ad.primitive_jvps[scan_p] = _scan_jvp
ad.primitive_jvps[tangent_p] = _jvp_through(_tangent)
ad.primitive_jvps[backward_p] = _jvp_through(_backward_plain)
ad.primitive_transposes[tangent_p] = _tangent_transpose


def _batched(primitive: Primitive):
    """Folds the mapped axis into batch, runs the primitive once, and unfolds its results."""

    def rule(arrays, axes, *, present, **params):
        mapped = next(x.shape[a] for x, a in zip(arrays, axes, strict=True) if a is not None)
        names = _names(primitive, present=present, **params)
        moved = [x if a is None else jnp.moveaxis(x, a, 0) for x, a in zip(arrays, axes, strict=True)]
        is_mapped = [a is not None for a in axes]
        first = 1 if is_mapped[0] else 0
        batch = moved[0].shape[first]

        def is_parameter(index):
            name = names[index]
            if name in ("B", "C"):
                where = present.index(name)
                return moved[where].ndim - is_mapped[where] == 3
            return name in ("A", "D", "delta_bias")

        # A parameter and its tangent have one leading axis: where one is mapped, both become a row each.
        by_row = {n for i, n in enumerate(names) if is_parameter(i) and (is_mapped[i] or moved[i].shape[0] != 1)}

        def fold(index):
            x = moved[index]
            if is_parameter(index) and names[index] not in by_row:
                return x
            x = x if is_mapped[index] else jnp.broadcast_to(x[None], (mapped, *x.shape))
            x = jnp.broadcast_to(x, (mapped, batch, *x.shape[2:]))
            return x.reshape(mapped * batch, *x.shape[2:])

        results = primitive.bind(*map(fold, range(len(arrays))), present=present, **params)
        return [x.reshape(mapped, batch, *x.shape[1:]) for x in results], [0] * len(results)

    return rule


for _primitive in (scan_p, tangent_p, backward_p):
    batching.primitive_batchers[_primitive] = _batched(_primitive)
