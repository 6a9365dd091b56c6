"""Queries into a basis and the merge out of one: the sources of both kernels, on a CPU."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from duotone.attention import merge_partials
from duotone.attention.cuda.rotate import merge as merge_rotated
from duotone.attention.cuda.rotate import queries as rotate_queries
from duotone.attention.cuda.rotate.merge import MergeTurned
from duotone.attention.cuda.rotate.queries import tiles
from duotone.attention.cuda.shared import launch
from duotone.attention.cuda.shared.work import Work
from duotone.quant.rotation import turn_heads

from cases import assert_near
from cuda_on_cpu import missing
from units_on_cpu import compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
EMPTY = -1e30
# batch, kv heads, q heads of each, head_dim, multiprocessors: blocks of 1, 2, 4 and 8 rows, full
# and not.
SHAPES = [
    (1, 2, 1, 64, 132),
    (3, 2, 4, 80, 20),
    (3, 1, 7, 96, 6),
    (1, 1, 16, 256, 4),
    (2, 2, 6, 128, 6),
    (3, 2, 1, 256, 132),
]


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """Launches run here; the number is that of multiprocessors."""

    def kernel(source, name, macros, device):
        emulated = dict(macros) | {"LATE": 0, "__CUDA_ARCH__": 900, "STAGES": 1}
        run = compiled(name, emulated, tmp_path)
        return lambda at, given: run(given, at.blocks, at.threads)

    def patch(sms: int) -> None:
        for module in (rotate_queries, launch):
            monkeypatch.setattr(module, "kernel", kernel)
        for module in (rotate_queries, merge_rotated):
            monkeypatch.setattr(module, "multiprocessors", lambda device: sms)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    return patch


def matrices_of(kv_heads: int, channels: int) -> torch.Tensor:
    return torch.eye(channels) + 0.1 * torch.randn(kv_heads, channels, channels)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("batch", "kv_heads", "group", "channels", "sms"), SHAPES)
def test_rows_meet_the_matrix_of_their_head(
    batch, kv_heads, group, channels, sms, dtype, on_cpu
) -> None:
    torch.manual_seed(0)
    on_cpu(sms)
    query = torch.randn(batch, kv_heads * group, 1, channels).to(dtype)
    matrices = matrices_of(kv_heads, channels)
    out = rotate_queries.rotate_queries(query, matrices)
    assert out.dtype == torch.float32
    expected = turn_heads(query.double(), matrices.double()).float()
    assert_near(out, expected)
    with pytest.raises(AssertionError, match="rms"):
        assert_near(out, turn_heads(query.double(), matrices.roll(1, 1).double()).float())


def test_queries_may_begin_anywhere(on_cpu) -> None:
    on_cpu(132)
    query, matrices = torch.randn(65)[1:].view(1, 1, 1, 64), matrices_of(1, 64)
    assert query.data_ptr() % rotate_queries.ALIGNMENT_BYTES
    out = rotate_queries.rotate_queries(query, matrices)
    assert_near(out, turn_heads(query.double(), matrices.double()).float())


class Parts(SimpleNamespace):
    """Random parts of a call, as kernels leave them: partial [heads, parts, group, channels]."""

    @classmethod
    def of(cls, batch: int, kv_heads: int, group: int, channels: int, parts: int):
        heads = batch * kv_heads
        partial = torch.randn(heads, parts, group, channels)
        weights = torch.stack(
            [4 * torch.randn(heads, parts, group), torch.rand(heads, parts, group) + 0.5], -1
        )
        hidden = torch.rand(heads, parts, group) < 0.3
        hidden[:, -1] = False
        hidden[0, :, 0] = True  # a query without any key
        weights[hidden] = torch.tensor([EMPTY, 0.0])
        partial[hidden] = 0
        return cls(batch=batch, kv_heads=kv_heads, partial=partial, weights=weights)

    def expected(self, bases: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, log2 of the sums) of [batch, q_heads]. bases: (matrices, parts) of each."""
        turned = [matrices for matrices, count in bases for _ in range(count)]
        rows = (self.batch, -1, 1, self.partial.shape[3])
        merged = []
        for part in range(self.partial.shape[1]):
            top, weight = self.weights[:, part].double().unbind(-1)
            out = self.partial[:, part].double() / weight.where(weight > 0, 1)[..., None]
            out = out.reshape(rows)
            if part < len(turned):
                out = turn_heads(out, turned[part].double().expand(self.kv_heads, -1, -1))
            lse = (top * 0.6931471805599453 + weight.log()).reshape(self.batch, -1, 1)
            merged.append((out, lse))
        out, lse = merge_partials(merged)
        return out, lse.squeeze(2) / 0.6931471805599453


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("parts", "turned"), [(1, [1]), (3, [2]), (11, [7]), (2, [1, 1]), (11, [5, 3]), (3, [0, 2])]
)
@pytest.mark.parametrize(("batch", "kv_heads", "group", "channels", "sms"), SHAPES)
def test_parts_leave_their_basis(
    batch, kv_heads, group, channels, sms, parts, turned, on_cpu
) -> None:
    torch.manual_seed(0)
    on_cpu(sms)
    given = Parts.of(batch, kv_heads, group, channels, parts)
    heads = kv_heads if parts < 11 else 1
    bases = [(matrices_of(heads, channels), count) for count in turned]
    out, lse = merged(given, bases)
    expected, sums = given.expected(bases)
    assert_near(out, expected.float())
    torch.testing.assert_close(lse, sums.float(), rtol=1e-5, atol=1e-5)
    assert (out[0, 0] == 0).all()
    assert lse[0, 0] == -torch.inf
    for wrong, (matrices, count) in enumerate(bases):
        first = sum(turned[:wrong])
        if (given.weights[:, first : first + count, :, 1] > 0).any():
            others = [*bases[:wrong], (matrices.roll(1, 1), count), *bases[wrong + 1 :]]
            with pytest.raises(AssertionError, match="rms"):
                assert_near(out, given.expected(others)[0].float())


