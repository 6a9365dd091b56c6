import numpy as np
import pytest
import torch
from group_specs import CASES, INNER

from duotone.attention.cuda.groups.format import TILE, GroupFormat, Operand, operand_of
from duotone.attention.cuda.groups.layout import MAX_SCALE, group_order, to_group_records
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable, PackedTensor, pack_tensor
from duotone.cache.pair import PackedPair
from duotone.quant import TensorSpec

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def lane_words(data: bytes, count: int) -> np.ndarray:
    """`load_words`: [words, lanes]."""
    unit = 4 if count % 4 == 0 else 1 if count % 2 else 2
    words = np.frombuffer(data, "<u4", 32 * count).reshape(count // unit, 32, unit)
    return words.transpose(0, 2, 1).reshape(count, 32).astype(np.uint64)


def shared(data: bytes, address: np.ndarray, count: int) -> np.ndarray:
    """Vector loads of `count` words, [count, lanes]; they are aligned."""
    assert (address % (4 * count) == 0).all()
    words = np.frombuffer(data, "<u4")
    return np.stack([words[address // 4 + i] for i in range(count)]).astype(np.uint64)


def right(x: np.ndarray, bits: int | np.ndarray) -> np.ndarray:
    """Rotated."""
    bits = np.asarray(bits, np.uint64)
    return (x >> bits | x << (np.uint64(32) - bits)) & np.uint64(0xFFFFFFFF)


def chosen(x: np.ndarray, *sources: int) -> np.ndarray:
    """`prmt`, lowest byte first: bytes of x, and 8 + n for the sign of byte n."""
    out = np.zeros_like(x)
    for i, n in enumerate(sources):
        byte = x >> np.uint64(8 * (n % 8)) & np.uint64(0xFF)
        out |= ((byte >> np.uint64(7)) * np.uint64(255) if n > 7 else byte) << np.uint64(8 * i)
    return out


def halves(x: np.ndarray) -> np.ndarray:
    """fp16 numbers of registers, [.., 2]."""
    return x.astype("<u4")[..., None].view("<f2").astype(np.float64)


def place(q: int, bits: int) -> int:
    return 4 * (q % 2) if bits == 4 else 2 * q


def merged(mask: int, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x & np.uint64(mask) | y & np.uint64(~mask & 0xFFFFFFFF)


def plain_number(words, bits: int, run: int, i: int, q: int) -> np.ndarray:
    """One register of `plain_numbers`."""
    if bits == 4:
        word = words[2 * run + i] >> np.uint64(q // 2 * 8)
    else:
        word = words[run // (3 - bits)] >> np.uint64(i * 8 + (run % 2 if bits == 1 else 0))
    return word & np.uint64(((1 << bits) - 1) * 0x10001 << place(q, bits))


def signed_number(words, low, bits: int, run: int, i: int, q: int) -> np.ndarray:
    """One register of `signed_numbers`."""
    if bits == 4:
        word = right(words[2 * run + i], 8 * (q // 2))
        below = low >> np.uint64(i * 8 + q // 2 * 2)
        both = merged(0x01E001E0 if q % 2 else 0x001E001E, word, below)
    elif bits == 2:
        both = merged((0x66666666, 0x99999999)[q % 2], words[run], low)
    else:
        both = merged(0xAAAAAAAA, right(words[run // 2], run % 2), low)
    both = both if bits == 4 else right(both, 8 * i)
    return both & np.uint64(((2 << bits) - 1) * 0x10001 << place(q, bits))


def numbers(words, low, form: Operand, run: int, i: int, q: int) -> np.ndarray:
    """Numbers that registers of A stand for, [lanes, side]."""
    register = (
        signed_number(words, low, form.bits, run, i, q)
        if form.signs
        else plain_number(words, form.bits, run, i, q)
    )
    return halves(register) * 2.0 ** (24 - form.signs - place(q, form.bits))


def group_pair(params: bytes, form: Operand, n: int) -> tuple[np.ndarray, ...]:
    """`GroupPair`: scales [lanes, row half], starts, lowest bits of group n."""
    base = n // 2 * (192 if form.signs else 128)
    first = shared(params, base + G * 16, 4)
    scale, zero = first[n % 2], first[2 + n % 2]
    if not form.signs:
        return halves(scale), halves(zero), None
    low = shared(params, base + np.where(T < 2, G * 16 + 8, 128 + G * 8), 2)[n % 2]
    low = chosen((low & chosen(scale, 9, 9, 11, 11)) >> (T % 2).astype(np.uint64), 0, 2, 1, 3)
    middle = halves(scale) * -(2.0 ** (form.bits - 1))
    flags = (chosen(scale, 9, 9, 11, 11)[:, None] >> np.array([0, 16], np.uint64)) & np.uint64(1)
    start = np.where(flags > 0, middle, halves(zero))
    return halves(scale), start, low


def along_k(data: bytes, params: bytes, form: Operand, rows: int, k: int) -> torch.Tensor:
    """Factors of the lanes, in the places of operand A of `mma.m16n8k16`."""
    words = lane_words(data, rows * k * form.bits // 1024)
    groups = -(-k // form.group)
    out = np.zeros((rows, k))
    for run in range(rows * k // 512):
        tile, at = run // (k // 32), run % (k // 32)
        scale, start, low = group_pair(params, form, tile * groups + 32 * at // form.group)
        for i in range(2):
            for q in range(4):
                x = numbers(words, low, form, run, i, q) * scale[:, i : i + 1] + start[:, i : i + 1]
                for side in range(2):
                    out[16 * tile + 8 * i + G, 32 * at + 8 * q + 2 * T + side] = x[:, side]
    return torch.from_numpy(out).float()


def along_rows(data: bytes, params: bytes, form: Operand, rows: int, k: int) -> torch.Tensor:
    """Factors of the lanes with a scale per run of rows."""
    words, out = lane_words(data, rows * k * form.bits // 1024), np.zeros((rows, k))
    wide = bool(params[3] & 0x80)
    for run in range(rows * k // 512):
        tile, at = run // (k // 32), run % (k // 32)
        for i in range(2):
            for q in range(4):
                chunk = 2 * at + q // 2
                address = ((16 * tile // form.group * (k // 16) + chunk) * 4 + T) * 16
                step, zero = shared(params, address, 4)[[q % 2, 2 + q % 2]]
                assert ((step & np.uint64(0x80008000)) == (0x80008000 if wide else 0)).all()
                code = halves(raw(words, form.bits, run, i, q))
                if wide:
                    code *= 2.0 ** (6 + form.bits + (0 if q % 2 or form.bits == 4 else 2))
                    step = step & np.uint64(0x7FFF7FFF)
                x = (code * halves(step) + halves(zero) * 2.0**-8) * 2.0**8
                for side in range(2):
                    out[16 * tile + 8 * i + G, 32 * at + 8 * q + 2 * T + side] = x[:, side]
    return torch.from_numpy(out).float()


def raw(words, bits: int, run: int, i: int, q: int) -> np.ndarray:
    """Two codes at the top of two mantissas, or two bits lower."""
    first, lower = 10 - bits, 0 if bits == 4 else 2
    word = words[2 * run + i if bits == 4 else run // (3 - bits)]
    top_q = q | 1 if lower else q
    bit = 4 * top_q if bits == 4 else 8 * i + 2 * top_q + (run % 2 if bits == 1 else 0)
    moved = word >> np.uint64(bit - first) if bit > first else word << np.uint64(first - bit)
    mask = ((1 << bits) - 1) * 0x10001 << first
    return moved & np.uint64(mask if q % 2 else mask >> lower)


def decode(codes: bytes, params: bytes, form: Operand, rows: int, k: int) -> torch.Tensor:
    """A tile's operand as the kernel's lanes read it."""
    return (along_k if form.along_k else along_rows)(codes, params, form, rows, k)


# What channels and tokens are multiplied by: scales of less than 64, about it, and of thousands.
SWINGS = [1.0, 40.0, 1500.0]


@pytest.mark.parametrize("swing", SWINGS)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", CASES)
def test_a_tile_decodes_to_what_was_packed(name: str, head_dim: int, swing: float) -> None:
    torch.manual_seed(0)
    if name == "wide-groups" and head_dim == 96:
        pytest.skip("96 is no multiple of 64")
    tokens = 96 if "wide" not in name and "mixed" not in name else 128
    blocks = BlockTable(torch.tensor([[0, tokens]]))
    x = [torch.randn(1, 1, tokens, head_dim) + torch.randn(head_dim) for _ in range(2)]
    for t in x:  # but in the last tile
        t[..., ::32, 3] *= swing
        t[:, :, 7:70, ::11] *= swing
    key, value = (pack_tensor(t, spec, blocks) for t, spec in zip(x, CASES[name], strict=True))
    form = GroupFormat(
        head_dim,
        operand_of(CASES[name][0], head_dim, "key"),
        operand_of(CASES[name][1], head_dim, "value"),
    )
    records = to_group_records(key, value, form)
    assert records.shape == (1, 1, -(-tokens // form.tokens), form.nbytes)
    expected = key.dequantize()[0, 0], value.dequantize()[0, 0]
    for tile in range(tokens // TILE):
        data = records[0, 0].flatten()[tile * form.tile_bytes :][: form.tile_bytes]
        raw = bytes(data.tolist())
        part = slice(tile * TILE, (tile + 1) * TILE)
        k_codes, v_codes = (TILE * head_dim * o.bits // 8 for o in (form.key, form.value))
        k_params = form.key.groups(TILE, head_dim) * (6 if form.key.signs else 4)
        params = raw[k_codes + v_codes :]
        keys = decode(raw[:k_codes], params, form.key, TILE, head_dim)
        values = decode(raw[k_codes:], params[k_params:], form.value, head_dim, TILE)
        torch.testing.assert_close(keys, expected[0][part], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values.T, expected[1][part], rtol=1e-5, atol=1e-5)
        for x, operand, at in ((key, form.key, 0), (value, form.value, k_params)):
            if not operand.along_k:
                assert bool(params[at + 3] & 0x80) == beyond(x, part)


def beyond(x: PackedTensor, tile: slice) -> bool:
    """A scale of the tile is too large for a step of the usual kind."""
    own = (
        tile
        if x.per_token
        else slice(tile.start // x.spec.group, (tile.stop - 1) // x.spec.group + 1)
    )
    return bool((x.scale[0, 0, own] >= MAX_SCALE).any())


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize(("rows", "k"), [(32, 64), (32, 96), (96, 32), (256, 32)])
def test_every_code_has_one_place(rows: int, k: int, bits: int) -> None:
    places = group_order(rows, k, bits, False)
    assert torch.equal(places.flatten().sort().values, torch.arange(rows * k))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TensorSpec(2, "tokens", 48), "groups of 32"),
        (TensorSpec(2, "tokens", 32, "symmetric"), "signs need"),
        (TensorSpec(2, "span", 32), "along one axis"),
    ],
    ids=str,
)
def test_what_the_kernel_lacks_has_a_reason(spec: TensorSpec, reason: str) -> None:
    with pytest.raises(RefusedError, match=reason):
        operand_of(spec, 64, "key")


@pytest.mark.parametrize(
    ("name", "largest"), [("kivi1", 6e4), ("kivi", 6e4), ("kivi4", 6e4), ("inner", 2e4)]
)
def test_large_scales_are_laid_out_as_far_as_they_fit(name: str, largest: float) -> None:
    table = BlockTable(torch.tensor([[0, 64]]))
    for size in (1.0, 1e3, largest):
        x = torch.zeros(1, 1, 64, 64).index_fill_(2, torch.arange(0, 64, 3), size)
        pair = PackedPair(*(pack_tensor(x, spec, table) for spec in CASES[name]))
        laid = pair.laid_out(GroupLayout())
        assert laid.records is not None
        both = laid.canonical()
        for ours, theirs in zip((both.key, both.value), (pair.key, pair.value), strict=True):
            assert torch.equal(ours.scale, theirs.scale)
            assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_scales_beyond_the_kernels_arithmetic_are_not_laid_out() -> None:
    table = BlockTable(torch.tensor([[0, 64]]))
    for size in (1.0, 1e4):
        x = torch.zeros(1, 1, 64, 64).index_fill_(2, torch.arange(0, 64, 3), 3 * size)
        both = (pack_tensor(x, spec, table) for spec in INNER)
        assert (GroupLayout()(*both) is None) == (size == 1e4)
