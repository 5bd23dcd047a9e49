"""Networks that people use are read by each route, and equal their framework or are refused for the stated reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importing.zoo.nets import NETS, Net
from tests.importing.zoo.table import BLOCK, PAGE, committed, head


@pytest.mark.torch
@pytest.mark.parametrize("net", NETS, ids=lambda net: f"{net.package}: {net.name}")
def test_network_equals_its_framework_or_is_refused_as_the_page_says(net: Net, tmp_path: Path) -> None:
    from tests.importing.zoo.trial import tried

    assert tried(net, tmp_path).row == committed()[net.name, net.package]


def test_page_has_a_row_for_each_network() -> None:
    """If this fails, run `python -m tests.importing.zoo --write`."""
    assert list(committed()) == [(net.name, net.package) for net in NETS]
    table = BLOCK.search(PAGE.read_text())
    assert table is not None
    assert table.group().splitlines()[:2] == head()
