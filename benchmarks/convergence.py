"""One model trained on real text by a single process and under four plans: do the losses agree? (Paper, Appendix B)

A single process (plain_model.py: torch's own modules, no code of the engine but attention and first values), plans
of the strategies eth, metis and hexiscale for two fast and two slow devices, and one of eth for four alike. All have
the same seed, so the same first values and the same samples in every iteration. fp32, AdamW, warm-up and cosine,
clipping; the text is the sources of Python's standard library.

What is compared is the loss of each iteration's global batch, before its update, with the single process's:

* `last`: relative difference in the last iteration;
* `last_100`: of the means over the last 100 iterations;
* `largest_smoothed`: the largest of all means over 50 neighbouring iterations;
* `largest`: the largest of all single iterations.

The target holds for the first three: 0.1 %. Curves are kept in `--results`, and those that are there are not trained
again, so `--plans` can do one at a time. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from convergence_plans import GLOBAL_BATCH_SIZE, MODEL, PLANS, described, plan_named
from paired_runs import torch_adamw
from plain_model import PlainGpt
from rank_processes import meet, run_ranks

from actors.data_settings import PYTHON_STDLIB
from actors.engine.data import Samples
from actors.engine.tokens import TokenFile
from actors.engine.trainer import Trainer, TrainerConfig
from actors.job import LearningRate, Training
from actors.text.text import prepare_tokens
from planner.plan import Plan

TARGET = 0.001
SMOOTHED = 50
LAST = 100
SINGLE = "single"


def training_of(iterations: int) -> Training:
    warm_up = iterations // 10
    return Training(
        global_batch_size=GLOBAL_BATCH_SIZE,
        sequence_length=MODEL.max_sequence_length,
        steps=iterations,
        learning_rate=LearningRate(peak=1e-3, schedule="cosine", warmup_steps=warm_up, minimum=1e-4),
    )


def train_alone(training: Training, tokens: Path) -> list[float]:
    """The losses of a plain loop in this process, the whole global batch at once."""
    torch.set_num_threads(1)
    model = PlainGpt(MODEL, seed=training.seed)
    optimizer = torch_adamw(model.parameters(), training)
    samples = Samples(
        TokenFile(tokens),
        sequence_length=training.sequence_length,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
    )
    losses = []
    for iteration in range(1, training.steps + 1):
        inputs, labels = samples.batch(iteration, 0, training.global_batch_size)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip or torch.inf)
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate.at(iteration, steps=training.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return losses


def train_plans(
    rank: int, world_size: int, store: dist.Store, configs: dict[str, TrainerConfig], curves: Curves
) -> None:
    """Train one plan after the other; rank 0 writes each curve as soon as it is whole."""
    for name, config in configs.items():
        if rank < config.plan.world_size:
            trainer = Trainer(config=config, rank=rank, store=dist.PrefixStore(name, store))
            steps = range(1, config.training.steps + 1)
            started = time.monotonic()
            losses = [trainer.run_iteration(iteration).loss for iteration in steps]
            meet(store, f"done {name}", rank=rank, world_size=config.plan.world_size)
            trainer.close()
            if rank == 0:
                curves.write(name, losses, plan=config.plan, seconds=time.monotonic() - started)
        meet(store, f"over {name}", rank=rank, world_size=world_size)


@dataclass(frozen=True)
class Curves:
    """Curves in a folder, each with all that decides it: one of other settings or another text is no curve."""

    folder: Path
    training: Training
    tokens: Path

    def write(self, name: str, losses: Sequence[float], *, plan: Plan | None, seconds: float) -> None:
        content = {"of": self._settings(plan), "seconds": round(seconds, 1), "losses": list(losses)}
        self._path(name).write_text(json.dumps(content))

    def read(self, name: str) -> dict[str, Any] | None:
        """`losses` of each iteration, and the `seconds` that they took."""
        if not self._path(name).exists():
            return None
        content: dict[str, Any] = json.loads(self._path(name).read_text())
        plan = None if name == SINGLE else plan_named(name)
        return content if content["of"] == self._settings(plan) else None

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _settings(self, plan: Plan | None) -> dict[str, Any]:
        return {
            "training": self.training.model_dump(mode="json"),
            "model": MODEL.model_dump(),
            # A token file is named after its content.
            "text": self.tokens.stem,
            "plan": None if plan is None else plan.fingerprint(),
        }


def smoothed(losses: Sequence[float], window: int) -> list[float]:
    """Means over neighbouring iterations; the first is over the first window."""
    window = min(window, len(losses))
    return [sum(losses[end - window : end]) / window for end in range(window, len(losses) + 1)]


def apart(losses: Sequence[float], single: Sequence[float]) -> list[float]:
    """Relative differences, entry by entry."""
    return [abs(mine - theirs) / theirs for mine, theirs in zip(losses, single, strict=True)]


def compared(losses: Sequence[float], single: Sequence[float]) -> dict[str, float]:
    """What the module's docstring lists."""
    return {
        "last": apart(losses, single)[-1],
        "last_100": apart(smoothed(losses, LAST)[-1:], smoothed(single, LAST)[-1:])[0],
        "largest_smoothed": max(apart(smoothed(losses, SMOOTHED), smoothed(single, SMOOTHED))),
        "largest": max(apart(losses, single)),
    }


