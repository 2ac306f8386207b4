"""The list of process groups: pure, the same everywhere, and no larger than needed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from hypothesis import given, settings

from actors.engine.process_groups import ProcessGroups, group_specs
from planner.gradient_blocks import gradient_blocks
from planner.plan import Plan
from tests.engine.law_plans import drawn_plans, plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import leave_pool_groups


@settings(max_examples=40, deadline=None)
@given(plan=drawn_plans())
def test_every_need_of_a_plan_has_one_group(plan: Plan) -> None:
    specs = group_specs(plan)
    assert len({spec.name for spec in specs}) == len(specs)
    assert all(len(spec.ranks) > 1 and list(spec.ranks) == sorted(set(spec.ranks)) for spec in specs)
    holders = [spec.ranks for spec in specs if spec.name.startswith("reduction")]
    needed = {block.holders for block in gradient_blocks(plan) if len(block.holders) > 1}
    assert sorted(holders) == sorted(needed)
    tensor_parallel = [spec for spec in specs if spec.name.startswith("tp")]
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    assert len(tensor_parallel) == sum(stage.dp for stage in stages if stage.tp > 1)
    exchanges = [spec for spec in specs if spec.name.startswith(("activations", "gradients"))]
    assert len(exchanges) == 2 * sum(len(pipeline.stages) > 1 for pipeline in plan.pipelines)


def _sums(rank: int, plan: Plan) -> dict[tuple[int, ...], float]:
    store = leave_pool_groups(rank)
    groups = ProcessGroups.open(
        plan=plan,
        rank=rank,
        store=store,
        timeout_seconds=30,
        device=torch.device("cpu"),
    )
    sums = {}
    for ranks, group in groups.reductions().items():
        value = torch.tensor([float(2**rank)])
        dist.all_reduce(value, group=group)
        sums[ranks] = float(value)
    mesh = groups.tp_mesh(plan.ranks[rank], torch.device("cpu"))
    assert (mesh is None) == (plan.pipelines[plan.ranks[rank].pipeline].stages[0].tp == 1)
    groups.close()
    assert not dist.is_initialized()
    return sums


def test_ranks_of_unlike_stages_meet_in_their_groups(rank_pool: RankPool) -> None:
    plan = plan_of([(2, 1, 4)], [(1, 2, 4)], [(1, 1, 4)])
    for _ in range(2):
        outcomes = rank_pool.run(_sums, plan, world_size=plan.world_size)
        for rank, sums in enumerate(outcomes):
            assert all(rank in ranks for ranks in sums)
            assert sums == {ranks: float(sum(2**other for other in ranks)) for ranks in sums}
            assert sums
