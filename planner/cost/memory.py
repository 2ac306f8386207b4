"""Memory of one device: `tensor_bytes` (a tensor tracker's peak) and `device_bytes` (what must fit)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from planner.catalogue import Backend, DeviceType
from planner.collectives import SCATTER_SEGMENT, SEGMENT
from planner.cost import activations
from planner.cost.activations import ActivationSizes
from planner.cost.held import HeldValues, held_values
from planner.cost.layer_backward import LayerBackward
from planner.cost.layer_flow import OperatorSet, Recompute, Segment, kept_bytes, segments
from planner.model_spec import ModelSpec
from planner.plan import Dtypes
from planner.profile.analytic import PRECISION_BYTES

if TYPE_CHECKING:
    from planner.request import PlanRequest

_MIB = 1024**2

# Taken by the driver's context, the matrix library's workspace and the communicators.
WORKSPACE_BYTES: dict[Backend, int] = {"cpu": 0, "cuda": 800 * _MIB, "npu": 1000 * _MIB}

# The caching allocator holds blocks that no tensor fills: a share of what tensors need.
ALLOCATOR_RESERVE = 0.04


# Step counters, scalars and the like.
SMALL_CHANGE_BYTES = 4096


@dataclass(frozen=True)
class StageLoad:
    """What of a stage decides a device's memory: the part it holds and how much of it is in flight."""

    tp: int
    rows: int
    layers: int
    embedding: bool
    head: bool
    in_flight: int
    """Micro-batches whose activations are alive at once: min(S - j, n) under 1F1B."""
    recompute: Recompute = ()
    zero_stage: int = 0
    zero_ways: float = 1.0
    """Devices that share the stage's optimizer state from ZeRO-1 on."""
    dp: int = 1
    """Replicas of the stage, which share its gradients under ZeRO-2."""
    sequence_parallel: bool = False
    """Under TP: whether activations between cut layers are cut by position."""
    largest_call: int | None = None
    """Gradients that travel at once, at most; None while only the stage is known: all that it holds."""
    further: int | None = None
    """Micro-batches of an iteration beyond those in flight; None while only the stage is known: many."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        return segments(self.recompute, self.layers)


class MemoryModel:
    """Bytes a device needs. Figures are multiplied by `memory_scale` (emulated devices)."""

    def __init__(
        self, *, model: ModelSpec, sequence_length: int, dtypes: Dtypes, memory_scale: float = 1.0
    ) -> None:
        self.model = model
        self.sequence_length = sequence_length
        self.dtypes = dtypes
        self.memory_scale = memory_scale
        self._held_values: dict[tuple[int, int, bool, bool], HeldValues] = {}
        self._rows: dict[tuple[int, int, bool], RowBytes] = {}

    @classmethod
    def of_request(cls, request: PlanRequest) -> MemoryModel:
        return cls(
            model=request.model,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            memory_scale=request.emulation.memory_scale,
        )

    def tensor_bytes(self, load: StageLoad) -> int:
        """Peak of all live tensors: the state, and the larger of the training step and the optimizer's."""
        sizes = self.rows_bytes(load.tp, load.rows, load.sequence_parallel)
        layers_kept = revived = 0.0
        for segment in reversed(load.segments):
            # When a layer runs backward, those behind it are freed.
            revived = max(revived, sizes.layer_revived(segment.operators) - layers_kept)
            layers_kept += segment.layers * sizes.layer_kept(segment.operators)
        bases = self.step_bases(load)
        peak = bases.peak(in_flight=load.in_flight, layers_kept=layers_kept, revived=revived)
        return int(peak * self.memory_scale)

    def step_bases(self, load: StageLoad) -> StepBases:
        """What of the stage's memory depends neither on what layers keep nor on micro-batches in flight."""
        held = self._held(load, load.layers)
        sizes = self.rows_bytes(load.tp, load.rows, load.sequence_parallel)
        width = PRECISION_BYTES[self.dtypes.param]
        state, update = self.state_bytes(load)
        # Posted receives and unsent sends. Towards the stage behind: the activations sent of all micro-batches
        # in flight, which are only let go of when the next must leave, one gradient received and the next
        # one's buffer. Towards the stage before: two gradients sent and the buffer of the next activation.
        # Under TP the result of an all-reduce may outlive its use by a moment.
        # With few micro-batches there is less: what is sent before the first backward is activations alone.
        before = 0 if load.embedding else min(3, 3 if load.further is None else load.further)
        behind = 0 if load.head else min(2, load.in_flight if load.further == 0 else 2)
        messages = (before + behind + (load.tp > 1)) * sizes.hidden
        sent = 0.0 if load.head else sizes.hidden
        # A table that is both ends waits with the head's gradient for that of the embedding.
        both = load.embedding and load.head and self.model.tied_embedding
        tied = held.largest_end_shard * width if both else 0.0
        layer = head = embedding = None
        if load.layers:
            # The last layer's backward; on the last stage the final norm's gradient comes in. (By position it is
            # what is gathered, and needs no copy.)
            live = sizes.layer_live(held.largest_layer_shard * width)
            layer = live + (sizes.hidden if load.head and not load.sequence_parallel else 0.0) + tied
        # Under ZeRO-2 a region's gradient is scattered as soon as it is there.
        arriving = self._scatter_bytes(load, held.largest_end_shard)
        if load.head:
            head = sizes.head_saved + sizes.head_live(held.largest_end_shard * width, arriving, tied)
        if load.embedding:
            # The table's gradient is made when the oldest micro-batch's layers are freed; its sum with that of the
            # head is a third of the size, when what came out of the layers is freed too.
            incoming = 2 * sizes.hidden if load.layers else 0.0
            embedding = held.largest_end_shard * width + tied + max(incoming, tied, arriving)
        return StepBases(
            state=state,
            update=update,
            messages=messages,
            # What came in is kept whole, though a rank reads no more than its positions of it.
            in_flight=sent + (sizes.embedding_saved if load.embedding else sizes.hidden - sizes.part),
            embedding_kept=sizes.embedding_saved if load.embedding else 0.0,
            layer=layer,
            head=head,
            embedding=embedding,
        )

    def _held(self, load: StageLoad, layers: int) -> HeldValues:
        key = (load.tp, layers, load.embedding, load.head)
        if key not in self._held_values:
            self._held_values[key] = held_values(self.model, *key)
        return self._held_values[key]

    @cached_property
    def _constants(self) -> float:
        return activations.constant_bytes(self.model, self.dtypes, self.sequence_length)

    def state_bytes(self, load: StageLoad, *, layers: int | None = None) -> tuple[float, float]:
        """Parameters, gradients and optimizer state; and what the optimizer's step needs beside them. `layers` stands
        for those of the load."""
        layers = load.layers if layers is None else layers
        held = self._held(load, layers)
        constants = self._constants if layers else 0
        parameters = held.padded * PRECISION_BYTES[self.dtypes.param]
        state = parameters + self._sharded_bytes(load, held) + constants + SMALL_CHANGE_BYTES
        return state + self._wire_bytes(load, held), self._update_bytes(load, held)

    def _wire_bytes(self, load: StageLoad, held: HeldValues) -> float:
        """Gradients in a narrower precision on their way, sent and received: no more than a segment at a time, and
        no more than there are. (ZeRO takes a shard of that while it is under way.)"""
        if load.zero_stage or not self.narrow_wire:
            return 0.0
        most = held.numel if load.largest_call is None else load.largest_call
        return 2 * PRECISION_BYTES[self.dtypes.wire] * min(SEGMENT, most)

    @property
    def narrow_wire(self) -> bool:
        """Whether gradients travel in a narrower precision than they are summed in."""
        return PRECISION_BYTES[self.dtypes.wire] < self._gradient_width

    def _update_bytes(self, load: StageLoad, held: HeldValues) -> float:
        """Temporaries of the optimizer's step. That of all matrices at once makes one of each value, in fp32;
        that of shards puts their gradients aside, unless it has master copies to work on."""
        if load.zero_stage and PRECISION_BYTES[self.dtypes.param] < 4:
            return 0.0
        return held.numel * 4 / _ways(load)

    def _sharded_bytes(self, load: StageLoad, held: HeldValues) -> float:
        """Gradients, and optimizer state with the master copy beside narrower parameters, under ZeRO."""
        gradient, optimizer = self._gradient_width, self._optimizer_width
        gradients = float(held.numel)
        if load.zero_stage == 2 and load.dp > 1:
            # What backward has made of one region, whole until it is reduced and scattered.
            gradients = held.numel / load.dp + held.largest_region
        return gradients * gradient + held.numel * optimizer / _ways(load)

    def _scatter_bytes(self, load: StageLoad, region: int) -> float:
        """What comes in of other replicas' gradients of a region of so many values, at a time."""
        if load.zero_stage < 2 or load.dp == 1:
            return 0.0
        return self._gradient_width * min(SCATTER_SEGMENT, region / load.dp)

    @property
    def _gradient_width(self) -> int:
        return PRECISION_BYTES[self.dtypes.grad]

    @property
    def _optimizer_width(self) -> int:
        """Two moments and, beside parameters narrower than fp32, a master copy."""
        masters = 4 if PRECISION_BYTES[self.dtypes.param] < 4 else 0
        return 2 * PRECISION_BYTES[self.dtypes.optimizer] + masters

    def layer_state_bytes(self, *, zero_stage: int = 0) -> float:
        """Parameters, gradients and optimizer state of one layer over all TP ranks: its least need.

        Of what ZeRO shares, nothing.
        """
        one, none = (held_values(self.model, 1, layers, False, False).numel for layers in (1, 0))
        kept = (self._optimizer_width, self._gradient_width)[zero_stage:] if zero_stage < 2 else ()
        per_value = PRECISION_BYTES[self.dtypes.param] + sum(kept)
        return (one - none) * per_value * self.memory_scale

    def device_bytes(self, load: StageLoad, device_type: DeviceType) -> int:
        """`tensor_bytes` plus workspace, communicators and the allocator's reserve."""
        return int(self.tensor_bytes(load) * (1 + ALLOCATOR_RESERVE) + WORKSPACE_BYTES[device_type.backend])

    def fits(self, load: StageLoad, device_type: DeviceType) -> bool:
        return self.device_bytes(load, device_type) <= device_type.memory_bytes

    def most_layers(self, load: StageLoad, device_type: DeviceType) -> int:
        """Most layers, up to those of `load`, that fit beside the rest of it; -1 if not even none do.

        Operators are recomputed in all layers or in none: how many there are is what is asked.
        """
        assert all(count == load.layers for _, count in load.recompute)
        low, high = -1, load.layers
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(_with_layers(load, middle), device_type):
                low = middle
            else:
                high = middle - 1
        return low

    def rows_bytes(self, tp: int, rows: int, sequence_parallel: bool = False) -> RowBytes:
        """Activation sizes of a micro-batch's rows."""
        key = (tp, rows, sequence_parallel)
        if key not in self._rows:
            self._rows[key] = RowBytes(
                ActivationSizes(self.model, self.dtypes, tp, rows, self.sequence_length, sequence_parallel)
            )
        return self._rows[key]


