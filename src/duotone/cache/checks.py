"""Checks of tensors from a file. Each raises ValueError: rule, got, where."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from duotone.cache.blocks import single_block
from duotone.cache.index import STORES, LedgerState
from duotone.cache.key_norm import divided
from duotone.cache.packed import PackedTensor
from duotone.cache.packing import pack_tensor
from duotone.cache.ragged import select, valid_mask
from duotone.quant import CacheSpec, KVSpec, unpack
from duotone.quant.classes import CLASS_BITS, class_counts
from duotone.quant.spec_base import is_count

DTYPES = {n: getattr(torch, n) for n in ("float16", "bfloat16", "float32", "float64")}
# Positions are int32.
MOST_TOKENS = 2**31 - 1


def must(condition: bool, rule: str, got: object) -> None:
    """Raise ValueError with a rule of saved caches and the content that breaks it."""
    if not condition:
        raise ValueError(f"{rule}; got {got}")


class Unchecked:
    """Tensors by name; `take` returns each one once, after a check of its type and shape."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._left = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def batch(self, name: str) -> int:
        """Length of a tensor of one axis: the number of sequences."""
        must(name in self._left, "a cache has lengths", f"no {name}")
        shape = tuple(self._left[name].shape)
        must(len(shape) == 1 and shape[0] > 0, "lengths are of 1 sequence or more", shape)
        return shape[0]

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor:
        """Take the tensor of that name; None stands for any size."""
        must(name in self._left, "a tensor is missing", f"no {name}")
        tensor = self._left.pop(name)
        must(tensor.dtype == dtype, f"{name} must be {dtype}", tensor.dtype)
        fits = tensor.dim() == len(shape) and all(
            wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
        )
        must(fits, f"{name} must be of shape {shape}", tuple(tensor.shape))
        return tensor

    def finish(self, all_stores: bool) -> None:
        """Raise where a tensor or a store is left over."""
        must(not self._left, "a cache has no other tensors", sorted(self._left)[:3])
        must(all_stores, "a cache has stores of its own layers only", "more")


def check_finite(name: str, tensor: Tensor, mask: Tensor | None) -> None:
    """Raise where a valid number is not finite.

    mask: True where numbers are valid; None: everywhere.
    """
    bad = ~torch.isfinite(tensor.to(torch.float32))
    bad = bad if mask is None else bad & mask
    must(not bool(bad.any()), "numbers must be finite", f"inf or NaN in {name}")


def check_levels(name: str, own: Mapping[str, Tensor], spec: CacheSpec, state: LedgerState) -> None:
    """Raise where dense tokens that leave the window some day have no levels of the spec's type.

    own: tensors of a layer, by the names of `declared.own_tensors`.
    """
    movable = state.movable(spec.sink)
    if not isinstance(spec.text, KVSpec) or not movable.any():
        return
    take = select(movable)
    spans = single_block(take.lengths)
    for part, norm in (("key", own.get("key_norm")), ("value", None)):
        try:
            pack_tensor(divided(take.apply(own[part]), norm), getattr(spec.text, part), spans)
        except ValueError as error:
            raise ValueError(
                f"dense tokens that leave the window later must have levels; in {name}.{part} "
                f"{error} Run the prompt again and save the cache anew."
            ) from None


def check_evicted(state: LedgerState, spec: CacheSpec) -> None:
    """Raise unless counts of evicted tokens, and logical ends, are possible."""
    seen, gone = state.seen, state.evicted
    for name, end in (("seen", seen), ("evicted_end", gone.end), ("whole", state.whole)):
        limit = MOST_TOKENS if name == "seen" else seen
        must(is_count(end) and end <= limit, f"{name} must be a count of tokens", repr(end))
    ok = (gone.visual >= 0).all() and (gone.visual <= gone.tokens).all()
    must(bool(ok), "evicted visual tokens are some of the evicted ones", gone.visual.tolist())
    ok = spec.evict is not None or not gone.tokens.any()
    must(bool(ok), "this spec evicts nothing", gone.tokens.tolist())


def check_places(state: LedgerState, name: str) -> None:
    """Raise unless each token is in one store at most, in order, at a position that was seen."""
    seen, places = state.seen, []
    for store in (*STORES, "dense"):
        roll, where = getattr(state, store), f"{name}{store}"
        width = roll.positions.shape[1]
        ok = (roll.lengths >= 0).all() and (roll.lengths <= width).all()
        must(bool(ok), f"lengths of {where} must lie in 0 to {width}", roll.lengths.tolist())
        must(bool((roll.positions >= 0).all()), "positions must be >= 0", where)
        valid, positions = valid_mask(roll.lengths, width), roll.positions.long()
        must(bool((~valid | (positions < seen)).all()), f"positions must be < {seen}", where)
        rising = positions.diff(dim=-1) > 0
        must(bool((rising | ~valid[:, 1:]).all()), "positions must rise", where)
        # A number of its own for each slot that holds no token.
        other = seen + sum(p.shape[1] for p in places) + torch.arange(width, device=valid.device)
        places.append(torch.where(valid, positions, other))
    ordered = torch.cat(places, 1).sort(-1).values
    must(bool((ordered.diff(dim=-1) > 0).all()), "a token is in one store", f"twice in {name}")
    stored = sum(getattr(state, store).lengths for store in (*STORES, "dense"))
    ok = bool((stored + state.evicted.tokens <= seen).all())
    must(ok, f"a sequence holds and evicts {seen} tokens at most", stored.tolist())
    # A byte of a file may be any number.
    must(bool((state.streamed.view(torch.uint8) <= 1).all()), "flags must be 0 or 1", name)


def check_table(name: str, offsets: Tensor) -> None:
    """Raise unless offsets are edges of blocks, with empty blocks last."""
    must(offsets.shape[1] > 0, "a table of blocks has edges", name)
    must(not bool(offsets[:, 0].any()), "the first block must begin at 0", name)
    sizes = offsets.diff(dim=-1)
    must(bool((sizes >= 0).all()), "blocks must not overlap", name)
    must(bool((offsets <= MOST_TOKENS).all()), f"blocks must end by {MOST_TOKENS}", name)
    holds = sizes > 0
    must(not bool((holds[:, 1:] & ~holds[:, :-1]).any()), "empty blocks come last", name)


def check_classes(name: str, tensor: PackedTensor, mask: Tensor) -> None:
    """Raise unless each valid block has as many channels of a class as the spec says."""
    counts = [count for _, count in class_counts(tensor.spec, tensor.head_dim)]
    device = tensor.classes.device
    wanted = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).to(device)
    numbers = unpack(tensor.classes, CLASS_BITS, tensor.head_dim).sort(-1).values
    ok = bool(((numbers == wanted) | ~mask).all())
    must(ok, "classes must have the spec's numbers of channels", f"others in {name}.classes")
