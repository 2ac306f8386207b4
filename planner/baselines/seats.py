"""Devices for the stages of pipelines: a TP group stays in one node and one type."""

from __future__ import annotations

from collections.abc import Sequence

from planner.baselines.forms import Form
from planner.cluster import Cluster

# Devices of every stage of every pipeline, row-major [dp][tp].
Seats = list[list[tuple[str, ...]]]


def seat(cluster: Cluster, pipelines: Sequence[Sequence[Form]], *, aligned: bool = False) -> Seats | None:
    """Devices in node order, pipeline by pipeline and stage by stage; None if TP groups cannot be cut so.

    With `aligned`, stage by stage and pipeline by pipeline, so that gradients stay near, not activations.
    Where narrow groups break up nodes that wider ones need, the wider ones choose first.
    """
    stages = [(p, s) for p, forms in enumerate(pipelines) for s in range(len(forms))]
    if aligned:
        stages.sort(key=lambda place: (place[1], place[0]))
    found = _seat(cluster, pipelines, stages)
    if found is None:
        widest = sorted(stages, key=lambda place: -pipelines[place[0]][place[1]].tp)
        found = _seat(cluster, pipelines, widest)
    return found


def _seat(
    cluster: Cluster, pipelines: Sequence[Sequence[Form]], stages: Sequence[tuple[int, int]]
) -> Seats | None:
    free: dict[str, list[list[str]]] = {}
    for (_, type_), ids in cluster.ids_by_place.items():
        free.setdefault(type_, []).append(list(ids))
    seats: Seats = [[()] * len(forms) for forms in pipelines]
    for pipeline, stage in stages:
        form = pipelines[pipeline][stage]
        devices: list[str] = []
        for part in form.parts:
            left = part.replicas
            while left:
                node = _node(free.get(part.type, []), form.tp)
                if node is None:
                    return None
                # A node that whole groups fill up is the first choice until it is empty.
                groups = 1 if len(node) % form.tp else min(left, len(node) // form.tp)
                devices += node[: groups * form.tp]
                del node[: groups * form.tp]
                left -= groups
        seats[pipeline][stage] = tuple(devices)
    return seats


def _node(nodes: list[list[str]], tp: int) -> list[str] | None:
    """The first node that whole groups of this degree fill up; else the first with room."""
    first = None
    while nodes and not nodes[0]:
        nodes.pop(0)
    for ids in nodes:
        if len(ids) >= tp:
            if len(ids) % tp == 0:
                return ids
            first = first or ids
    return first
