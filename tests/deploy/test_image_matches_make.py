"""The tests have no container engine, so this keeps what the image does in step with what `make` does."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MANIFESTS = sorted((ROOT / "deploy").rglob("*.yaml"))
IMAGE = f"eth-service:{PROJECT['project']['version']}"


def instructions(name: str) -> list[str]:
    """The arguments of each of the Dockerfile's instructions of that name, continuation lines joined."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", DOCKERFILE))
    return re.findall(rf"(?m)^{name}\s+(.*)$", joined)


def documents() -> Iterator[tuple[str, Any]]:
    for path in MANIFESTS:
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), document


def values(node: Any, key: str) -> Iterator[Any]:
    """Every value that stands under `key`, at any depth of a parsed YAML document."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        if name == key:
            yield child
        yield from values(child, key)


def pip_installs(text: str) -> list[str]:
    return re.findall(r"-m pip install (.*)", text)


def test_same_python() -> None:
    (base,) = [arg for arg in instructions("ARG") if arg.startswith("BASE=")]
    version = re.match(r"BASE=python:(\d+\.\d+)-", base)
    assert version
    assert PROJECT["project"]["requires-python"] == f">={version[1]}"
    assert PROJECT["tool"]["mypy"]["python_version"] == version[1]
    major, minor = version[1].split(".")
    assert f"({major}, {minor})" in MAKEFILE
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{major}{minor}"


def test_same_packages_without_the_development_tools() -> None:
    (ours,) = pip_installs(MAKEFILE)
    assert re.findall(r"-c (\S+)", ours) == ["constraints.txt"]
    assert re.findall(r"\.\[(.+?)\]", ours) == ["dev"]
    packages, sources = pip_installs(DOCKERFILE)
    assert re.findall(r"-c (\S+)", packages) == ["constraints.txt"]
    assert '".${EXTRAS:+[$EXTRAS]}"' in packages and "EXTRAS=" in instructions("ARG")
    assert "--no-deps" in sources
    assert set(PROJECT["project"]["optional-dependencies"]) == {"dev", "npu", "s3"}


def test_every_requirement_is_pinned() -> None:
    def name(requirement: str) -> str:
        return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>~! ]", requirement)[0]).lower()

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dev"]
    assert {name(one) for one in wanted} - {name(pin) for pin in pins} == set()
    exact = {name(one): one.split("==")[1] for one in wanted if "==" in one}
    assert exact.items() <= {name(pin): pin.split("==")[1] for pin in pins}.items()


def test_copied_files_exist_and_reach_the_build() -> None:
    ignored_but = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [
        source
        for copy in instructions("COPY")
        if not copy.startswith("--from=")
        for source in copy.split()[:-1]
    ]
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert [source for source in copied if f"!{source}" not in ignored_but] == []
    packages = {
        pattern.removesuffix(".*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    assert packages <= set(copied)


def test_image_runs_as_an_ordinary_user() -> None:
    (user,) = instructions("USER")
    assert int(user) > 0
    contexts = [context for _, document in documents() for context in values(document, "securityContext")]
    assert contexts and all(
        context["runAsUser"] == int(user) and context["runAsNonRoot"] for context in contexts
    )


def test_manifests_use_the_image_and_the_pinned_ray() -> None:
    images = {image for _, document in documents() for image in values(document, "image")}
    assert images == {IMAGE}
    assert f"docker build -t {IMAGE} ." in DOCKERFILE
    (pin,) = re.findall(r"(?m)^ray==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert {version for _, document in documents() for version in values(document, "rayVersion")} == {pin}


def test_manifests_are_complete_objects() -> None:
    for path, document in documents():
        assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys(), path
    claims = {
        document["metadata"]["name"]
        for _, document in documents()
        if document["kind"] == "PersistentVolumeClaim"
    }
    assert {claim for _, document in documents() for claim in values(document, "claimName")} <= claims
    clusters = {
        document["metadata"]["name"] for _, document in documents() if document["kind"] == "RayCluster"
    }
    assert {name for _, document in documents() for name in values(document, "ray.io/cluster")} <= clusters


def test_every_mount_has_a_volume() -> None:
    pods = [pod["spec"] for _, document in documents() for pod in values(document, "template")]
    assert pods
    for pod in pods:
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted <= {volume["name"] for volume in pod["volumes"]}


@pytest.fixture(scope="module")
def serve_help() -> str:
    program = "import sys; from eth_service.cli import main; sys.argv = ['eth', 'serve', '--help']; main()"
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def serve_arguments() -> list[str]:
    """What follows `eth serve` in the image's own command and in each manifest."""
    commands = [" ".join(args) for _, document in documents() for args in values(document, "args")]
    commands += [" ".join(json.loads(command)) for command in instructions("CMD")]
    return [command.split("/opt/eth/bin/eth serve ", 1)[1] for command in commands]


def test_commands_are_real(serve_help: str) -> None:
    assert PROJECT["project"]["scripts"]["eth"] == "eth_service.console:main"
    assert len(serve_arguments()) == 2
    options = {option for arguments in serve_arguments() for option in re.findall(r"--[a-z-]+", arguments)}
    assert "--port" in options
    assert {option for option in options if f"{option} " not in serve_help} == set()


def test_ports_agree() -> None:
    (exposed,) = instructions("EXPOSE")
    assert [re.findall(r"--port (\d+)", arguments) for arguments in serve_arguments()] == [[exposed]] * 2
    ports = {port for _, document in documents() for port in values(document, "containerPort")}
    assert ports == {int(exposed)}
