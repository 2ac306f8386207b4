"""AdamW over pieces against torch's AdamW on whole tensors."""

from __future__ import annotations

import math

import pytest
import torch

from actors.engine.gradient_buffer import GradientBuffer
from actors.engine.optimizer import Optimizer, PieceState, clip_coefficient
from actors.engine.weights import initial_parameter, shard
from actors.job import Optimizer as Settings
from planner.parameters import Parameter, model_parameters
from planner.plan import Plan
from tests.engine.held_parameters import HeldLeaf, initial_gradient, make_handles, own_blocks
from tests.plans import make_model, make_plan

MODEL = make_model(hidden_size=12, vocab_size=29, max_sequence_length=6)
# Rank 0 holds everything in pieces; ranks 1 to 4 hold quarters, the last of them vocabulary padding too.
PLAN = make_plan(MODEL, [[(1, 1, 4)], [(4, 1, 4)]])
RATES = (1e-3, 2e-3, 5e-4)


def _gradient(parameter: Parameter, iteration: int) -> torch.Tensor:
    return initial_gradient(f"{parameter.name} {iteration}", parameter.shape)


def _norm(iteration: int) -> float:
    total = sum(float(_gradient(p, iteration).double().square().sum()) for p in model_parameters(MODEL))
    return total**0.5


def _reference(settings: Settings, clip: float | None) -> dict[str, torch.Tensor]:
    """Whole fp32 parameters after an iteration per rate, by torch alone."""
    parameters = {
        p.name: torch.nn.Parameter(initial_parameter(p, model=MODEL, seed=0)) for p in model_parameters(MODEL)
    }
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    whole: torch.optim.Optimizer
    if settings.name == "sgd":
        whole = torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    else:
        whole = torch.optim.AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.epsilon)
    for iteration, rate in enumerate(RATES, start=1):
        for parameter in model_parameters(MODEL):
            parameters[parameter.name].grad = _gradient(parameter, iteration)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        for group in whole.param_groups:
            group["lr"] = rate
        whole.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _trained(
    plan: Plan, rank: int, settings: Settings, clip: float | None, dtype: torch.dtype = torch.float32
) -> tuple[list[HeldLeaf], Optimizer]:
    """A rank's parameters after the same iterations, each gradient given to the leaf as backward would."""
    handles = make_handles(plan, rank, dtype=dtype)
    buffer = GradientBuffer(handles=handles, blocks=own_blocks(plan, rank))
    optimizer = Optimizer(buffer=buffer, settings=settings, gradient_clip=clip)
    for iteration, rate in enumerate(RATES, start=1):
        buffer.zero()
        for handle in handles:
            whole = _gradient(handle.spec, iteration)
            local = shard(handle.spec, whole, tp=handle.tp, tp_rank=handle.tp_rank)
            (handle.leaf.float() * local).sum().backward()
        optimizer.step(gradient_norm=_norm(iteration), learning_rate=rate)
    return handles, optimizer


@pytest.mark.parametrize("clip", [None, 1.0, 1e6])
@pytest.mark.parametrize("rank", [0, 1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(weight_decay=0.3),
        Settings(name="sgd", momentum=0.9, weight_decay=0.3),
        Settings(name="sgd", momentum=0.0),
    ],
    ids=["adamw", "sgd", "sgd without momentum"],
)
def test_pieces_train_as_whole_parameters(settings: Settings, rank: int, clip: float | None) -> None:
    expected = _reference(settings, clip)
    for handle in _trained(PLAN, rank, settings, clip)[0]:
        whole = shard(handle.spec, expected[handle.spec.name], tp=handle.tp, tp_rank=handle.tp_rank)
        torch.testing.assert_close(handle.local, whole, rtol=2e-6, atol=2e-7)


