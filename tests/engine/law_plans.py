"""Plans for the laws: hand-picked ones, each for a reason, and a family that hypothesis draws from."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from planner.cluster import Cluster
from planner.model_spec import ModelSpec
from planner.operators import layer_operators
from planner.plan import Plan
from tests.plans import Degrees, make_llama, make_model, make_plan

FP32: dict[str, Any] = {"param": "fp32"}
MOST_RANKS = 6

# 257 entries: no TP degree divides them. Twelve heads: 2, 3, 4 and 6 do.
MODEL = make_model(max_sequence_length=16)
# Two queries share a key: 2, 3 and 6 ranks can share the keys. Slow pairs of a head are scaled.
LLAMA = make_llama(
    hidden_size=48, rope_scaling={"type": "llama3", "factor": 8, "original_sequence_length": 16}
)
DROPPED_LLAMA = make_llama(layers=2, dropout=0.1)


def cpu_cluster(*counts: int) -> Cluster:
    """One node; devices of type `kind0`, `kind1`, .., so many of each. All are the host's processor."""
    figures = {
        "backend": "cpu",
        "peak_tflops": {"fp32": 1},
        "memory_bytes": "1 GiB",
        "memory_bandwidth": "10 GB/s",
    }
    devices = [{"type": f"kind{index}", "count": count} for index, count in enumerate(counts)]
    types = {f"kind{index}": figures for index in range(len(counts))}
    return Cluster.model_validate({"device_types": types, "nodes": [{"name": "host", "devices": devices}]})


def plan_of(*pipelines: list[Degrees], model: ModelSpec = MODEL, **fields: Any) -> Plan:
    """A plan for host processors in fp32; see `make_plan`."""
    count = sum(tp * dp for stages in pipelines for tp, dp, _ in stages)
    return make_plan(model, pipelines, cluster=cpu_cluster(count), **({"dtypes": FP32} | fields))


def on_nodes(plan: Plan, *counts: int) -> Plan:
    """The same plan on nodes whose own links are much faster than those between them."""
    cluster = cpu_cluster(1).model_dump()
    nodes = [{"name": f"n{i}", "devices": [{"type": "kind0", "count": n}]} for i, n in enumerate(counts)]
    links = {
        "intra_node": {"bandwidth": 1e11, "latency": 0.0},
        "inter_node": {"bandwidth": 1e8, "latency": 1e-4},
    }
    data = plan.model_dump()
    devices = iter([f"n{i}/{k}" for i, n in enumerate(counts) for k in range(n)])
    for stage in (stage for pipeline in data["pipelines"] for stage in pipeline["stages"]):
        stage["devices"] = [next(devices) for _ in stage["devices"]]
    return Plan.model_validate(data | {"cluster": cluster | {"nodes": nodes, "links": links}})


