"""Opening the user's pictures, with messages that say what to do."""

from pathlib import Path

from PIL import Image, UnidentifiedImageError


def open_picture(path: str | Path) -> Image.Image:
    """The picture at `path` as RGB, fully read."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"a picture must be an existing file, got {str(path)!r} (looked in {Path.cwd()}); "
            "check the spelling or give an absolute path"
        )
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"a picture must be an image file that Pillow reads (PNG, JPEG, WebP, ...), got "
            f"{str(path)!r}: {error}; convert it or pick another file"
        ) from error
