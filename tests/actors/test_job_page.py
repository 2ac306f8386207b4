"""docs/jobs.md names every field of a job, and none that a job does not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel

from actors.data_settings import Data
from actors.job import (
    Checkpointing,
    Emulation,
    Evaluation,
    Job,
    LearningRate,
    Optimizer,
    Runtime,
    Training,
    parse_job,
)

PAGE = Path(__file__).parents[2] / "docs" / "jobs.md"

SECTIONS: dict[str, type[BaseModel]] = {
    "data.": Data,
    "training.": Training,
    "training.optimizer.": Optimizer,
    "training.learning_rate.": LearningRate,
    "runtime.": Runtime,
    "checkpoint.": Checkpointing,
    "evaluation.": Evaluation,
    "emulation.": Emulation,
    "": Job,
}


def _fields() -> Iterator[str]:
    inner = {prefix.removesuffix(".") for prefix in SECTIONS} | {"version"}
    for prefix, section in SECTIONS.items():
        yield from (prefix + name for name in section.model_fields if prefix + name not in inner)


def _documented() -> Iterator[str]:
    for row in PAGE.read_text().splitlines():
        if row.startswith("| `"):
            names = re.findall(r"`([^`]+)`", row.split("|")[1])
            parent = names[0].rsplit(".", 1)[0]
            yield from (parent + name if name.startswith(".") else name for name in names)


def test_every_field_has_its_row() -> None:
    assert sorted(_documented()) == sorted(_fields())


def test_the_example_is_a_job(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert parse_job(yaml.safe_load(example), base=tmp_path).name == "my-run"
