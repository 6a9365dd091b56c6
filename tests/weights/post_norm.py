"""A post-norm vision encoder as in GLM-4V (EVA-CLIP): x + LN(attention(x)), x + LN(mlp(x))."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.weights.equivalences.module_map import Block, Reader, Stream, ValueHeads

CHANNELS, HEADS, HIDDEN = 24, 2, 44


class PostNormBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.dense = nn.Linear(CHANNELS, CHANNELS)
        self.input_layernorm = nn.LayerNorm(CHANNELS, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(CHANNELS, HIDDEN), nn.Linear(HIDDEN, CHANNELS)
        self.post_attention_layernorm = nn.LayerNorm(CHANNELS, eps=1e-6)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.dense(out.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.input_layernorm(self.attention(x))
        return x + self.post_attention_layernorm(self.fc2(F.gelu(self.fc1(x))))


class PostNormEncoder(nn.Module):
    """pixels [batch, 3, 8, 8] -> [batch, 4 + 1, 10]."""

    def __init__(self, blocks: int = 3):
        super().__init__()
        self.patches = nn.Conv2d(3, CHANNELS, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, CHANNELS))
        self.positions = nn.Embedding(5, CHANNELS)
        self.blocks = nn.ModuleList(PostNormBlock() for _ in range(blocks))
        self.projector = nn.Linear(CHANNELS, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patches(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.projector(x)


def stream_of(model: PostNormEncoder) -> Stream:
    return Stream(
        name="vision",
        channels=CHANNELS,
        blocks=tuple(_block(f"blocks.{i}") for i in range(len(model.blocks))),
        readers=(Reader(("projector",)),),
        writers=("patches",),
        tables=("positions",),
        vectors=("class_token",),
    )


def _block(at: str) -> Block:
    return Block(
        attention_inputs=(f"{at}.qkv",),
        attention_output=f"{at}.dense",
        attention_output_norm=f"{at}.input_layernorm",
        mlp_inputs=(f"{at}.fc1",),
        mlp_output=f"{at}.fc2",
        mlp_output_norm=f"{at}.post_attention_layernorm",
        values=ValueHeads(f"{at}.qkv", HEADS, CHANNELS // HEADS, 2 * CHANNELS),
    )
