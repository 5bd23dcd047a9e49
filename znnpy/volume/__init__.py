"""Volumes larger than memory: read box by box, predicted patch by patch, written chunk by chunk."""

from znnpy.volume.registry import open_volume

__all__ = ["open_volume"]
