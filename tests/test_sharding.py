"""The scan over several devices: operands sharded over batch and dim under jit, and the sequence split in shard_map.

Results are those of one device, and the compiled program's collectives are counted.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_scan
from tests import float64
from tests.cases import Case, draw

OWN = ("chunked", "pallas")  # the forms whose partitioning is the library's; XLA does it for the textbook ones
TEXTBOOK = ("scan", "assoc")
LIMIT = 2e-5
KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"

OPERANDS = [
    Case("gate_bias", batch=4, dim=8, seq=24, state=3, initial=True, z=True, bias=True, softplus=True),
    Case("groups_segments", batch=4, dim=8, seq=21, B=4, C=2, segments=True),
    Case("fixed_reverse", batch=4, dim=8, seq=16, B=1, C="fixed", reverse=True, z=True),
    Case("bfloat16", batch=4, dim=8, seq=16, dtype="bfloat16", D=False),
]
LAYOUTS = [("data", "model"), (None, ("data", "model")), ("data", None), (None, "model")]


def collectives(compiled) -> list[tuple[str, int]]:
    """Kind and number of elements received of each collective of a compiled program."""
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.*?) ({KINDS})(-start)?\(", line)
        if match:
            shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
            found.append((match[2], sum(math.prod(int(n) for n in s.split(",") if n) for s in shapes)))
    return found


def with_gradients(run, arrays):
    """run's results and the gradients of every floating-point argument, from cotangents cos(result)."""
    ids = {k: v for k, v in arrays.items() if k == "segment_ids"}
    value, pullback = jax.vjp(lambda x: run(x | ids), {k: v for k, v in arrays.items() if k not in ids})
    return value, pullback(jax.tree.map(jnp.cos, value))[0]


def pulled_back(arrays, **options):
    """Those of out and the final state of a scan."""
    return with_gradients(lambda a: pallas_scan.scan(**a, return_final_state=True, **options), arrays)


@functools.cache
def one_device(case):
    # In half precision JAX's own gradients are rounded on their way.
    form = "scan" if case.dtype == "float32" else "chunked"
    run = functools.partial(pulled_back, implementation=form, **case.options)
    return jax.jit(run)(border(case, draw(case)))


