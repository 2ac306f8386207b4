"""What the engine itself costs a micro-batch: all that is neither a model operator nor a wait for a peer.

The engine is timed from outside: while this program runs, its functions are wrapped, and every CPU second of a rank's
thread is charged to the innermost wrapped function that is running. Operators are the named operators of a layer
(planner/operators.py), embedding, logits and loss, and autograd's backward without the hooks that it calls; the
optimizer's step stands apart, being arithmetic that any training has. What is left is the engine's own, in parts:

* schedule: 1F1B, its bookkeeping, the steps' times
* batches: handing over the samples of a micro-batch, which a thread has read
* layers: what lies between the operators of forward
* gradients: hooks that put gradients into the buffer and launch collectives
* messages: activations and their gradients, without the wait for them
* iteration: once an iteration, and here a micro-batch's share: zeroing the buffer, sums, norm, agreement, report

CPU seconds of one thread, so that neither a wait nor what else the host does counts; what a wrapped call costs by
itself is measured on an empty function and taken off. Medians over iterations. One JSON line last.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gradient_sync_plans import host_cluster
from rank_processes import run_ranks
from torch import nn

from actors.engine import exchange
from actors.engine.gradient_buffer import ParameterGradients
from actors.engine.gradient_sync import GradientSync
from actors.engine.model.layer import Gpt3Layer, LlamaLayer
from actors.engine.model.norm import RmsNorm
from actors.engine.model.stage import StageModel
from actors.engine.optimizer import Optimizer
from actors.engine.read_ahead import ReadAhead
from actors.engine.stage_runner import StageRunner
from actors.engine.trainer import MEASURED_ITERATIONS, Trainer, TrainerConfig
from actors.job import Training
from actors.text.text import prepare_tokens
from planner.model_spec import ModelSpec
from planner.plan import Dtypes, PipelinePlan, Plan, StagePlan

OWN = ("schedule", "batches", "layers", "gradients", "messages", "iteration")
OPERATORS, UPDATE, WAIT = "operators", "update", "wait"


@dataclass(frozen=True)
class Shape:
    """A model, and how it is run: samples of a micro-batch, micro-batches, stages of a pipeline."""

    family: str
    layers: int
    hidden: int
    sequence: int
    samples: int
    micro_batches: int
    stages: int = 1
    precision: str = "fp32"


SHAPES = {
    "nano": Shape("gpt3", 4, 64, 64, 1, 8),
    "small": Shape("gpt3", 8, 128, 128, 2, 4),
    "small llama": Shape("llama", 8, 128, 128, 2, 4),
    "small bf16": Shape("gpt3", 8, 128, 128, 2, 4, precision="bf16"),
    "two stages": Shape("gpt3", 8, 128, 128, 2, 8, stages=2),
    "medium": Shape("gpt3", 6, 256, 256, 2, 4),
    "wide": Shape("llama", 4, 512, 128, 2, 4),
}


class Ledger:
    """Charges the thread's CPU seconds to the innermost wrapped function that is running."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        """Of calls, by the category that they interrupt: each leaves some of its own cost there."""
        self._running = ["iteration"]
        self._since = time.thread_time()

    def start(self) -> None:
        self.seconds.clear()
        self.calls.clear()
        self._since = time.thread_time()

    def wrapped(self, function: Callable[..., Any], category: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            self._turn()
            self.calls[self._running[-1]] += 1
            self._running.append(category)
            try:
                return function(*arguments, **options)
            finally:
                self._turn()
                self._running.pop()

        return run

    def wrap(self, owner: Any, name: str, category: str) -> None:
        setattr(owner, name, self.wrapped(getattr(owner, name), category))

    def stop(self) -> dict[str, float]:
        self._turn()
        return dict(self.seconds)

    def _turn(self) -> None:
        now = time.thread_time()
        self.seconds[self._running[-1]] += now - self._since
        self._since = now


def call_cost(repetitions: int = 20000) -> float:
    """Seconds that one wrapped call leaves with whom it interrupts."""
    ledger = Ledger()
    empty = ledger.wrapped(lambda: None, "empty")
    for _ in range(repetitions):
        empty()
    ledger.start()
    for _ in range(repetitions):
        empty()
    return ledger.stop()["iteration"] / repetitions


def instrument(ledger: Ledger) -> None:
    """Wrap the engine's functions in this process."""
    for kind in (Gpt3Layer, LlamaLayer):
        for operator in kind.operators:
            if hasattr(kind, operator.name):
                ledger.wrap(kind, operator.name, OPERATORS)
    # The norms among the operators are modules.
    for norm in (nn.LayerNorm, RmsNorm):
        ledger.wrap(norm, "forward", OPERATORS)
    for name in ("embed", "logits", "loss"):
        ledger.wrap(StageModel, name, OPERATORS)
    ledger.wrap(StageModel, "forward", "layers")
    ledger.wrap(torch.autograd, "backward", OPERATORS)
    ledger.wrap(StageRunner, "run", "schedule")
    for name in ("counted", "micro_batch", "documents", "draws"):
        ledger.wrap(ReadAhead, name, "batches")
    ledger.wrap(GradientSync, "_arrived", "gradients")
    for name in ("post", "receive", "send", "finish"):
        ledger.wrap(exchange.Channel, name, "messages")
    ledger.wrap(exchange._Pending, "wait", WAIT)
    ledger.wrap(Optimizer, "step", UPDATE)
    accumulator = ParameterGradients._accumulator

    def timed_accumulator(*arguments: Any) -> Callable[..., Any]:
        return ledger.wrapped(accumulator(*arguments), "gradients")

    ParameterGradients._accumulator = timed_accumulator  # type: ignore[method-assign]


def plan_of(shape: Shape) -> Plan:
    fields: dict[str, Any] = {}
    if shape.family == "llama":
        fields = {"kv_heads": 2, "ffn_hidden_size": shape.hidden * 11 // 4, "tied_embedding": False}
    model = ModelSpec(
        name="overhead",
        family=shape.family,  # type: ignore[arg-type]
        layers=shape.layers,
        hidden_size=shape.hidden,
        heads=4,
        vocab_size=257,
        max_sequence_length=shape.sequence,
        **fields,
    )
    cluster, each = host_cluster(shape.stages), shape.layers // shape.stages
    stages = tuple(
        StagePlan(
            devices=(device.id,),
            tp=1,
            dp=1,
            rows=(shape.samples,),
            layers=(number * each, (number + 1) * each),
            embedding=number == 0,
            head=number == shape.stages - 1,
        )
        for number, device in enumerate(cluster.devices)
    )
    samples = shape.samples * shape.micro_batches
    pipeline = PipelinePlan(
        id=0, micro_batch_size=shape.samples, samples=samples, local_batch_size=samples, stages=stages
    )
    return Plan(
        model=model,
        cluster=cluster,
        global_batch_size=samples,
        sequence_length=shape.sequence,
        dtypes=Dtypes.for_precision(shape.precision),  # type: ignore[arg-type]
        pipelines=(pipeline,),
    )


def measure(
    rank: int, world_size: int, store: dist.Store, tokens: Path, shapes: Sequence[Shape], iterations: int
) -> list[list[dict[str, float]]]:
    """CPU seconds by category: of each shape that has this rank, each iteration."""
    cost = call_cost()
    ledger = Ledger()
    instrument(ledger)
    found = []
    for number, shape in enumerate(shapes):
        plan = plan_of(shape)
        if rank >= plan.world_size:
            found.append([])
            continue
        training = Training(
            global_batch_size=plan.global_batch_size,
            sequence_length=plan.sequence_length,
            steps=10**6,
            learning_rate={"peak": 1e-4},  # type: ignore[arg-type]
            precision=plan.dtypes.param,
        )
        config = TrainerConfig(plan=plan, training=training, tokens=tokens, timeout_seconds=60)
        trainer = Trainer(config=config, rank=rank, store=dist.PrefixStore(f"shape{number}", store))
        rows = []
        # In the first, each operation is watched for its memory.
        for iteration in range(1, MEASURED_ITERATIONS + iterations + 2):
            ledger.start()
            trainer.run_iteration(iteration)
            seconds = ledger.stop()
            if iteration > MEASURED_ITERATIONS + 1:
                rows.append({name: seconds[name] - cost * ledger.calls[name] for name in seconds})
        trainer.close()
        found.append(rows)
    return found


def own_parts(rows: Sequence[dict[str, float]], micro_batches: int) -> dict[str, float]:
    """Microseconds a micro-batch, by part: medians over iterations."""
    return {part: statistics.median(row.get(part, 0.0) for row in rows) / micro_batches * 1e6 for part in OWN}


def report(name: str, shape: Shape, rank: int, rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    """A line of the table, and its figures."""
    parts = own_parts(rows, shape.micro_batches)
    own = statistics.median(sum(row.get(part, 0.0) for part in OWN) for row in rows)
    operators = statistics.median(row[OPERATORS] for row in rows)
    share = statistics.median(
        sum(row.get(part, 0.0) for part in OWN) / sum(row[key] for key in row if key != WAIT) for row in rows
    )
    own, operators = (seconds / shape.micro_batches * 1e6 for seconds in (own, operators))
    print(
        f"{name:12s} {rank:4d} | {operators:12.0f} {own:8.0f}  {share:6.2%} | "
        + " ".join(f"{parts[part]:9.0f}" for part in OWN),
        flush=True,
    )
    rounded = {part: round(value, 1) for part, value in parts.items()}
    return {"rank": rank, "own_us": round(own, 1), "share": round(share, 4), "parts_us": rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--iterations", type=int, default=30)
    options = parser.parse_args()
    shapes = [SHAPES[name] for name in options.shapes]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(5000)))
        tokens = prepare_tokens(text, cache_dir=Path(folder)).path
        world_size = max(shape.stages for shape in shapes)
        by_rank = run_ranks(measure, world_size, tokens, shapes, options.iterations)
    print("CPU microseconds a micro-batch")
    print("shape        rank | in operators      own   share | " + " ".join(f"{part:>9s}" for part in OWN))
    found = {
        name: [report(name, shape, rank, by_rank[rank][number]) for rank in range(shape.stages)]
        for number, (name, shape) in enumerate(zip(options.shapes, shapes, strict=True))
    }
    print(json.dumps({"benchmark": "engine_overhead", "iterations": options.iterations, "shapes": found}))


if __name__ == "__main__":
    main()
