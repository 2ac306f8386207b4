"""Recomputation: bytes and seconds by hand, what a set of operators gives up, and the fewest that fit."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalogue import CATALOGUE
from planner.cluster import Link, Links, from_short_form
from planner.cost.activations import ActivationSizes, layer_values
from planner.cost.ladder import Rung
from planner.cost.layer_flow import first_layers, kept_bytes, recompute_of, replayed, segments
from planner.cost.memory import MemoryModel, StageLoad, most_tensor_bytes
from planner.cost.plan_memory import PlanMemory
from planner.cost.price import check_memory, price_plan
from planner.cost.recompute import RecomputeModel, recompute_on
from planner.cost.stages import StageCost
from planner.errors import UserError
from planner.model_spec import PRESETS, ModelSpec
from planner.operators import layer_operators
from planner.plan import Dtypes, Plan
from planner.profile.table import ProfileTable
from tests.planner.exact.random_profile import RandomProfile
from tests.planner.numbered_profile import NumberedProfile
from tests.plans import make_model, make_plan

GPT3 = make_model()
LLAMA = make_model(family="llama", kv_heads=4, ffn_hidden_size=60)
SLOW = settings(deadline=None, derandomize=True)


def values_of(model: ModelSpec, *, precision: str = "bf16", tp: int = 1, rows: int = 2) -> Any:
    sizes = ActivationSizes(model, Dtypes(param=precision), tp=tp, rows=rows, sequence_length=32)  # type: ignore[arg-type]
    return layer_values(sizes)


def job(
    model: ModelSpec,
    profile: ProfileTable,
    *,
    precision: str = "bf16",
    length: int = 32,
    scale: float = 1.0,
    links: Links | None = None,
) -> tuple[StageCost, MemoryModel, RecomputeModel]:
    dtypes = Dtypes(param=precision)  # type: ignore[arg-type]
    cost = StageCost(
        model=model,
        device_types=CATALOGUE,
        links=links or Links(),
        sequence_length=length,
        dtypes=dtypes,
        profile=profile,
    )
    memory = MemoryModel(model=model, sequence_length=length, dtypes=dtypes, memory_scale=scale)
    return cost, memory, RecomputeModel(cost, memory)


# 2 samples of 32 tokens in bf16, hidden size 24, 12 heads.
TOKENS = 64
HIDDEN, SQUARE = TOKENS * 24 * 2, TOKENS * 32 * 12
STATISTICS = TOKENS * 8  # Mean and deviation of LayerNorm; RMSNorm has one of them.


def test_a_gpt3_layer_by_hand() -> None:
    """Input, two norms and their statistics, q, k, v, context, fp32 softmax and its copy, twice the MLP."""
    values = values_of(GPT3)
    inner = TOKENS * 96 * 2
    everything = 4 * HIDDEN + 2 * STATISTICS + 3 * HIDDEN + HIDDEN + (4 + 2) * SQUARE + 2 * inner
    assert kept_bytes(values, frozenset()) == everything
    # Softmax alone gives up its output and the copy, but its replay reads the scores.
    assert kept_bytes(values, frozenset({"softmax"})) == everything - 6 * SQUARE + 2 * SQUARE
    assert kept_bytes(values, frozenset({"scores", "softmax"})) == everything - 6 * SQUARE
    # A product's result whose reader keeps nothing: no replay, nothing given up.
    assert kept_bytes(values, frozenset({"scores", "mlp_down", "attention_output"})) == everything
    # The residual sum is the norm's input; replayed alone it needs the update, which is as large.
    assert kept_bytes(values, frozenset({"attention_residual"})) == everything
    assert kept_bytes(values, frozenset({"attention_output", "attention_residual"})) == everything - HIDDEN
    assert kept_bytes(values, frozenset({"mlp_up"})) == everything - inner
    assert kept_bytes(values, frozenset(layer_operators(GPT3))) == HIDDEN


def test_a_llama_layer_by_hand() -> None:
    """Queries and keys are kept rotated; keys and values have a third of the heads; the MLP is gated."""
    values = values_of(LLAMA)
    kv, inner = HIDDEN / 3, TOKENS * 60 * 2
    everything = 4 * HIDDEN + STATISTICS + 2 * HIDDEN + 2 * kv + 6 * SQUARE + 4 * inner
    assert kept_bytes(values, frozenset()) == everything
    # Rotation alone reads what it gives up; with the product before it, queries, keys and values go.
    assert kept_bytes(values, frozenset({"rotary"})) == everything
    assert kept_bytes(values, frozenset({"qkv"})) == everything - kv
    assert kept_bytes(values, frozenset({"qkv", "rotary"})) == everything - HIDDEN - 2 * kv
    assert kept_bytes(values, frozenset({"activation"})) == everything - 2 * inner
    assert kept_bytes(values, frozenset(layer_operators(LLAMA))) == HIDDEN


def test_dropout_is_a_mask_and_a_result() -> None:
    values = values_of(make_model(dropout=0.1))
    everything = kept_bytes(values, frozenset())
    # Table 3's "AS, AD": the softmax, the mask and the result go, the scores stay. Alone, dropout's input stays.
    both = frozenset({"softmax", "attention_dropout"})
    assert kept_bytes(values, both) == everything - (4 + 1 + 2) * SQUARE + 2 * SQUARE
    assert kept_bytes(values, frozenset({"attention_dropout"})) == everything - SQUARE


def test_seconds_of_replay_by_hand() -> None:
    """Two of three layers replay softmax with its scores, one of these the norm too; each TP sum is repeated."""
    link = Link(bandwidth=1e9, latency=1e-3)
    profile = NumberedProfile(GPT3)
    cost, _, _ = job(GPT3, profile, links=Links(intra_node=link))
    recompute = recompute_of({"softmax": 2, "attention_norm": 1, "scores": 2, "mlp_norm": 0})
    assert recompute == (("attention_norm", 1), ("scores", 2), ("softmax", 2))

    def seconds(counts: dict[str, int], tp: int = 1) -> float:
        return cost.replay_seconds(
            device_type="A100", tp=tp, rows=2, layers=3, recompute=recompute_of(counts)
        )

    assert seconds(dict(recompute)) == pytest.approx(
        profile.forward("attention_norm") + 2 * profile.forward("scores", "softmax")
    )
    # The MLP's last product and sum are the next layer's input: full recomputation need not replay them.
    every = dict.fromkeys(layer_operators(GPT3), 1)
    needed = set(every) - {"attention_dropout", "mlp_down", "mlp_residual"}
    assert seconds(every) == pytest.approx(profile.forward(*needed))
    all_reduce = 2 * (1e-3 + HIDDEN / 2 / 1e9)
    assert seconds(every, tp=2) == pytest.approx(profile.forward(*needed) + all_reduce)
    step = cost.replica_step(device_type="A100", tp=1, rows=2, layers=3)
    more = cost.replica_step(device_type="A100", tp=1, rows=2, layers=3, recompute=recompute_of(every))
    assert more.forward == step.forward
    assert more.backward == pytest.approx(step.backward + seconds(every))


def test_what_is_timed_together_is_charged_together() -> None:
    names = layer_operators(GPT3)
    profile = NumberedProfile(GPT3, groups=(names[:8], names[8:]), includes_tp=True)
    cost, _, model = job(GPT3, profile)
    seconds = cost.replay_seconds(device_type="A100", tp=2, rows=2, layers=4, recompute=(("softmax", 1),))
    assert seconds == pytest.approx(profile.forward(*names[:8]))
    rungs = model.ladder(device_type="A100", tp=2, rows=2)
    # Attention saves more bytes and takes less; then the whole layer but its last operators.
    assert [rung.seconds for rung in rungs] == pytest.approx(
        [0, profile.forward(*names[:8]), profile.forward(*names)]
    )
    # Of groups, a plan names the operators that are really replayed.
    assert set(rungs[1].operators) == set(names[:8]) - {"attention_dropout"}


@pytest.mark.parametrize(
    ("model", "precision"), [(GPT3, "bf16"), (GPT3, "fp32"), (LLAMA, "bf16"), (LLAMA, "fp32")]
)
def test_one_operator_more_never_keeps_more_nor_replays_less(model: ModelSpec, precision: str) -> None:
    values, names = values_of(model, precision=precision), layer_operators(model)
    for size in (0, 1, 2, 3, 9, len(names) - 1):
        for chosen in itertools.islice(itertools.combinations(names, size), 100):
            before = frozenset(chosen)
            for name in set(names) - before:
                after = before | {name}
                assert kept_bytes(values, after) <= kept_bytes(values, before)
                assert replayed(values, before) <= replayed(values, after)


@pytest.mark.parametrize("seed", range(4))
def test_no_set_of_operators_beats_the_ladder(seed: int) -> None:
    """Against all sets: none gives up more bytes than the hull through the rungs in the same time."""
    model = (GPT3, LLAMA, make_model(dropout=0.1), GPT3)[seed]
    precision = "fp32" if seed == 3 else "bf16"
    cost, memory, recompute = job(model, RandomProfile(seed, model), precision=precision)
    rungs = recompute.ladder(device_type="A100", tp=2, rows=2)
    values = memory.rows_bytes(2, 2).values
    everything = kept_bytes(values, frozenset())
    assert rungs[0] == Rung((), 0.0, 0.0)
    assert rungs[-1].saved_bytes == everything - memory.rows_bytes(2, 2).hidden
    ratios = []
    for below, rung in itertools.pairwise(rungs):
        assert set(below.operators) < set(rung.operators)
        assert rung.saved_bytes == everything - kept_bytes(values, frozenset(rung.operators))
        assert rung.seconds == pytest.approx(
            cost.layer_replay_seconds("A100", 2, 2, frozenset(rung.operators))
        )
        ratios.append((rung.saved_bytes - below.saved_bytes) / (rung.seconds - below.seconds))
    assert ratios == sorted(ratios, reverse=True)
    names = layer_operators(model)
    hull_bytes, hull_seconds = [r.saved_bytes for r in rungs], [r.seconds for r in rungs]
    for bits in range(0, 2 ** len(names), 7):
        chosen = frozenset(name for place, name in enumerate(names) if bits >> place & 1)
        saved = everything - kept_bytes(values, chosen)
        if saved > 0:
            least = float(np.interp(saved, hull_bytes, hull_seconds))
            assert cost.layer_replay_seconds("A100", 2, 2, chosen) >= least * (1 - 1e-9)


def test_segments_cut_a_stage_where_counts_end() -> None:
    found = segments((("qkv", 1), ("scores", 4), ("softmax", 4)), 6)
    assert [(segment.layers, set(segment.operators)) for segment in found] == [
        (1, {"qkv", "scores", "softmax"}),
        (3, {"scores", "softmax"}),
        (2, set()),
    ]
    assert segments((), 0) == ()
    assert first_layers((("qkv", 1), ("scores", 4)), 2) == (("qkv", 1), ("scores", 2))
    assert first_layers((("qkv", 1),), 0) == ()


def test_what_is_alive_again_by_hand() -> None:
    """In bf16 with dropout, where the scores decide: in the backward of softmax all of attention is alive; when it runs
    again there are scores, their fp32 copy and the result, where backward has the gradient of the scores."""
    model = GPT3.model_copy(update={"dropout": 0.1})
    memory = MemoryModel(model=model, sequence_length=512, dtypes=Dtypes(param="bf16"))
    sizes, square = memory.rows_bytes(1, 2), 2 * 512**2 * model.heads
    saved = sizes.layer_saved
    for operators, given_up, more in (
        ({"softmax"}, 4 - 2, 2),
        ({"scores", "softmax"}, 4, 2),
        # Begins before backward has made any fp32 gradient.
        ({"scores", "softmax", "attention_dropout"}, 4 + 3, 0),
    ):
        chosen = frozenset[str](operators)
        assert saved - sizes.layer_kept(chosen) == given_up * square
        assert sizes.layer_revived(chosen) == (given_up + more) * square
    # By then the MLP's backward is done, and what of it runs again freed: only what all operators give up is alive.
    inner = frozenset(("mlp_up", "activation"))
    assert sizes.layer_revived(inner) == saved - sizes.layer_kept(inner)


def test_attention_is_not_alive_again_when_the_mlp_decides() -> None:
    """Short samples: the most is alive in the MLP's backward, before attention runs again."""
    wide = GPT3.model_copy(update={"ffn_hidden_size": 64 * GPT3.hidden_size})
    sizes = MemoryModel(model=wide, sequence_length=8, dtypes=Dtypes()).rows_bytes(1, 2)
    attention = frozenset(("scores", "softmax"))
    assert sizes.layer_kept(attention) < sizes.layer_saved
    assert sizes.layer_revived(attention) == 0