def slow_between_stages(plan: Plan) -> Plan:
    """The same plan, each stage on a node of its own: what several TP ranks receive comes in slices."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return on_nodes(plan, *(len(stage.devices) for stage in stages))


def uneven_rows() -> Plan:
    """Four replicas of two device types that take unlike shares hand to two, and those to two TP ranks."""
    plan = plan_of([(1, 4, 2), (1, 2, 2)], micro_batch_sizes=[8], samples=[16])
    data = plan.model_dump()
    data["cluster"] = cpu_cluster(2, 4).model_dump()
    first, second = data["pipelines"][0]["stages"]
    first["rows"] = [1, 1, 3, 3]
    second["rows"] = [4, 4]
    return Plan.model_validate(data)


def with_recompute(plan: Plan, *counts: dict[str, int]) -> Plan:
    """The same plan whose stages, over all pipelines in order, recompute what `counts` say."""
    data = plan.model_dump()
    stages = [stage for pipeline in data["pipelines"] for stage in pipeline["stages"]]
    for stage, wanted in zip(stages, counts, strict=True):
        stage["recompute"] = wanted
    return Plan.model_validate(data)


def by_position(plan: Plan) -> Plan:
    """The same plan whose stages with TP cut activations by position."""
    data = plan.model_dump()
    for stage in (stage for pipeline in data["pipelines"] for stage in pipeline["stages"]):
        stage["sequence_parallel"] = stage["tp"] > 1
    return Plan.model_validate(data)


def whole_layers(model: ModelSpec, layers: int) -> dict[str, int]:
    """Full recomputation."""
    return dict.fromkeys(layer_operators(model), layers)


HAND_PICKED: dict[str, Plan] = {
    "one device": plan_of([(1, 1, 4)]),
    "two stages, embedding tied over them": plan_of([(1, 1, 2), (1, 1, 2)], samples=[5]),
    "vocabulary cut in unequal shards": plan_of([(2, 1, 4)], samples=[3]),
    "replicas": plan_of([(1, 2, 4)]),
    "two unlike pipelines": plan_of([(1, 1, 4)], [(1, 1, 1), (1, 1, 3)], samples=[3, 5]),
    "tensor parallel against data parallel": plan_of([(2, 1, 4)], [(1, 2, 4)], samples=[2, 6]),
    "three pipelines of unlike layers": plan_of(
        [(1, 1, 4)], [(1, 1, 1), (1, 1, 3)], [(1, 1, 2), (2, 1, 2)], samples=[4, 3, 2]
    ),
    "four replicas hand to two": plan_of([(1, 4, 2), (1, 2, 2)], micro_batch_sizes=[4], samples=[12]),
    "rows by device type": uneven_rows(),
    "fewer micro-batches than stages": plan_of(
        [(1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)], [(1, 1, 2), (1, 1, 2)], samples=[2, 1]
    ),
    "surplus samples masked": plan_of(
        [(1, 2, 2), (1, 1, 2)], [(1, 1, 4)], micro_batch_sizes=[4, 3], samples=[5, 4]
    ),
    "degrees that do not divide each other": plan_of([(3, 1, 2), (1, 1, 2)], [(2, 1, 4)], samples=[3, 2]),
    "stages without layers, head apart": plan_of(
        [(1, 1, 0), (2, 1, 4), (1, 1, 0)],
        model=make_model(max_sequence_length=16, tied_embedding=False),
        samples=[3],
    ),
    "four heads on four ranks, unlike replicas": plan_of(
        [(4, 1, 2)], [(1, 2, 2)], model=make_model(layers=2, hidden_size=32, heads=4), samples=[1, 2]
    ),
    "llama on one device": plan_of([(1, 1, 4)], model=LLAMA),
    "llama, keys shared by three ranks, vocabulary cut": plan_of([(3, 1, 4)], model=LLAMA, samples=[3]),
    "llama, two unlike pipelines": plan_of(
        [(2, 1, 3), (1, 2, 1)], [(1, 1, 1), (1, 1, 3)], model=LLAMA, samples=[4, 3]
    ),
    "llama, tied over stages, one key a rank, linear scaling": plan_of(
        [(2, 1, 1), (1, 2, 1)],
        [(1, 1, 2)],
        model=make_llama(
            layers=2,
            kv_heads=2,
            tied_embedding=True,
            rope_base=500.0,
            rope_scaling={"type": "linear", "factor": 2},
        ),
        samples=[3, 2],
    ),
    "dropout, heads cut against replicas": plan_of(
        [(3, 1, 1), (1, 1, 3)],
        [(1, 2, 4)],
        model=make_model(max_sequence_length=16, dropout=0.2),
        micro_batch_sizes=[2, 4],
        samples=[3, 5],
    ),
    "dropout in llama, keys shared and cut": plan_of(
        [(2, 1, 2)],
        [(1, 1, 1), (1, 2, 1)],
        model=DROPPED_LLAMA,
        micro_batch_sizes=[3, 2],
        samples=[4, 3],
    ),
    "recomputation as in the paper's Table 3, unlike in each stage": with_recompute(
        plan_of([(2, 1, 3), (1, 2, 1)], [(1, 1, 4)], samples=[3, 5]),
        {"softmax": 2, "attention_dropout": 3, "scores": 1},
        {"qkv": 1, "mlp_up": 1, "activation": 1},
        whole_layers(MODEL, 2),
    ),
    "recomputation and dropout in llama": with_recompute(
        plan_of([(2, 1, 2)], [(1, 1, 1), (1, 2, 1)], model=DROPPED_LLAMA, samples=[4, 3]),
        whole_layers(DROPPED_LLAMA, 1) | {"softmax": 2},
        {"rotary": 1, "attention_dropout": 1, "attention_residual": 1, "mlp_norm": 1},
        whole_layers(DROPPED_LLAMA, 1),
    ),
}


@st.composite
def _stages(draw: st.DrawFn, *, layers: int, most_ranks: int, degrees: tuple[int, ...]) -> list[Degrees]:
    count = draw(st.integers(1, min(3, most_ranks, layers)))
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), min_size=count - 1, max_size=count - 1)))
    bounds = [0, *cuts, layers]
    stages, left = [], most_ranks
    for number in range(count):
        room = left - (count - number - 1)
        tp = draw(st.sampled_from([degree for degree in degrees if degree <= room]))
        dp = draw(st.integers(1, min(3, room // tp)))
        stages.append((tp, dp, bounds[number + 1] - bounds[number]))
        left -= tp * dp
    return stages


@st.composite
def drawn_models(draw: st.DrawFn) -> ModelSpec:
    """Both families, heads tied or not, vocabularies that some TP degrees divide."""
    fields: dict[str, Any] = {
        "layers": draw(st.integers(2, 5)),
        "vocab_size": draw(st.sampled_from([257, 258, 263])),
        "tied_embedding": draw(st.booleans()),
        "max_sequence_length": 16,
        "dropout": draw(st.sampled_from([0.0, 0.1])),
    }
    if not draw(st.booleans()):
        return make_model(**fields)
    return make_llama(kv_heads=draw(st.sampled_from([12, 6])), **fields)


@st.composite
def drawn_plans(draw: st.DrawFn, *, like: Plan | None = None) -> Plan:
    """Any plan of two to six ranks: unlike pipelines, stages, degrees, micro-batches and surpluses.

    With `like`, a plan for the same model and global batch.
    """
    model = like.model if like else draw(drawn_models())
    degrees = tuple(degree for degree in (1, 2, 3, 4) if model.kv_heads % degree == 0)
    pipelines: list[list[Degrees]] = []
    left = MOST_RANKS
    for number in range(draw(st.integers(1, min(3, like.global_batch_size) if like else 3))):
        # The first pipeline leaves a rank to each that may follow.
        room = max(1, left - max(0, 2 - number))
        pipelines.append(draw(_stages(layers=model.layers, most_ranks=room, degrees=degrees)))
        left -= sum(tp * dp for tp, dp, _ in pipelines[-1])
        if left < 1:
            break
    sizes, samples = list[int](), list[int]()
    for stages in pipelines:
        common = next(size for size in range(1, 37) if all(size % dp == 0 for _, dp, _ in stages))
        sizes.append(common * draw(st.integers(1, 2)))
        if like:
            left_over = like.global_batch_size - sum(samples) - (len(pipelines) - len(samples) - 1)
            last = len(samples) == len(pipelines) - 1
            samples.append(left_over if last else draw(st.integers(1, left_over)))
        else:
            samples.append(draw(st.integers(1, 3 * sizes[-1])))
    plan = plan_of(*pipelines, model=model, micro_batch_sizes=sizes, samples=samples)
    counts = [draw(_recompute(model, stage[2])) for stages in pipelines for stage in stages]
    return with_recompute(plan, *counts)


def _recompute(model: ModelSpec, layers: int) -> st.SearchStrategy[dict[str, int]]:
    """Some operators in some of a stage's layers; often none at all."""
    operators = st.sampled_from(layer_operators(model))
    return st.one_of(st.just({}), st.dictionaries(operators, st.integers(0, layers), max_size=6))
