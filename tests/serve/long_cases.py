"""Long contexts by the served path against float64: V of one sign, so that no error cancels."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.serve.decode import DecodeStep
from duotone.serve.pages import Chunk, PageLayout, read_pages, write_pages, write_ring
from duotone.serve.prepared import scratch_of
from duotone.serve.ragged import RaggedStep
from duotone.serve.windows import Attention

# Tokens in pages; those of an open page come after them.
LENGTHS = (8192, 65536, 262144)
OPEN = 5
# Tokens in a row with equal size of V and equal mean of K: windows differ in both.
RUN = 1024
# Errors below it may grow: a fifth of what rounding an answer to float16 costs.
NOTHING = 1e-4

Rows = tuple[Tensor, Tensor, Tensor]
Both = tuple[list[Tensor], list[Tensor]]


class Long:
    """A request of each length with `new` tokens; each has the first pages of the longest one."""

    def __init__(
        self,
        layout: PageLayout,
        gqa: int,
        new: int,
        *,
        kv_heads: int = 1,
        lengths: Sequence[int] = LENGTHS,
        query_dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(0)
        self.layout, self.gqa, self.new, self.lengths = layout, gqa, new, lengths
        self.heads, self.device, self.query_dtype = kv_heads, torch.device(device), query_dtype
        self.scale, count = layout.head_dim**-0.5, max(lengths) // layout.tokens
        numbers = torch.randperm(count + len(lengths) * (layout.rings + 1)).int() + 1
        self.pages, own = numbers[:count].to(device), numbers[count:].to(device)
        own = own.view(len(lengths), -1)
        self.blocks, opened = own[:, :-1].contiguous(), own[:, -1:]
        self.table = torch.cat([self.pages.expand(len(lengths), -1), opened], 1)
        shape = (len(numbers) + 1, kv_heads, layout.tokens, layout.token_bytes)
        self.pool = torch.full(shape, 255, dtype=torch.uint8, device=device)
        write_pages(layout, self.pool, self.pages, *self._kept(max(lengths)))
        self.opened = [self._drawn(OPEN) for _ in lengths]
        self.states = [self._drawn(new) for _ in lengths]
        for row, length in enumerate(lengths):
            self.table[row, length // layout.tokens] = opened[row]
            write_ring(layout, self.pool, self.blocks[row], length, *self.opened[row][1:])

    def one_by_one(self) -> Both:
        """Attention of the new tokens by `Chunk`, and in float64."""
        outs = []
        for row, length in enumerate(self.lengths):
            where = (self.pool, self.table[row], self.blocks[row])
            chunk = Chunk(self.layout, *where, self.states[row], length + OPEN, stored=False)
            chunk.open()
            outs.append(chunk.attend(self.scale))
        return outs, self.wanted_of_read

    def together(self, attention: Attention, is_short: bool) -> Both:
        """Attention of the new tokens by `RaggedStep`, and in float64.

        is_short: they are few enough for decode kernels, which round no packed token.
        """
        edges = [row * self.new for row in range(len(self.lengths) + 1)]
        rows = [
            (row, edges[row], edges[row + 1], length + OPEN)
            for row, length in enumerate(self.lengths)
        ]
        slots = torch.full((edges[-1],), -1, device=self.device)
        where = (self.table, self.blocks, slots)
        step = RaggedStep(self.layout, self.heads, self.gqa, rows, *where)
        assert (step.short is not None, bool(step.windows)) == (is_short, not is_short)
        query, *new = (torch.cat(x) for x in zip(*self.states, strict=True))
        scratch = scratch_of(self.layout, self.heads, self.device)
        opened = step.open(self.pool, *new)
        out = step.attend(self.pool, query, opened, scratch, self.scale, attention)
        by_kernel = is_short and has_kernels(self.device)
        wanted = self.wanted_of_packed if by_kernel else self.wanted_of_read
        return list(out.split(self.new)), wanted

    def decoded(self) -> Both:
        """Attention of the last token of each open page by the kernel, and in float64."""
        count = len(self.lengths)
        step = DecodeStep(self.layout, count, self.device)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device) + OPEN
        slots = torch.zeros(count, dtype=torch.long, device=self.device)
        step.fill(lengths, self.table, [self.blocks], slots)
        query = torch.cat([query[-1:] for query, _, _ in self.opened])
        out = torch.full_like(query, torch.nan, dtype=torch.float32)
        step.attend(self.pool, self.table, query, self.scale, out)
        layout = PageLayout(self.layout.bits, self.layout.head_dim, torch.float32)
        packed = read_pages(layout, self.pool, self.pages)
        rows = zip(self.lengths, self.opened, strict=True)
        wanted = [self._exact(n, packed, (x[0][-1:], *x[1:])) for n, x in rows]
        return list(out.split(1)), wanted

    @cached_property
    def wanted_of_read(self) -> list[Tensor]:
        """Attention of the new tokens in float64, over pages as windows hold them."""
        return self._wanted(read_pages(self.layout, self.pool, self.pages))

    @cached_property
    def wanted_of_packed(self) -> list[Tensor]:
        """Attention of the new tokens in float64, over pages whose numbers nobody has rounded."""
        layout = PageLayout(self.layout.bits, self.layout.head_dim, torch.float32)
        return self._wanted(read_pages(layout, self.pool, self.pages))

    def _wanted(self, packed: tuple[Tensor, Tensor]) -> list[Tensor]:
        found = []
        for length, old, new in zip(self.lengths, self.opened, self.states, strict=True):
            later = (torch.cat(x) for x in zip(old[1:], new[1:], strict=True))
            found.append(self._exact(length, packed, (new[0], *later)))
        return found

    def _exact(self, length: int, packed: tuple[Tensor, Tensor], later: Rows) -> Tensor:
        """Causal attention in float64 over packed tokens and later ones, of which all are seen."""
        query, *later = (x.double() for x in later)
        both = zip(packed, later, strict=True)
        keys, values = (torch.cat([x[:length].double(), y]) for x, y in both)
        new, grouped = len(query), query.unflatten(1, (-1, self.gqa))
        scores = torch.einsum("qhgd,nhd->hgqn", grouped, keys) * self.scale
        scores[..., len(keys) - new :] += scores.new_full((new, new), -torch.inf).triu(1)
        return torch.einsum("hgqn,nhd->qhgd", scores.softmax(-1), values).flatten(1, 2)

    def _drawn(self, tokens: int) -> Rows:
        """Q, K and V."""
        shape = (tokens, self.gqa * self.heads, self.layout.head_dim)
        query = torch.randn(shape, device=self.device).to(self.query_dtype)
        return query, *self._kept(tokens)

    def _kept(self, tokens: int) -> tuple[Tensor, Tensor]:
        """K and V. V is positive, and of another size in each run of tokens."""
        width, run = self.layout.head_dim, torch.arange(tokens, device=self.device) // RUN
        key, value = torch.randn(2, tokens, self.heads, width, device=self.device)
        means = torch.randn(tokens // RUN + 1, 1, width, device=self.device)[run] / 2
        sizes = 2.0 ** torch.randint(-2, 3, (tokens // RUN + 1, 1, 1), device=self.device)[run]
        return tuple(x.to(self.layout.dtype) for x in (key + means, value.abs() * sizes))


def errors(outs: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Error of each request: (root mean square, maximum), in the power of two below each number.

    Rounding to a type costs equally much of it everywhere.
    """
    assert all(bool((x > 0).all()) for x in wanted)
    pairs = zip(outs, wanted, strict=True)
    shares = [(out.double() - want) / want.log2().floor().exp2() for out, want in pairs]
    return [(float(x.square().mean().sqrt()), float(x.abs().max())) for x in shares]


def check(both: Both, most: float) -> None:
    """Check that errors are at most `most`, and the last request's at most twice the first's."""
    found = errors(*both)
    assert max(largest for _, largest in found) <= most, found
    assert found[-1][0] <= max(2 * found[0][0], NOTHING), found