BIG = PRESETS["gpt3-350m"]
DROPPED = BIG.model_copy(update={"dropout": 0.1})
loads = st.builds(
    StageLoad,
    tp=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 6),
    layers=st.integers(1, 12),
    embedding=st.booleans(),
    head=st.booleans(),
    in_flight=st.integers(1, 6),
    zero_stage=st.sampled_from([0, 1, 2]),
    zero_ways=st.sampled_from([2.0, 5.0]),
    dp=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
)
precisions = st.sampled_from(["bf16", "fp32"])


def kept_by_layers(memory: MemoryModel, load: StageLoad) -> float:
    sizes = memory.rows_bytes(load.tp, load.rows, load.sequence_parallel)
    return sum(segment.layers * sizes.layer_kept(segment.operators) for segment in load.segments)


def ladder_of(model: RecomputeModel, type_: str, load: StageLoad) -> tuple[Rung, ...]:
    return model.ladder(
        device_type=type_, tp=load.tp, rows=load.rows, sequence_parallel=load.sequence_parallel
    )


@SLOW
@given(loads, st.sampled_from(["rows", "layers", "in_flight"]), precisions, st.data())
def test_layers_keep_less_and_time_rises_along_the_ladder(
    load: StageLoad, field: str, precision: str, data: st.DataObject
) -> None:
    cost, memory, model = job(BIG, RandomProfile(1, BIG), precision=precision, length=1024)
    rungs = ladder_of(model, "A100", load)
    place = data.draw(st.integers(0, (len(rungs) - 1) * load.layers - 1))
    here, above = (
        dataclasses.replace(load, recompute=recompute_on(rungs, load.layers, place + step)) for step in (0, 1)
    )
    kept = [kept_by_layers(memory, one) for one in (here, above)]
    assert kept[1] < kept[0]
    times = [
        cost.replay_seconds(
            device_type="A100",
            tp=load.tp,
            rows=load.rows,
            layers=load.layers,
            recompute=one.recompute,
            sequence_parallel=load.sequence_parallel,
        )
        for one in (here, above)
    ]
    assert times[0] < times[1]
    more = dataclasses.replace(here, **{field: getattr(here, field) + 1})
    assert memory.tensor_bytes(more) >= memory.tensor_bytes(here)


