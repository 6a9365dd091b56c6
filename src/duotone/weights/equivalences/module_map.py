"""Map of a transformer: the part of each module, as paths of modules; filled in per family.

A stream is a residual stream: [tokens, channels] that blocks read and add to. A multimodal model
has two, the vision tower's and the language model's; the projector reads the first and writes into
the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

StreamName = Literal["vision", "language"]


@dataclass(frozen=True)
class ValueHeads:
    """The rows of `linear` that make V: `heads` * `head_dim` rows from `first_row` on."""

    linear: str
    heads: int
    head_dim: int
    first_row: int = 0


@dataclass(frozen=True)
class Block:
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    attention_norm, mlp_norm: None where the branch reads the stream as it is (post-norm).
    attention_output_norm, mlp_output_norm: norms of a branch's output (post-norm and sandwich).
    attention_scale, mlp_scale: LayerScale parameters. up: the linear whose output multiplies the
    gate's, so that factors of down_proj's input fold into it; None for a plain MLP.
    """

    attention_inputs: tuple[str, ...]
    attention_output: str
    mlp_inputs: tuple[str, ...]
    mlp_output: str
    values: ValueHeads
    attention_norm: str | None = None
    mlp_norm: str | None = None
    attention_output_norm: str | None = None
    mlp_output_norm: str | None = None
    attention_scale: str | None = None
    mlp_scale: str | None = None
    up: str | None = None

    @property
    def branches(self) -> tuple[Branch, Branch]:
        """Attention and MLP as two `Branch` objects."""
        return (
            Branch(
                self.attention_norm,
                self.attention_inputs,
                self.attention_output,
                self.attention_output_norm,
                self.attention_scale,
            ),
            Branch(
                self.mlp_norm,
                self.mlp_inputs,
                self.mlp_output,
                self.mlp_output_norm,
                self.mlp_scale,
            ),
        )


@dataclass(frozen=True)
class Branch:
    """A branch, added to the stream: norm -> inputs -> ... -> output [-> output_norm]."""

    norm: str | None
    inputs: tuple[str, ...]
    output: str
    output_norm: str | None
    scale: str | None


@dataclass(frozen=True)
class Reader:
    """Linears outside the blocks that read the stream, through `norm` if there is one.

    A linear may read several neighbours at once (patch mergers, pixel shuffle, several feature
    layers). Its inputs are then k * channels, and so may be the norm's.
    """

    linears: tuple[str, ...]
    norm: str | None = None


@dataclass(frozen=True)
class Stream:
    """A residual stream and everything that touches it.

    writers: linears and convolutions outside the blocks whose output enters it.
    tables: embeddings whose rows enter it. vectors: parameters [..., channels] that do.
    entry_norm: a norm whose *output* is the stream (CLIP's ln_pre); the stream begins after that
    norm. outside: modules that read the stream and stay in its first basis (pooling heads that
    nobody uses in a multimodal model).
    """

    name: StreamName
    channels: int
    blocks: tuple[Block, ...]
    readers: tuple[Reader, ...]
    writers: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    entry_norm: str | None = None
    outside: tuple[str, ...] = ()

    @property
    def is_rotatable(self) -> bool:
        """True if no branch output is normalised: such a norm's weight fixes the branch basis."""
        return all(branch.output_norm is None for b in self.blocks for branch in b.branches)


@dataclass(frozen=True)
class WeightMap:
    """A model's streams, in the order of the data; embedding and head, which may be tied."""

    family: str
    streams: tuple[Stream, ...]
    embedding: str
    head: str

    def stream(self, name: StreamName) -> Stream:
        """The stream of that name. Errors: ValueError if the model has none."""
        found = next((s for s in self.streams if s.name == name), None)
        if found is None:
            names = [s.name for s in self.streams]
            raise ValueError(f"{self.family} has streams {names}; got {name!r}.")
        return found


def at(model: nn.Module, path: str) -> Any:
    """The module or parameter at `path`. Errors: ValueError naming the part that is missing."""
    found: Any = model
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"{type(model).__name__} has no {path!r}: {part!r} is missing in "
                f"{type(found).__name__}. The family's weight map does not fit this model."
            )
        found = getattr(found, part)
    return found


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path`."""
    at(model, path)
    model.set_submodule(path, module)


def set_data(parameter: Tensor, value: Tensor) -> None:
    """Write `value` into a parameter, cast to its type; shapes must agree."""
    if parameter.shape != value.shape:
        raise ValueError(f"expected shape {tuple(parameter.shape)}; got {tuple(value.shape)}.")
    parameter.data.copy_(value)
