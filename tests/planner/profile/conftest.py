from collections.abc import Callable
from pathlib import Path

import pytest

from planner.model_spec import PRESETS, ModelSpec
from planner.profile.file import DeviceProfile
from planner.profile.importers import import_folder
from planner.profile.measured import MeasuredProfile
from tests.planner.profile.sources import SINGLE, write_operators

MODEL = PRESETS["gpt3-1.3b"]


@pytest.fixture
def model() -> ModelSpec:
    return MODEL


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., DeviceProfile]:
    """Imports a made-up fp16 folder of one model; arguments are those of `write_operators`."""
    count = 0

    def make(device_type: str = "A100", **source: object) -> DeviceProfile:
        nonlocal count
        count += 1
        folder = write_operators(tmp_path / f"source{count}" / "fp16", **source)  # type: ignore[arg-type]
        return import_folder(folder, device_type=device_type, model=MODEL)[0].profile

    return make


@pytest.fixture
def table(imported: Callable[..., DeviceProfile]) -> MeasuredProfile:
    from planner.catalogue import CATALOGUE

    return MeasuredProfile(MODEL, {"A100": imported(names=SINGLE)}, {"A100": CATALOGUE["A100"]})