def steps_up(model: RecomputeModel, type_: str, load: StageLoad) -> list[tuple[tuple[str, int], ...]]:
    rungs = ladder_of(model, type_, load)
    return [recompute_on(rungs, load.layers, place) for place in range((len(rungs) - 1) * load.layers + 1)]


@SLOW
@given(
    loads,
    st.floats(1.0, 12.0),
    st.sampled_from(["910B4", "RTX3090"]),
    precisions,
    st.sampled_from([BIG, DROPPED]),
)
def test_the_fewest_fits_and_fewer_layers_do_not(
    load: StageLoad, scale: float, type_: str, precision: str, spec: ModelSpec
) -> None:
    cost, memory, model = job(spec, RandomProfile(2, spec), precision=precision, length=1024, scale=scale)
    device, found = CATALOGUE[type_], model.fewest([(type_, load)])
    ways = steps_up(model, type_, load)
    fits = [memory.fits(dataclasses.replace(load, recompute=way), device) for way in ways]
    if found is None:
        assert not any(fits)
        return
    assert ways.index(found.recompute) == fits.index(True)
    assert found.seconds == (
        cost.replay_seconds(
            device_type=type_,
            tp=load.tp,
            rows=load.rows,
            layers=load.layers,
            recompute=found.recompute,
            sequence_parallel=load.sequence_parallel,
        ),
    )


