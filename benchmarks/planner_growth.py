"""How the time to plan, and to bound, grows with the devices: up to 8192 of three types.

A third of the devices are of each type, in nodes of eight, two samples a device; times from datasheets. Each
row is planned in a process of its own; seconds are CPU seconds. The plot is drawn in characters, and as a PNG
with `--plot FILE` where matplotlib is installed. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from plan_measure import Row, in_own_process, show, show_header

from planner.cluster import from_short_form
from planner.model_spec import resolve_model
from planner.request import PlanRequest

TYPES = ("910B2", "910B3", "910B4")
DEVICES = (24, 48, 96, 192, 384, 768, 1536, 3072, 8192)
DEVICES_PER_NODE, SAMPLES_A_DEVICE, SEQUENCE_LENGTH = 8, 2, 2048
TARGET_DEVICES, TARGET_SECONDS = 8192, 60.0
_WIDTH, _HEIGHT = 64, 16


def make_request(model: str, devices: int) -> PlanRequest:
    nodes = [devices // DEVICES_PER_NODE // len(TYPES)] * len(TYPES)
    nodes[0] += devices // DEVICES_PER_NODE - sum(nodes)
    groups = (f"{count}x{DEVICES_PER_NODE}:{type_}" for count, type_ in zip(nodes, TYPES, strict=True))
    return PlanRequest(
        model=resolve_model(model),
        cluster=from_short_form(",".join(groups)),
        global_batch_size=SAMPLES_A_DEVICE * devices,
        sequence_length=SEQUENCE_LENGTH,
    )


def text_plot(rows: Sequence[Row]) -> list[str]:
    """Both axes logarithmic: `p` seconds to plan, `b` seconds to bound, `*` both at one place."""
    points = [
        (math.log(row["devices"]), math.log(max(row[field], 1e-3)), mark)
        for row in rows
        for field, mark in (("plan_seconds", "p"), ("bound_seconds", "b"))
        if row["iteration_seconds"] is not None and row[field]
    ]
    if not points:
        return []
    left, right = min(x for x, _, _ in points), max(x for x, _, _ in points)
    low, high = min(y for _, y, _ in points), max(y for _, y, _ in points)
    cells = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for x, y, mark in points:
        column = round((x - left) / max(right - left, 1e-9) * (_WIDTH - 1))
        line = round((high - y) / max(high - low, 1e-9) * (_HEIGHT - 1))
        cells[line][column] = mark if cells[line][column] in (" ", mark) else "*"
    names = {0: f"{math.exp(high):.2f} s", _HEIGHT - 1: f"{math.exp(low):.2f} s"}
    lines = [f"{names.get(number, ''):>9} |{''.join(line)}" for number, line in enumerate(cells)]
    return [
        *lines,
        f"{'':>9} +{'-' * _WIDTH}",
        f"{'':>10} {math.exp(left):<{_WIDTH - 8}.0f}{math.exp(right):>8.0f} devices",
        "p: seconds to plan, b: seconds to bound, *: both; logarithmic",
    ]


def draw(rows: Sequence[Row], path: Path) -> None:
    """The same as a PNG."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: {path} is not drawn; the plot above shows the same")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for field, label in (("plan_seconds", "plan"), ("bound_seconds", "bound")):
        known = [row for row in rows if row["iteration_seconds"] is not None and row[field]]
        axes.loglog([row["devices"] for row in known], [row[field] for row in known], "o-", label=label)
    axes.set(xlabel="devices of three types", ylabel="CPU seconds", title=str(rows[0]["model"]))
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt3-13b")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)), help="separated by commas")
    parser.add_argument("--plot", type=Path, help="draw a PNG here")
    options = parser.parse_args()
    rows = []
    show_header(peers=())
    for devices in map(int, options.devices.split(",")):
        make = partial(make_request, options.model, devices)
        rows.append(in_own_process(make, peers=(), profiles=None))
        show(rows[-1])
    for line in text_plot(rows):
        print(line)
    if options.plot is not None:
        draw(rows, options.plot)
    largest = [row for row in rows if row["devices"] == TARGET_DEVICES and row["iteration_seconds"]]
    spent = [row["plan_seconds"] + (row["bound_seconds"] or 0.0) for row in largest]
    print(
        json.dumps(
            {
                "benchmark": "planner_growth",
                "model": options.model,
                "rows": rows,
                "seconds_at_8192": max(spent, default=None),
                "target_seconds_at_8192": TARGET_SECONDS,
            }
        )
    )


if __name__ == "__main__":
    main()