def test_vocabulary_padding_stays_zero() -> None:
    handles, _ = _trained(PLAN, 4, Settings(), None)
    (tokens,) = [handle.local for handle in handles if handle.spec.tied]
    # 29 = 8 + 8 + 8 + 5.
    assert tokens.shape[0] == 8
    assert (tokens[5:] == 0).all()
    assert (tokens[:5] != 0).all()


def test_bf16_parameters_are_their_masters_rounded() -> None:
    handles, optimizer = _trained(PLAN, 0, Settings(), None, dtype=torch.bfloat16)
    states = _by_name(optimizer)
    for handle in handles:
        assert handle.local.dtype == torch.bfloat16
        master = _joined(handle.spec, states[handle.spec.name], "master")
        assert master.dtype == torch.float32
        assert torch.equal(handle.local, master.bfloat16())


def test_updates_far_below_a_bf16_step_add_up() -> None:
    """Below 1 a bf16 step is 2**-8: thirty updates of 1e-4 would all be rounded away without a master."""
    handles = make_handles(PLAN, 0, dtype=torch.bfloat16)
    buffer = GradientBuffer(handles=handles, blocks=own_blocks(PLAN, 0))
    optimizer = Optimizer(buffer=buffer, settings=Settings(), gradient_clip=None)
    buffer.flat.fill_(1.0)
    for _ in range(30):
        optimizer.step(gradient_norm=1.0, learning_rate=1e-4)
    (norm,) = [handle.local for handle in handles if handle.spec.name == "final_norm.weight"]
    assert torch.equal(norm, torch.full_like(norm, 1 - 2**-8))


def test_state_has_an_address_that_no_plan_decides() -> None:
    """What rank 0 holds in whole parameters, ranks 1 to 4 hold in parts: the parts make the whole."""
    whole = _by_name(_trained(PLAN, 0, Settings(), 1.0)[1])
    parts = [_by_name(_trained(PLAN, rank, Settings(), 1.0)[1]) for rank in (1, 2, 3, 4)]
    for parameter in model_parameters(MODEL):
        for key in ("exp_avg", "exp_avg_sq"):
            complete = _joined(parameter, whole[parameter.name], key)
            assert complete.shape == parameter.shape
            if parameter.tp_dim is not None:
                pieces = [piece for part in parts for piece in part[parameter.name]]
                torch.testing.assert_close(_joined(parameter, pieces, key), complete, rtol=1e-5, atol=1e-9)
    assert all(state.step == len(RATES) for states in whole.values() for state in states)


def _by_name(optimizer: Optimizer) -> dict[str, list[PieceState]]:
    states: dict[str, list[PieceState]] = {}
    for state in optimizer.states():
        states.setdefault(state.name, []).append(state)
    return states


def _joined(parameter: Parameter, states: list[PieceState], key: str) -> torch.Tensor:
    if parameter.tp_dim is None:
        assert len(states) == 1
        return states[0].tensors[key]
    ordered = sorted(states, key=lambda state: state.tp_range or (0, 0))
    return torch.cat([state.tensors[key] for state in ordered], dim=parameter.tp_dim)


def test_written_state_is_the_state_that_is_used() -> None:
    """Loading writes into the views; a copy would be lost."""
    _, trained = _trained(PLAN, 0, Settings(), 1.0)
    _, fresh = _trained(PLAN, 0, Settings(), None, dtype=torch.bfloat16)
    for source, target in zip(trained.states(), fresh.states(), strict=True):
        for key, tensor in source.tensors.items():
            target.tensors[key].copy_(tensor)
        target.tensors["master"].fill_(0.5)
    for source, target in zip(trained.states(), fresh.states(), strict=True):
        assert torch.equal(source.tensors["exp_avg"], target.tensors["exp_avg"])
        assert (target.tensors["master"] == 0.5).all()


def test_clipping_only_shortens() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 1.0) == pytest.approx(0.25)
    assert clip_coefficient(4.0, None) == 1.0
    # Where a job goes on, what is no number must not pass for a short gradient.
    assert math.isnan(clip_coefficient(math.nan, 1.0))
