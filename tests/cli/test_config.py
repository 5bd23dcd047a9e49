"""`--config run.yaml` gives options as the command line would; what is given there wins, and mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from tests.support.cli import Place
from znnpy.cli import main
from znnpy.config_file import read_config


def read(command: str, content: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Return the parameters that a command gets from a file and from words."""
    (folder / "run.yaml").write_text(content)
    context = main.commands[command].make_context(command, ["--config", str(folder / "run.yaml"), *arguments])
    return context.params


def test_options_of_every_kind_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    content = (
        "volume: v.h5\nnetwork: [a.yaml, b.yaml]\nram: 16G\nthreads: 4\npatch: [8, 16, 16]\nno-depth-first: true\n"
        "output-dtype: uint8\nfill_missing: 1.5\nresume: true\noverwrite: false\nthreshold: [0.5, 0.25]\n"
        "roi: '0:9,:,:'\nonly: cpu.conv.direct\njson: true\nout: null\n"
    )
    words = (
        *("v.h5", "--network", "a.yaml", "--network", "b.yaml", "--ram", "16G", "--threads", "4", "--patch", "8,16,16"),
        *(
            "--no-depth-first",
            "--output-dtype",
            "uint8",
            "--fill-missing",
            "1.5",
            "--resume",
            "--threshold",
            "0.5,0.25",
        ),
        *("--roi", "0:9,:,:", "--only", "cpu.conv.direct", "--json"),
    )
    assert read("infer", content, tmp_path) == main.commands["infer"].make_context("infer", list(words)).params


def test_what_takes_several_words_is_read_as_such(tmp_path: Path) -> None:
    found = read("view", "prediction: p.h5\nvolume: v.h5\nlabels: ['a,b.h5', c.h5]\n", tmp_path)
    assert (found["prediction"], found["volume"], found["labels"]) == ("p.h5", "v.h5", ("a,b.h5", "c.h5"))
    assert read("view", "prediction: p.h5\nvolume: v.h5\nlabels: a.h5\n", tmp_path)["labels"] == ("a.h5",)
    assert read("graph", "network: a.yaml\nmaps: [4, 5]\n", tmp_path)["maps"] == (4, 5)


@pytest.mark.parametrize(("value", "count"), [("[4]", "1 was"), ("5", "1 was"), ("[4, 5, 6]", "3 were")])
def test_as_many_values_as_an_option_takes_are_needed(tmp_path: Path, value: str, count: str) -> None:
    with pytest.raises(click.BadParameter, match=f"Takes 2 values but {count} given"):
        read("graph", f"network: a.yaml\nmaps: {value}\n", tmp_path)


def test_options_that_are_given_win(tmp_path: Path) -> None:
    content = "volume: v.h5\nthreads: 4\nnetwork: a.yaml\npatch: [8, 16, 16]\n"
    found = read("infer", content, tmp_path, "w.h5", "--threads", "2", "--network", "b.yaml")
    assert (found["volume"], found["threads"], found["patch"]) == ("w.h5", 2, (8, 16, 16))
    assert list(found["network"]) == ["b.yaml"]


def test_a_run_is_that_of_its_file(place: Place) -> None:
    network, out = place.folder / "net.yaml", place.folder / "other.h5"
    (place.folder / "run.yaml").write_text(
        f"volume: {place.volume}\nnetwork: {network}\nout: {out}\npatch: [4, 8, 8]\nram: 2G\njson: true\n"
    )
    result = place.run("infer", "--config", place.folder / "run.yaml")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["output"], report["patch"], report["ram_bytes"]) == (str(out), [4, 8, 8], 2**31)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ramm: 16G\n", "run.yaml: infer has no option ramm; it has allow-nan, "),
        ("config: other.yaml\n", "infer has no option config"),
        ("help: true\n", "infer has no option help"),
        ("ram: 12Q\n", "'12Q' is not a size: give a number with K, M, G or T"),
        ("threads: many\n", "'many' is not a valid integer range"),
        ("resume: 1\n", "resume is true or false, not 1"),
        ("ram: true\n", "ram is a word or a number, or a list of them, not True"),
        ("patch: []\n", "patch is a word or a number, or a list of them, not []"),
        ("patch: {z: 1}\n", "patch is a word or a number, or a list of them, not {'z': 1}"),
        ("- ram\n", "it lists no options; write lines such as `ram: 16G`"),
        ("", "it lists no options"),
        ("ram: 1G\nram: 2G\n", "line 2, column 1: not valid YAML: key 'ram' is given twice"),
        ("ram: [1G\n", "not valid YAML"),
        ("ram: \x00\n", "not valid YAML"),
        ("#" * 2**20 + "\nram: 1G", "it has more than 1048576 bytes"),
    ],
    ids=lambda value: value[:30],
)
def test_mistakes_in_a_file_are_usage_errors(place: Place, content: str, said: str) -> None:
    (place.folder / "run.yaml").write_text(content)
    result = place.run("infer", place.volume, "--config", place.folder / "run.yaml")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert said in " ".join(result.stderr.split())


def test_files_that_cannot_be_read_are_usage_errors(place: Place) -> None:
    (place.folder / "latin.yaml").write_bytes(b"out: \xe9\n")
    for name, said in (
        ("none.yaml", "it cannot be read: No such file or directory; check the path"),
        (".", "it cannot be read: Is a directory"),
        ("latin.yaml", "it is not text in UTF-8"),
    ):
        result = place.run("infer", place.volume, "--config", place.folder / name, "--json")
        assert result.exit_code == 2
        assert said in json.loads(result.stdout)["error"]


def test_every_command_takes_a_file() -> None:
    for name, command in main.commands.items():
        taking = [of for of in command.params if isinstance(of, click.Option) and of.callback is read_config]
        assert [of.name for of in taking] == ["config"], name


def test_the_file_on_the_page_is_one(repository: Path, tmp_path: Path) -> None:
    page = (repository / "docs" / "cli.md").read_text()
    found = read("infer", page.partition("# run.yaml")[2].partition("\n")[2].partition("```")[0], tmp_path)
    assert (found["volume"], found["patch"], found["calibrate"]) == ("volume.h5", (32, 64, 64), False)
