"""A message is checked by the names and numbers that it holds; whole messages are in tests/golden/messages.txt."""

from __future__ import annotations


def assert_holds(message: object, *parts: object) -> None:
    """Fail if a part is missing in the message."""
    missing = [str(part) for part in parts if str(part) not in str(message)]
    assert not missing, f"{missing} not in: {message}"