def train_missing(names: Sequence[str], curves: Curves) -> None:
    """Train what there is no curve of: the single process here, all plans on ranks that start once."""
    training, tokens = curves.training, curves.tokens
    missing = [name for name in names if curves.read(name) is None]
    if SINGLE in missing:
        started = time.monotonic()
        losses = train_alone(training, tokens)
        curves.write(SINGLE, losses, plan=None, seconds=time.monotonic() - started)
    configs = {
        name: TrainerConfig(plan=plan_named(name), training=training, tokens=tokens, timeout_seconds=300)
        for name in missing
        if name != SINGLE
    }
    if configs:
        most = max(config.plan.world_size for config in configs.values())
        run_ranks(train_plans, most, configs, curves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--plans", nargs="+", choices=[SINGLE, *PLANS], default=[SINGLE, *PLANS])
    parser.add_argument("--data", default=PYTHON_STDLIB, help="a text file, a folder or python-stdlib")
    parser.add_argument("--results", type=Path, help="folder of the curves")
    parser.add_argument("--plot", type=Path, help="PNG to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tokens = prepare_tokens(options.data, cache_dir=folder).path
        curves = Curves(folder, training_of(options.iterations), tokens)
        train_missing(options.plans, curves)
        found = {name: curves.read(name) for name in (SINGLE, *PLANS)}
    report({name: curve for name, curve in found.items() if curve is not None}, options.plot)


def report(found: dict[str, dict[str, Any]], picture: Path | None) -> None:
    """Table, plot and JSON line of the curves that exist."""
    curves = {name: curve["losses"] for name, curve in found.items()}
    single = curves.get(SINGLE)
    rows: dict[str, dict[str, object]] = {}
    print("run        last loss  mean of last 100 | last difference  of last 100  smoothed  single | plan")
    for name, losses in curves.items():
        row: dict[str, object] = {"last_loss": losses[-1], "mean_last_100": smoothed(losses, LAST)[-1]}
        row["seconds"] = found[name]["seconds"]
        shown = " " * 52
        if single is not None and name != SINGLE:
            differences = compared(losses, single)
            row |= differences
            shown = "  ".join(f"{value:11.2e}" for value in differences.values())
        if name != SINGLE:
            row["plan"] = described(plan_named(name))
        print(
            f"{name:10s} {losses[-1]:9.5f}  {row['mean_last_100']:16.5f} | {shown} | {row.get('plan', 'none')}"
        )
        rows[name] = row
    if picture is not None and single is not None:
        from convergence_plot import plot

        smooth = smoothed(single, SMOOTHED)
        others = {name: losses for name, losses in curves.items() if name != SINGLE}
        plot(picture, curves, {n: apart(smoothed(o, SMOOTHED), smooth) for n, o in others.items()})
    iterations = len(next(iter(curves.values())))
    print(json.dumps({"benchmark": "convergence", "target": TARGET, "iterations": iterations, "runs": rows}))


if __name__ == "__main__":
    main()
