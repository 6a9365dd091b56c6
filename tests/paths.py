"""Folders of this repository."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
