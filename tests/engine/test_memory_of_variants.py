"""The planner's `tensor_bytes` against a tracker's peak: LLaMA, dropout and recomputation.

As in test_memory_prediction.py: never under, at most 5 % over, on every stage. Each plan makes another part
the largest; full and partial recomputation are met on first, middle and last stages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.cluster import Cluster
from planner.model_spec import ModelSpec
from planner.plan import Dtypes, Plan, Precision
from tests.engine.law_plans import by_position, whole_layers, with_recompute
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import write_tokens
from tests.engine.test_memory_prediction import check_peaks
from tests.plans import Degrees, make_llama, make_model, make_plan

SHAPE: dict[str, Any] = {"hidden_size": 64, "heads": 4, "max_sequence_length": 128}
Counts = dict[str, int]


def _gpt3(**changes: Any) -> ModelSpec:
    return make_model(**(SHAPE | changes))


def _llama(**changes: Any) -> ModelSpec:
    return make_llama(**(SHAPE | {"kv_heads": 2, "ffn_hidden_size": 176} | changes))


def _paper(layers: int) -> Counts:
    """What Table 3 of the paper recomputes."""
    return dict.fromkeys(("qkv", "scores", "softmax", "attention_dropout"), layers)


def _plan(
    model: ModelSpec,
    stages: list[Degrees],
    *,
    micro_batch_size: int,
    micro_batches: int,
    precision: Precision,
    recompute: list[Counts] | None = None,
) -> Plan:
    node = {
        "name": "n",
        "devices": [{"type": "910B2", "count": sum(tp * dp for tp, dp, _ in stages)}],
        "emulate": True,
    }
    plan = make_plan(
        model,
        [stages],
        cluster=Cluster.model_validate({"nodes": [node]}),
        dtypes=Dtypes.for_precision(precision),
        micro_batch_sizes=[micro_batch_size],
        samples=[micro_batch_size * micro_batches],
    )
    return with_recompute(plan, *recompute) if recompute else plan


def _three_stages(model: ModelSpec, precision: Precision, recompute: bool = False) -> Plan:
    counts = [whole_layers(model, layers) for layers in (2, 1, 1)]
    return _plan(
        model,
        [(1, 1, 2), (1, 1, 1), (1, 1, 1)],
        micro_batch_size=4,
        micro_batches=6,
        precision=precision,
        recompute=counts if recompute else None,
    )


def _wide(model: ModelSpec, precision: Precision, recompute: list[Counts] | None = None) -> Plan:
    """The MLP decides: short samples, wide layers."""
    return _plan(
        model,
        [(1, 1, 2), (1, 1, 2)],
        micro_batch_size=8,
        micro_batches=4,
        precision=precision,
        recompute=recompute,
    )


def _cut(model: ModelSpec, precision: Precision, recompute: list[Counts] | None = None) -> Plan:
    return _plan(
        model,
        [(2, 1, 2), (1, 2, 2)],
        micro_batch_size=4,
        micro_batches=4,
        precision=precision,
        recompute=recompute,
    )


def _long(model: ModelSpec, precision: Precision, recompute: list[Counts] | None = None) -> Plan:
    return _plan(
        model,
        [(1, 1, 2), (1, 1, 2)],
        micro_batch_size=2,
        micro_batches=4,
        precision=precision,
        recompute=recompute,
    )


def _one_stage(model: ModelSpec, tp: int, precision: Precision) -> Plan:
    return _plan(model, [(tp, 1, 4)], micro_batch_size=2, micro_batches=2, precision=precision)


TABLE = {"vocab_size": 4096, "tied_embedding": True}
SHORT = {"max_sequence_length": 32, "hidden_size": 128, "ffn_hidden_size": 512}
LONG = {"max_sequence_length": 256}
DROPPED = {"dropout": 0.1}


def _by_position(
    model: ModelSpec, precision: Precision, stages: list[Degrees], *, size: int = 4, recompute: bool = False
) -> Plan:
    counts = [whole_layers(model, layers) for _, _, layers in stages]
    plan = _plan(
        model,
        stages,
        micro_batch_size=size,
        micro_batches=6,
        precision=precision,
        recompute=counts if recompute else None,
    )
    return by_position(plan)


CUT_STAGES: list[Degrees] = [(2, 1, 2), (2, 1, 1), (2, 1, 1)]
PLANS: dict[str, Callable[[], Plan]] = {
    "llama": lambda: _three_stages(_llama(), "fp32"),
    "llama in bf16": lambda: _three_stages(_llama(), "bf16"),
    "llama, cut and tied": lambda: _cut(_llama(tied_embedding=True), "bf16"),
    "llama, wide": lambda: _wide(_llama(**SHORT), "fp32"),
    "llama, large vocabulary": lambda: _cut(_llama(vocab_size=4096), "fp32"),
    "dropout": lambda: _three_stages(_gpt3(**DROPPED), "fp32"),
    "dropout in bf16": lambda: _cut(_gpt3(**DROPPED), "bf16"),
    "dropout, long": lambda: _long(_gpt3(**LONG, **DROPPED), "fp32"),
    "dropout, wide": lambda: _wide(_gpt3(**SHORT, **DROPPED), "fp32"),
    "dropout in llama": lambda: _long(_llama(**LONG, **DROPPED), "bf16"),
    "all recomputed": lambda: _three_stages(_gpt3(), "fp32", recompute=True),
    "all recomputed in llama": lambda: _three_stages(_llama(), "bf16", recompute=True),
    "all recomputed, dropout": lambda: _three_stages(_gpt3(**DROPPED), "bf16", recompute=True),
    "attention recomputed, long": lambda: _long(
        _gpt3(**LONG, **DROPPED), "fp32", recompute=[_paper(2), _paper(1)]
    ),
    "attention recomputed in llama": lambda: _long(
        _llama(**LONG), "bf16", recompute=[_paper(1), _paper(2) | {"rotary": 2}]
    ),
    "the MLP recomputed": lambda: _wide(
        _gpt3(**SHORT), "bf16", recompute=[{"mlp_norm": 2, "mlp_up": 2, "activation": 2}, {"activation": 1}]
    ),
    "by position": lambda: _by_position(_gpt3(), "fp32", CUT_STAGES),
    "by position, llama, wide, bf16": lambda: _by_position(
        _llama(**SHORT), "bf16", [(2, 1, 2), (2, 1, 2)], size=8
    ),
    "by position, four ranks, dropout": lambda: _by_position(_gpt3(**DROPPED), "fp32", [(4, 1, 4)]),
    "by position, all recomputed": lambda: _by_position(_gpt3(**DROPPED), "bf16", CUT_STAGES, recompute=True),
    "recomputed and cut": lambda: _cut(
        _llama(**DROPPED), "bf16", recompute=[whole_layers(_llama(), 2), _paper(2)]
    ),
    # Backward has the gradient of softmax in fp32 when that runs again, in fp32 too.
    "softmax recomputed, dropout": lambda: _plan(
        _llama(**LONG, **DROPPED),
        [(1, 1, 4)],
        micro_batch_size=2,
        micro_batches=2,
        precision="bf16",
        recompute=[{"softmax": 4}],
    ),
    # The final norm's backward is in fp32, and the most that the head holds.
    "a small vocabulary, cut": lambda: _one_stage(
        _llama(hidden_size=128, ffn_hidden_size=512, tied_embedding=True, **LONG, **DROPPED), 2, "bf16"
    ),
    # The table's gradient as an embedding, that as a head, and their sum.
    "one table is both ends": lambda: _one_stage(_gpt3(**(SHORT | TABLE)), 1, "fp32"),
    "one table is both ends, cut": lambda: _one_stage(_llama(**(SHORT | TABLE)), 2, "bf16"),
}


@pytest.mark.parametrize("name", PLANS)
def test_tensor_bytes_are_those_of_a_tracker(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    check_peaks(rank_pool, PLANS[name](), write_tokens(tmp_path))
