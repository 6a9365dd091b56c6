"""Digests: every change of bytes, names, types or shapes is seen, on any way through memory."""

import pytest
import torch

from duotone.tools import digest as module
from duotone.tools.digest import digest, word_sum

KNOWN_SUM = 5000676112964677729
KNOWN_DIGEST = "b890181a8a4c81bd0e9a0f8b984551b0"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool)


def some(dtype: torch.dtype, count: int = 1003) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (count,)).to(dtype)


def test_a_known_tensor_has_a_known_digest() -> None:
    """Files outlive versions: the arithmetic must not change without another format."""
    tensors = {"a": torch.arange(1000).reshape(10, 100), "b": torch.arange(7, dtype=torch.uint8)}
    assert word_sum(tensors["a"]).item() == KNOWN_SUM
    assert digest(tensors, {"x": 1}) == KNOWN_DIGEST


def splitmix64(word: int) -> int:
    """The finalizer as it is published, in Python's integers."""
    wrap = (1 << 64) - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & wrap
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & wrap
    return word ^ (word >> 31)


def test_the_sum_is_what_the_formula_says() -> None:
    x = torch.arange(100, dtype=torch.int64) * 10**15 - 3 * 10**16
    wrap = (1 << 64) - 1
    places = [0x9E3779B97F4A7C15 * i & wrap for i in range(len(x))]
    total = sum(splitmix64((w & wrap) ^ p) for w, p in zip(x.tolist(), places, strict=True))
    assert word_sum(x).item() & wrap == total & wrap


def test_changes_of_two_words_do_not_cancel() -> None:
    x = torch.randn(64)
    signs = [word_sum(-x.where(torch.arange(64) != i, -x)).item() for i in range(64)]
    found = set(signs)
    for i in range(64):
        for j in range(i):
            y = x.clone()
            y[[i, j]] *= -1
            found.add(word_sum(y).item())
    assert len(found) == 64 + 64 * 63 // 2


def test_every_bit_counts() -> None:
    x = some(torch.uint8, 41)
    sums = {word_sum(x).item()}
    for i in range(len(x)):
        for bit in range(8):
            x[i] ^= 1 << bit
            sums.add(word_sum(x).item())
            x[i] ^= 1 << bit
    assert len(sums) == 1 + 8 * len(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_way_through_memory_does_not_count(dtype: torch.dtype, monkeypatch) -> None:
    x = some(dtype)
    expected = word_sum(x).item()
    assert word_sum(torch.cat([x[:3], x])[3:]).item() == expected
    assert word_sum(torch.stack([x, x], 1)[:, 1]).item() == expected
    monkeypatch.setitem(module.CHUNK, "cpu", 16)
    assert word_sum(x).item() == expected


def test_names_types_shapes_and_data_count() -> None:
    x = torch.arange(8, dtype=torch.int32)
    given = [{"a": x}, {"b": x}, {"a": x[None]}, {"a": x.view(torch.float32)}, {"a": x, "b": x}, {}]
    assert len({digest(tensors) for tensors in given} | {digest({"a": x}, 1)}) == 7
    assert digest({"a": x, "b": x[1:]}) == digest({"b": x[1:], "a": x})
    assert digest({"a": x[:0]}) != digest({"a": x[:0, None]})
