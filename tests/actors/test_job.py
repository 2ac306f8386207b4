"""The Job contract: what a file may say, and one clear line for what it may not."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.job import Checkpointing, Job, LearningRate, parse_job, read_job
from planner.errors import UserError, parse
from planner.plan import Plan
from tests.plans import make_model, make_plan


def job_data(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": "demo",
        "model": "gpt3-nano",
        "data": {"path": "text.txt"},
        "training": {"global_batch_size": 8, "sequence_length": 32, "steps": 5},
    }
    return data | changes


def training(**changes: Any) -> dict[str, Any]:
    return {"training": job_data()["training"] | changes}


def mixture(*weights: Any) -> list[dict[str, Any]]:
    return [{"path": "text.txt", "weight": weight} for weight in weights]


def parsed(tmp_path: Path, **changes: Any) -> Job:
    return parse_job(job_data(**changes), base=tmp_path)


def test_a_short_job_has_defaults(tmp_path: Path) -> None:
    job = parsed(tmp_path)
    assert (job.cluster, job.plan, job.strategy) == ("auto", "auto", "eth")
    assert job.training.precision == "fp32" and job.training.gradient_clip == 1.0
    assert job.texts()[0].path == tmp_path / "text.txt"


def test_paths_start_at_the_job_file(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    (folder / "cluster.yaml").write_text("nodes: [{devices: [{type: A100, count: 2}]}]")
    (folder / "job.yaml").write_text(yaml.safe_dump(job_data(cluster="cluster.yaml")))
    job = read_job(folder / "job.yaml")
    assert not isinstance(job.cluster, str) and job.cluster.counts == {"A100": 2}
    assert job.texts()[0].path == folder / "text.txt"


def test_what_is_held_out_is_a_share_or_a_text(tmp_path: Path) -> None:
    assert parsed(tmp_path).data.held_out == 0
    assert parsed(tmp_path, data={"path": "text.txt", "held_out": 0.25}).data.held_out == 0.25
    job = parsed(tmp_path, data={"path": "text.txt", "held_out": {"path": "other.txt"}})
    held_out = job.held_out_text()
    assert held_out is not None and held_out.path == tmp_path / "other.txt"


@pytest.mark.parametrize("field", ["document_attention", "packing"])
def test_boundaries_of_documents_do_nothing_unless_asked(tmp_path: Path, field: str) -> None:
    assert getattr(parsed(tmp_path).data, field) is False
    assert getattr(parsed(tmp_path, data={"path": "text.txt", field: True}).data, field) is True
    with pytest.raises(UserError, match=rf"data\.{field}"):
        parsed(tmp_path, data={"path": "text.txt", field: "inside"})


@pytest.mark.parametrize("value", [1, -0.1, True, "0.1", None, [0.1], float("nan")])
def test_any_other_held_out_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(UserError, match=r"data\.held_out: held_out = .* must be a share of the samples"):
        parsed(tmp_path, data={"path": "text.txt", "held_out": value})


def test_a_plan_file_is_read_and_must_agree(tmp_path: Path) -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)]], samples=[8])
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    model = json.loads(plan.model.model_dump_json())
    same = training(sequence_length=32, precision="bf16")
    job = parsed(tmp_path, plan="plan.json", model=model, **same)
    assert job.plan == plan
    with pytest.raises(UserError, match=r"training.global_batch_size = 9 \(the plan says 8\) differs"):
        parsed(tmp_path, plan="plan.json", model=model, training=same["training"] | {"global_batch_size": 9})
    with pytest.raises(UserError, match="model differs from the plan's"):
        parsed(tmp_path, plan="plan.json", **same)
    with pytest.raises(UserError, match=r"training\.precision = fp32"):
        parsed(tmp_path, plan="plan.json", model=model, **training())
    with pytest.raises(UserError, match="cluster differs"):
        parsed(tmp_path, plan="plan.json", model=model, cluster="1x1:A100", **same)


def test_what_the_job_states_of_synchronisation_must_agree_with_its_plan(tmp_path: Path) -> None:
    plan = make_plan(
        make_model(),
        [[(1, 1, 4)]],
        samples=[8],
        gradient_sync="tensor",
        overlap=False,
        dtypes={"wire": "bf16"},
    )
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    common = {
        "plan": "plan.json",
        "model": json.loads(plan.model.model_dump_json()),
        **training(sequence_length=32, precision="bf16"),
    }
    unstated = parsed(tmp_path, **common)
    assert isinstance(unstated.plan, Plan) and unstated.plan.gradient_sync == "tensor"
    agreeing = {"gradient_sync": "tensor", "wire_dtype": "bf16", "overlap": False}
    parsed(tmp_path, runtime=agreeing, **common)
    for field, other in {"gradient_sync": "block", "wire_dtype": "fp32", "overlap": True}.items():
        with pytest.raises(
            UserError, match=rf"runtime.{field} = {other} \(the plan says {agreeing[field]}\)"
        ):
            parsed(tmp_path, runtime=agreeing | {field: other}, **common)


def test_zero_stages_leave_a_way(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"zero_stages = \[1\]: runtime.gradient_sync = 'tensor' shares nothing"
    ):
        parsed(tmp_path, zero_stages=[1], runtime={"gradient_sync": "tensor"})
    plan = make_plan(make_model(), [[(1, 1, 4)]], samples=[8], zero_stage=1)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    model = json.loads(plan.model.model_dump_json())
    same = training(sequence_length=32, precision="bf16")
    assert parsed(tmp_path, plan="plan.json", model=model, zero_stages=[1], **same).plan == plan
    with pytest.raises(UserError, match=r"zero_stages = \[0, 2\] leaves out the plan's zero_stage = 1"):
        parsed(tmp_path, plan="plan.json", model=model, zero_stages=[0, 2], **same)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "no spaces"}, "name = 'no spaces'"),
        ({"colour": 1}, "colour is not a known key"),
        ({"model": "gpt9"}, "presets: gpt3-1.3b"),
        ({"cluster": "1x1:B52"}, "'B52' is not known"),
        ({"plan": "none.json"}, "plan file"),
        ({"strategy": "meti"}, "strategy = 'meti' is not known; use one of eth, hexiscale, metis"),
        (training(steps=0), "training.steps = 0"),
        (training(sequence_length=1000), "training.sequence_length = 1000 is more than the model's"),
        (training(precision="fp8"), "training.precision = 'fp8'"),
        (training(optimizer={"name": "sgd", "betas": [0.9, 0.9]}), "betas is not an option of sgd"),
        (training(optimizer={"momentum": 0.5}), "momentum is not an option of adamw"),
        (training(learning_rate={"peak": 1e-3, "schedule": "wsd"}), "wsd needs decay_steps"),
        (training(learning_rate={"peak": 1e-3, "decay_steps": 5}), "the other schedules have none"),
        ({"runtime": {"on_nan": "pray"}}, "runtime.on_nan = 'pray'"),
        (training(learning_rate="fast"), "learning_rate = 'fast': write a number, or a mapping with peak"),
        (training(seed=2**63), "training.seed = 9223372036854775808: input should be less than"),
        (
            {"runtime": {"timeout_seconds": 1e9}},
            "runtime.timeout_seconds = 1000000000.0: input should be less",
        ),
        ({"runtime": None}, "runtime = None: write keys and values below it"),
        ({"data": "text.txt"}, "data = 'text.txt': write keys and values below it"),
        ({"name": 7}, "name = 7: YAML reads this as something other than text; put it in quotes"),
        (training(learning_rate=-1), "training.learning_rate.peak = -1"),
        (training(optimizer={"betas": [0.9, 1.0]}), "both must be at least 0 and below 1"),
        ({"data": {"path": ""}}, "data.path"),
        ({"data": {}}, "data: path is missing; add it, or a mixture of texts"),
        (
            {"data": {"path": "a", "mixture": mixture(1, 2)}},
            "path = 'a' stands beside mixture, whose sources",
        ),
        (
            {"data": {"field": "a", "mixture": mixture(1, 2)}},
            "field = 'a' stands beside mixture, whose sources",
        ),
        ({"data": {"mixture": mixture(1)}}, "mixture has 1 source; give two or more, or one as path"),
        ({"data": {"mixture": mixture(1, 0)}}, "mixture.1.weight = 0 must be above 0; raise it"),
        ({"data": {"mixture": mixture(1, -2)}}, "mixture.1.weight = -2 must be above 0; raise it"),
        ({"data": {"mixture": mixture(1e-9, 1)}}, "mixture.0.weight = 1e-09 is less than 1e-06 of all"),
        ({"data": {"mixture": mixture(1, "much")}}, "data.mixture.1.weight = 'much'"),
        ({"data": {"mixture": [{"path": "a"}, {"weight": 1}]}}, "data.mixture.0.weight is missing; add it"),
        ({"emulation": {}, "cluster": "1x1:A100"}, "no node of the cluster says emulate: true"),
        (training(learning_rate=float("inf")), "training.learning_rate.peak = inf: input should be a finite"),
        (training(global_batch_size=10**20), "training.global_batch_size = 1000000"),
        ({"plan": ["x"]}, "plan = ['x']: write auto, a file or a mapping"),
        ({"plan": {"version": 1}}, "plan: model is missing; add it"),
        ({"emulation": {"time_scale": 0}}, "time_scale = 0"),
        ({"emulation": {"time_scale": "fast"}}, "emulation.time_scale: time_scale = 'fast' must be a number"),
        ({"emulation": {"time_scale": float("nan")}}, "time_scale = nan must be a number above 0, or auto"),
        ({"evaluation": {"every": 10}}, "evaluation.every = 10, but nothing is held out to evaluate on; set"),
        ({"evaluation": {"every": 0}}, "evaluation.every = 0"),
        ({"runtime": {"gradient_sync": "ring"}}, "runtime.gradient_sync = 'ring'"),
        ({"runtime": {"wire_dtype": "fp16"}}, "runtime.wire_dtype = 'fp16'"),
    ],
)
def test_a_wrong_job_is_one_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        parsed(tmp_path, **changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    data = job_data()
    del data["training"]
    with pytest.raises(UserError, match="training is missing; add it"):
        parse_job(data, base=tmp_path)
    with pytest.raises(UserError, match="a job is a mapping"):
        parse_job([1], base=tmp_path)
    with pytest.raises(UserError, match=r"job file .* does not exist"):
        read_job(tmp_path / "none.yaml")


def test_learning_rates_warm_up_and_end() -> None:
    rate = LearningRate(peak=1.0, schedule="cosine", warmup_steps=4, minimum=0.1)
    rates = [rate.at(i, steps=10) for i in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    linear = LearningRate(peak=1.0, schedule="linear", minimum=0.0)
    assert [linear.at(i, steps=4) for i in (1, 2, 4)] == pytest.approx([0.75, 0.5, 0.0])
    assert LearningRate(peak=0.3).at(99, steps=100) == 0.3
    stable = LearningRate(peak=1.0, schedule="wsd", warmup_steps=2, decay_steps=4, minimum=0.2)
    found = [stable.at(i, steps=10) for i in range(1, 11)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_a_home_folder_may_be_written_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    job = parsed(tmp_path / "jobs", data={"path": "~/text.txt"})
    assert job.texts()[0].path == tmp_path / "home" / "text.txt"


def test_a_bare_number_is_a_constant_rate(tmp_path: Path) -> None:
    job = parsed(tmp_path, **training(learning_rate=0.01))
    assert job.training.learning_rate == LearningRate(peak=0.01)


@pytest.mark.parametrize(
    ("every", "seconds"), [(5, None), (None, None), ("10 min", 600.0), ("1.5 h", 5400.0), ("30 s", 30.0)]
)
def test_saves_come_every_so_many_iterations_or_seconds(
    every: int | str | None, seconds: float | None
) -> None:
    settings = parse(Checkpointing, {"every": every}, source="job")
    assert settings.every == every and settings.every_seconds == seconds
    assert parse(Checkpointing, settings.model_dump(), source="job") == settings


@pytest.mark.parametrize("every", [0, -3, True, 2.5, "soon", "0 s", "-1 s", [5]])
def test_saves_that_come_never_are_refused(every: object) -> None:
    with pytest.raises(UserError, match=r"checkpoint: .*(10 min|is not a quantity|is not known)"):
        parse(Checkpointing, {"every": every}, source="checkpoint")
