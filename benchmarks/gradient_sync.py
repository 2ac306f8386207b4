"""Block-, tensor- and device-wise synchronisation of gradients (paper 4.3), on real gloo ranks of this host.

1. Schemes: 4, 8 and 12 ranks, four depths, two pairs of unlike pipelines each, three seeds that draw the
   stage splits. Per cell the three schemes take turns, so that each ratio is of two runs next to each other;
   medians. Bytes are what the kernel's TCP counters saw, beside the least that any scheme can do with: to sum
   the copies of an element over its h holders, g of which hold unlike addends, takes g - 1 + h - 1 transfers.
2. Overlap: emulated ranks, whose backward leaves the host free, train with and without overlap; the share
   of synchronisation that is hidden behind backward, from the trace of the second iteration.
3. Overlap on real processors: iteration time with overlap over that without, in turns.

Ranks share the host's cores: what a scheme costs is bytes moved, elements added and turns taken. Where cores
are the limit, the bytes of all ranks count; where each rank has its own, those of the busiest. One JSON line
last.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from gradient_sync_overlap import Overlap, measure_overlap, measure_real_overlap
from gradient_sync_plans import DEPTHS, OVERLAP_DEPTHS
from gradient_sync_schemes import SCHEMES, TARGETS, Cell, measure_schemes

from actors.text.text import prepare_tokens

# b/t/d are block-, tensor- and device-wise.
_HEAD = (
    "ranks family               depth |       seconds b/t/d |  t/b    d/b   | bytes over minimum |"
    " MB sent b/t/d | busiest rank | calls b/t/d (min) | median call KB | extra MB b/t/d"
)


def show_schemes(cells: list[Cell]) -> None:
    """A row a cell; a star marks a ratio that misses its target."""
    for cell in cells:
        times, over, sent, busiest, calls, sizes, extra = (
            "/".join(format(values[scheme], form) for scheme in SCHEMES)
            for values, form in (
                (cell.seconds, ".3f"),
                (cell.bytes_over_minimum, ".2f"),
                (cell.megabytes_sent, ".0f"),
                (cell.busiest_megabytes, ".0f"),
                (cell.calls, "d"),
                (cell.median_call_kilobytes, ".0f"),
                (cell.extra_megabytes, ".1f"),
            )
        )
        ratios = " ".join(
            f"{cell.ratios[scheme]:5.2f}{' ' if cell.ratios[scheme] >= target else '*'}"
            for scheme, target in TARGETS.items()
        )
        print(
            f"{cell.ranks:5d} {cell.family:20s} {cell.depth:5d} | {times:>19s} | {ratios} | {over:>18s} |"
            f" {sent:>13s} | {busiest:>12s} | {calls:>12s} ({cell.minimum_calls:2d}) | {sizes:>14s} | {extra}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--backward-seconds", type=float, default=0.6, help="longest emulated backward")
    parser.add_argument("--only", choices=["schemes", "overlap", "real"], help="one part alone")
    options = parser.parse_args()

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    cells: list[Cell] = []
    if wanted("schemes"):
        print(_HEAD, flush=True)
        for ranks in options.ranks:
            found = measure_schemes(ranks, options.depths, options.hidden, options.repetitions)
            show_schemes(found)
            cells += found
    overlaps: list[Overlap] = []
    real: dict[int, dict[int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        tokens = _tokens(Path(folder))
        if wanted("overlap"):
            for ranks in (4, 8):
                overlaps += measure_overlap(ranks, OVERLAP_DEPTHS, tokens, options.backward_seconds)
            show_overlap(overlaps)
        if wanted("real"):
            real = {ranks: measure_real_overlap(ranks, (4, 8), tokens, 5) for ranks in (4, 8)}
            print("iteration time with overlap over without, host processors:", real)
    print(json.dumps(report(cells, overlaps, real)))


def _tokens(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(5000)))
    return prepare_tokens(text, cache_dir=folder).path


def show_overlap(overlaps: list[Overlap]) -> None:
    print("ranks depth | sync/backward | hidden without, with | exposed ms without, with | late steps")
    for one in overlaps:
        print(
            f"{one.ranks:5d} {one.depth:5d} | {one.sync_over_backward:13.2f} |"
            f" {one.hidden_without:14.2f} {one.hidden:5.2f} |"
            f" {1e3 * one.exposed_without_seconds:17.0f} {1e3 * one.exposed_seconds:6.0f} | {one.late_steps}"
        )


def explained(cell: Cell, scheme: str) -> dict[str, object]:
    """What a cell below its target was made of, from its own figures.

    Tensor-wise moves block-wise's bytes in more calls, so what a call more costs is all that it can lose by;
    device-wise moves more bytes, and where bytes are the limit it loses by no more than that many times.
    """
    seconds = {name: cell.seconds[name] - cell.seconds["block"] for name in TARGETS}
    megabytes = cell.megabytes_sent["device"] - cell.megabytes_sent["block"]
    return {
        "cell": f"{cell.ranks} ranks, {cell.family}, depth {cell.depth}",
        "ratio": round(cell.ratios[scheme], 2),
        "bytes_over_block": round(cell.megabytes_sent[scheme] / cell.megabytes_sent["block"], 2),
        "calls_over_block": round(cell.calls[scheme] / cell.calls["block"], 1),
        "ms_a_call": round(1e3 * seconds["tensor"] / (cell.calls["tensor"] - cell.calls["block"]), 3),
        "ns_a_byte": round(1e3 * seconds["device"] / megabytes, 3),
        "ns_a_byte_of_block": round(1e3 * cell.seconds["block"] / cell.megabytes_sent["block"], 3),
    }


def report(
    cells: list[Cell], overlaps: list[Overlap], real: dict[int, dict[int, float]]
) -> dict[str, object]:
    """The last line: each claim's figure, its target and what misses it."""
    result: dict[str, object] = {
        "benchmark": "gradient_sync",
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    if cells:
        for scheme, target in TARGETS.items():
            ratios = [cell.ratios[scheme] for cell in cells]
            result[f"{scheme}_over_block"] = {
                "median": round(statistics.median(ratios), 2),
                "least": round(min(ratios), 2),
                "target": target,
                "missed": [explained(cell, scheme) for cell in cells if cell.ratios[scheme] < target],
            }
        result["bytes_over_minimum"] = round(max(cell.bytes_over_minimum["block"] for cell in cells), 4)
        result["extra_megabytes"] = round(max(cell.extra_megabytes["block"] for cell in cells), 2)
        result["difference_of_schemes"] = max(cell.difference for cell in cells)
    if overlaps:
        shares = [one.hidden for one in overlaps]
        result["hidden_share"] = {
            "median": round(statistics.median(shares), 2),
            "least": round(min(shares), 2),
            "target": 0.5,
        }
    if real:
        result["overlapped_iteration_over_plain"] = {
            ranks: {depth: round(ratio, 3) for depth, ratio in depths.items()}
            for ranks, depths in real.items()
        }
    return result


if __name__ == "__main__":
    main()
