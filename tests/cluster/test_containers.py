"""The Dockerfile and the objects of Kubernetes in `deploy/`, as far as they run without either."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.support.fake_programs import DEPLOY, Fakes, in_bytes, option

REPOSITORY = DEPLOY.parent


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path)


def objects() -> dict[str, dict[str, Any]]:
    """Return the objects of kubernetes.yaml by kind and name."""
    found = list(YAML(typ="safe").load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(one) for one in found)
    return {f"{one['kind']} {one['metadata']['name']}": one for one in found}


def pod(one: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = one["spec"]["template"]
    return template


def container(one: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(one)["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_objects_of_kubernetes() -> None:
    every = objects()
    service = every.pop("Service znnpy-scheduler")
    scheduler = every["Deployment znnpy-scheduler"]
    assert sorted(every) == ["Deployment znnpy-scheduler", "Deployment znnpy-worker", "Job znnpy-infer"]
    for one in every.values():
        assert pod(one)["spec"]["securityContext"]["runAsNonRoot"]
        assert all(isinstance(word, str) for word in container(one)["command"])  # numbers are no words there
        if one["kind"] == "Deployment":
            assert one["spec"]["selector"]["matchLabels"] == pod(one)["metadata"]["labels"]
    images = {container(one)["image"] for one in every.values()}
    assert len(images) == 1
    assert not images.pop().endswith(":latest")
    assert service["spec"]["selector"] == pod(scheduler)["metadata"]["labels"]
    assert scheduler["spec"]["replicas"] == 1


def test_objects_of_kubernetes_name_one_port() -> None:
    every = objects()
    (port,) = every["Service znnpy-scheduler"]["spec"]["ports"]
    scheduler, worker = (container(every[f"Deployment znnpy-{role}"]) for role in ("scheduler", "worker"))
    number = int(option(scheduler["command"], "--port"))
    assert port["port"] == port["targetPort"] == number
    assert [one["containerPort"] for one in scheduler["ports"]] == [number]
    assert scheduler["readinessProbe"]["tcpSocket"]["port"] == number
    address = f"tcp://znnpy-scheduler:{number}"
    assert worker["command"][:3] == ["dask", "worker", address]
    assert option(container(every["Job znnpy-infer"])["command"], "--cluster") == address


def test_a_worker_in_kubernetes_has_the_numbers_of_its_node() -> None:
    worker = objects()["Deployment znnpy-worker"]
    command, resources = container(worker)["command"], container(worker)["resources"]
    assert option(command, "--nworkers") == "1"
    assert option(command, "--nthreads") == resources["requests"]["cpu"] == resources["limits"]["cpu"]
    most = in_bytes(resources["limits"]["memory"])
    assert most == in_bytes(resources["requests"]["memory"])
    assert 0.85 * most < in_bytes(option(command, "--memory-limit")) < 0.95 * most
    (apart,) = pod(worker)["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["labelSelector"]["matchLabels"] == pod(worker)["metadata"]["labels"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"


def test_commands_in_kubernetes_are_known() -> None:
    from tests.test_readme import _parses

    every = objects()
    command = container(every["Job znnpy-infer"])["command"]
    assert command[0] == "znnpy"
    assert "--resume" in command
    _parses(command[1:])
    dask = pytest.importorskip("distributed.cli")
    assert dask
    from distributed.cli import dask_scheduler, dask_worker

    for program, name in ((dask_scheduler, "scheduler"), (dask_worker, "worker")):
        words = container(every[f"Deployment znnpy-{name}"])["command"]
        assert words[:2] == ["dask", name]
        program.main.make_context(name, list(words[2:]))  # UsageError for what it does not know


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with continued lines joined."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def complaints(text: str) -> list[str]:
    """Return which of hadolint's rules a Dockerfile breaks, of those that matter for this one."""
    found = []
    for word, rest in instructions(text):
        if word == "FROM" and not re.fullmatch(r"\S+:(?!latest)\S+", rest):
            found.append("DL3006, DL3007: a base image needs a tag, and not `latest`")
        if word == "ADD":
            found.append("DL3020: COPY copies files")
        if word == "WORKDIR" and not rest.startswith("/"):
            found.append("DL3000: WORKDIR is absolute")
        if word in ("CMD", "ENTRYPOINT") and not _is_words(rest):
            found.append("DL3025: CMD and ENTRYPOINT are lists of words")
        if word == "RUN":
            found += [f"{rule} in: {rest}" for rule in _complaints_of_run(rest)]
    users = [rest for word, rest in instructions(text) if word == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("DL3002: the last user is not root")
    return found


def _is_words(rest: str) -> bool:
    try:
        words = json.loads(rest)
    except ValueError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


def _complaints_of_run(rest: str) -> list[str]:
    found = []
    for command in re.split(r"&&|;|\|", rest):
        words = command.split()
        if "sudo" in words:
            found.append("DL3004: no sudo")
        if "pip" in words and "install" in words and "--no-cache-dir" not in words:
            found.append("DL3042: pip keeps no cache")
        if "apt-get" in words and "install" in words:
            found += [f"DL3014, DL3015: {flag}" for flag in ("-y", "--no-install-recommends") if flag not in words]
            if "rm -rf /var/lib/apt/lists/*" not in rest:
                found.append("DL3009: lists of apt are removed")
    return found


def test_dockerfile_breaks_no_rules() -> None:
    assert complaints((DEPLOY / "Dockerfile").read_text()) == []


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("FROM python", "DL3006"),
        ("FROM python:latest", "DL3007"),
        ("ADD a b", "DL3020"),
        ("WORKDIR here", "DL3000"),
        ("ENTRYPOINT znnpy", "DL3025"),
        ("RUN true && \\\n  pip install x", "DL3042"),
        ("RUN apt-get install -y g++", "DL3015"),
        ("RUN apt-get install --no-install-recommends g++", "DL3014"),
        ("RUN apt-get install -y --no-install-recommends g++", "DL3009"),
        ("RUN sudo true", "DL3004"),
        ("USER root", "DL3002"),
    ],
)
def test_broken_rules_are_found(line: str, rule: str) -> None:
    assert rule in " ".join(complaints(f"FROM python:3.12-slim\nUSER 1000\n{line}\n"))


