"""What all peers share: layers by a min-max split within memory, an estimate, and the price of the best.

A peer proposes sketches. The bench orders them by a quick estimate, settles the first few hundred (devices,
layers) and prices the best few in full. Budgets count evaluations, so results do not depend on the machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from planner.baselines.after import After
from planner.baselines.forms import Form, covered, tp_degrees
from planner.baselines.memory_savers import Zero, ZeroStage, zero_order
from planner.baselines.seats import seat
from planner.baselines.sketch import Chain, Settled, Sketch
from planner.baselines.splits import ROUND_OFF, Splitter
from planner.baselines.stage_figures import SharedFigures
from planner.cost.models import CostModels
from planner.cost.plan_memory import check_memory
from planner.cost.price import iteration_seconds, with_prediction
from planner.errors import UserError
from planner.local_batches import Pace
from planner.plan import PipelinePlan, Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.assemble import plan_of
from planner.search.shortlist import Offer, ignore
from planner.units import format_bytes

# Sketches whose quick estimate is this much above the best estimate are not settled.
_HOPELESS = 1.15
# A sketch that does not fit costs little, so many more of them may be seen than are settled.
_TRIES_A_SETTLED = 20
# On a small budget so many are seen even if none fits.
_THIN_TRIES = 2
# What is this much above the plan to beat is not changed any further.
_NEAR_UPPER = 1.03
# Up to so many devices a peer is searched in full beside another strategy: it takes a fraction of a second.
_FEW_DEVICES = 8


@dataclass(frozen=True)
class Budget:
    """How many sketches are settled, and how many of them priced.

    `upper`: seconds that a plan must stay below to be of use; what is far above is neither priced nor changed.
    `changes`: whether the best sketches are then changed stage by stage, though none may be near `upper`.
    """

    settled: int
    priced: int
    upper: float = float("inf")
    changes: bool = True
    starts: int = 3
    """How many of the best are changed."""

    @classmethod
    def for_devices(cls, devices: int) -> Budget:
        """Evaluations of large clusters cost more."""
        if devices <= 64:
            return cls(settled=600, priced=40)
        return cls(settled=400, priced=24) if devices <= 256 else cls(settled=240, priced=12)

    @classmethod
    def beside(cls, devices: int, *, upper: float) -> Budget:
        """A fraction of that, for when a good plan is known and only a better one is of use."""
        if devices <= _FEW_DEVICES:
            return replace(cls.for_devices(devices), upper=upper)
        if devices <= 64:
            return cls(settled=24, priced=4, upper=upper, changes=False, starts=1)
        return cls(settled=40, priced=6, upper=upper, changes=False, starts=2)

    @property
    def improves(self) -> bool:
        """Whether what was priced is changed; with an `upper`, all that was priced is near it."""
        return self.changes or self.upper < float("inf")


class Bench:
    """Settles and prices sketches of one request."""

    def __init__(
        self,
        request: PlanRequest,
        *,
        profile: ProfileTable,
        figures: SharedFigures | None = None,
        types: Collection[str] | None = None,
        offer: Offer = ignore,
        budget: Budget | None = None,
    ) -> None:
        """`figures` are those of the request, if there are some already; `types` are those to use, None means all;
        `offer` is told of every plan that is priced."""
        self._offer = offer
        self.request = request
        self.profile = profile
        self.figures = figures or SharedFigures(CostModels.of_request(request, profile=profile))
        self.models = self.figures.models
        self.cost, self.memory = self.models.cost, self.models.memory
        self.layers = request.model.layers
        self.counts = {
            type_: count for type_, count in request.cluster.counts.items() if types is None or type_ in types
        }
        self.budget = budget or Budget.for_devices(sum(self.counts.values()))
        self.settled_count = self.priced_count = self.seen_count = 0
        self._of_stages = self.figures.of(request)
        self._splits = Splitter(self._of_stages, upper=self.budget.upper * _NEAR_UPPER)
        zero_stages = zero_order(request)
        self.zero_stages = zero_stages if self.budget.changes else zero_stages[:1]
        self._after = After(request, self.profile)

    def degrees(self, type_: str) -> tuple[int, ...]:
        """TP degrees that fit into the type's largest node."""
        in_nodes = [
            sum(entry.count for entry in node.devices if entry.type == type_)
            for node in self.request.cluster.nodes
        ]
        return tp_degrees(self.request.model, max(in_nodes))

    def layer_seconds(self, form: Form) -> float:
        """Seconds that one more layer of a micro-batch takes."""
        return self._of_stages.layer_seconds(form)

    def micro_batch_sizes(self, most: int) -> list[int]:
        """Every small size, then powers of two and three times them; powers of two alone on a small budget."""
        thin = not self.budget.changes
        return [
            m
            for m in range(1, most + 1)
            if _is_power(m) or (not thin and (m <= 8 or (m % 3 == 0 and _is_power(m // 3))))
        ]

    def covers(self, form: Form) -> bool:
        return covered(self.cost, form)

    def quick_estimate(self, chain: Chain, micro_batches: int) -> float:
        """Eq. 1 of a chain whose layers could be split at will, without ends and transfers."""
        speed = sum(count / self.layer_seconds(form) for form, count in Counter(chain).items())
        period = self.layers / speed
        return period * (len(chain) + micro_batches - 1)

    def may_be_of_use(self, speed: float, periods: int) -> bool:
        """Whether the quick estimate of so many layers a second may be below what is to be beaten; the others would
        not be looked at."""
        return self.layers / speed * periods <= self.budget.upper * (1 + ROUND_OFF)

    def settle(
        self,
        sketch: Sketch,
        share: Callable[[Sequence[Pace]], Sequence[int]],
        *,
        expected: Sequence[int],
        layers: Sequence[int] | None = None,
    ) -> Settled | None:
        """The better of `settle_with` the first ZeRO stage that fits, and with a later one where it helps."""
        best: Settled | None = None
        for stage in self.zero_stages:
            # Without recomputation there is nothing to win by more sharding.
            if best is not None and (stage < 2 or not best.recomputes):
                continue
            found = self.settle_with(stage, sketch, share, expected=expected, layers=layers)
            if found is not None and (best is None or found.estimate < best.estimate):
                best = found
        return best

    def settle_with(
        self,
        zero_stage: ZeroStage,
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
        zero = Zero(zero_stage, self.request.zero_scope, len(sketch.pipelines))
        size, splits = sketch.micro_batch_size, []
        counts = [-(-samples // size) for samples in expected]
        distinct = set(zip(sketch.pipelines, counts, strict=True))
        if any(self._splits.is_hopeless(chain, count, layers) for chain, count in distinct):
            return None
        if not all(self._splits.may_fit(chain, count, zero) for chain, count in distinct):
            return None
        seats = seat(self.request.cluster, sketch.pipelines, aligned=sketch.aligned)
        if seats is None:
            return None
        for chain, devices, count in zip(sketch.pipelines, seats, counts, strict=True):
            found = self._splits.split(chain, devices, count, layers, zero)
            if found is None:
                return None
            splits.append(found)
        self.settled_count += 1
        paces = [Pace(size, split.fill_seconds, split.period_seconds) for split in splits]
        samples = share(paces)
        if min(samples) < 1:
            return None
        ends = [pace.end_seconds(pace.micro_batches(n)) for pace, n in zip(paces, samples, strict=True)]
        after = max(
            self._after.seconds(chain, split.layers, zero)
            for chain, split in set(zip(sketch.pipelines, splits, strict=True))
        )
        return Settled(
            sketch,
            zero_stage,
            tuple(map(tuple, seats)),
            tuple(splits),
            tuple(samples),
            tuple(paces),
            max(ends),
            max(ends) + after,
        )

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
            if quick > min(best * _HOPELESS, self.budget.upper):
                break
            if len(found) >= most or (found and tries > most * _TRIES_A_SETTLED):
                break
            if tries > most * _THIN_TRIES and not self.budget.changes:
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

    def priced(self, found: Sequence[Settled]) -> list[tuple[float, Settled, Plan]]:
        """Their full prices, best first, of those that may be of use.

        Where nobody is told of the others, only those are sure to be priced that may be among the best `starts`: no
        price is below its Eq. 1.
        """
        priced: list[tuple[float, Settled, Plan]] = []
        few = self.budget.starts if self._offer is ignore else len(found)
        for settled in found:
            least = settled.end_seconds * (1 - ROUND_OFF)
            if not self.of_use(settled.end_seconds) or sum(one[0] < least for one in priced) >= few:
                continue
            plan = self.price(self.plan(settled.pipelines, settled.zero_stage))
            assert plan.predicted is not None
            priced.append((plan.predicted.iteration_seconds, settled, plan))
        return sorted(priced, key=lambda one: one[0])

    def of_use(self, seconds: float) -> bool:
        """Whether a plan whose backward ends no sooner may be better than the one to beat, or become so."""
        return seconds < self.budget.upper * _NEAR_UPPER

    def price(self, plan: Plan) -> Plan:
        """The plan with its prediction."""
        priced = with_prediction(plan, cost=self.cost)
        self.priced_count += 1
        self._offer(priced)
        return priced

    def finished(self, settled: Settled, priced: Plan) -> Plan:
        """The priced plan, with statistics; without ZeRO where that fits as well and is quicker."""
        found = [priced]
        if settled.zero_stage and 0 in self.zero_stages:
            plain = self.plan(settled.pipelines, 0)
            if plan_fits(plain):
                found.append(self.price(plain))
        return min(found, key=iteration_seconds).model_copy(update={"search": self.statistics()})

    def plan(self, pipelines: Sequence[PipelinePlan], zero_stage: ZeroStage) -> Plan:
        """A Plan of these pipelines, all other devices idle."""
        used = {device for pipeline in pipelines for device in pipeline.devices}
        idle = tuple(device.id for device in self.request.cluster.devices if device.id not in used)
        return plan_of(self.request, pipelines, idle=idle, profile=self.profile, zero_stage=zero_stage)

    def statistics(self) -> dict[str, int]:
        """For the plan's record."""
        return {
            "sketches_seen": self.seen_count,
            "sketches_settled": self.settled_count,
            "plans_priced": self.priced_count,
        }

    def _forbidden(self) -> str:
        """What the request does not allow that would save memory, and the remedy."""
        without = [] if self.request.recompute else ["recomputation"]
        if not any(self.request.zero_stages):
            without.append("ZeRO")
        if not without:
            return "; use `--strategy eth`, more devices or a shorter sequence"
        return f" without {' and '.join(without)}; allow it, use `--strategy eth` or more devices"

    def cannot_fit(self, what: str) -> UserError:
        """Says what the peer tried, and the memory it had."""
        memory = ", ".join(
            f"{format_bytes(self.request.cluster.device_types[type_].memory_bytes)} of {type_}"
            for type_ in self.counts
        )
        return UserError(
            f"strategy = {self.request.strategy!r}: model {self.request.model.name} does not fit; {what}"
            f" within {memory}{self._forbidden()}"
        )


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def plan_fits(plan: Plan) -> bool:
    """Whether every stage of a plan fits its devices."""
    try:
        check_memory(plan)
    except UserError:
        return False
    return True
