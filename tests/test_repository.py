"""What must hold for every file of the repository, whatever it contains."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "actors", "eth_service")
MAX_LINES = 450

# Regular expressions and joined pieces, so that this file does not hold what it looks for.
FORBIDDEN = {
    "a folder of one machine": re.compile(r"(?<![\w.~-])/(work|root|opt/wheels|opt/pypi)" + "/"),
    "the address of a package registry": re.compile(
        r"pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian\.org"
    ),
    "a private key": re.compile("-----BEGIN [A-Z ]*PRIV" + "ATE KEY"),
}


def findings(text: str) -> list[str]:
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {what}: {match[0]}"
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(text)
    ]


def repository_files() -> list[Path]:
    """Tracked files, and those that would be tracked by the next `git add`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_depends_on_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {finding}"
        for path in repository_files()
        for finding in findings(path.read_bytes().decode("utf-8", errors="replace"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text", ["cd /wo" + "rk/x", "see https://pypi" + ".org/simple", "a\nHOME=/ro" + "ot/.cache"]
)
def test_a_machine_dependent_line_is_found(text: str) -> None:
    assert findings(text)


@pytest.mark.parametrize(
    "text", ["../work/notes", "team/work/x", "http://127.0.0.1:8000/", "/data/runs", "/tmp/ray"]
)
def test_an_ordinary_path_is_allowed(text: str) -> None:
    assert findings(text) == []


def test_modules_stay_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_package_data_is_installed() -> None:
    """A page or a table beside the code is of no use to an installed package that leaves it out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    patterns = settings["package-data"]["*"]
    data = [
        path
        for path in repository_files()
        if path.relative_to(ROOT).parts[0] in PACKAGES and path.suffix != ".py"
    ]
    assert [str(path) for path in data if not any(fnmatch(path.name, pattern) for pattern in patterns)] == []


def test_the_map_names_what_exists() -> None:
    """CONTRIBUTING.md's map: two spaces of indent a folder level, a name, and what it is for."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```map\n(.*?)```", text, flags=re.DOTALL)
    assert blocks, "CONTRIBUTING.md has no ```map block"
    named: list[Path] = []
    folders: list[str] = []
    for indent, name in re.findall(r"(?m)^( *)(\S+)", "".join(blocks)):
        folders = [*folders[: len(indent) // 2], name]
        named.append(ROOT.joinpath(*folders))
    assert [str(path.relative_to(ROOT)) for path in named if not path.exists()] == []