def most_tensor_bytes(device_type: DeviceType) -> int:
    """The largest `tensor_bytes` whose `device_bytes` fit."""
    room = device_type.memory_bytes + 1 - WORKSPACE_BYTES[device_type.backend]
    return max(math.ceil(room / (1 + ALLOCATOR_RESERVE)) - 1, -1)


def _ways(load: StageLoad) -> float:
    return load.zero_ways if load.zero_stage else 1.0


@dataclass(frozen=True)
class StepBases:
    """Bytes that do not depend on what layers keep.

    `in_flight` is held once a micro-batch in flight; `layer`, `head` and `embedding` are held on top in the
    moment when that part runs backward, None where the stage has no such part.
    """

    state: float
    update: float
    messages: float
    in_flight: float
    embedding_kept: float
    layer: float | None
    head: float | None
    embedding: float | None

    def peak(self, *, in_flight: int, layers_kept: float, revived: float) -> float:
        """The most that is alive at once. (The arguments are those of `phases`.)"""
        phases = self.phases(in_flight=in_flight, layers_kept=layers_kept, revived=revived)
        return self.state + max(*phases, self.update)

    def phases(self, *, in_flight: int, layers_kept: Any, revived: Any) -> list[Any]:
        """What is alive beside the state at its largest moments; arrays if arguments are.

        Args:
            in_flight: micro-batches.
            layers_kept: what all layers keep of one micro-batch.
            revived: what a layer's backward needs more for being recomputed: of what it gave up, what is alive again.
        """
        around = in_flight * (layers_kept + self.in_flight) + self.messages
        phases = [around]
        if self.layer is not None:
            phases.append(around + revived + self.layer)
        if self.head is not None:
            phases.append(around + self.head)
        if self.embedding is not None:
            phases.append(around - layers_kept - self.embedding_kept + self.embedding)
        return phases


