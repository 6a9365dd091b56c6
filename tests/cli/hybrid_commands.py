"""Folders of tiny hybrid models, and a processor of Qwen's pictures, for commands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_configs import END, IMAGE, PAD, START
from PIL import Image
from shrunk import tiny_model_of
from torch import Tensor

from duotone.loading import Loaded

from families import HYBRIDS, new_model

FolderOf = Callable[[str], Path]


class GridProcessor:
    """Words are ids by their letters; a picture is 16 patches, which become 4 tokens."""

    def apply_chat_template(self, conversations: list, **_: Any) -> dict[str, Tensor]:
        encoded = [self._encode(one) for one in conversations]
        longest = max(len(ids) for ids, _ in encoded)
        ids = torch.tensor([[PAD] * (longest - len(row)) + row for row, _ in encoded])
        pictures = [picture for _, found in encoded for picture in found]
        given = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
        given["mm_token_type_ids"] = (ids == IMAGE).long()
        if pictures:
            given["pixel_values"] = torch.cat(pictures)
            given["image_grid_thw"] = torch.tensor([[1, 4, 4]] * len(pictures))
        return given

    def _encode(self, conversation: list) -> tuple[list[int], list[Tensor]]:
        ids, pictures = [], []
        for part in (part for message in conversation for part in message["content"]):
            if part["type"] == "image":
                ids += [START, *[IMAGE] * 4, END]
                pictures.append(_patches(part["image"]))
            else:
                ids += [2 + sum(map(ord, word)) % 250 for word in part["text"].split()]
        return [*ids, 3], pictures

    def batch_decode(self, rows: Any, **_: Any) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def _patches(picture: Image.Image) -> Tensor:
    """[16, 3 * 2 * 4 * 4]: patches of 4 x 4 pixels, each twice in time."""
    pixels = torch.from_numpy(np.array(picture.convert("RGB").resize((16, 16))) / 127.5 - 1)
    patches = pixels.float().unflatten(0, (4, 4)).unflatten(2, (4, 4)).permute(0, 2, 4, 1, 3)
    return patches.flatten(0, 1)[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)


@pytest.fixture
def folder_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderOf:
    """Folder of a model by its name, without its weights, which commands get all the same."""

    def made(name: str) -> Path:
        model = new_model(name) if name in HYBRIDS else tiny_model_of(name)
        model.config.save_pretrained(tmp_path / name)
        loaded = Loaded(name, model, GridProcessor() if name == "qwen3_5" else None)
        monkeypatch.setattr("duotone.loading.load", lambda _, device: loaded)
        return tmp_path / name

    return made
