"""What the benchmarks share that compare the engine with another way to train the same model, in turns."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gradient_sync_plans import Degrees, host_cluster, make_plan

from actors.job import Training
from actors.text.text import prepare_tokens
from planner.model_spec import ModelSpec
from planner.plan import Plan

TARGET = 0.97
"""The least ratio of tokens a second, engine over peer."""


@dataclass(frozen=True)
class Shape:
    """Layers, hidden size, tokens of a sample, samples of a micro-batch and micro-batches of a device."""

    layers: int
    hidden: int
    sequence: int
    size: int
    count: int


def host_plan(shape: Shape, degrees: Degrees, *, overlap: bool = False, **fields: Any) -> Plan:
    """Alike devices that are the host's processor. Every replica has `size` rows of each micro-batch.

    Args:
        degrees: (tp, dp) of each stage of each pipeline.
        fields: of the ModelSpec.
    """
    model = ModelSpec.model_validate(
        {
            "name": "paired",
            "layers": shape.layers,
            "hidden_size": shape.hidden,
            "heads": 4,
            "vocab_size": 257,
            "max_sequence_length": shape.sequence,
        }
        | fields
    )
    devices = sum(tp * dp for stages in degrees for tp, dp in stages)
    rng = random.Random(0)
    plan = make_plan(model, degrees, host_cluster(devices), rng, samples=2 * shape.count, overlap=overlap)
    data = plan.model_dump()
    for pipeline in data["pipelines"]:
        stages = pipeline["stages"]
        most = max(stage["dp"] for stage in stages)
        pipeline["micro_batch_size"] = shape.size * most
        pipeline["samples"] = pipeline["local_batch_size"] = shape.size * most * shape.count
        for number, stage in enumerate(stages):
            stage["rows"] = [shape.size * most // stage["dp"]] * stage["dp"]
            stage["layers"] = [shape.layers * n // len(stages) for n in (number, number + 1)]
    data["global_batch_size"] = sum(pipeline["samples"] for pipeline in data["pipelines"])
    return Plan.model_validate(data)


def training_of(plan: Plan) -> Training:
    """AdamW at a constant rate, clipped; as many steps as anyone may take."""
    return Training(
        global_batch_size=plan.global_batch_size,
        sequence_length=plan.sequence_length,
        steps=10**6,
        learning_rate={"peak": 1e-4},  # type: ignore[arg-type]
    )


def torch_adamw(
    parameters: Iterable[torch.nn.Parameter], training: Training, **options: Any
) -> torch.optim.AdamW:
    """torch's AdamW with the job's settings; norms and biases do not decay."""
    groups: dict[tuple[bool, type], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        # By type as well: operations on lists take no mixture of plain and distributed tensors.
        groups.setdefault((parameter.dim() > 1, type(parameter.data)), []).append(parameter)
    settings = training.optimizer
    return torch.optim.AdamW(
        [
            {"params": members, "weight_decay": settings.weight_decay if matrices else 0.0}
            for (matrices, _), members in groups.items()
        ],
        lr=training.learning_rate.peak,
        betas=settings.betas,
        eps=settings.epsilon,
        **options,
    )


def made_up_tokens(folder: Path) -> Path:
    """A token file of text enough for many samples."""
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(20000)))
    return prepare_tokens(text, cache_dir=folder).path


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Where 95 % of the medians of resampled ratios lie."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]