class RowBytes:
    """Activation bytes of one micro-batch's rows on one TP rank."""

    def __init__(self, sizes: ActivationSizes) -> None:
        self._sizes = sizes
        self.hidden, self.part = sizes.hidden, sizes.part
        self.values = activations.layer_values(sizes)
        self.layer_saved = activations.layer_saved_bytes(sizes)
        self._backward = LayerBackward(sizes)
        self._kept: dict[OperatorSet, float] = {}
        self._revived: dict[OperatorSet, float] = {}
        self._live: dict[float, float] = {}
        self.embedding_saved = activations.embedding_saved_bytes(sizes)
        self.head_saved = activations.head_saved_bytes(sizes)

    def layer_kept(self, operators: OperatorSet) -> float:
        """What a layer keeps that recomputes these operators."""
        if operators not in self._kept:
            self._kept[operators] = kept_bytes(self.values, operators)
        return self._kept[operators]

    def layer_revived(self, operators: OperatorSet) -> float:
        """What the backward of such a layer needs beyond what it keeps and beyond `layer_live`: what it gave up,
        less if not all of that is alive when most is, more if running it again takes more."""
        if operators not in self._revived:
            more = self._backward.most(operators) - self.layer_kept(operators)
            more -= self._backward.most_kept - self.layer_saved
            self._revived[operators] = max(more, 0.0)
        return self._revived[operators]

    @cached_property
    def never_alive(self) -> float:
        """Of what a layer gives up, its backward has all but so many bytes alive again, whatever it recomputes."""
        return self._backward.most_kept - self._backward.least_most

    def layer_live(self, largest_gradient: float) -> float:
        if largest_gradient not in self._live:
            self._live[largest_gradient] = activations.layer_live_bytes(
                self._sizes, largest_gradient=largest_gradient
            )
        return self._live[largest_gradient]

    def head_live(self, weight_gradient: float, arriving: float, waiting: float) -> float:
        return activations.head_live_bytes(
            self._sizes, weight_gradient=weight_gradient, arriving=arriving, waiting=waiting
        )


def _with_layers(load: StageLoad, layers: int) -> StageLoad:
    recompute = tuple((name, layers) for name, _ in load.recompute) if layers else ()
    return replace(load, layers=layers, recompute=recompute)
