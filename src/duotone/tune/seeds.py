"""Seeds of a search: known good points and the published configurations."""

from __future__ import annotations

from collections.abc import Callable

import duotone
from duotone import CacheSpec
from duotone.defaults import CONVERSATIONS, TEXT
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.spec_checks import check_spec
from duotone.quant.schemes import named

from .space import Point, Space, merged, prefixed

BOTH = ("key", "value")


def preset(**changes: object) -> Point:
    """The 1-bit preset of spans in one part, `duotone-whole` @1, as a point."""
    key = prefixed("key", top=4, first=2, second=4, group=64, fit_gain=True, energy=1.0)
    value = prefixed("value", top=2, first=2, second=12, gain=1.25, energy=1.5)
    return merged({"ranges": "run"}, prefixed(BOTH, levels="lloyd"), key, value, changes)


def two_bits(**changes: object) -> Point:
    """Unequal channels and energies at about two bits."""
    value = prefixed("value", top=4, first=2, second=12, gain=1.1)
    return merged(preset(), prefixed("key", first=6, second=4), value, changes)


def even_two_bits(**changes: object) -> Point:
    """Result of a first search at two bits: levels a little inside K's ends, V of 2 and 1 bits."""
    key = prefixed("key", levels="uniform", shrink=0.9, fit_gain=False, first=3, second=7)
    value = prefixed("value", top=2, first=6, second=10, group=64)
    return merged(preset(), key, value, changes)


def parts(**changes: object) -> Point:
    """A background of few bits under a foreground of many, at about one bit."""
    key = prefixed("key", top=4, first=6, second=4, fit_gain=True, energy=1.0)
    value = prefixed("value", top=4, first=2, second=12, energy=1.5)
    back = prefixed(("key_back", "value_back"), top=2, first=2, second=4)
    common = {"ranges": "run", "foreground": 3 / 8}
    return merged(common, prefixed(BOTH, levels="lloyd"), key, value, back, changes)


def parts_two_bits(**changes: object) -> Point:
    """A background of few bits under a foreground of many, at about two bits."""
    key = prefixed("key", first=12, second=4)
    value = prefixed("value", first=8, second=8)
    back = merged(
        prefixed("key_back", top=4, first=2, second=6),
        prefixed("value_back", top=2, first=8, second=0),
    )
    return merged(parts(), key, value, back, changes)


def plain(bits: int, **changes: object) -> Point:
    """Channel-wise levels at one width."""
    return merged(prefixed(BOTH, top=bits), changes)


def kivi(bits: int, recent: int = 128, **changes: object) -> Point:
    """KIVI's axes and groups in one stream."""
    return merged(
        plain(bits, policy="stream", recent=recent),
        prefixed(BOTH, group=32),
        {"value_along": "channels"},
        changes,
    )


def seed_points(space: Space) -> list[Point]:
    """First trials: the preset and its neighbours at other widths, then the papers' schemes.

    On a model without pictures: the streams alone.
    """
    lloyd, half = prefixed(BOTH, levels="lloyd", energy=1.0), space.layers // 2
    value_even = prefixed("value", first=0, second=16, gain=1.3)
    points = [
        preset(),
        parts(),
        merged(parts(), prefixed(BOTH, param_dtype="float8")),
        preset(value_gain=1.2, key_group=128),
        merged(preset(), value_even),
        preset(key_first=1, key_second=5),
        preset(key_first=3, key_second=4),
        preset(value_transform="hadamard"),
        preset(key_top=2, key_first=3, value_second=13, value_transform="hadamard"),
        preset(key_top=2, key_first=8, key_second=0, value_first=6, value_second=10),
        even_two_bits(),
        even_two_bits(key_first=1, value_group=128),
        even_two_bits(value_top=4, value_levels="uniform", value_gain=1.0, value_group=256),
        parts_two_bits(),
        two_bits(),
        two_bits(value_transform="hadamard"),
        two_bits(key_first=4, key_second=8),
        merged(two_bits(), prefixed("key", first=8, second=8), prefixed("value", first=6)),
        merged(plain(4, ranges="run"), lloyd),
        plain(4),
        plain(4, value_transform="hadamard"),
        merged(plain(4), prefixed(BOTH, transform="hadamard")),
        plain(4, value_transform="hadamard", value_energy=1.0),
        plain(4, key_first=13, value_transform="hadamard", key_group=64),
        plain(4, ranges="run", key_group=64),
        merged(plain(8, ranges="run"), prefixed(BOTH, first=4, second=12, energy=1.0)),
        plain(8, ranges="run"),
        merged(plain(1), {"key_shrink": 0.5, "value_shrink": 0.3}),
        plain(2),
        kivi(2),
        kivi(2, recent=32),
        kivi(2, recent=0, flush=128),
        merged(kivi(2), prefixed(BOTH, prefix=half, eta=27, eta_after=100)),
        kivi(4, recent=0),
        merged(kivi(2, recent=32, sink=8), prefixed(BOTH, levels="lloyd")),
    ]
    known = set(space.defaults)
    kept = [{k: v for k, v in p.items() if k in known} for p in points]
    usable = [p for p in kept if "policy" in known or p.get("value_along") == "channels"]
    return [space.point(**p) for p in usable if space.holds(p)]


def _half(layers: int) -> int:
    return layers // 2 // 2 * 2


# Label -> (layers of the model -> spec). XQuant's settings are made for 32 layers. Here V has pairs
# from half the depth on and K has two bits, like XQuant's "vm = 16" row.
PUBLISHED: dict[str, Callable[[int], CacheSpec]] = {
    **{
        f"{name} @{bits}": lambda _, name=name, bits=bits: duotone.scheme(name, bits=bits)
        for name, widths in (
            ("calibquant", (1, 2)),
            ("calibquant-paper", (1, 2)),
            ("minmax", (1, 2, 4)),
            ("kivi", (1, 2, 4)),
            ("kivi-sink", (2,)),
            ("innerq", (2,)),
        )
        for bits in widths
    },
    "asymkv, K 2, V 1": lambda _: duotone.scheme("asymkv"),
    "asymkv, half of K 2": lambda layers: duotone.scheme("asymkv", lk=_half(layers)),
    "xquant, pairs of V": lambda layers: duotone.scheme(
        "xquant", kq=layers, vq=0, km=layers, vm=_half(layers)
    ),
    "xquant, pairs everywhere": lambda layers: duotone.scheme("xquant"),
}
# Ours, for orientation: shown, but not counted as published.
OURS: dict[str, Callable[[int], CacheSpec]] = {
    f"{name} @{bits}": lambda _, name=name, bits=bits: duotone.scheme(name, bits=bits)
    for name, widths in (
        ("duotone", (1, 2)),
        ("duotone-whole", (1, 2)),
        ("duotone-stream", (2,)),
    )
    for bits in widths
} | {
    # What `enable` takes where no spec is given.
    name.replace("@", " @"): lambda _, name=name: named(name)
    for name in (CONVERSATIONS, TEXT)
}


def known_specs(facts: ModelFacts, *, has_pictures: bool) -> dict[str, CacheSpec]:
    """{label: spec} of `PUBLISHED` and `OURS` that fit the model and pack something of samples."""
    made = {label: make(facts.layers) for label, make in (PUBLISHED | OURS).items()}
    return {
        label: spec
        for label, spec in made.items()
        if (has_pictures or spec.visual == "text") and fits(facts, spec)
    }


def fits(facts: ModelFacts, spec: CacheSpec) -> bool:
    """True if the model takes the spec."""
    try:
        check_spec(facts, spec)
    except ValueError:
        return False
    return True
