"""PlanRequest: everything a planning strategy is asked."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from planner.cluster import Cluster
from planner.errors import Contract
from planner.model_spec import ModelSpec
from planner.plan import MAX_GLOBAL_BATCH_SIZE, Dtypes, PlanEmulation
from planner.prices import check_prices


class PlanRequest(Contract):
    """One planning task. With `equal_batches` every pipeline gets the same number of samples.

    `objective` says what to minimise: the iteration's seconds, or the price of a token, for which device types
    need a `price_per_hour`; `throughput_floor` (tokens a second) then says how slow the plan may be. With
    `bound` the strategy also works out how much better any plan could be. `recompute`, `sequence_parallel` and
    `zero_stages` say what a plan may make use of.
    """

    model: ModelSpec
    cluster: Cluster
    global_batch_size: int = Field(ge=1, le=MAX_GLOBAL_BATCH_SIZE, description="samples an iteration")
    sequence_length: int = Field(ge=1, description="tokens a sample")
    dtypes: Dtypes = Dtypes()
    strategy: str = "eth"
    emulation: PlanEmulation = PlanEmulation()
    equal_batches: bool = False
    objective: Literal["time", "cost"] = "time"
    throughput_floor: float | None = Field(default=None, gt=0, description="tokens a second")
    bound: bool = True
    recompute: bool = Field(default=True, description="stages may recompute operators in backward")
    sequence_parallel: bool = Field(
        default=True, description="stages with TP may cut activations by position"
    )
    zero_stages: tuple[Literal[0, 1, 2], ...] = Field(
        default=(0, 1, 2), min_length=1, description="ZeRO stages to choose from"
    )
    zero_scope: Literal["all", "pipeline"] = Field(
        default="all", description="who shares optimizer state: all holders, or those of one pipeline"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_length > self.model.max_sequence_length:
            raise ValueError(
                f"sequence_length = {self.sequence_length} is more than the model's max_sequence_length"
                f" = {self.model.max_sequence_length}; shorten it"
            )
        if self.throughput_floor is not None and self.objective != "cost":
            raise ValueError(
                f"throughput_floor = {self.throughput_floor:g} belongs to the objective cost: the plan of least"
                " time has the highest throughput anyway; add --objective cost or leave the floor out"
            )
        if self.objective == "cost":
            check_prices(self.cluster)
        return self
