"""Three floors, eth_service -> actors -> planner: imports run downwards only, and the lower are lighter."""

import ast
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "actors", "eth_service")


@dataclass(frozen=True)
class Rule:
    folder: str
    forbidden: frozenset[str]


RULES = (
    Rule("planner", frozenset({"ray", "torch", "torch_npu", "actors", "eth_service"})),
    Rule("actors/engine", frozenset({"ray", "eth_service"})),
    Rule("actors", frozenset({"eth_service"})),
)


def imported_modules(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Each import statement's line and the modules it may load, at any depth, relative ones made absolute.

    `from a import b` yields both `a` and `a.b`, since `b` may be a module. Calls of `import_module` and
    `__import__` count where the name is written out.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if node.level else []
            above = parents[: max(0, len(parents) - node.level + 1)]
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}".lstrip(".")
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            argument = node.args[0]
            if name in {"import_module", "__import__"} and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def files_of(root: Path, module: str) -> Iterator[Path]:
    """The files that run when `module` is imported: its own and `__init__.py` of every package above it."""
    path = root
    for part in module.split("."):
        path = path / part
        yield from (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file())


def violations(root: Path, rules: tuple[Rule, ...] = RULES) -> list[str]:
    """Every forbidden import that a file of a rule's folder makes, itself or through our other files."""
    found = []
    for rule in rules:
        pending = sorted((root / rule.folder).rglob("*.py"))
        reached_from = {file: file for file in pending}
        while pending:
            file = pending.pop()
            package = ".".join(file.relative_to(root).parent.parts)
            for line, module in imported_modules(file.read_text(encoding="utf-8"), package):
                top = module.split(".")[0]
                if top in rule.forbidden:
                    via = reached_from[file]
                    route = "" if via == file else f", which {via.relative_to(root)} imports"
                    found.append(
                        f"{file.relative_to(root)}:{line}{route}: {rule.folder} must not import {top}"
                    )
                elif top in PACKAGES:
                    for target in files_of(root, module):
                        if target not in reached_from:
                            reached_from[target] = reached_from[file]
                            pending.append(target)
    return sorted(set(found))


def test_imports_run_downwards() -> None:
    assert violations(ROOT) == []


def test_every_rule_has_files_to_judge() -> None:
    assert all(any((ROOT / rule.folder).rglob("*.py")) for rule in RULES)


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("planner/a.py", "import torch.nn as nn", "planner must not import torch"),
        ("planner/a.py", "from ray import remote", "planner must not import ray"),
        ("planner/deep/er/a.py", "def f():\n    import torch_npu", "planner must not import torch_npu"),
        ("planner/a.py", "try:\n    from actors.job import Job\nexcept ImportError:\n    pass", "actors"),
        ("planner/deep/a.py", "from ...eth_service import app", "planner must not import eth_service"),
        (
            "planner/a.py",
            "import importlib\nimportlib.import_module('torch.fft')",
            "planner must not import torch",
        ),
        ("planner/a.py", "__import__('ray')", "planner must not import ray"),
        ("actors/engine/a.py", "import ray", "actors/engine must not import ray"),
        (
            "actors/engine/a.py",
            "class A:\n    def f(self):\n        from ...eth_service import x",
            "eth_service",
        ),
        ("actors/a.py", "import eth_service.app", "actors must not import eth_service"),
        ("actors/a.py", "from .. import eth_service", "actors must not import eth_service"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, file: str, source: str, expected: str) -> None:
    write(tmp_path, {file: source})
    found = violations(tmp_path)
    assert found and all(one.startswith(file) for one in found)
    assert any(expected in one for one in found)


def test_a_detour_is_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "actors/engine/stage.py": "from .. import worker",
            "actors/worker.py": "from . import lease",
            "actors/lease.py": "import ray",
        },
    )
    assert violations(tmp_path) == [
        "actors/lease.py:1, which actors/engine/stage.py imports: actors/engine must not import ray"
    ]


def test_a_package_above_counts_as_imported(tmp_path: Path) -> None:
    write(tmp_path, {"actors/__init__.py": "import ray", "actors/engine/a.py": "import actors.engine.b"})
    (found,) = violations(tmp_path)
    assert found.startswith("actors/__init__.py:1") and "actors/engine must not import ray" in found


def test_allowed_imports_pass(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "planner/a.py": "import numpy\nfrom .b import rays, torchlight\nimport rayleigh",
            "planner/b.py": "rays = torchlight = 'import torch'",
            "actors/engine/a.py": "import torch\nfrom planner.a import rays",
            "actors/worker.py": "import ray\nfrom actors.engine import a",
            "eth_service/app.py": "import ray\nfrom actors import worker\nfrom planner import a",
        },
    )
    assert violations(tmp_path) == []


def write(root: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source + "\n", encoding="utf-8")


def _submodule(module: ModuleType, name: str) -> bool:
    return hasattr(module, "__path__") and importlib.util.find_spec(f"{module.__name__}.{name}") is not None


def test_benchmarks_import_what_there_is() -> None:
    """Most of them run in slow tests only: a name that moved would be missed for long."""
    missing = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                module = importlib.import_module(str(node.module))
                missing += [
                    f"{path.name}: {node.module}.{name.name}"
                    for name in node.names
                    if not hasattr(module, name.name) and not _submodule(module, name.name)
                ]
    assert not missing
