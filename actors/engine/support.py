"""What the runtime can execute of a Plan. Free of torch, so that command line and driver refuse early."""

from __future__ import annotations

from collections.abc import Iterator

from planner.errors import UserError
from planner.plan import Dtypes, Plan

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""Communication library of each kind of device. Emulated devices talk over the host's."""


def check_supported(plan: Plan) -> None:
    """Raise a UserError that names the first field the runtime cannot execute, and the remedy."""
    for problem in _problems(plan):
        raise UserError(problem)


def device_backend(plan: Plan, device_id: str) -> str:
    """The communication library of a device: `gloo`, `nccl` or `hccl`."""
    return BACKENDS[device_kind(plan, device_id)]


def device_kind(plan: Plan, device_id: str) -> str:
    """`cpu`, `cuda` or `npu`: where the tensors of a device are; an emulated device's are on the host."""
    cluster = plan.cluster
    node = cluster.node_by_name[cluster.device_by_id[device_id].node]
    return "cpu" if node.emulate else cluster.type_of(device_id).backend


def _problems(plan: Plan) -> Iterator[str]:
    yield from _zero_problems(plan)
    yield from _dtype_problems(plan.dtypes)
    yield from _backend_problems(plan)


def _zero_problems(plan: Plan) -> Iterator[str]:
    if plan.zero_stage == 0:
        return
    if plan.gradient_sync != "block":
        yield (
            f"gradient_sync = {plan.gradient_sync!r} cannot shard optimizer state (zero_stage ="
            f" {plan.zero_stage}); set gradient_sync to 'block', or zero_stage to 0"
        )


def _dtype_problems(dtypes: Dtypes) -> Iterator[str]:
    if dtypes.wire not in ("fp32", "bf16"):
        yield f"dtypes.wire = {dtypes.wire!r} is not supported by the runtime; use 'bf16' or 'fp32'"
    for field in ("grad", "optimizer"):
        if (value := getattr(dtypes, field)) != "fp32":
            yield f"dtypes.{field} = {value!r} is not supported by the runtime; use 'fp32'"


def _backend_problems(plan: Plan) -> Iterator[str]:
    users: dict[str, str] = {}
    for place in plan.ranks:
        users.setdefault(device_backend(plan, place.device), place.device)
    if len(users) > 1:
        (first, a), (second, b) = list(users.items())[:2]
        yield (
            f"pipelines: device {a!r} communicates by {first} and {b!r} by {second}, which cannot share a"
            " group; plan for devices of one vendor, and do not mix emulated nodes with real accelerators"
        )
