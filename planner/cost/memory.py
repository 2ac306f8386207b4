"""Memory of one device: `tensor_bytes` (a tensor tracker's peak) and `device_bytes` (what must fit)."""

from __future__ import annotations

from dataclasses import dataclass

from planner.catalogue import Backend, DeviceType
from planner.cost import activations
from planner.cost.activations import ActivationSizes
from planner.cost.held import HeldValues, held_values
from planner.model_spec import ModelSpec
from planner.plan import Dtypes
from planner.profile.analytic import PRECISION_BYTES

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


class MemoryModel:
    """Bytes a device needs. Figures are multiplied by `memory_scale` (emulated devices)."""

    def __init__(
        self, *, model: ModelSpec, sequence_length: int, dtypes: Dtypes, memory_scale: float = 1.0
    ) -> None:
        self.model = model
        self.sequence_length = sequence_length
        self.dtypes = dtypes
        self.memory_scale = memory_scale
        self._rows: dict[tuple[int, int], RowBytes] = {}

    def tensor_bytes(self, load: StageLoad) -> int:
        """Peak of all live tensors: the state, and the larger of the training step and the optimizer's."""
        held = held_values(self.model, load.tp, load.layers, load.embedding, load.head)
        width = PRECISION_BYTES[self.dtypes.param]
        state = held.padded * width + held.numel * self._state_bytes_per_value()
        mask = self.sequence_length**2 * width if load.layers else 0
        # The update of all matrices at once makes one temporary of each, in fp32.
        update = held.numel * 4
        peak = state + mask + max(self._step_bytes(load, held), update) + SMALL_CHANGE_BYTES
        return int(peak * self.memory_scale)

    def layer_state_bytes(self) -> float:
        """Parameters, gradients and optimizer state of one layer over all TP ranks: its least need."""
        one, none = (held_values(self.model, 1, layers, False, False).numel for layers in (1, 0))
        per_value = PRECISION_BYTES[self.dtypes.param] + self._state_bytes_per_value()
        return (one - none) * per_value * self.memory_scale

    def _state_bytes_per_value(self) -> int:
        """Gradient, two moments and, beside parameters narrower than fp32, a master copy."""
        masters = 4 if PRECISION_BYTES[self.dtypes.param] < 4 else 0
        return PRECISION_BYTES[self.dtypes.grad] + 2 * PRECISION_BYTES[self.dtypes.optimizer] + masters

    def device_bytes(self, load: StageLoad, device_type: DeviceType) -> int:
        """`tensor_bytes` plus workspace, communicators and the allocator's reserve."""
        return int(self.tensor_bytes(load) * (1 + ALLOCATOR_RESERVE) + WORKSPACE_BYTES[device_type.backend])

    def fits(self, load: StageLoad, device_type: DeviceType) -> bool:
        return self.device_bytes(load, device_type) <= device_type.memory_bytes

    def most_layers(self, load: StageLoad, device_type: DeviceType) -> int:
        """Most layers, up to those of `load`, that fit beside the rest of it; -1 if not even none do."""
        low, high = -1, load.layers
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(_with_layers(load, middle), device_type):
                low = middle
            else:
                high = middle - 1
        return low

    def _step_bytes(self, load: StageLoad, held: HeldValues) -> float:
        """Most that forward and backward hold beside the state, with all micro-batches in flight."""
        sizes = self._of_rows(load.tp, load.rows)
        width = PRECISION_BYTES[self.dtypes.param]
        kept = load.layers * sizes.layer_saved + (sizes.embedding_saved if load.embedding else 0.0)
        around = load.in_flight * kept + _message_hiddens(load) * sizes.hidden
        phases = [around]
        if load.layers:
            # The last layer's backward; on the last stage the final norm's gradient comes in.
            live = sizes.layer_live(held.largest_layer_shard * width)
            phases.append(around + live + (sizes.hidden if load.head else 0.0))
        if load.head:
            phases.append(around + sizes.head_saved + sizes.head_live(held.largest_end_shard * width))
        if load.embedding:
            # The table's gradient is made when the oldest micro-batch's layers are freed.
            incoming = 2 * sizes.hidden if load.layers else 0.0
            phases.append(around - kept + held.largest_end_shard * width + incoming)
        return max(phases)

    def _of_rows(self, tp: int, rows: int) -> RowBytes:
        key = (tp, rows)
        if key not in self._rows:
            self._rows[key] = RowBytes(
                ActivationSizes(self.model, self.dtypes, tp, rows, self.sequence_length)
            )
        return self._rows[key]


def _message_hiddens(load: StageLoad) -> int:
    """Posted receives and unsent sends, in activations of a micro-batch.

    Towards the stage behind: the activations sent of all micro-batches in flight, which are only let go of
    when the next must leave, one gradient received and the next one's buffer. Towards the stage before:
    two gradients sent and the buffer of the next activation. Under TP the result of an all-reduce may
    outlive its use by a moment.
    """
    behind = 0 if load.head else load.in_flight + 2
    before = 0 if load.embedding else 3
    return behind + before + (load.tp > 1)


class RowBytes:
    """Activation bytes of one micro-batch's rows on one TP rank."""

    def __init__(self, sizes: ActivationSizes) -> None:
        self._sizes = sizes
        self.hidden = sizes.hidden
        self.layer_saved = activations.layer_saved_bytes(sizes)
        self.embedding_saved = activations.embedding_saved_bytes(sizes)
        self.head_saved = activations.head_saved_bytes(sizes)

    def layer_live(self, largest_gradient: float) -> float:
        return activations.layer_live_bytes(self._sizes, largest_gradient=largest_gradient)

    def head_live(self, weight_gradient: float) -> float:
        return activations.head_live_bytes(self._sizes, weight_gradient=weight_gradient)


def _with_layers(load: StageLoad, layers: int) -> StageLoad:
    return StageLoad(load.tp, load.rows, layers, load.embedding, load.head, load.in_flight)