def merged(
    given: Parts, bases: list[tuple[torch.Tensor, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, lse) of the kernel, into every third row of both."""
    parts, group, channels = given.partial.shape[1:]
    rows = (given.batch, given.kv_heads * group)
    out = torch.full((*rows, 3, channels), torch.nan)
    lse = torch.full((*rows, 3), torch.nan)
    work = Work(
        torch.empty(*rows, 1, channels),
        SimpleNamespace(head_dim=channels),
        given.kv_heads,
        0,
        torch.empty(given.batch),
    )
    fields = {
        "partial": given.partial.data_ptr(),
        "weights": given.weights.data_ptr(),
        "out": out[:, :, 1].data_ptr(),
        "out_stride": out.stride(1),
        "lse": lse[:, :, 1].data_ptr(),
        "lse_stride": lse.stride(1),
        "all_parts": parts,
    }
    MergeTurned(*zip(*bases, strict=True))(work, out, fields)
    for others in (out[:, :, ::2], lse[:, :, ::2]):
        assert others.isnan().all()
    return out[:, :, 1:2], lse[:, :, 1]


@pytest.mark.parametrize(
    ("kv_heads", "rows", "blocks", "of_block"),
    [(8, 4, 32, 1), (8, 32, 128, 2), (8, 128, 128, 8), (8, 256, 256, 8), (32, 16, 128, 4)],
)
def test_blocks_have_few_rows_where_these_are_few(kv_heads, rows, blocks, of_block) -> None:
    at = tiles(128, kv_heads, rows, 132)
    assert (at.blocks, at.rows, at.threads) == (blocks, of_block, 256)
    assert merge_rotated.shared_bytes(at, 128, 2) <= 56 << 10
    assert ctypes.sizeof(merge_rotated.Arguments) % 8 == 0
