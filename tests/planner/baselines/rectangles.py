"""Every rectangle TP x PP x DP with equal layers, device by named device, each stage with activations whole or cut
by position; shares no code with the strategy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from planner.cost.price import check_memory, price_plan
from planner.errors import UserError
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.request import PlanRequest


def prices_by_rectangle(
    request: PlanRequest, *, micro_batch_sizes: Sequence[int]
) -> dict[tuple[int, int, int, int], float]:
    """The least price of every (tp, pp, dp, micro-batch size) over all ways to place its TP groups."""
    best: dict[tuple[int, int, int, int], float] = {}
    model = request.model
    degrees = [tp for tp in range(1, 9) if model.heads % tp == 0 and model.ffn_hidden_size % tp == 0]
    for tp in degrees:
        groups = list(_groups(request, tp))
        for pp, dp, size in itertools.product(
            range(1, model.layers + 1), range(1, len(groups) + 1), micro_batch_sizes
        ):
            if model.layers % pp or pp * dp > len(groups) or request.global_batch_size % (dp * size):
                continue
            for placed in itertools.permutations(groups, pp * dp):
                key = (tp, pp, dp, size)
                for cuts in itertools.product((False, True) if tp > 1 else (False,), repeat=pp):
                    price = _price(request, placed, tp, pp, dp, size, cuts)
                    best[key] = min(best.get(key, float("inf")), price)
    return best


def _groups(request: PlanRequest, tp: int) -> Iterator[tuple[str, ...]]:
    """Disjoint TP groups inside a node and a type."""
    for node in request.cluster.nodes:
        for type_ in request.cluster.counts:
            ids = [d.id for d in request.cluster.devices if (d.node, d.type) == (node.name, type_)]
            for start in range(0, len(ids) - tp + 1, tp):
                yield tuple(ids[start : start + tp])


def _price(
    request: PlanRequest,
    placed: Sequence[tuple[str, ...]],
    tp: int,
    pp: int,
    dp: int,
    size: int,
    cuts: Sequence[bool],
) -> float:
    """inf if it does not fit. `cuts`: of each stage, whether it is cut by position."""
    layers, samples = request.model.layers // pp, request.global_batch_size // dp
    pipelines = tuple(
        PipelinePlan(
            id=replica,
            micro_batch_size=size,
            samples=samples,
            local_batch_size=samples,
            stages=tuple(
                StagePlan(
                    devices=placed[replica * pp + stage],
                    tp=tp,
                    dp=1,
                    rows=(size,),
                    layers=(stage * layers, (stage + 1) * layers),
                    embedding=stage == 0,
                    head=stage == pp - 1,
                    sequence_parallel=cuts[stage],
                )
                for stage in range(pp)
            ),
        )
        for replica in range(dp)
    )
    used = {device for group in placed for device in group}
    plan = Plan(
        model=request.model,
        cluster=request.cluster,
        global_batch_size=request.global_batch_size,
        sequence_length=request.sequence_length,
        dtypes=request.dtypes,
        idle_devices=tuple(d.id for d in request.cluster.devices if d.id not in used),
        pipelines=pipelines,
    )
    try:
        check_memory(plan)
    except UserError:
        return float("inf")
    return price_plan(plan).iteration_seconds
