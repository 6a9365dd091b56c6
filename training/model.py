"""The model as training sees it: initial weights, the training pass, the file that ships."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, InternVLForConditionalGeneration

from data import CELL, IGNORED, LABEL_COUNT, SIDE, Encoder


def build_model(folder: Path, device: str) -> InternVLForConditionalGeneration:
    """Return fresh fp32 weights; positions start as sinusoids in the plane, not as zeros."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = InternVLForConditionalGeneration._from_config(config, dtype=torch.float32)
    embeddings = model.model.vision_tower.embeddings
    side, width = embeddings.patch_embeddings.patch_shape[0], config.vision_config.hidden_size
    rates = torch.exp(torch.linspace(0, -4, width // 4)) * torch.pi / 2
    waves = torch.arange(side)[:, None] * rates
    waves = torch.cat([waves.sin(), waves.cos()], 1)
    grid = torch.cat([waves[:, None].expand(-1, side, -1), waves.expand(side, -1, -1)], -1)
    embeddings.position_embeddings.data[0, 1:] = 0.1 * grid.reshape(side * side, width)
    return model.to(device)


class Trainee(nn.Module):
    """The model's training pass: fixed picture places, no masks, loss on the answers."""

    def __init__(self, model: InternVLForConditionalGeneration, encoder: Encoder):
        super().__init__()
        self.model, self.encoder = model, encoder
        width = model.config.text_config.hidden_size
        self.sight = nn.Linear(width, LABEL_COUNT + 2 * (SIDE // CELL))

    def picture_features(self, pixels: Tensor) -> Tensor:
        """Return [pictures, 256, hidden] from uint8 pixels [pictures, 256, 256, 3]."""
        inner = self.model.model
        tower = inner.vision_tower
        hidden = tower.embeddings(pixels.permute(0, 3, 1, 2).float() / 127.5 - 1)
        for layer in tower.encoder.layer:
            hidden = layer(hidden)
        count, tokens, width = hidden[:, 1:].shape
        side = int(tokens**0.5)
        hidden = inner.pixel_shuffle(hidden[:, 1:].reshape(count, side, side, width))
        return inner.multi_modal_projector(hidden.flatten(1, 2))

    def embed(self, ids: Tensor, features: Tensor, pictures: int) -> Tensor:
        """Return token embeddings with the picture features in their places."""
        embeds = self.model.get_input_embeddings()(ids).to(torch.bfloat16)
        features = features.to(torch.bfloat16).unflatten(0, (-1, pictures))
        parts, end = [], 0
        for i, start in enumerate(self.encoder.picture_starts(pictures)):
            parts += [embeds[:, end:start], features[:, i]]
            end = start + features.shape[2]
        return torch.cat([*parts, embeds[:, end:]], 1)

    def sight_loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Return how badly visual tokens say what they show and where they are (nats a token)."""
        side = SIDE // CELL
        places = torch.arange(side * side, device=features.device)
        rows, columns = F.one_hot(places // side, side), F.one_hot(places % side, side)
        places = torch.cat([rows, columns], 1).expand(len(targets), -1, -1)
        wanted = torch.cat([targets, places.to(targets.dtype)], 2)
        loss = F.binary_cross_entropy_with_logits(self.sight(features).float(), wanted.float())
        return loss * wanted.shape[2]

    def forward(self, pixels: Tensor, tokens: Tensor, targets: Tensor, pictures: int):
        """Return the mean loss over the answer tokens and the loss of the visual tokens."""
        ids, labels = tokens[:, 0].long(), tokens[:, 1].long()
        language = self.model.model.language_model
        features = self.picture_features(pixels)
        hidden = self.embed(ids, features, pictures)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        rotary = language.rotary_emb(hidden, positions)
        for layer in language.layers:
            hidden = layer(hidden, position_embeddings=rotary)
        logits = self.model.lm_head(language.norm(hidden)[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        return loss, self.sight_loss(features, targets)


def compile_layers(model: InternVLForConditionalGeneration) -> None:
    """Compile layer by layer: one graph per kind and shape instead of one for the whole depth."""
    inner = model.model
    for layer in [*inner.vision_tower.encoder.layer, *inner.language_model.layers]:
        layer.compile(dynamic=False)


def save_weights(model: InternVLForConditionalGeneration, path: Path) -> None:
    """Write bf16 weights under their hub names, the tied head left out."""
    state = {k: v.bfloat16().contiguous() for k, v in model.state_dict().items()}
    state.pop("lm_head.weight")
    save_file(state, path, metadata={"format": "pt"})
