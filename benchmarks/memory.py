"""Peak memory measured on real gloo ranks against the planner's prediction, every stage of ten plans.

A rank trains two iterations while every storage that an operation returns is counted until it is freed
(actors/engine/live_memory.py): its model, gradients, optimizer state, activations, messages. The figure of a stage is
that of its fullest rank. The planner's is `tensor_bytes` of the same stage, from the plan alone; it should be 0 to 5 %
more and never less. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from gradient_sync_plans import host_cluster
from rank_processes import run_ranks

from actors.engine.trainer import MEASURED_ITERATIONS, Trainer, TrainerConfig
from actors.job import Training
from actors.text.text import prepare_tokens
from planner.cost.plan_memory import PlanMemory
from planner.model_spec import ModelSpec
from planner.operators import layer_operators
from planner.plan import Dtypes, PipelinePlan, Plan, Precision, StagePlan

MOST_OVER = 0.05
"""Of the measured bytes, what a prediction may be more."""

# What Table 3 of the paper recomputes.
ATTENTION = ("qkv", "scores", "softmax", "attention_dropout")


@dataclass(frozen=True)
class Stage:
    """TP and DP degree, layers, and of how many of them what is recomputed."""

    tp: int
    dp: int
    layers: int
    attention: int = 0
    everything: int = 0


@dataclass(frozen=True)
class Case:
    """One plan: the pipelines' stages; `samples` are those of a micro-batch, alike in all pipelines."""

    family: str
    precision: Precision
    pipelines: Sequence[Sequence[Stage]]
    samples: int = 4
    micro_batches: int = 4
    by_position: bool = False
    shape: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "one device": Case("gpt3", "fp32", [[Stage(1, 1, 6)]]),
    "three stages": Case(
        "llama", "fp32", [[Stage(1, 1, 2), Stage(1, 1, 2), Stage(1, 1, 2)]], micro_batches=6
    ),
    "unlike pipelines": Case("gpt3", "bf16", [[Stage(2, 1, 6)], [Stage(1, 1, 3), Stage(1, 1, 3)]]),
    "tp beside dp": Case("llama", "bf16", [[Stage(2, 1, 6)], [Stage(1, 2, 6)]]),
    "ZeRO-1": Case(
        "gpt3", "fp32", [[Stage(1, 2, 6)], [Stage(1, 1, 3), Stage(1, 1, 3)]], plan={"zero_stage": 1}
    ),
    "ZeRO-2": Case("llama", "bf16", [[Stage(1, 2, 3), Stage(1, 2, 3)]], plan={"zero_stage": 2}),
    "sequence parallel": Case(
        "llama", "fp32", [[Stage(2, 1, 3), Stage(2, 1, 3)]], by_position=True, micro_batches=6
    ),
    "recomputed": Case(
        "gpt3",
        "bf16",
        [[Stage(1, 1, 3, everything=3), Stage(2, 1, 3, everything=3)]],
        shape={"dropout": 0.1},
    ),
    "attention recomputed": Case(
        "llama",
        "fp32",
        [[Stage(1, 1, 3, attention=3), Stage(1, 1, 3, attention=2)]],
        samples=2,
        shape={"max_sequence_length": 256},
    ),
    "fp16, large vocabulary": Case(
        "gpt3", "fp16", [[Stage(2, 1, 6)]], shape={"vocab_size": 8192, "tied_embedding": True}
    ),
}


def model_of(case: Case) -> ModelSpec:
    shape: dict[str, Any] = {
        "name": "memory",
        "family": case.family,
        "layers": 6,
        "hidden_size": 128,
        "heads": 4,
        "vocab_size": 257,
        "max_sequence_length": 128,
    }
    if case.family == "llama":
        shape |= {"kv_heads": 2, "ffn_hidden_size": 352, "tied_embedding": False}
    return ModelSpec(**(shape | case.shape))


