"""Pictures come out as a person sees them, whatever the file holds."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from duotone.tasks import open_picture

RAMP = torch.arange(0, 65536, 1024, dtype=torch.int32).reshape(1, 64)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(RAMP.numpy().astype("uint16")).save(tmp_path / "deep.png")
    deep = open_picture(tmp_path / "deep.png")
    seen = [deep.getpixel((x, 0))[0] for x in range(deep.width)]
    assert seen == (RAMP // 256).flatten().tolist()


def test_photos_stand_upright(tmp_path: Path) -> None:
    photo = Image.new("RGB", (6, 2))
    exif = photo.getexif()
    exif[0x0112] = 6  # turned by a quarter
    photo.save(tmp_path / "photo.jpg", exif=exif)
    assert open_picture(tmp_path / "photo.jpg").size == (2, 6)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_modes_become_rgb(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (1, 3)).save(tmp_path / "picture.tiff")
    assert open_picture(tmp_path / "picture.tiff").mode == "RGB"


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_white_are_refused(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (1, 3)).save(tmp_path / "picture.tiff")
    with pytest.raises(ValueError, match=r"8 or 16 bits.*convert"):
        open_picture(tmp_path / "picture.tiff")
