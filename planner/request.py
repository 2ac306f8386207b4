"""PlanRequest: everything a planning strategy is asked."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from planner.cluster import Cluster
from planner.errors import Contract
from planner.model_spec import ModelSpec
from planner.plan import MAX_GLOBAL_BATCH_SIZE, Dtypes, PlanEmulation


class PlanRequest(Contract):
    """One planning task. With `equal_batches` every pipeline gets the same number of samples."""

    model: ModelSpec
    cluster: Cluster
    global_batch_size: int = Field(ge=1, le=MAX_GLOBAL_BATCH_SIZE, description="samples an iteration")
    sequence_length: int = Field(ge=1, description="tokens a sample")
    dtypes: Dtypes = Dtypes()
    strategy: str = "eth"
    emulation: PlanEmulation = PlanEmulation()
    equal_batches: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_length > self.model.max_sequence_length:
            raise ValueError(
                f"sequence_length = {self.sequence_length} is more than the model's max_sequence_length"
                f" = {self.model.max_sequence_length}; shorten it"
            )
        return self
