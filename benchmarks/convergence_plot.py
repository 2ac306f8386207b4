"""The losses of several runs over iterations, the last hundred enlarged, and how far they lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Wide lines first: curves that lie on each other all stay visible.
_WIDTHS = (6.0, 4.4, 3.0, 1.8, 0.8)


def plot(path: Path, curves: dict[str, Sequence[float]], differences: dict[str, Sequence[float]]) -> None:
    """Write a PNG.

    Args:
        curves: loss of each iteration, by the name of the run.
        differences: relative, from the first run, each smoothed; one entry an iteration from the first whole window.
    """
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    for (name, losses), width in zip(curves.items(), _WIDTHS, strict=False):
        iterations = range(1, len(losses) + 1)
        left.plot(iterations, losses, linewidth=width / 4, label=name)
        middle.plot(iterations[-100:], losses[-100:], linewidth=width)
    colours = dict(zip(curves, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))
    for name, values in differences.items():
        last = len(curves[name])
        right.semilogy(
            range(last - len(values) + 1, last + 1),
            [max(value, 1e-9) for value in values],
            color=colours[name],
            linewidth=1,
        )
    right.axhline(1e-3, color="black", linestyle=":", linewidth=1)
    left.set_title("loss")
    for line in left.legend(fontsize=8).get_lines():
        line.set_linewidth(2)
    middle.set_title("loss, last 100 iterations")
    right.set_title("smoothed difference (dotted: 0.1 %)")
    for axes in (left, middle, right):
        axes.set_xlabel("iteration")
    figure.savefig(path, dpi=80)
    plt.close(figure)
