"""V that lags behind K: attention reads exact V of the newest tokens, as in KIVI's code."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duotone.attention import attend
from duotone.cache import LayerStore, Ledger, StaticPlaces, StaticStore
from duotone.cache.lag import Lagging
from duotone.quant import CacheSpec, KVSpec, TensorSpec, quantize

HEADS, D, LAG, FLUSH = 2, 8, 5, 4
KEY, VALUE = TensorSpec(2, group=4), TensorSpec(2, "channels", 4, lag=LAG)
SPEC = CacheSpec(visual="text", text=KVSpec(KEY, VALUE), flush=FLUSH, scale_keys="never")


class Both:
    """A cache of one layer, and lists of its K and V that follow the rule of the released code."""

    def __init__(self, lengths: list[int], spec: CacheSpec = SPEC) -> None:
        self.spec, batch = spec, len(lengths)
        self.ledger, self.store = Ledger(spec, batch, torch.device("cpu")), LayerStore(spec)
        self.draw = torch.Generator().manual_seed(0)
        self.key: list[Tensor] = [torch.zeros(HEADS, 0, D) for _ in lengths]
        self.value: list[Tensor] = [torch.zeros(HEADS, 0, D) for _ in lengths]
        self.packed = [0] * batch
        self.step(max(lengths), lengths)
        self.flush()

    def step(self, tokens: int, lengths: list[int]) -> None:
        """Left-padded new tokens; a window that is full leaves before a single one enters."""
        if tokens == 1:
            self.flush()
        k, v = torch.randn(2, len(lengths), HEADS, tokens, D, generator=self.draw)
        real = torch.arange(tokens) >= tokens - torch.tensor(lengths)[:, None]
        self.store.apply(self.ledger.plan(torch.zeros_like(real), real), k, v)
        for b, n in enumerate(lengths):
            self.key[b] = torch.cat([self.key[b], k[b, :, tokens - n :]], 1)
            self.value[b] = torch.cat([self.value[b], v[b, :, tokens - n :]], 1)

    def flush(self) -> None:
        self.packed = [k.shape[1] // FLUSH * FLUSH for k in self.key]

    def expected(self, b: int, query: Tensor) -> Tensor:
        """Loops over heads: codes of whole blocks of K, and of all V but the newest."""
        k, v, n = self.key[b], self.value[b], self.packed[b]
        old = min(max(0, v.shape[1] - LAG), n) if n else 0
        # Codes of float32, as the cache has them: float64 rounds a few parameters to other fp16.
        packed_k = quantize(k[:, :n], KEY).dequantize() if n else k[:, :0]
        packed_v = quantize(v[:, :old], VALUE).dequantize() if old else v[:, :0]
        k = torch.cat([packed_k, k[:, n:]], 1).double()
        v = torch.cat([packed_v, v[:, old:]], 1).double()
        weights = (k @ query[b, :, 0].double()[:, :, None]).squeeze(-1).softmax(-1)
        return (weights[:, None] @ v).squeeze(1)

    def check(self) -> None:
        query = torch.randn(len(self.key), HEADS, 1, D, generator=self.draw)
        found = attend(query, self.store.segments(self.ledger.state), sm_scale=1.0)
        for b in range(len(self.key)):
            assert torch.allclose(found[b, :, 0].double(), self.expected(b, query), atol=1e-5)


@given(lengths=st.lists(st.integers(1, 23), min_size=1, max_size=3))
def test_the_newest_values_are_exact_at_every_step(lengths: list[int]) -> None:
    both = Both(lengths)
    for _ in range(14):
        both.check()
        both.step(1, [1] * len(lengths))
    both.check()


def test_without_lag_values_leave_with_keys() -> None:
    both = Both([16])
    text = KVSpec(KEY, VALUE.replace(lag=0))
    plain = Both([16], SPEC.replace(text=text))
    query = torch.randn(1, HEADS, 1, D, generator=both.draw)
    outs = [attend(query, x.store.segments(x.ledger.state), sm_scale=1.0) for x in (both, plain)]
    assert not torch.allclose(*outs, atol=1e-2)
    assert plain.store.lag is None
    assert both.store.lag_bytes == HEADS * LAG * D * 4


def test_sinks_are_none_of_the_newest_tokens() -> None:
    both = Both([16], SPEC.replace(sink=3))
    packed, dense = both.store.segments(both.ledger.state)
    assert (packed.lengths.tolist(), dense.lengths.tolist()) == ([12], [4])
    # One token of the window counts, and no sink.
    assert packed.exact.used.tolist() == [LAG - 1]


def test_rows_and_cuts_keep_what_they_have() -> None:
    both = Both([16, 9])
    both.ledger.rows(torch.tensor([1, 0]))
    both.store.rows(torch.tensor([1, 0]))
    for name in ("key", "value", "packed"):
        setattr(both, name, getattr(both, name)[::-1])
    both.check()
    lag = both.store.lag
    values = torch.arange(12.0).view(2, 1, 6, 1)
    made = Lagging(values, torch.tensor([6, 3]))
    cut = made.cut(torch.tensor([20, 8]), torch.tensor([17, 2]))
    assert cut.lengths.tolist() == [3, 0]
    assert cut.values[0, 0, :, 0].tolist() == [0, 1, 2]
    decoded = torch.full((2, 1, 17, 1), -1.0)
    into = cut.newest(torch.tensor([2, 2])).into(decoded, torch.tensor([17, 2]))
    assert into[0, 0, 13:, 0].tolist() == [-1, -1, 1, 2]
    assert (into[1] == -1).all()
    assert lag.lengths.tolist() == [5, 5]


def test_a_crop_forgets_exact_values_of_tokens_that_go() -> None:
    both = Both([16])
    before = both.ledger.state
    both.ledger.crop(14)
    both.store.truncate(both.ledger.state, before)
    exact = both.store.segments(both.ledger.state)[0].exact
    assert exact.lengths.tolist() == [3]
    whole = both.store.segments(both.ledger.state)[0].states("value")
    assert torch.equal(whole[0, :, 11:14], both.value[0][:, 11:14])
    assert not torch.allclose(whole[0, :, 10], both.value[0][:, 10], atol=1e-3)


def test_fixed_buffers_refuse_it() -> None:
    both = Both([16])
    places, order = StaticPlaces.of(both.ledger.state, SPEC, 4)
    with pytest.raises(ValueError, match="no exact V"):
        StaticStore(both.store, places, order)


def test_only_values_of_text_may_lag() -> None:
    with pytest.raises(ValueError, match="lag must be 0"):
        KVSpec(TensorSpec(2, "channels", lag=3), TensorSpec(2))
    with pytest.raises(ValueError, match="only the V of text"):
        CacheSpec(visual=KVSpec(TensorSpec(2), VALUE))
    with pytest.raises(ValueError, match="lag must be an integer"):
        TensorSpec(2, lag=3)