@SLOW
@given(loads, st.floats(1.0, 12.0), precisions)
def test_the_table_says_what_fewest_says_and_relaxed_is_close_below(
    load: StageLoad, scale: float, precision: str
) -> None:
    _, _, model = job(BIG, RandomProfile(3, BIG), precision=precision, length=1024, scale=scale)
    table = model.seconds_table("910B4", load, most_in_flight=load.in_flight)
    relaxed = model.seconds_table("910B4", load, most_in_flight=load.in_flight, relaxed=True)
    assert table.shape == relaxed.shape == (load.in_flight + 1, load.layers + 1)
    assert np.isinf(table[0]).all() and np.isinf(relaxed[0]).all()
    found = model.fewest([("910B4", load)])
    seconds = found.seconds[0] if found else np.inf
    assert table[load.in_flight, load.layers] == pytest.approx(seconds, rel=1e-9)
    rungs = ladder_of(model, "910B4", load)
    step = max(above.seconds - below.seconds for below, above in itertools.pairwise(rungs))
    assert (relaxed <= table * (1 + 1e-9)).all()
    finite = np.isfinite(table)
    # A layer more on the ladder, and the corner between two rungs; and of two layers what may be alive again or not.
    assert (table[finite] - relaxed[finite] <= 2 * step + 2 * rungs[-1].seconds).all()
    # More in flight or more layers never need less.
    assert (table[2:] >= table[1:-1] * (1 - 1e-9)).all()


