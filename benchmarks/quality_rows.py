"""The rows of the quality table: CalibQuant as written and as released, our levels, the preset."""

from typing import Any

import duotone

CALIBRATED_BITS = (2, 1)
TAUS = (0, 1, 2, 3)
RELEASED_TAU = {1: (0, 3), 2: (0, 3)}
# Gains about the mean (K, V): measured before on other models, not tuned here.
GAINS = {1: (1.3, 1.4), 2: (1.1, 1.1)}


def with_gain(spec: duotone.CacheSpec, key_gain, value_gain) -> duotone.CacheSpec:
    """The same levels scaled about the mean, by numbers or by "fit" (per block, data-free)."""
    visual = spec.visual
    key, value = visual.key.replace(gain=key_gain), visual.value.replace(gain=value_gain)
    return spec.replace(visual=visual.replace(key=key, value=value))


def with_global_value(spec: duotone.CacheSpec) -> duotone.CacheSpec:
    """One range for all tokens and channels of V (CalibQuant Table 4's ablation)."""
    value = spec.visual.value.replace(along="span")
    return spec.replace(visual=spec.visual.replace(value=value))


def grid_specs(bits: int) -> dict[str, duotone.CacheSpec]:
    """{label: spec} of the 4 x 4 grid of tau, of the paper's ranges and of the released ones."""
    bases = {"calibquant-paper": duotone.scheme("calibquant-paper", bits=bits)}
    released = duotone.scheme("calibquant", bits=bits)
    if released.visual != bases["calibquant-paper"].visual:
        bases["calibquant"] = released
    return {
        f"{name}-{bits} tau {a},{b}": spec.replace(tau=(a, b))
        for name, spec in bases.items()
        for a in TAUS
        for b in TAUS
    }


def table_specs(bits: int, tau: tuple[int, int] | None) -> dict[str, duotone.CacheSpec]:
    """{label: spec} of the table's rows at `bits`; `tau` is the grid's choice for the paper's."""
    released = duotone.scheme("calibquant", bits=bits)
    paper = duotone.scheme("calibquant-paper", bits=bits).replace(tau=tau)
    lloyd = duotone.scheme("lloyd", bits=bits)
    rows = {
        "calibquant": released,
        "calibquant, no tau": released.replace(tau=None),
        "calibquant-paper": paper,
        "calibquant-paper, no tau": paper.replace(tau=None),
        "calibquant-paper, global V": with_global_value(paper),
        "lloyd": lloyd,
    }
    if bits in GAINS:
        rows["lloyd, gain {} / {}".format(*GAINS[bits])] = with_gain(lloyd, *GAINS[bits])
        rows["lloyd, fitted gain"] = with_gain(lloyd, "fit", "fit")
    rows["duotone"] = duotone.scheme("duotone", bits=bits)
    if bits == 1:
        rows["calibquant, no tau, a range per image"] = rows["calibquant, no tau"].replace(
            ranges="run"
        )
        rows |= ablations(rows["duotone"])
    return {f"{name} @{bits}": spec for name, spec in rows.items()}


def ablations(spec: duotone.CacheSpec) -> dict[str, duotone.CacheSpec]:
    """{label: spec}: the 1-bit preset less one of its parts, at about its true bits."""
    visual = spec.visual

    def without(**fields: Any) -> duotone.CacheSpec:
        key, value = (tensor.replace(**fields) for tensor in (visual.key, visual.value))
        return spec.replace(visual=duotone.KVSpec(key, value))

    return {
        "duotone, one width for all channels": without(classes=None),
        "duotone, all tokens count alike": without(energy=0.0),
        "duotone, V without gain": with_gain(spec, visual.key.gain, 1.0),
        "duotone, a range per sequence": spec.replace(ranges="sequence"),
    }
