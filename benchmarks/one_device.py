"""The engine on one device against a plain training loop of the same model, in turns in one process.

Both run the same modules, so the same attention; the plain loop lets gradients pile up in `.grad`, clips with torch's
`clip_grad_norm_` and updates with torch's AdamW. What the engine adds is its schedule, gradient buffer, world-wide
agreement and strided optimizer views. CPU seconds of one thread, so that what else the host does counts little;
the ratio is the plain loop's over the engine's, the median of pairs with a bootstrap interval. Target: 0.97. One
JSON line last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from gradient_sync_plans import host_cluster, make_plan

from actors.engine.batches import ReplicaBatches
from actors.engine.data import Samples
from actors.engine.model.stage import build_stage
from actors.engine.tokens import TokenFile, prepare_tokens
from actors.engine.trainer import Trainer, TrainerConfig
from actors.engine.weights import initial_parameter
from actors.job import Training
from planner.model_spec import ModelSpec
from planner.plan import Plan

# layers, hidden size, sequence, samples of a micro-batch, micro-batches.
SHAPES = {
    "nano": (4, 64, 64, 1, 8),
    "small": (8, 128, 128, 2, 4),
    "medium": (6, 256, 256, 2, 4),
    "wide": (4, 512, 128, 2, 2),
}
TARGET = 0.97


def plan_of(shape: tuple[int, int, int, int, int]) -> Plan:
    layers, hidden, sequence, size, count = shape
    model = ModelSpec(
        name="one-device",
        layers=layers,
        hidden_size=hidden,
        heads=4,
        vocab_size=257,
        max_sequence_length=sequence,
    )
    plan = make_plan(model, (((1, 1),),), host_cluster(1), random.Random(0), samples=size * count)
    data = plan.model_dump()
    data["pipelines"][0]["micro_batch_size"] = size
    data["pipelines"][0]["stages"][0]["rows"] = [size]
    return Plan.model_validate(data)


def plain_loop(config: TrainerConfig) -> Callable[[int], float]:
    """One iteration by number; returns its loss."""
    plan, training = config.plan, config.training
    pipeline = plan.pipelines[0]
    model, handles = build_stage(
        model=plan.model,
        stage=pipeline.stages[0],
        sequence_length=plan.sequence_length,
        dtype=torch.float32,
        device=torch.device("cpu"),
        mesh=None,
        tp_rank=0,
    )
    for handle in handles:
        handle.local.copy_(initial_parameter(handle.spec, model=plan.model, seed=training.seed))
    parameters = list(model.parameters())
    matrices, vectors = ([p for p in parameters if (p.dim() > 1) == which] for which in (True, False))
    groups = [
        {"params": matrices, "weight_decay": training.optimizer.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=training.learning_rate.peak, betas=training.optimizer.betas, eps=training.optimizer.epsilon
    )
    samples = Samples(
        TokenFile(config.tokens),
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        seed=training.seed,
    )
    batches = ReplicaBatches(plan=plan, place=plan.ranks[0], samples=samples, device=torch.device("cpu"))
    scale = 1.0 / (plan.global_batch_size * plan.sequence_length)

    def iterate(iteration: int) -> float:
        total = 0.0
        for index in range(pipeline.micro_batches):
            inputs, labels = batches.micro_batch(iteration, index)
            loss = model(inputs, labels, scale, batches.draws(iteration, index))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(parameters, training.gradient_clip or torch.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return iterate


def compare(shape: tuple[int, int, int, int, int], tokens: Path, *, turns: int) -> tuple[list[float], float]:
    """Ratios of neighbouring iterations, and the largest relative difference of their losses."""
    plan = plan_of(shape)
    training = Training(
        global_batch_size=plan.global_batch_size,
        sequence_length=plan.sequence_length,
        steps=10**6,
        learning_rate={"peak": 1e-4},  # type: ignore[arg-type]
    )
    config = TrainerConfig(plan=plan, training=training, tokens=tokens, timeout_seconds=60)
    trainer = Trainer(config=config, rank=0, store=dist.HashStore())
    plain = plain_loop(config)
    ratios, difference = [], 0.0
    warm_up = 3
    for iteration in range(1, turns + warm_up + 1):
        start = time.process_time()
        mine = trainer.run_iteration(iteration).loss
        middle = time.process_time()
        theirs = plain(iteration)
        end = time.process_time()
        difference = max(difference, abs(mine - theirs) / theirs)
        if iteration > warm_up:
            ratios.append((end - middle) / (middle - start))
    trainer.close()
    return ratios, difference


def interval(ratios: list[float]) -> tuple[float, float]:
    """Where 95 % of the medians of resampled ratios lie."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(20000)))
        tokens = prepare_tokens(text, cache_dir=Path(folder)).path
        print("shape    layers hidden sequence | plain / engine  95 % interval | losses differ by")
        for name in options.shapes:
            ratios, difference = compare(SHAPES[name], tokens, turns=options.turns)
            median, (low, high) = statistics.median(ratios), interval(ratios)
            layers, hidden, sequence, *_ = SHAPES[name]
            print(
                f"{name:8s} {layers:6d} {hidden:6d} {sequence:8d} | {median:14.3f}  {low:.3f} to {high:.3f} |"
                f" {difference:.1e}",
                flush=True,
            )
            found[name] = {"ratio": round(median, 3), "interval": [round(low, 3), round(high, 3)]}
    print(json.dumps({"benchmark": "one_device", "target": TARGET, "shapes": found}))


if __name__ == "__main__":
    main()
