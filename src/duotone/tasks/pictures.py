"""Loader of the user's pictures, with errors that name the remedy."""

from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

# Modes that Pillow's conversion to RGB would clip to 255: a picture of 16 bits would be white.
DEEP_MODES = ("I", "F")


def open_picture(path: str | Path) -> Image.Image:
    """The picture at `path` as RGB, upright, fully read."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"a picture must be an existing file, got {str(path)!r} (looked in {Path.cwd()}); "
            "check the spelling or give an absolute path"
        )
    try:
        with Image.open(path) as image:
            return _eight_bits(ImageOps.exif_transpose(image), path).convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"a picture must be an image file that Pillow reads (PNG, JPEG, WebP, ...), got "
            f"{str(path)!r}: {error}; convert it or pick another file"
        ) from error


def _eight_bits(image: Image.Image, path: Path) -> Image.Image:
    """A picture of 16 bits in 8. Errors: ValueError for numbers whose range is not known."""
    if image.mode.startswith("I;16"):
        return image.point(lambda level: level / 256, "L")
    if image.mode in DEEP_MODES:
        raise ValueError(
            f"a picture must have 8 or 16 bits per channel, got {str(path)!r} in Pillow's mode "
            f"{image.mode!r}, whose white is not known; convert it to 8 bits"
        )
    return image
