"""Hadamard matrices of small orders m that are no power of two, row 0 all +1.

Paley's two constructions give orders from prime powers too: 28 is GF(27), 52 is GF(25).
Williamson's array gives the orders in `williamson_rows.json`. Further orders are doubled from both.

The first row matters. Where that row is all +1, channel 0 of the transform is the mean of the
input. A weight's mean is then in one column and can be split off
(`weights.equivalences.outlier_split`). QuaRot's and MQuant's tables of 52, 156 and 172 are not
normalised; there the split catches 0.6 to 2.4 %.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from itertools import product

import torch
from torch import Tensor

LARGEST_BASE = 256


@cache
def base_matrix(m: int) -> Tensor:
    """H [m, m] int8 of +-1 with H H^T = m I and row 0 all +1.

    Errors: ValueError where none is known here.
    """
    made = _construct(m)
    if made is None:
        raise ValueError(
            f"a Hadamard matrix of order {m} is not among those constructed here (1, 2, Paley I "
            f"and II, Williamson {sorted(4 * len(r[0]) for r in _williamson_rows())}, and doubled "
            "ones); pad the size or use blocks (HadamardPlan)."
        )
    # Flipping columns keeps H H^T.
    return (made * made[0]).to(torch.int8)


@cache
def has_base(m: int) -> bool:
    """True if `base_matrix(m)` exists."""
    return _construct(m) is not None


def _construct(m: int) -> Tensor | None:
    if m in (1, 2):
        return sylvester(m)
    if m < 4 or m % 4:
        return None
    for build in (_paley_one, _paley_two, _williamson):
        made = build(m)
        if made is not None:
            return made
    half = _construct(m // 2)
    return None if half is None else torch.kron(sylvester(2), half)


def sylvester(p: int) -> Tensor:
    """H_p [p, p] int64 by Sylvester's doubling; p a power of two."""
    if p < 1 or p & (p - 1):
        raise ValueError(f"Sylvester's matrices have a power of two as order; got {p}.")
    made = torch.ones(1, 1, dtype=torch.int64)
    step = torch.tensor([[1, 1], [1, -1]])
    while len(made) < p:
        made = torch.kron(step, made)
    return made


def _paley_one(m: int) -> Tensor | None:
    """H = I + S with the skew S = [[0, 1], [-1, Q]]; q = m - 1 = 3 mod 4 (Paley 1933)."""
    q = m - 1
    field = _prime_power(q)
    if field is None or q % 4 != 3:
        return None
    s = torch.zeros(m, m, dtype=torch.int64)
    s[0, 1:], s[1:, 0] = 1, -1
    s[1:, 1:] = _jacobsthal(*field)
    return s + torch.eye(m, dtype=torch.int64)


def _paley_two(m: int) -> Tensor | None:
    """H = C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]]; q = m/2 - 1 = 1 mod 4."""
    q = m // 2 - 1
    field = _prime_power(q)
    if field is None or q % 4 != 1:
        return None
    c = torch.zeros(q + 1, q + 1, dtype=torch.int64)
    c[0, 1:] = c[1:, 0] = 1
    c[1:, 1:] = _jacobsthal(*field)
    eye = torch.eye(q + 1, dtype=torch.int64)
    return torch.kron(c, sylvester(2)) + torch.kron(eye, torch.tensor([[1, -1], [-1, -1]]))


def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = p^k, p prime; None if there are none."""
    if q < 2:
        return None
    p = next((d for d in range(2, int(q**0.5) + 1) if q % d == 0), q)
    k, rest = 0, q
    while rest % p == 0:
        rest, k = rest // p, k + 1
    return (p, k) if rest == 1 else None


def _jacobsthal(p: int, k: int) -> Tensor:
    """Q[a, b] = chi(a - b) over GF(p^k), chi the quadratic character; [q, q] int64."""
    elements = list(product(range(p), repeat=k))
    modulus = _irreducible(p, k)
    chi = -torch.ones(p**k, dtype=torch.int64)
    places = torch.tensor([p**i for i in reversed(range(k))])
    squares = torch.tensor([_times(a, a, modulus, p) for a in elements])
    chi[squares @ places] = 1
    chi[0] = 0
    points = torch.tensor(elements)
    return chi[((points[:, None] - points) % p) @ places]


def _times(a: tuple[int, ...], b: tuple[int, ...], modulus: tuple[int, ...], p: int) -> tuple:
    """Product of two polynomials (lowest power first) modulo x^k + modulus and p."""
    k = len(a)
    full = [0] * (2 * k - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            full[i + j] += x * y
    for power in range(2 * k - 2, k - 1, -1):
        for j, c in enumerate(modulus):
            full[power - k + j] -= full[power] * c
    return tuple(c % p for c in full[:k])


def _irreducible(p: int, k: int) -> tuple[int, ...]:
    """Low coefficients of a monic irreducible polynomial of degree k over GF(p).

    A ring of p^k elements without zero divisors is the field; degrees here are at most 5.
    """
    if k == 1:
        return (0,)
    elements = list(product(range(p), repeat=k))
    monic_of_degree = {d: list(product(range(p), repeat=d)) for d in range(1, k // 2 + 1)}
    for low in elements:
        if not any(_divides(d, (*low, 1), p) for ds in monic_of_degree.values() for d in ds):
            return low
    raise AssertionError(f"GF({p}^{k}) exists, so an irreducible polynomial does")


def _divides(low: tuple[int, ...], polynomial: tuple[int, ...], p: int) -> bool:
    rest, d = list(polynomial), len(low)
    for top in range(len(rest) - 1, d - 1, -1):
        for j, c in enumerate(low):
            rest[top - d + j] -= rest[top] * c
    return all(c % p == 0 for c in rest[:d])


@cache
def _williamson_rows() -> list[list[str]]:
    """First rows of four symmetric circulants A, B, C, D with A^2 + B^2 + C^2 + D^2 = 4q I."""
    room = files("duotone.weights.equivalences")
    return json.loads((room / "williamson_rows.json").read_text())["rows"]


def _williamson(m: int) -> Tensor | None:
    """Williamson's array of four symmetric circulants of order m / 4 (Williamson 1944)."""
    rows = next((rows for rows in _williamson_rows() if 4 * len(rows[0]) == m), None)
    if rows is None:
        return None
    a, b, c, d = (_circulant([1 if sign == "+" else -1 for sign in row]) for row in rows)
    grid = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(row, dim=1) for row in grid])


def _circulant(row: list[int]) -> Tensor:
    first = torch.tensor(row)
    return torch.stack([first.roll(i) for i in range(len(row))])