@SLOW
@given(loads, st.floats(1.0, 12.0), st.booleans())
def test_loads_under_any_zero_are_worked_out_together(load: StageLoad, scale: float, relaxed: bool) -> None:
    _, memory, model = job(BIG, RandomProfile(3, BIG), length=1024, scale=scale)
    zeros = [(0, 1.0, 1), (1, 4.0, 1), (2, 4.0, 2), (2, 1e9, 3)]
    every = [dataclasses.replace(load, zero_stage=stage, zero_ways=ways, dp=dp) for stage, ways, dp in zeros]
    together = model.seconds_tables("910B4", every, most_in_flight=load.in_flight, relaxed=relaxed)
    for one, table in zip(every, together, strict=True):
        alone = model.seconds_table("910B4", one, most_in_flight=load.in_flight, relaxed=relaxed)
        assert np.array_equal(table, alone)
        if not relaxed:
            plain = dataclasses.replace(one, recompute=())
            most = memory.most_layers(plain, CATALOGUE["910B4"])
            assert (table[load.in_flight] == 0).sum() - 1 == most


@SLOW
@given(loads, st.floats(1.0, 12.0), precisions, st.integers(0, 3))
def test_the_table_says_what_fewest_says_where_running_again_takes_more(
    load: StageLoad, scale: float, precision: str, seed: int
) -> None:
    profile = RandomProfile(seed, DROPPED)
    _, _, model = job(DROPPED, profile, precision=precision, length=1024, scale=scale)
    found = model.fewest([("910B4", load)])
    tables = [
        model.seconds_table("910B4", load, most_in_flight=load.in_flight, relaxed=relaxed)
        for relaxed in (False, True)
    ]
    seconds = found.seconds[0] if found else np.inf
    assert tables[0][load.in_flight, load.layers] == pytest.approx(seconds, rel=1e-9)
    assert (tables[1] <= tables[0] * (1 + 1e-9)).all()


@SLOW
@given(st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(1, 5), st.floats(1.0, 12.0))
def test_no_choice_of_sets_by_layer_beats_the_relaxed_table(
    chosen: list[int], in_flight: int, scale: float
) -> None:
    """Random nested sets on four layers that fit take at least what the relaxed table says."""
    cost, memory, model = job(BIG, RandomProfile(4, BIG), length=1024, scale=scale)
    names = layer_operators(BIG)
    counts: dict[str, int] = {}
    for layer, bits in enumerate(chosen):
        for place, name in enumerate(names):
            if (bits * 2654435761 >> place) & 1:
                counts[name] = max(counts.get(name, 0), layer + 1)
    load = StageLoad(1, 4, 4, True, False, in_flight, recompute=recompute_of(counts))
    relaxed = model.seconds_table("910B4", load, most_in_flight=in_flight, relaxed=True)
    if memory.fits(load, CATALOGUE["910B4"]):
        seconds = cost.replay_seconds(device_type="910B4", tp=1, rows=4, layers=4, recompute=load.recompute)
        assert relaxed[in_flight, 4] <= seconds * (1 + 1e-9)


