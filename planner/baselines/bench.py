"""What all peers share: layers by a min-max split within memory, an estimate, and the price of the best.

A peer proposes sketches. The bench orders them by a quick estimate, settles the first few hundred (devices,
layers) and prices the best few in full. Budgets count evaluations, so results do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from planner.baselines.forms import Form, covered, tp_degrees
from planner.baselines.seats import seat
from planner.baselines.sketch import Chain, Settled, Sketch
from planner.baselines.splits import Splitter
from planner.cost.gradient import update_bytes_per_value
from planner.cost.held import held_values
from planner.cost.links import all_reduce_seconds
from planner.cost.memory import MemoryModel
from planner.cost.price import with_prediction
from planner.cost.stages import StageCost
from planner.errors import UserError
from planner.local_batches import Pace
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.profile.analytic import PRECISION_BYTES
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.assemble import plan_of
from planner.search.shortlist import Offer, ignore
from planner.units import format_bytes

# Sketches whose quick estimate is this much above the best estimate are not settled.
_HOPELESS = 1.15
# A sketch that does not fit costs little, so many more of them may be seen than are settled.
_TRIES_A_SETTLED = 20


@dataclass(frozen=True)
class Budget:
    """How many sketches are settled, and how many of them priced."""

    settled: int
    priced: int

    @classmethod
    def for_devices(cls, devices: int) -> Budget:
        """Evaluations of large clusters cost more."""
        if devices <= 64:
            return cls(settled=600, priced=40)
        return cls(settled=400, priced=24) if devices <= 256 else cls(settled=240, priced=12)


class Bench:
    """Settles and prices sketches of one request."""

    def __init__(
        self,
        request: PlanRequest,
        *,
        profile: ProfileTable,
        types: Collection[str] | None = None,
        offer: Offer = ignore,
    ) -> None:
        """`types` are those to use, None means all; `offer` is told of every plan that is priced."""
        self._offer = offer
        self.request = request
        self.profile = profile
        self.cost = StageCost(
            model=request.model,
            device_types=request.cluster.device_types,
            links=request.cluster.links,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            profile=profile,
        )
        self.memory = MemoryModel(
            model=request.model,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            memory_scale=request.emulation.memory_scale,
        )
        self.layers = request.model.layers
        self.counts = {
            type_: count for type_, count in request.cluster.counts.items() if types is None or type_ in types
        }
        self.budget = Budget.for_devices(sum(self.counts.values()))
        self.settled_count = self.priced_count = self.seen_count = 0
        self._splits = Splitter(self.cost, self.memory)
        self._after: dict[tuple[object, ...], float] = {}

    def degrees(self, type_: str) -> tuple[int, ...]:
        """TP degrees that fit into the type's largest node."""
        in_nodes = [
            sum(entry.count for entry in node.devices if entry.type == type_)
            for node in self.request.cluster.nodes
        ]
        return tp_degrees(self.request.model, max(in_nodes))

    def layer_seconds(self, form: Form) -> float:
        """Seconds that one more layer of a micro-batch takes."""
        return self._splits.layer_seconds(form)

    def covers(self, form: Form) -> bool:
        return covered(self.cost, form)

    def quick_estimate(self, chain: Chain, micro_batches: int) -> float:
        """Eq. 1 of a chain whose layers could be split at will, without ends and transfers."""
        period = self.layers / sum(1 / self.layer_seconds(form) for form in chain)
        return period * (len(chain) + micro_batches - 1)

    def settle(
        self,
        sketch: Sketch,
        share: Callable[[Sequence[Pace]], Sequence[int]],
        *,
        expected: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> Settled | None:
        """Devices and layers for a sketch; None if they do not fit.

        Layers are split for the `expected` samples of each pipeline, or as `layers` says; then `share` says
        what each takes.
        """
        self.seen_count += 1
        if any(len(chain) > self.layers + 2 for chain in sketch.pipelines):
            return None
        size, splits = sketch.micro_batch_size, []
        counts = [-(-samples // size) for samples in expected]
        distinct = set(zip(sketch.pipelines, counts, strict=True))
        if not all(self._splits.limits(chain, count) for chain, count in distinct):
            return None
        seats = seat(self.request.cluster, sketch.pipelines, aligned=sketch.aligned)
        if seats is None:
            return None
        for chain, devices, count in zip(sketch.pipelines, seats, counts, strict=True):
            found = self._splits.split(chain, devices, count, layers)
            if found is None:
                return None
            splits.append(found)
        self.settled_count += 1
        paces = [Pace(size, split.fill_seconds, split.period_seconds) for split in splits]
        samples = share(paces)
        if min(samples) < 1:
            return None
        pipelines = tuple(
            _pipeline(index, chain, devices, split.layers, size, count)
            for index, (chain, devices, split, count) in enumerate(
                zip(sketch.pipelines, seats, splits, samples, strict=True)
            )
        )
        ends = [pace.end_seconds(pace.micro_batches(n)) for pace, n in zip(paces, samples, strict=True)]
        after = max(
            self._after_seconds(chain, split.layers, len(pipelines))
            for chain, split in set(zip(sketch.pipelines, splits, strict=True))
        )
        return Settled(sketch, pipelines, tuple(paces), max(ends), max(ends) + after)

    def best(
        self,
        sketches: Iterable[Sketch],
        settle: Callable[[Sketch], Settled | None],
        *,
        micro_batches: Callable[[Sketch], int],
    ) -> list[tuple[float, Settled, Plan]]:
        """The sketches that price best, best first; empty if none fits."""
        found = self.settled(sketches, settle, micro_batches=micro_batches)
        chosen = sorted(found, key=lambda settled: settled.estimate)[: self.budget.priced]
        return self.priced(chosen)

    def settled(
        self,
        sketches: Iterable[Sketch],
        settle: Callable[[Sketch], Settled | None],
        *,
        micro_batches: Callable[[Sketch], int],
    ) -> list[Settled]:
        """The most promising sketches that fit; of those that do not, more may be tried until one fits."""
        found: list[Settled] = []
        best, most = float("inf"), self.budget.settled
        for tries, (quick, sketch) in enumerate(self._ordered(sketches, micro_batches)):
            if quick > best * _HOPELESS or len(found) >= most or (found and tries > most * _TRIES_A_SETTLED):
                break
            settled = settle(sketch)
            if settled is not None:
                found.append(settled)
                best = min(best, settled.estimate)
        return found

    def _ordered(
        self, sketches: Iterable[Sketch], micro_batches: Callable[[Sketch], int]
    ) -> list[tuple[float, Sketch]]:
        """The distinct ones with their quick estimates, least first."""
        order = []
        for sketch in dict.fromkeys(sketches):
            count = micro_batches(sketch)
            quick = max(self.quick_estimate(chain, count) for chain in set(sketch.pipelines))
            order.append((quick, sketch))
        return sorted(order, key=lambda one: one[0])

    def priced(self, found: Iterable[Settled]) -> list[tuple[float, Settled, Plan]]:
        """Their full prices, best first."""
        priced = []
        for settled in found:
            plan = self.price(self.plan(settled.pipelines))
            assert plan.predicted is not None
            priced.append((plan.predicted.iteration_seconds, settled, plan))
        return sorted(priced, key=lambda one: one[0])

    def price(self, plan: Plan) -> Plan:
        """The plan with its prediction."""
        priced = with_prediction(plan, profile=self.profile)
        self.priced_count += 1
        self._offer(priced)
        return priced

    def plan(self, pipelines: Sequence[PipelinePlan]) -> Plan:
        """A Plan of these pipelines, all other devices idle."""
        used = {device for pipeline in pipelines for device in pipeline.devices}
        idle = tuple(device.id for device in self.request.cluster.devices if device.id not in used)
        return plan_of(self.request, pipelines, idle=idle, profile=self.profile)

    def statistics(self) -> dict[str, int]:
        """For the plan's record."""
        return {
            "sketches_seen": self.seen_count,
            "sketches_settled": self.settled_count,
            "plans_priced": self.priced_count,
        }

    def cannot_fit(self, what: str) -> UserError:
        """Says what the peer tried, and the memory it had."""
        memory = ", ".join(
            f"{format_bytes(self.request.cluster.device_types[type_].memory_bytes)} of {type_}"
            for type_ in self.counts
        )
        return UserError(
            f"strategy = {self.request.strategy!r}: model {self.request.model.name} does not fit; {what}"
            f" within {memory} (nothing is recomputed); use `--strategy eth`, more devices or a shorter"
            " sequence"
        )

    def _after_seconds(self, chain: Chain, layers: Sequence[int], pipelines: int) -> float:
        """About what gradients and optimizer take, of the stage that takes longest."""
        last = len(chain) - 1
        return max(
            self._stage_after(form, count, stage == 0, stage == last, pipelines)
            for stage, (form, count) in enumerate(zip(chain, layers, strict=True))
        )

    def _stage_after(self, form: Form, layers: int, embedding: bool, head: bool, pipelines: int) -> float:
        key = (form, layers, embedding, head, pipelines)
        if key not in self._after:
            dtypes = self.request.dtypes
            values = held_values(self.request.model, form.tp, layers, embedding, head).numel
            update = max(
                self.profile.streaming_seconds(
                    device_type=type_, moved_bytes=values * update_bytes_per_value(dtypes)
                )
                for type_, _ in form.loads
            )
            links, nodes = self.request.cluster.links, self.request.cluster.nodes
            link = min(
                (
                    links.between(type_a=type_, type_b=type_, same_node=len(nodes) == 1)
                    for type_, _ in form.loads
                ),
                key=lambda one: one.bandwidth,
            )
            sync = all_reduce_seconds(
                link,
                members=len(form.replicas) * pipelines,
                message_bytes=float(values * PRECISION_BYTES[dtypes.wire]),
            )
            self._after[key] = update + sync
        return self._after[key]


def micro_batch_sizes(most: int) -> list[int]:
    """Every small size, then powers of two and three times them."""
    return [m for m in range(1, most + 1) if m <= 8 or m & (m - 1) == 0 or (m % 3 == 0 and _is_power(m // 3))]


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _pipeline(
    index: int,
    chain: Chain,
    devices: Sequence[tuple[str, ...]],
    layers: Sequence[int],
    size: int,
    samples: int,
) -> PipelinePlan:
    stages, first = [], 0
    for number, (form, ids, count) in enumerate(zip(chain, devices, layers, strict=True)):
        stages.append(
            StagePlan(
                devices=ids,
                tp=form.tp,
                dp=len(form.replicas),
                rows=tuple(rows for _, rows in form.replicas),
                layers=(first, first + count),
                embedding=number == 0,
                head=number == len(chain) - 1,
            )
        )
        first += count
    return PipelinePlan(
        id=index,
        micro_batch_size=size,
        samples=samples,
        local_batch_size=-(-samples // size) * size,
        stages=tuple(stages),
    )
