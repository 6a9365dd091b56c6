"""Structures tell objects apart by all that is not the content of a tensor."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from duotone.cache.alike import Structure
from duotone.cache.blocks import BlockTable
from duotone.quant import CacheSpec


@dataclass
class Part:
    x: Tensor
    n: int


Part.__module__ = "duotone.made.here"


def part(n: int = 1, fill: float = 0.0, size: int = 3) -> Part:
    return Part(torch.full((2, size), fill), n)


def test_only_content_may_differ() -> None:
    one, other = Structure.of([part()]), Structure.of([part(fill=7.0)])
    assert one.is_like(other)
    one.copy_from(other)
    assert one.tensors[0].eq(7).all()


@pytest.mark.parametrize(
    "other",
    [
        [part(n=2)],
        [part(size=4)],
        [part(), part()],
        [Part(torch.zeros(2, 3, dtype=torch.float64), 1)],
        [Part(torch.zeros(3, 2).T, 1)],
        (part(),),
        [Part(None, 1)],
    ],
    ids=range(7),
)
def test_everything_else_counts(other: object) -> None:
    assert not Structure.of([part()]).is_like(Structure.of(other))


def test_an_object_that_comes_twice_is_not_two_objects() -> None:
    one, two = part(), part()
    assert not Structure.of([one, one]).is_like(Structure.of([one, two]))
    assert Structure.of([one, one]).is_like(Structure.of([two, two]))
    assert len(Structure.of([one, one]).tensors) == 1


def test_bytes_of_views_count_once() -> None:
    x = torch.zeros(10)
    assert Structure.of([x, x[:5]]).nbytes == 40


def test_tables_are_alike_by_the_numbers_that_the_host_took() -> None:
    uniform = BlockTable.uniform(2, 12, 4, torch.device("cpu"))
    made = BlockTable(uniform.offsets.clone())
    assert Structure.of(uniform).is_like(Structure.of(made))
    ragged = BlockTable(torch.tensor([[0, 4, 8, 12], [0, 2, 8, 12]]))
    assert not Structure.of(uniform).is_like(Structure.of(ragged))


def test_tables_that_are_taken_over_derive_anew() -> None:
    one, other = (BlockTable(torch.tensor([[0, *edges]])) for edges in ((3, 9), (6, 9)))

    def derived(table: BlockTable) -> list[list]:
        found = (table.split(2).offsets, table.sizes, table.counts, table.block_of_token(9))
        return [x.tolist() for x in found]

    assert derived(one) != derived(other)
    mine, theirs = Structure.of(one), Structure.of(other)
    assert mine.is_like(theirs)
    mine.copy_from(theirs)
    assert derived(one) == derived(other)


def test_specs_are_left_to_the_caller() -> None:
    one, other = CacheSpec(visual="dense"), CacheSpec(visual="text")
    assert Structure.of([one]).is_like(Structure.of([other]))


def test_unknown_parts_are_refused() -> None:
    with pytest.raises(TypeError, match="launches may depend on"):
        Structure.of([object()])