def test_unlike_replicas_recompute_the_same() -> None:
    """Enough for the tightest: the counts fit both, and one step less fails one of them."""
    _, memory, model = job(BIG, RandomProfile(5, BIG), length=1024, scale=3.0)
    light = StageLoad(1, 2, 8, False, False, 6)
    loads = [("910B2", dataclasses.replace(light, rows=4)), ("RTX3090", light)]
    found = model.fewest(loads)
    assert found is not None and found.recompute and len(found.seconds) == 2
    alone = [model.fewest([one]) for one in loads]
    assert all(one is not None for one in alone)
    assert max(found.seconds) >= max(one.seconds[0] for one in alone if one)
    for type_, load in loads:
        assert memory.fits(dataclasses.replace(load, recompute=found.recompute), CATALOGUE[type_])


@pytest.mark.parametrize("name", ["910B2", "RTX3090", "CPU"])
def test_the_largest_tensor_bytes_that_fit(name: str) -> None:
    """Against `fits`, which rounds: found by searching the load of an emulated device of any scale."""
    device = CATALOGUE[name]
    most = most_tensor_bytes(device)
    load = StageLoad(1, 1, 1, False, False, 1)
    unit = MemoryModel(model=GPT3, sequence_length=32, dtypes=Dtypes()).tensor_bytes(load)
    for offset, fits in ((-1, True), (0, True), (1, False)):
        scale = (most + offset + 0.5) / unit
        memory = MemoryModel(model=GPT3, sequence_length=32, dtypes=Dtypes(), memory_scale=scale)
        assert memory.tensor_bytes(load) == most + offset
        assert memory.fits(load, device) is fits


def test_the_plan_of_the_papers_table_3_fits_as_there() -> None:
    """ETH's plan of GPT-3 13B: its first stages recompute attention, its last ones nothing; without, none fits.

    The paper recomputes in stages 0 to 2 of the 910B4s and 0 and 1 of the 910B2s, at what seems to be ZeRO-1.
    """
    plan = make_plan(
        PRESETS["gpt3-13b"],
        [
            [(4, 1, 4), (4, 1, 4), (4, 1, 5), *[(2, 2, 5)] * 3, *[(1, 4, 6)] * 2],
            [(8, 1, 8), (8, 1, 9), (4, 2, 11), (4, 2, 12)],
        ],
        cluster=from_short_form("4x8:910B4,4x8:910B2"),
        micro_batch_sizes=(4, 8),
        samples=(344, 680),
        zero_stage=1,
    )
    with pytest.raises(UserError, match=r"pipelines\[0\]\.stages\[0\] needs"):
        check_memory(plan)
    memory, data = PlanMemory(plan), plan.model_dump()
    model = RecomputeModel(StageCost.of_plan(plan), memory.model)
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            type_ = plan.cluster.device_by_id[stage.devices[0]].type
            found = model.fewest([(type_, memory.load(pipeline=index, stage=number, replica=0))])
            assert found is not None
            data["pipelines"][index]["stages"][number]["recompute"] = dict(found.recompute)
    fitting = Plan.model_validate(data)
    check_memory(fitting)
    sets = [[set(stage.recompute) for stage in pipeline.stages] for pipeline in fitting.pipelines]
    assert sets[0][:3] == [{"scores", "softmax"}] * 3 and sets[0][7] == set()
    assert sets[1] == [{"scores", "softmax"}, set(), set(), set()]
    priced, plain = price_plan(fitting), price_plan(plan)
    assert priced.iteration_seconds < 1.01 * plain.iteration_seconds
    first, before = priced.pipelines[0].stages[0], plain.pipelines[0].stages[0]
    assert first.recompute_seconds == pytest.approx(first.backward_seconds - before.backward_seconds)
