"""Shapes of decode attention that are measured."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Shape:
    """One query per sequence against `tokens` keys and values of each kv head."""

    batch: int
    q_heads: int
    kv_heads: int
    tokens: int
    head_dim: int = 128

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 1 or self.q_heads % self.kv_heads:
            raise ValueError(
                "a shape is batch,q_heads,kv_heads,tokens[,head_dim], all positive and q_heads a "
                f"multiple of kv_heads; got {self}, e.g. 32,32,8,8192"
            )

    @classmethod
    def parse(cls, text: str) -> Shape:
        """'32,32,8,8192' or '32,32,8,8192,64'. Errors: ValueError for anything else."""
        parts = text.split(",")
        if len(parts) not in (4, 5) or not all(part.strip().isdecimal() for part in parts):
            raise ValueError(
                "a shape is batch,q_heads,kv_heads,tokens[,head_dim] in whole numbers; "
                f"got {text!r}, e.g. 32,32,8,8192"
            )
        return cls(*map(int, parts))

    @property
    def group(self) -> int:
        """q heads per kv head."""
        return self.q_heads // self.kv_heads

    def __str__(self) -> str:
        return ",".join(str(part) for part in asdict(self).values())


# Shapes of the kernel table, the papers' 3,328 visual tokens at a serving batch, MHA, and a small
# head_dim.
SHAPES = (
    Shape(32, 32, 8, 8192),
    Shape(8, 32, 8, 32768),
    Shape(64, 32, 8, 3328),
    Shape(16, 48, 8, 8192),
    Shape(1, 32, 8, 131072),
    Shape(16, 32, 32, 4096),
    Shape(32, 32, 8, 8192, 64),
)
