"""What the bound relaxes, given up one by one: to see which relaxation makes the gap between plan and bound.

A tightened bound holds for plans of one kind only. `benchmarks/bound_gap.py` compares such bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.search.exact.choices import StageChoice
from planner.search.exact.surroundings import Holders, Surroundings


@dataclass(frozen=True)
class Tightened:
    """Switches of `bound_seconds`; with the defaults everything is relaxed, and the bound holds for every plan.

    Each other value leaves plans out, which may then be quicker than the bound. It then bounds, of the plans of
    several pipelines and of the single ones alike, only those with what the switch says.
    """

    gradients: bool = False
    """Gradients are reduced over the links, and by as many holders in a node, as the solver expects (`Expected`)."""
    pipelines: int = 2
    """Where there are several pipelines, at least so many hold each gradient."""
    receiving: bool = False
    """Stages receive over the links that the solver expects."""
    one_type: bool = False
    """No stage mixes device types."""
    whole_layers: bool = False
    """Layers recompute their operators whole, as in every plan, but by the solver's rule and not the fewest seconds."""
    most_ways: float = math.inf
    """No stage shares its optimizer state over more devices."""
    zero_stage: int | None = None
    """All stages run under this ZeRO stage."""


ALL_RELAXED = Tightened()


@dataclass(frozen=True)
class PartlyExpected:
    """Surroundings with the gradients or the receiving of `expected`, and all else of `least`."""

    least: Surroundings
    expected: Surroundings
    gradients: bool
    receiving: bool

    def receive_seconds(self, choice: StageChoice, *, sides: int) -> float:
        return (self.expected if self.receiving else self.least).receive_seconds(choice, sides=sides)

    def gradient_byte_seconds(self, holders: Holders, *, alone: bool) -> float:
        of = self.expected if self.gradients else self.least
        return of.gradient_byte_seconds(holders, alone=alone)

    def replica_byte_seconds(self, choice: StageChoice) -> float:
        return (self.expected if self.gradients else self.least).replica_byte_seconds(choice)
