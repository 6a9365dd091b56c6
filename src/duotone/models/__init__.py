"""The model that ships with the package, so that everything runs offline."""

from pathlib import Path


def duotone_tiny_path() -> Path:
    """Return the folder of duotone-tiny, ready for `from_pretrained`."""
    return Path(__file__).parent / "duotone_tiny"


def example_picture() -> Path:
    """Return the path of a bundled picture that duotone-tiny can describe."""
    return Path(__file__).parents[1] / "examples" / "scene.png"