def plan_of(case: Case) -> Plan:
    model = model_of(case)
    cluster = host_cluster(sum(stage.tp * stage.dp for stages in case.pipelines for stage in stages))
    devices = iter([device.id for device in cluster.devices])
    pipelines = []
    for index, stages in enumerate(case.pipelines):
        made, first = [], 0
        for number, stage in enumerate(stages):
            counts = dict.fromkeys(ATTENTION, stage.attention) | dict.fromkeys(
                layer_operators(model) if stage.everything else (), stage.everything
            )
            made.append(
                StagePlan(
                    devices=tuple(next(devices) for _ in range(stage.tp * stage.dp)),
                    tp=stage.tp,
                    dp=stage.dp,
                    rows=(case.samples // stage.dp,) * stage.dp,
                    layers=(first, first + stage.layers),
                    embedding=number == 0,
                    head=number == len(stages) - 1,
                    recompute={name: count for name, count in counts.items() if count},
                    sequence_parallel=case.by_position and stage.tp > 1,
                )
            )
            first += stage.layers
        samples = case.samples * case.micro_batches
        pipelines.append(
            PipelinePlan(
                id=index,
                micro_batch_size=case.samples,
                samples=samples,
                local_batch_size=samples,
                stages=tuple(made),
            )
        )
    return Plan(
        model=model,
        cluster=cluster,
        global_batch_size=sum(pipeline.samples for pipeline in pipelines),
        sequence_length=model.max_sequence_length,
        dtypes=Dtypes.for_precision(case.precision),
        pipelines=tuple(pipelines),
        **case.plan,
    )


def config_of(plan: Plan, tokens: Path) -> TrainerConfig:
    training = Training(
        global_batch_size=plan.global_batch_size,
        sequence_length=plan.sequence_length,
        steps=MEASURED_ITERATIONS,
        learning_rate={"peak": 1e-4},  # type: ignore[arg-type]
        precision=plan.dtypes.param,
    )
    return TrainerConfig(plan=plan, training=training, tokens=tokens, timeout_seconds=60)


def peaks(rank: int, world_size: int, store: dist.Store, configs: Sequence[TrainerConfig]) -> list[int]:
    """Peak bytes of this rank under each plan, 0 under those that have fewer ranks."""
    found = []
    for number, config in enumerate(configs):
        if rank >= config.plan.world_size:
            found.append(0)
            continue
        trainer = Trainer(config=config, rank=rank, store=dist.PrefixStore(f"plan{number}", store))
        reports = [trainer.run_iteration(iteration + 1) for iteration in range(MEASURED_ITERATIONS)]
        trainer.close()
        found.append(reports[-1].peak_tensor_bytes)
    return found


def compare(name: str, plan: Plan, measured: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of the table, one a stage, of what each rank measured."""
    memory = PlanMemory(plan)
    rows = []
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            here = [place.rank for place in plan.ranks if (place.pipeline, place.stage) == (index, number)]
            load = memory.load(pipeline=index, stage=number, replica=0)
            predicted, peak = memory.model.tensor_bytes(load), max(measured[rank] for rank in here)
            over = predicted / peak - 1
            rows.append(
                {
                    "plan": name,
                    "stage": f"{index}.{number}",
                    "measured": peak,
                    "predicted": predicted,
                    "over": over,
                }
            )
            print(
                f"{name:22s} {plan.model.family:6s} {plan.dtypes.param:5s} {index}.{number}"
                f"  {stage.tp:2d} {stage.dp:2d} {stage.layer_count:6d} {load.in_flight:9d}"
                f" | {peak / 1e6:11.3f} {predicted / 1e6:12.3f}  {over:+7.2%}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    plans = {name: plan_of(CASES[name]) for name in options.plans}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(5000)))
        tokens = prepare_tokens(text, cache_dir=Path(folder)).path
        configs = [config_of(plan, tokens) for plan in plans.values()]
        by_rank = run_ranks(peaks, max(plan.world_size for plan in plans.values()), configs)
    print(
        "plan                   model  dtype  p.s  tp dp layers in flight | measured MB predicted MB  difference"
    )
    rows = [
        row
        for (name, plan), measured in zip(plans.items(), zip(*by_rank, strict=True), strict=True)
        for row in compare(name, plan, measured)
    ]
    over = [row["over"] for row in rows]
    result = {
        "benchmark": "memory",
        "plans": len(plans),
        "stages": len(rows),
        "least_over": round(min(over), 4),
        "most_over": round(max(over), 4),
        "within": min(over) >= 0 and max(over) <= MOST_OVER,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