def test_dockerfile_gives_the_programs_that_other_files_call() -> None:
    found = dict(instructions((DEPLOY / "Dockerfile").read_text()))
    assert json.loads(found["ENTRYPOINT"]) == ["znnpy"]
    user = pod(objects()["Deployment znnpy-worker"])["spec"]["securityContext"]["runAsUser"]
    assert found["USER"] == str(user)
    extras = found["ARG"].removeprefix("EXTRAS=").split(",")
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert {"cluster", "io"} <= set(extras)
    assert [extra for extra in extras if not re.search(rf"^{extra} = \[", text, re.MULTILINE)] == []


def installing() -> tuple[list[str], str]:
    """Return the command of the Dockerfile that installs znnpy, and the extras that it takes."""
    found = instructions((DEPLOY / "Dockerfile").read_text())
    (extras,) = (rest.partition("=")[2] for word, rest in found if word == "ARG")
    (shell,) = (json.loads(rest) for word, rest in found if word == "SHELL")
    (line,) = (rest for word, rest in found if word == "RUN" and "pip install" in rest)
    return [*shell, line], extras


def test_dockerfile_installs_the_wheel_with_its_extras(fakes: Fakes, tmp_path: Path) -> None:
    command, extras = installing()
    wheel = tmp_path / "znnpy-0.1.0-cp312-cp312-linux_x86_64.whl"
    wheel.touch()
    assert fakes.call(command, EXTRAS=extras).returncode == 0
    assert fakes.calls == [["pip", "install", "--no-cache-dir", f"./{wheel.name}[{extras}]"]]
    assert not wheel.exists()  # nor is it kept in the image


@pytest.mark.long
def test_commands_of_the_dockerfile_install_a_wheel(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: building leaves files behind
    source.mkdir()
    for name in ("znnpy", "kernels", "planner"):
        shutil.copytree(REPOSITORY / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    image = tmp_path / "image"
    image.mkdir()
    without = {**os.environ, "CC": "false", "CXX": "false"}  # kernels are left out, and so is the time they take
    without.pop("PYTHONPATH", None)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(image), str(source)],
        check=True,
        env=without,
    )
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    environment = {**without, "PATH": f"{programs}:{os.environ['PATH']}"}
    command, extras = installing()
    subprocess.run(command, check=True, cwd=image, env={**environment, "EXTRAS": extras})
    imported = ["python", "-c", "import znnpy.cluster.dask_workers, tensorstore"]
    for program, said in (
        (["znnpy", "--version"], "znnpy"),
        (["dask", "worker", "--help"], "--nthreads"),
        (imported, ""),
    ):
        ended = subprocess.run(program, check=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert said in ended.stdout