def border(case, arrays):
    """Sequences that begin where a device's part does, and that cross a border."""
    if case.segments:
        begins = jnp.zeros((case.batch, case.seq), jnp.int32).at[:, (5, case.seq // 2, case.seq - 5)].set(1)
        arrays["segment_ids"] = jnp.cumsum(begins, axis=1)
    return arrays


def close(got, want, limit=LIMIT):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert float64.relative_error(a, b) <= limit


# --- batch and dim, under jit ---


def sharded(case, mesh, batch, dim):
    specs = {k: P(batch, None, dim) for k in ("u", "delta", "z")} | {k: P(dim) for k in ("A", "D", "delta_bias")}
    specs |= {"B": P(batch), "C": P(batch), "initial_state": P(batch, dim), "segment_ids": P(batch)}
    specs |= {k: P(dim) for k in ("B", "C") if getattr(case, k) == "fixed"}
    return {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in border(case, draw(case)).items()}


def check_operands(implementation, case, layout, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    options = case.options | {"implementation": implementation}
    run = jax.jit(functools.partial(pulled_back, **options))
    with jax.set_mesh(mesh):
        arrays = sharded(case, mesh, *layout)
        compiled = run.lower(arrays).compile()
        got = compiled(arrays)
    close(got, one_device(case), 2.0**-8 if case.dtype == "bfloat16" else LIMIT)
    assert got[0][0].sharding.is_equivalent_to(arrays["u"].sharding, 3)
    return compiled, arrays


OWN_OPERANDS = [("chunked", case, LAYOUTS[0]) for case in OPERANDS]
OWN_OPERANDS += [("chunked", OPERANDS[1], layout) for layout in LAYOUTS[1:]]
OWN_OPERANDS += [("pallas", OPERANDS[1], LAYOUTS[1]), *(("pallas", case, LAYOUTS[0]) for case in OPERANDS[1:])]


@pytest.mark.parametrize("implementation, case, layout", OWN_OPERANDS, ids=str)
def test_sharded_over_batch_and_dim_only_gradients_are_summed(implementation, case, layout):
    compiled, arrays = check_operands(implementation, case, layout, AxisType.Auto)
    batch, dim = layout
    local = {k: math.prod(x.sharding.shard_shape(x.shape)) for k, x in arrays.items()}
    parameters = {"A", "D", "delta_bias"} | {k for k in ("B", "C") if getattr(case, k) == "fixed"}
    summed = (parameters if batch else set()) | ({"B", "C"} - parameters if dim else set())
    found = collectives(compiled)
    assert {kind for kind, _ in found} == {"all-reduce"}
    assert sum(elements for _, elements in found) == sum(local[k] for k in summed if k in local)


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
@pytest.mark.parametrize("implementation", TEXTBOOK)
def test_textbook_forms_sharded_over_batch_and_dim_gather_no_activation(implementation, layout):
    compiled, _ = check_operands(implementation, OPERANDS[0], layout, AxisType.Auto)
    assert {kind for kind, _ in collectives(compiled)} == {"all-reduce"}


@pytest.mark.parametrize("implementation", [*OWN, *TEXTBOOK])
def test_explicit_meshes_shard_the_results_as_u(implementation):
    check_operands(implementation, OPERANDS[0], ("data", "model"), AxisType.Explicit)


def test_channels_that_do_not_come_to_equal_parts_are_scanned_whole():
    case = Case("odd", batch=3, dim=6, seq=9, z=True)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    run = jax.jit(lambda a: pulled_back({k: jax.lax.with_sharding_constraint(v, P("data")) for k, v in a.items()}))
    with jax.set_mesh(mesh):
        got = run(draw(case))
    close(got, one_device(case))


def test_the_tangent_map_is_partitioned_too():
    case = OPERANDS[1]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    ids = border(case, draw(case))["segment_ids"]

    def tangents(floats):
        return jax.jvp(lambda x: pallas_scan.scan(**x, segment_ids=ids), (floats,), (jax.tree.map(jnp.cos, floats),))

    def floats(arrays):
        return {k: v for k, v in arrays.items() if k != "segment_ids"}

    with jax.set_mesh(mesh):
        arrays = floats(sharded(case, mesh, "data", "model"))
        compiled = jax.jit(tangents).lower(arrays).compile()
        got = compiled(arrays)
    assert not collectives(compiled)
    close(got, jax.jit(tangents)(floats(draw(case))))


# --- the sequence, in shard_map ---

SEQUENCES = [
    Case("everything", seq=32, initial=True, segments=True, z=True, bias=True, softplus=True, B=2),
    Case("reverse", seq=32, initial=True, segments=True, reverse=True),
    Case("fixed", seq=32, B="fixed", C=2),
    Case("bfloat16", seq=32, dtype="bfloat16", initial=True, z=True),
]


def split(case, mesh, *, batch=None, check_vma=True, axis_names=None, **options):
    """`pallas_scan.scan` of arrays, in a shard_map that cuts seq over the mesh axis "seq"."""
    arrays = draw(case)
    timed = {"u", "delta", "z", "segment_ids"} | {k for k in ("B", "C") if getattr(case, k) != "fixed"}
    specs = {k: P(batch, "seq") if k in timed else P(batch) if k == "initial_state" else P() for k in arrays}

    def local(arrays):
        return pallas_scan.scan(**arrays, return_final_state=True, axis_name="seq", **options, **case.options)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P(batch, "seq"), P(batch)),
        check_vma=check_vma,
        axis_names=set(axis_names or mesh.axis_names),
    )


SPLIT = [("chunked", case, parts, True) for case in SEQUENCES for parts in (2, 8)]
SPLIT += [("chunked", SEQUENCES[0], 4, True), ("chunked", SEQUENCES[0], 2, False), ("scan", SEQUENCES[0], 4, False)]
SPLIT += [(other, case, 4, True) for other in ("pallas", *TEXTBOOK) for case in SEQUENCES[:3]]
SPLIT += [("pallas", SEQUENCES[0], 2, False), ("pallas", SEQUENCES[1], 8, True)]


@pytest.mark.parametrize("implementation, case, parts, check_vma", SPLIT, ids=str)
def test_a_sequence_split_over_devices_equals_one_scan(implementation, case, parts, check_vma):
    mesh = jax.make_mesh((parts,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:parts])
    run = split(case, mesh, check_vma=check_vma, implementation=implementation)
    got = jax.jit(functools.partial(with_gradients, run))(border(case, draw(case)))
    close(got, one_device(case), 2.0**-8 if case.dtype == "bfloat16" else LIMIT)


@pytest.mark.parametrize("implementation", OWN)
def test_what_devices_exchange_does_not_grow_with_the_sequence(implementation):
    def received(seq):
        case = Case("traffic", batch=2, seq=seq, dim=6, state=4, initial=True, segments=True, z=True)
        mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        run = split(case, mesh, implementation=implementation)
        return collectives(jax.jit(functools.partial(with_gradients, run)).lower(draw(case)).compile())

    short = received(64)
    assert short == received(128)
    pair = 2 * 6 * (4 + 2)  # batch x dim x (a state, its Σδ, and whether it passes)
    gathered = [elements for kind, elements in short if kind == "all-gather"]
    assert gathered == [4 * pair, 4 * pair]  # one exchange forward, one backward


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("manual", [("seq",), ("data", "seq")], ids="+".join)
def test_batch_and_sequence_sharded_together(manual, kind):
    """Batch by hand in the same shard_map, or left to jit around it."""
    case = Case("both", batch=4, seq=32, dim=8, B=2, z=True)
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        timed = {"u", "delta", "z", "B", "C"}
        placed = {
            k: jax.device_put(v, NamedSharding(mesh, P("data", "seq") if k in timed else P()))
            for k, v in draw(case).items()
        }
        run = split(case, mesh, batch="data" if "data" in manual else None, axis_names=manual)
        got = jax.jit(functools.partial(with_gradients, run))(placed)
    close(got, one_device(case))


def test_second_derivatives_of_a_split_sequence():
    case = Case("second", seq=32, dim=4, state=2, initial=True)
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def hvp(run):
        def loss(arrays):
            out, final = run(arrays)
            return jnp.sum(out**2) + jnp.sum(final**3)

        arrays = draw(case)
        return jax.jit(lambda a: jax.jvp(jax.grad(loss), (a,), (jax.tree.map(jnp.sin, a),))[1])(arrays)

    close(hvp(split(case, mesh)), hvp(lambda a: pallas_scan.scan(**a, return_final_state=True)), 1e-4)


def test_forward_mode_of_a_split_sequence():
    case = Case("forward_mode", seq=32, initial=True)
    mesh = jax.make_mesh((4,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def tangents(run):
        arrays = draw(case)
        return jax.jit(lambda a: jax.jvp(run, (a,), (jax.tree.map(jnp.cos, a),)))(arrays)

    close(tangents(split(case, mesh)), tangents(lambda a: pallas_scan.scan(**a, return_final_state=True)))


def test_axis_name_outside_shard_map_is_refused():
    arrays = draw(Case("outside"))
    with pytest.raises(ValueError, match=r"axis_name: got 'seq', expected the name of a mesh axis"):
        pallas_scan.scan(**arrays, axis_name="seq")
    with pytest.raises(TypeError, match=r"axis_name: got 3 .* expected a str or None"):
        pallas_scan.scan(**arrays, axis_name=3)
