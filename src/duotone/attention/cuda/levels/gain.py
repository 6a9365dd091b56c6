"""Launches that fit a gain per block (`quant.ranges.fitted_gain`), after those of `levels.search`.

Blocks of few tokens take one launch, with Gram matrices of tokens in shared memory. Longer blocks
take four: the covariance of channels in parts, its sum, products with the sum, and the last step.
Where covariances would take much memory, blocks take turns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from duotone.attention.cuda.shared.geometry import shared_bytes
from duotone.attention.cuda.shared.runtime import Launch

SHORT, LONG = "levels/gain_short.cu", "levels/gain_long.cu"
# Tokens that a block of threads holds in shared memory; floats between channels there.
SHORT_TOKENS, TOKENS, GAP = (64, 128), 64, 4
# Most bytes of a block of threads in addition to the tokens.
BESIDE_BYTES = 12 << 10
# Most bytes of all covariances; blocks of threads per SM that find them, and that use them.
SPREAD_BYTES, SPREADING, USING = 32 << 20, 2, 8
# Channels of a tile of a covariance.
SIDE = 64
# Called with (source, kernel, its macros, grid); arguments may change from one launch to the next.
Run = Callable[[str, str, dict[str, int], Launch], None]


def launch_gains(
    given: ctypes.Structure,
    run: Run,
    rows: int,
    longest: int,
    channels: int,
    threads: int,
    device: torch.device,
    sms: int,
) -> None:
    """Fit the gains of all rows. given: `Arguments` of `levels.search`."""
    most = shared_bytes(device) - BESIDE_BYTES
    fits = (n for n in SHORT_TOKENS if longest <= n and held_bytes(n, channels) <= most)
    if room := next(fits, None):
        at = Launch(rows, threads, held_bytes(room, channels))
        run(SHORT, "level_gain_short", {"ROOM": room}, at)
        return
    side = spread_channels(channels)
    pairs = side // SIDE * (side // SIDE + 1) // 2
    given.gain_parts = _parts(longest, rows, USING * sms)
    given.spread_parts = _parts(longest, rows * pairs, SPREADING * sms)
    together = min(rows, max(1, SPREAD_BYTES // (4 * side * side * given.spread_parts)))
    sizes = (together * given.spread_parts * side * side, rows * given.gain_parts * 2)
    spread, products = torch.empty(sum(sizes), device=device).split(sizes)
    given.spread, given.products = spread.data_ptr(), products.data_ptr()
    for first in range(0, rows, together):
        given.first_row, count = first, min(together, rows - first)
        blocks = {
            "level_spread": (count * pairs * given.spread_parts, 0),
            "level_spread_sum": (count * side * side // threads, 0),
            "level_gain_parts": (count * given.gain_parts, held_bytes(TOKENS, channels)),
        }
        for name, (grid, nbytes) in blocks.items():
            run(LONG, name, long_macros(channels), Launch(grid, threads, nbytes))
    run(LONG, "level_gain_last", long_macros(channels), Launch(rows, threads, 0))


def room_for_gains(channels: int, device: torch.device) -> bool:
    """True where shared memory holds a tile of so many channels, and its decoded codes."""
    return held_bytes(TOKENS, channels) <= shared_bytes(device) - BESIDE_BYTES


def spread_channels(channels: int) -> int:
    """Channels of a covariance, filled up."""
    return -(-channels // SIDE) * SIDE


def long_macros(channels: int) -> dict[str, int]:
    """Macros of levels/gain_long.cu in addition to those of all sources."""
    return {"ROOM": TOKENS, "SPREAD_CHANNELS": spread_channels(channels)}


def held_bytes(tokens: int, channels: int) -> int:
    """Shared memory of elements and of their decoded codes, laid out as in levels/gain.cuh."""
    return 2 * 4 * channels * (tokens + GAP)


def _parts(longest: int, blocks: int, wanted: int) -> int:
    """Number of parts of a block of tokens that fill the device, each of 64 tokens at least."""
    return max(1, min(-(-wanted // blocks), -(-longest // TOKENS)))
