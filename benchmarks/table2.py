"""The seven models of the paper's Table 2 on its three pairs of device types: plan, bound, peers, and time.

Half of each cluster's devices are of each type, in nodes of up to eight; global batch 1024, sequence 2048; times
from datasheets (analytic profile). Each row is planned in a process of its own. Seconds of planning and bounding
are CPU seconds; memory is that process's peak. `/ peer` is a peer's iteration over ours, with the term that
makes most of the difference. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from plan_measure import PEERS, Row, in_own_process, show, show_header, worst_ratio

from planner.cluster import from_short_form
from planner.model_spec import resolve_model
from planner.request import PlanRequest

# Model -> devices (Table 2).
MODELS = {
    "gpt3-350m": 4,
    "gpt3-1.3b": 8,
    "gpt3-2.6b": 16,
    "gpt3-6.7b": 32,
    "gpt3-13b": 64,
    "llama2-70b": 512,
    "gpt3-175b": 1024,
}
CLUSTERS = {"B2/B3": ("910B2", "910B3"), "B2/B4": ("910B2", "910B4"), "B3/B4": ("910B3", "910B4")}
GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, DEVICES_PER_NODE = 1024, 2048, 8
# Largest gap to the bound, seconds to plan and seconds to bound that each model should have.
TARGETS = {
    "gpt3-350m": (0.01, None, None),
    "gpt3-1.3b": (0.01, None, None),
    "gpt3-2.6b": (0.03, None, None),
    "gpt3-6.7b": (0.03, None, None),
    "gpt3-13b": (0.03, 2.0, 4.0),
    "llama2-70b": (0.05, None, None),
    "gpt3-175b": (0.05, 10.0, 20.0),
}
MOST_BYTES = 2 * 2**30


def make_request(model: str, types: tuple[str, str]) -> PlanRequest:
    half = MODELS[model] // 2
    nodes, size = max(1, half // DEVICES_PER_NODE), min(half, DEVICES_PER_NODE)
    return PlanRequest(
        model=resolve_model(model),
        cluster=from_short_form(",".join(f"{nodes}x{size}:{type_}" for type_ in types)),
        global_batch_size=GLOBAL_BATCH_SIZE,
        sequence_length=SEQUENCE_LENGTH,
    )


def misses(row: Row) -> list[str]:
    """Which targets a row misses."""
    if row["iteration_seconds"] is None:
        return ["no plan"]
    gap, plan, bound = TARGETS[row["model"]]
    found = []
    if row["gap"] is None or row["gap"] > gap:
        found.append(f"gap above {gap:.0%}")
    if plan is not None and row["plan_seconds"] > plan:
        found.append(f"planned in more than {plan:g} s")
    if bound is not None and row["bound_seconds"] > bound:
        found.append(f"bounded in more than {bound:g} s")
    if row["peak_bytes"] > MOST_BYTES:
        found.append("more than 2 GiB")
    found += [
        f"{peer['strategy']} is better" for peer in row["peers"] if peer["ratio"] and peer["ratio"] < 1 - 1e-9
    ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, separated by commas")
    parser.add_argument("--clusters", default=",".join(CLUSTERS), help="some of them, separated by commas")
    parser.add_argument("--peers", default=",".join(PEERS), help="strategies to compare with; empty for none")
    options = parser.parse_args()
    peers = [name for name in options.peers.split(",") if name]
    rows, missed = [], {}
    show_header(peers=peers)
    for model in options.models.split(","):
        for name in options.clusters.split(","):
            make = partial(make_request, model, CLUSTERS[name])
            row = in_own_process(make, peers=peers, profiles=None)
            show(row)
            rows.append({"pair": name} | row)
            if wrong := misses(row):
                missed[f"{model} {name}"] = wrong
    for place, wrong in missed.items():
        print(f"missed: {place}: {', '.join(wrong)}")
    print(
        json.dumps(
            {
                "benchmark": "table2",
                "rows": rows,
                "least_ratio": worst_ratio(rows, peers),
                "missed": missed,
            }
        )
    )


if __name__ == "__main__":
    main()
