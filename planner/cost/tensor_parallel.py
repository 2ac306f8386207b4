"""Seconds of the all-reduces inside a TP group, and where they come from."""

from __future__ import annotations

from typing import Literal

from planner.cluster import Links
from planner.cost.links import all_reduce_seconds
from planner.profile.table import ProfileTable

CollectiveSource = Literal["operators", "measured", "links"]
"""Measured with the operators, measured apart, or priced by the link formula."""


class TensorParallelCollectives:
    """All-reduces of TP groups, each inside one node and one device type."""

    def __init__(self, profile: ProfileTable, links: Links, *, precision: str, take_measured: bool) -> None:
        """Without `take_measured` the links price what the profile has measured apart from its operators."""
        self._profile = profile
        self._links = links
        self._precision = precision
        self._take_measured = take_measured

    def source(self, device_type: str, tp: int, message_bytes: float) -> CollectiveSource:
        """Where the seconds of such a message come from."""
        if self._profile.includes_tp_collectives(device_type):
            return "operators"
        return "links" if self._measured(device_type, tp, message_bytes) is None else "measured"

    def all_reduce(self, device_type: str, tp: int, message_bytes: float) -> float:
        """Seconds of summing a message over a TP group; 0 if the operators include it."""
        if tp == 1 or self._profile.includes_tp_collectives(device_type):
            return 0.0
        measured = self._measured(device_type, tp, message_bytes)
        if measured is not None:
            return measured
        link = self._links.between(type_a=device_type, type_b=device_type, same_node=True)
        return all_reduce_seconds(link, members=tp, message_bytes=message_bytes)

    def _measured(self, device_type: str, tp: int, message_bytes: float) -> float | None:
        if not self._take_measured:
            return None
        return self._profile.all_reduce_seconds(
            device_type=device_type,
            scope="intra_node",
            members=tp,
            message_bytes=message_bytes,
            precision=self._precision,
        )
