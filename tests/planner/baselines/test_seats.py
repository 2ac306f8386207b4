"""Devices for stages: those that one TP group after the other takes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from planner.baselines.forms import Form, Part, make_form
from planner.baselines.seats import seat
from planner.cluster import Cluster
from tests.planner.baselines.jobs import draw_request

FORMS = st.builds(
    lambda tp, types, replicas: make_form(tp, tuple(Part(type_, replicas, 1) for type_ in types)),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([("fast",), ("slow",), ("fast", "slow")]),
    st.integers(1, 4),
)


def group_by_group(cluster: Cluster, stages: list[Form]) -> list[tuple[str, ...]] | None:
    """Each TP group gets the first devices of the first node that such groups fill up, else of the first with room."""
    free = {place: list(ids) for place, ids in cluster.ids_by_place.items()}
    found = []
    for form in stages:
        devices: list[str] = []
        for type_, _ in form.replicas:
            roomy = [ids for (_, held), ids in free.items() if held == type_ and len(ids) >= form.tp]
            node = next((ids for ids in roomy if len(ids) % form.tp == 0), roomy[0] if roomy else None)
            if node is None:
                return None
            devices += node[: form.tp]
            del node[: form.tp]
        found.append(tuple(devices))
    return found


@settings(max_examples=200, deadline=None)
@given(
    nodes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(any), min_size=1, max_size=4),
    forms=st.lists(FORMS, min_size=1, max_size=4),
)
def test_seats_are_those_of_one_group_after_the_other(
    nodes: list[tuple[int, int]], forms: list[Form]
) -> None:
    counts = [{type_: n for type_, n in zip(("fast", "slow"), node, strict=True) if n} for node in nodes]
    cluster = draw_request(0, counts, strategy="metis").cluster
    # If that does not work out, the widest choose first.
    places = [list(range(len(forms))), sorted(range(len(forms)), key=lambda stage: -forms[stage].tp)]
    expected = None
    for order in places:
        found = group_by_group(cluster, [forms[stage] for stage in order])
        if found is not None:
            expected = [found[order.index(stage)] for stage in range(len(forms))]
            break
    seats = seat(cluster, [tuple(forms)])
    assert (seats and seats[0]) == expected
