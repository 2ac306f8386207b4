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
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from paired_runs import TARGET, Shape, host_plan, interval, made_up_tokens, torch_adamw, training_of

from actors.engine.batches import ReplicaBatches
from actors.engine.data import Samples
from actors.engine.model.stage import build_stage
from actors.engine.tokens import TokenFile
from actors.engine.trainer import Trainer, TrainerConfig
from actors.engine.weights import initial_parameter

SHAPES = {
    "tiny": Shape(layers=2, hidden=32, sequence=32, size=1, count=2),
    "nano": Shape(layers=4, hidden=64, sequence=64, size=1, count=8),
    "small": Shape(layers=8, hidden=128, sequence=128, size=2, count=4),
    "medium": Shape(layers=6, hidden=256, sequence=256, size=2, count=4),
    "wide": Shape(layers=4, hidden=512, sequence=128, size=2, count=2),
}


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
    optimizer = torch_adamw(parameters, training)
    samples = Samples(
        TokenFile(config.tokens),
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        seed=training.seed,
    )
    batches = ReplicaBatches(plan=plan, place=plan.ranks[0], samples=samples)
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


def compare(shape: Shape, tokens: Path, *, turns: int) -> tuple[list[float], float]:
    """Ratios of neighbouring iterations, and the largest relative difference of their losses."""
    plan = host_plan(shape, (((1, 1),),))
    training = training_of(plan)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES)[1:])
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = made_up_tokens(Path(folder))
        print("shape    layers hidden sequence | plain / engine  95 % interval | losses differ by")
        for name in options.shapes:
            ratios, difference = compare(SHAPES[name], tokens, turns=options.turns)
            median, (low, high) = statistics.median(ratios), interval(ratios)
            shape = SHAPES[name]
            print(
                f"{name:8s} {shape.layers:6d} {shape.hidden:6d} {shape.sequence:8d} |"
                f" {median:14.3f}  {low:.3f} to {high:.3f} | {difference:.1e}",
                flush=True,
            )
            found[name] = {
                "ratio": round(median, 3),
                "interval": [round(low, 3), round(high, 3)],
                "losses_differ_by": difference,
            }
    print(json.dumps({"benchmark": "one_device", "target": TARGET, "shapes": found}))


if __name__ == "__main__":
    main()
