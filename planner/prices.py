"""What devices cost: prices by type, and what a plan's devices cost for the tokens that they train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from planner.catalogue import canonical_name
from planner.cluster import Cluster
from planner.errors import UserError
from planner.plan import Plan

_SECONDS_AN_HOUR = 3600.0
_TOKENS = 1e6


def check_prices(cluster: Cluster) -> None:
    """ValueError that names the device types of the cluster which have no price, in one line."""
    missing = [name for name in cluster.counts if cluster.device_types[name].price_per_hour is None]
    if missing:
        options = " ".join(f"--price {name}=PRICE" for name in missing)
        raise ValueError(
            f"objective = cost: {', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no price;"
            f" give {options}, or price_per_hour under device_types in the cluster file"
        )


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """`910B2=4.5` or `910B2=4.5,910B4=2` -> prices by type; UserError quotes what does not parse."""
    prices: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, sign, value = part.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = -1.0
        if not sign or not name.strip() or not 0 <= price < float("inf"):
            raise UserError(
                f"--price = {part!r} is not a device type's price an hour; write --price 910B2=4.5"
            )
        prices[name.strip()] = price
    return prices


def with_prices(cluster: Cluster, prices: Mapping[str, float]) -> Cluster:
    """The cluster with these prices an hour in place of its own; UserError for a type that it does not have."""
    types = dict(cluster.device_types)
    for name, price in prices.items():
        known = name if name in types else canonical_name(name)
        if known not in cluster.counts:
            raise UserError(
                f"--price = '{name}={price:g}': the cluster has no {name}; it has {', '.join(cluster.counts)}"
            )
        types[known] = types[known].model_copy(update={"price_per_hour": price})
    return cluster.model_copy(update={"device_types": types})


def price_per_hour(plan: Plan) -> float | None:
    """Of all devices that the plan uses; None where one has no price. Idle devices cost nothing."""
    used = Counter(
        plan.cluster.device_by_id[device].type for pipeline in plan.pipelines for device in pipeline.devices
    )
    total = 0.0
    for name, count in used.items():
        price = plan.cluster.device_types[name].price_per_hour
        if price is None:
            return None
        total += count * price
    return total


def cost_per_million_tokens(plan: Plan) -> float | None:
    """Price of the devices used over the predicted iteration, for 10^6 tokens; None without prices."""
    assert plan.predicted is not None, "only a priced plan has a cost"
    price = price_per_hour(plan)
    if price is None:
        return None
    tokens = plan.global_batch_size * plan.sequence_length
    return price / _SECONDS_AN_HOUR * plan.predicted.iteration_seconds / tokens * _TOKENS


def with_cost(plan: Plan) -> Plan:
    """The priced plan with `cost_per_million_tokens`."""
    assert plan.predicted is not None
    cost = cost_per_million_tokens(plan)
    return plan.model_copy(
        update={"predicted": plan.predicted.model_copy(update={"cost_per_million_tokens": cost})}
    )


def tokens_per_second(plan: Plan) -> float:
    """Of the predicted iteration."""
    assert plan.predicted is not None
    return plan.global_batch_size * plan.sequence_length / plan.predicted.iteration_seconds
