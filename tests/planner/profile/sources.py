"""Folders of measurements as other tools write them, made up from simple formulas."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from planner.model_spec import PRESETS, ModelSpec

MIB = 1024**2
HEADER = (
    "op_name",
    "forward-compute",
    "backward-compute",
    "input_size",
    "output_size",
    "weights",
    "activations",
    "fwd_reserved",
    "bwd_reserved",
)
SINGLE = (
    "encoder-embedding",
    "enc-1st-layernorm",
    "enc-attention-qkv",
    "enc-attention-score",
    "enc-attention-softmax",
    "enc-attention-dropout",
    "enc-attention-context",
    "enc-attention-dense",
    "enc-post-attention-dropout",
    "enc-2nd-layernorm",
    "enc-MLP-GEMM-1",
    "enc-MLP-gelu",
    "enc-MLP-GEMM-2",
    "enc-post-MLP-dropout",
    "final-layernorm",
    "gpt-post-process",
)
GROUPED = ("dec-embedding", "dec-self-attention", "dec-mlp", "dec-post-process")
VOCABULARY = 51_200


def microseconds(row: int, *, tp: int, samples: int) -> tuple[float, float]:
    """Forward and backward of the row-th operator: affine in the samples, slower at tp 2 than at tp 1."""
    forward = 50.0 + 10 * row + 7 * samples + 3 * tp
    return forward, 2 * forward + 1


def _weights(name: str, model: ModelSpec) -> int:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    return {
        "encoder-embedding": VOCABULARY * hidden,
        "enc-attention-qkv": 3 * hidden * hidden,
        "enc-attention-dense": hidden * hidden,
        "enc-MLP-GEMM-1": hidden * ffn,
        "enc-MLP-GEMM-2": hidden * ffn,
        "gpt-post-process": VOCABULARY * hidden,
        "dec-self-attention": 4 * hidden * hidden,
        "dec-mlp": 2 * hidden * ffn,
        "dec-post-process": VOCABULARY * hidden,
    }.get(name, 0)


def write_operators(
    folder: Path,
    *,
    name: str = "gpt_1_3B",
    model: ModelSpec = PRESETS["gpt3-1.3b"],
    names: Sequence[str] = SINGLE,
    degrees: Iterable[int] = (1, 2),
    sizes: Iterable[int] = (1, 2, 4),
    width: int = 2,
    length: int = 2048,
    heads: int | None = None,
    changes: dict[str, dict[str, object]] | None = None,
) -> Path:
    """One CSV a (tp, micro-batch); `changes` replaces cells by operator and column."""
    folder.mkdir(parents=True, exist_ok=True)
    for tp in degrees:
        for samples in sizes:
            with (folder / f"{name}_mbs{samples}_tp{tp}_algo0.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, HEADER)
                writer.writeheader()
                for row, operator in enumerate(names):
                    forward, backward = microseconds(row, tp=tp, samples=samples)
                    square = samples * length**2 * (heads or model.heads) / tp * width / MIB
                    hidden = samples * length * model.hidden_size * width / MIB
                    cells = dict.fromkeys(HEADER[1:], 0.0) | {
                        "forward-compute": forward,
                        "backward-compute": backward,
                        "output_size": round(hidden, 3),
                        "weights": round(_weights(operator, model) * width / tp / MIB, 3),
                        "activations": square if operator.endswith(("score", "softmax")) else hidden,
                        "bwd_reserved": 3.0,
                    }
                    writer.writerow({"op_name": operator} | cells | (changes or {}).get(operator, {}))
    return folder


def write_collective(
    folder: Path,
    operation: str,
    members: int,
    lines: Sequence[tuple[float, float]],
    *,
    name: str = "gpt_1_3B",
) -> None:
    """Lines of (MiB, milliseconds), as they come."""
    text = "data_size(MB),time(ms)\n" + "".join(f"{size:g},{time:.3f}\n" for size, time in lines)
    (folder / f"prim_{name}_{operation}_{members}gpus.csv").write_text(text)


def write_transfers(folder: Path, scope: str, speeds: dict[float, float]) -> None:
    """MiB -> GB/s; with the carriage returns that some files have."""
    lines = (",".join(f"{value:g}" for value in row) for row in (speeds.keys(), speeds.values()))
    (folder / f"p2p_{scope}_node.csv").write_text("\r\n".join(lines) + "\r\n", newline="")


def write_layers(
    folder: Path,
    *,
    type_: str = "A100",
    cases: Iterable[tuple[int, int]] = ((1, 1), (1, 2), (2, 1), (2, 2)),
    layers: int = 3,
    parameters: int | None = None,
    **changes: Any,
) -> Path:
    """One JSON a (tp, batch): milliseconds are 1 + batch / tp for a layer, a quarter of it for the ends."""
    folder.mkdir(parents=True, exist_ok=True)
    for tp, samples in cases:
        layer = 1 + samples / tp
        content: dict[str, Any] = {
            "model": {"model_name": "GPT3", "num_layers": layers + 2},
            "execution_time": {"layer_compute_total_ms": [layer / 4, *[layer] * layers, layer / 4]},
            "execution_memory": {"layer_memory_total_mb": [10.0, *[20.0] * layers, 30.0]},
        }
        if parameters is not None:
            content["model"]["parameters"] = {
                "parameters_per_layer_bytes": [1, *[parameters // tp] * layers, 1]
            }
        (folder / f"DeviceType.{type_}_tp{tp}_bs{samples}.json").write_text(json.dumps(content | changes))
    return folder
