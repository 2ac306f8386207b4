"""From a job to the plan that runs, as far as no Ray is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.engine.documents import PLAIN, Documents
from actors.job import Job, read_job
from actors.planning import Prepared, least_sharded, make_plan, plan_request, prepare
from planner.errors import UserError
from planner.plan import Plan
from planner.units import parse_bandwidth
from tests.e2e.runs import write_job
from tests.plans import make_model
from tests.plans import make_plan as plan_of_stages

FAST = {"bandwidth": "100 Tbps", "latency": 0.0}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def job_with(folder: Path, **changes: Any) -> Job:
    return read_job(write_job(folder, steps=2, **changes))


def test_a_job_s_own_plan_runs_priced_and_at_the_scale_it_states(tmp_path: Path) -> None:
    job = job_with(tmp_path, time_scale=1234.0)
    plan = make_plan(job, prepare(job), equal_batches=False)
    assert plan.emulation.time_scale == 1234.0
    assert plan.predicted is not None and plan.predicted.simulated_seconds is not None
    assert plan.predicted.simulated_seconds <= plan.predicted.iteration_seconds * (1 + 1e-9)


def test_the_job_says_how_gradients_travel_where_its_plan_does_not(tmp_path: Path) -> None:
    for stated, overlap in (({}, True), ({"overlap": False}, False)):
        job = job_with(tmp_path, time_scale=1.0, runtime=stated)
        plan = make_plan(job, prepare(job), equal_batches=False)
        assert plan.overlap is overlap
        config = prepare(job).trainer_config(job, plan)
        assert not config.deterministic
    job = job_with(tmp_path, time_scale=1.0, runtime={"deterministic": True})
    assert prepare(job).trainer_config(job, plan).deterministic
    request = plan_request(
        job_with(tmp_path, plan="auto", cluster="1x2:910B2", runtime={"wire_dtype": "bf16"})
    )
    assert (request.dtypes.param, request.dtypes.wire) == (job.training.precision, "bf16")
    assert (request.recompute, request.zero_stages) == (True, (0, 1, 2))
    by_tensor = job_with(tmp_path, plan="auto", cluster="1x2:910B2", runtime={"gradient_sync": "tensor"})
    assert plan_request(by_tensor).zero_stages == (0,)
    one = job_with(tmp_path, plan="auto", cluster="1x2:910B2", zero_stages=[1])
    assert plan_request(one).zero_stages == (1,)


def test_a_plan_shards_nothing_that_is_not_worth_it() -> None:
    """One device has nobody to share with; without replicas ZeRO-2 is ZeRO-1; beside another pipeline ZeRO-1 saves
    half of the update."""
    alone = plan_of_stages(make_model(), [[(1, 1, 4)]], zero_stage=2)
    assert least_sharded(alone, (0, 1, 2)).zero_stage == 0
    assert least_sharded(alone, (1, 2)).zero_stage == 1
    pair = plan_of_stages(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], zero_stage=2)
    assert least_sharded(pair, (1, 2)).zero_stage == 1
    fast_links = {"bandwidth": "100 Tbps", "latency": 0}
    cluster = pair.cluster.model_dump() | {"links": {"intra_node": fast_links, "inter_node": fast_links}}
    pair = Plan.model_validate(pair.model_dump() | {"cluster": cluster})
    assert least_sharded(pair, (0, 1, 2)).zero_stage == 1


def test_the_job_s_emulation_comes_before_the_plan_s(tmp_path: Path) -> None:
    emulation = {"time_scale": 50.0, "memory_scale": 3.0, "links": {"intra_node": FAST, "inter_node": FAST}}
    job = job_with(tmp_path, emulation=emulation)
    plan = make_plan(job, prepare(job), equal_batches=False)
    assert (plan.emulation.time_scale, plan.emulation.memory_scale) == (50.0, 3.0)
    assert plan.cluster.links.inter_node.bandwidth == parse_bandwidth("100 Tbps")


def test_equal_batches_change_the_samples_and_nothing_else(tmp_path: Path) -> None:
    job = job_with(tmp_path)
    plan = make_plan(job, prepare(job), equal_batches=False)
    equal = make_plan(job, prepare(job, equal_batches=True), equal_batches=True)
    assert [p.samples for p in plan.pipelines] == [5, 3]
    assert [p.samples for p in equal.pipelines] == [4, 4]
    assert [p.stages for p in equal.pipelines] == [p.stages for p in plan.pipelines]


def test_the_cluster_s_own_links_must_name_its_types(tmp_path: Path) -> None:
    links = {"overrides": {"A100/H100": FAST}}
    job = job_with(tmp_path, emulation={"links": links})
    with pytest.raises(UserError, match="names 'H100', which the cluster does not hold"):
        prepare(job)


def test_the_token_file_is_made_once(tmp_path: Path) -> None:
    job = job_with(tmp_path)
    first = prepare(job).tokens
    stamp = first.stat().st_mtime_ns
    assert prepare(job).tokens == first
    assert first.stat().st_mtime_ns == stamp


def test_a_mixture_is_prepared_as_one_and_its_short_sources_are_named(tmp_path: Path) -> None:
    job = job_with(tmp_path)
    (tmp_path / "few.txt").write_text("a few words of text. " * 20)

    def mixed(**settings: Any) -> Prepared:
        sources = [{"path": str(job.texts()[0].path), "weight": 3}, {"path": "few.txt", "weight": 1}]
        return prepare(job_with(tmp_path, data={"mixture": sources, **settings}))

    identity = mixed(held_out=0.1).data_identity()
    assert (identity.weights, identity.held_out) == ((3, 1), "0.1")
    assert mixed().data_identity().tokens == prepare(job).data_identity().tokens + 421
    (tmp_path / "few.txt").write_text("few")
    with pytest.raises(UserError, match=r"but data\.mixture\.1\.path = '.*few\.txt' holds 4; shorten"):
        mixed()
    (tmp_path / "few.txt").write_text("a" * (job.training.sequence_length + 1))
    with pytest.raises(UserError, match=r"on: data\.mixture\.1\.path = '.*few\.txt' holds 1 sample; shorten"):
        mixed(held_out=0.1)


def test_what_boundaries_of_documents_do_reaches_ranks_and_checkpoints(tmp_path: Path) -> None:
    job = job_with(tmp_path)
    text = {"path": str(job.texts()[0].path)}
    for settings, expected in (
        ({}, PLAIN),
        ({"document_attention": True}, Documents(attention=True)),
        ({"document_attention": True, "packing": True}, Documents(attention=True, packing=True)),
    ):
        prepared = prepare(job_with(tmp_path, data=text | settings))
        assert prepared.plan is not None
        assert prepared.trainer_config(job, prepared.plan).documents == expected
        identity = prepared.data_identity()
        assert (identity.document_attention, identity.packing) == (expected.attention, expected.packing)


def test_packed_samples_are_what_a_share_is_held_out_of(tmp_path: Path) -> None:
    length = job_with(tmp_path).training.sequence_length
    (tmp_path / "few.txt").write_text("a" * (length + 1))
    with pytest.raises(UserError, match="leaves nothing to train on: the text holds 1 sample"):
        prepare(job_with(tmp_path, data={"path": "few.txt", "held_out": 0.1}))
    # A document that is longer than a sample is cut into two.
    prepared = prepare(job_with(tmp_path, data={"path": "few.txt", "held_out": 0.1, "packing": True}))
    assert prepared.held_out.share == 0.1
