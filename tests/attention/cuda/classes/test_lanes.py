"""One tile through the lanes of `class_decode.cu`, in numpy: no index of the kernel is untested."""

import numpy as np
import pytest
import torch

import duotone
from duotone.attention.cuda.classes.layout import to_class_records
from duotone.cache import BlockTable, pack_tensor
from duotone.quant import TensorSpec

import class_lanes as lanes
from cases import CALIBRATED, CLASSES_VALUE, PRESET_KEY, UNITS

PRESETS = {bits: duotone.scheme("duotone", bits=bits).visual for bits in (1, 2)}
SPECS = {
    "one": (PRESETS[1].key, PRESETS[1].value),
    "two": (PRESETS[2].key, PRESETS[2].value),
    "three": (PRESET_KEY, CLASSES_VALUE),
    "calibrated": CALIBRATED,
    "units": UNITS,
    "plain V": (UNITS[0], TensorSpec(2)),
}


@pytest.mark.parametrize("tokens", [1, 63, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", SPECS)
def test_a_tile_gives_softmax_times_v(name: str, head_dim: int, tokens: int) -> None:
    torch.manual_seed(0)
    blocks = BlockTable(torch.tensor([[0, tokens]]))
    x = torch.randn(2, 1, 1, tokens, head_dim) * torch.rand(head_dim) * 2
    x = x + 3 * torch.randn(head_dim)
    key, value = (pack_tensor(t, spec, blocks) for t, spec in zip(x, SPECS[name], strict=True))
    records = to_class_records(key, value)
    raw = bytes(records.data[0, 0].flatten()[: sum(records.format.parts)].tolist())
    query = torch.randn(4, head_dim).double()
    expected = scores = query @ key.dequantize()[0, 0].double().T / head_dim**0.5
    scores_of = tile_scores if records.format.key_in_tiles else span_scores
    got = scores_of(raw, records, query.numpy())[:tokens].T / head_dim**0.5
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4 * float(query.norm(dim=1).max()))

    weights = torch.softmax(scores, -1)
    expected = weights @ value.dequantize()[0, 0].double()
    np.testing.assert_allclose(
        tile_output(raw, records, scores.numpy(), head_dim), expected, rtol=0, atol=2e-4
    )


def tile_scores(raw: bytes, records, query: np.ndarray) -> np.ndarray:
    """[64 keys, 4 heads] without sm_scale."""
    form = records.format
    side, channels = lanes.Side(form.key), form.channels
    full = np.zeros((4, channels))
    full[:, : query.shape[1]] = query
    top = np.abs(query * records.key_top[0, 0, 0].double().numpy()).max(1).clip(1e-20)
    table = (full * (lanes.Q_TOP / top)[:, None]).T
    digits = lanes.fold(raw, form, table, side)
    f = lanes.scores(raw, form, digits, side) * (top / lanes.Q_TOP)[lanes.T]
    largest = np.abs(query).max(1)
    plain = full * (lanes.PLAIN_TOP / largest)[:, None]
    offset = lanes.zero_scores(raw, form, plain) * (largest / lanes.PLAIN_TOP)[lanes.T]
    return by_key(f + offset)


def span_scores(raw: bytes, records, query: np.ndarray) -> np.ndarray:
    """The same where K's parameters are the span's."""
    form = records.format
    side, place = lanes.Side(form.key), form.key.place_of_rank.numpy()
    scale, zero, order = (
        t[0, 0, 0].double().numpy()
        for t in (records.key_scale, records.key_zero, records.key_order)
    )
    order = order.astype(int)
    folded = np.zeros((4, form.key.places))
    folded[:, place] = query[:, order[: form.key.channels]] * scale
    top = np.abs(folded).max(1).clip(1e-20)
    digits = lanes.span_digits(folded * (lanes.Q_TOP / top)[:, None], side)
    offset = query[:, order] @ zero
    f = lanes.scores(raw, form, digits, side) * (top / lanes.Q_TOP)[lanes.T]
    return by_key(f + offset[lanes.T])


def by_key(f: np.ndarray) -> np.ndarray:
    """[64 keys, 4 heads] from [8, lanes]."""
    out = np.zeros((64, 4))
    for x in range(8):
        out[16 * (x // 2) + 8 * (x % 2) + lanes.G, lanes.T] = f[x]
    return out


def tile_output(raw: bytes, records, scores: np.ndarray, head_dim: int) -> np.ndarray:
    """[4 heads, channels], from scores of the tokens."""
    form = records.format
    padded = np.full((4, 64), -np.inf)
    padded[:, : scores.shape[1]] = scores
    p = np.rint(2 ** ((padded - scores.max(1, keepdims=True)) / np.log(2) + lanes.P_TOP))
    weights = np.stack(
        [p[lanes.T, 16 * (x // 2) + 8 * (x % 2) + lanes.G] for x in range(8)]
    ).astype(np.int64)
    sums, total = lanes.value_sums(raw, form, weights)
    order = records.value_order[0, 0, 0].long().numpy()
    scale, zero = (t[0, 0, 0].double().numpy() for t in (records.value_scale, records.value_zero))
    out = np.zeros((4, head_dim))
    coded = form.value.channels
    out[:, order] = total[:, None] * zero
    out[:, order[:coded]] += sums[:, form.value.place_of_rank.numpy()] * scale
    return out / total[:, None]
