"""Plans on measured times: the imported profiles of A100-40 and RTX 3090, and of V100 and Ascend devices.

Operator folders are imported into a temporary folder and planned with, in fp16. Links that the folders lack are
the paper's (200 Gbps inside a node, 100 Gbps between nodes). A model whose two folders measured unlike shapes is
planned on each type alone. Each row is planned in a process of its own; seconds are CPU seconds. One JSON line
last. Skipped where the folder of profiles is absent.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plan_measure import PEERS, Row, in_own_process, show, show_header, worst_ratio

from planner.cluster import from_short_form
from planner.model_spec import ModelSpec
from planner.plan import Dtypes
from planner.profile.importers import Import, import_folder
from planner.request import PlanRequest

PROFILES_ROOT = Path(__file__).resolve().parents[1].parent / "shared" / "profiles"
SEQUENCE_LENGTH = 2048


@dataclass(frozen=True)
class Case:
    """Two folders with the device types that they measured, a model by its start, nodes of either type."""

    folders: tuple[tuple[str, str], tuple[str, str]]
    model: str
    nodes: int
    devices_per_node: int
    global_batch_size: int


A100_3090 = (("a100-40", "A100-40"), ("rtx-3090", "RTX3090"))
V100_ASCEND = (("v100", "V100-32"), ("ascend64", "910B2"))
CASES = (
    Case(A100_3090, "gpt3-350m", 1, 4, 256),
    Case(A100_3090, "gpt3-2.6b", 2, 4, 256),
    Case(V100_ASCEND, "gpt3-1.3b", 1, 8, 256),
    Case(V100_ASCEND, "gpt3-13b", 4, 8, 1024),
)


def imported(root: Path, folder: str, type_: str, model: str) -> Import:
    """The profile of the model whose name starts so."""
    precision = None if (root / folder / "fp16").is_dir() else "fp16"
    for found in import_folder(root / folder, device_type=type_, precision=precision):
        if found.model.name.startswith(model):
            return found
    raise SystemExit(f"{root / folder} holds no {model}")


def make_request(model: ModelSpec, case: Case, types: tuple[str, ...]) -> PlanRequest:
    nodes = ",".join(f"{case.nodes}x{case.devices_per_node}:{type_}" for type_ in types)
    return PlanRequest(
        model=model,
        cluster=from_short_form(nodes),
        global_batch_size=case.global_batch_size,
        sequence_length=min(SEQUENCE_LENGTH, model.max_sequence_length),
        dtypes=Dtypes.for_precision("fp16"),
    )


def rows_of(case: Case, root: Path, peers: list[str]) -> list[Row]:
    found = {type_: imported(root, folder, type_, case.model) for folder, type_ in case.folders}
    shapes = {each.model.model_copy(update={"name": ""}) for each in found.values()}
    groups = [tuple(found)] if len(shapes) == 1 else [(type_,) for type_ in found]
    if len(groups) > 1:
        names = " and ".join(each.model.name for each in found.values())
        print(f"{case.model}: the folders measured unlike shapes ({names}), so each type is planned alone")
    rows = []
    for types in groups:
        with tempfile.TemporaryDirectory() as folder:
            for type_ in types:
                profile = found[type_].profile
                (Path(folder) / profile.file_name).write_text(profile.to_json(), encoding="utf-8")
            make = partial(make_request, found[types[0]].model, case, types)
            rows.append(in_own_process(make, peers=peers, profiles=Path(folder)))
        show(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles-root", type=Path, default=PROFILES_ROOT, help="folder of the folders")
    parser.add_argument("--models", default="", help="some of them, separated by commas; all if empty")
    parser.add_argument("--peers", default=",".join(PEERS), help="strategies to compare with; empty for none")
    options = parser.parse_args()
    if not options.profiles_root.is_dir():
        print(f"{options.profiles_root} is absent: nothing to plan with")
        print(json.dumps({"benchmark": "imported_profiles", "skipped": True}))
        return
    peers = [name for name in options.peers.split(",") if name]
    wanted = [name for name in options.models.split(",") if name]
    rows: list[Row] = []
    show_header(peers=peers)
    for case in CASES:
        if not wanted or case.model in wanted:
            rows += rows_of(case, options.profiles_root, peers)
    print(
        json.dumps({"benchmark": "imported_profiles", "rows": rows, "least_ratio": worst_ratio(rows, peers)})
    )


if __name__ == "__main__":
    main()
