"""One stage's iteration on one rank: 1F1B over its micro-batches, messages included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from actors.engine.device import Device
from actors.engine.exchange import Exchange
from actors.engine.model.dropout import Draws
from actors.engine.model.stage import StageModel
from actors.engine.schedule import Step, StepKind, one_f_one_b

Batch = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
DrawsOf = Callable[[int], Draws]
DocumentsOf = Callable[[int], torch.Tensor | None]


@dataclass(frozen=True)
class StepTime:
    """When a step ran, by `time.monotonic()`, waiting for its message left out."""

    kind: StepKind
    micro_batch: int
    start: float
    end: float


@dataclass
class StageResult:
    """What an iteration's steps left: the scaled losses of the last stage, and when each step ran."""

    losses: list[torch.Tensor] = field(default_factory=list)
    times: list[StepTime] = field(default_factory=list)


@dataclass(frozen=True)
class _InFlight:
    """A micro-batch between its forward and its backward.

    The edge instead of the output: the graph needs no more, so the output is freed once it is sent.
    """

    edge: GradientEdge
    received: torch.Tensor | None


class StageRunner:
    """Runs the micro-batches of one iteration after another; gradients arrive in the leaves."""

    def __init__(
        self,
        *,
        model: StageModel,
        exchange: Exchange,
        device: Device,
        stages: int,
        stage: int,
        micro_batches: int,
        before_last_backward: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._exchange = exchange
        self._device = device
        self._micro_batches = micro_batches
        self.loss_scale = 1.0
        """What the next iteration's sum over counted tokens is multiplied with."""
        self._before_last_backward = before_last_backward
        self._steps: list[Step] = one_f_one_b(stages=stages, stage=stage, micro_batches=micro_batches)
        self._in_flight: dict[int, _InFlight] = {}

    def run(self, batch: Batch, draws: DrawsOf, documents: DocumentsOf) -> StageResult:
        """All steps of one iteration. `batch` gives a micro-batch's inputs and labels, `draws` its dropout, `documents`
        where documents begin in it."""
        result = StageResult()
        self._in_flight.clear()
        self._exchange.start(self._micro_batches)
        for step in self._steps:
            if step.kind == "forward":
                self._forward(
                    step.micro_batch, batch, draws(step.micro_batch), documents(step.micro_batch), result
                )
            else:
                self._backward(step.micro_batch, result)
        self._exchange.finish()
        return result

    def forward_only(self, batch: Batch, documents: DocumentsOf, *, micro_batches: int) -> list[torch.Tensor]:
        """Forward steps alone, without dropout: on the last stage each micro-batch's loss, summed over its counted
        tokens. Nothing is kept for a backward, so that it needs less memory than training does."""
        model, activations = self._model, self._exchange.activations
        losses: list[torch.Tensor] = []
        activations.start(micro_batches)
        model.eval()
        try:
            with torch.no_grad():
                for index in range(micro_batches):
                    inputs, labels = batch(index) if model.has_embedding or model.has_head else (None, None)
                    if not model.has_embedding:
                        inputs = activations.receive()
                    assert inputs is not None
                    begins = documents(index)
                    with self._device.step("forward"):
                        output = model(inputs, labels if model.has_head else None, documents=begins)
                    if model.has_head:
                        losses.append(output)
                    else:
                        activations.send(output)
        finally:
            model.train()
        activations.finish()
        return losses

    def _forward(
        self,
        micro_batch: int,
        batch: Batch,
        draws: Draws,
        documents: torch.Tensor | None,
        result: StageResult,
    ) -> None:
        model = self._model
        inputs, labels, received = None, None, None
        if model.has_embedding or model.has_head:
            inputs, labels = batch(micro_batch)
        if not model.has_embedding:
            inputs = received = self._exchange.activations.receive().requires_grad_()
        assert inputs is not None
        start = time.monotonic()
        with self._device.step("forward"):
            output = model(inputs, labels if model.has_head else None, self.loss_scale, draws, documents)
        result.times.append(StepTime("forward", micro_batch, start, time.monotonic()))
        self._in_flight[micro_batch] = _InFlight(get_gradient_edge(output), received)
        if model.has_head:
            result.losses.append(output.detach())
        else:
            self._exchange.activations.send(output.detach())
            # Only now: posted earlier, the buffer would be held all through the warm-up.
            self._exchange.gradients.post()

    def _backward(self, micro_batch: int, result: StageResult) -> None:
        gradient = None if self._model.has_head else self._exchange.gradients.receive()
        in_flight = self._in_flight.pop(micro_batch)
        if micro_batch == self._micro_batches - 1 and self._before_last_backward is not None:
            self._before_last_backward()
        start = time.monotonic()
        with self._device.step("backward"):
            torch.autograd.backward(in_flight.edge, gradient)
        result.times.append(StepTime("backward", micro_batch, start, time.monotonic()))
        if in_flight.received is not None:
            assert in_flight.received.grad is not None
            self._exchange.gradients.send(in_flight.received.grad)
