"""Options that planning commands share: what is planned, on what, and what the planner may use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(help="preset, or a model's file or Hugging Face folder, by path or URL")
]
ClusterOption = Annotated[
    str, typer.Option(help="nodes x devices : type, as in 4x8:910B2,4x8:910B4, or a cluster file")
]
GlobalBatchSize = Annotated[int, typer.Option(min=1, help="samples an iteration")]
SequenceLength = Annotated[
    int | None, typer.Option(min=1, help="tokens a sample [default: the model's longest]")
]
PrecisionOption = Annotated[str, typer.Option(help="of parameters and activations: bf16, fp16 or fp32")]
Profiles = Annotated[
    Path | None, typer.Option(help="folder of measured or imported profiles [default: datasheets]")
]
Objective = Annotated[str, typer.Option(help="what to minimise: time or cost (of a token)")]
ThroughputFloor = Annotated[
    float | None, typer.Option(help="with --objective cost: tokens a second that the plan must reach")
]
Price = Annotated[
    list[str] | None, typer.Option(help="a device type's price an hour, as in 910B2=4.5; may be repeated")
]
NoRecompute = Annotated[
    bool, typer.Option("--no-recompute", help="no stage recomputes operators in backward")
]
Zero = Annotated[str, typer.Option(help="ZeRO stages to choose from, separated by commas")]
Without = Annotated[
    list[str] | None,
    typer.Option(
        help="parts of the search of eth to leave out: cache, skipping, order, dp, exact, peers; or of every"
        " strategy: sequence_parallel; may be repeated"
    ),
]
