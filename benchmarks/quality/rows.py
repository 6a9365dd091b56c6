"""The rows of the quality tables: CalibQuant and the preset part by part; every scheme by bits.

Windows are cut to `window` tokens where prompts are too short for the published ones; rows that end
in "as published" keep theirs.
"""

import inspect
from typing import Any

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.quant.schemes import SCHEMES

BITS = (4, 2, 1)
INGREDIENT_BITS = (2, 1)
CALIBRATED_BITS = (2, 1)
TAUS = (0, 1, 2, 3)
# Gains about the mean (K, V): measured before on other models, not tuned here.
GAINS = {1: (1.3, 1.4), 2: (1.1, 1.1)}


def with_gain(spec: CacheSpec, key_gain, value_gain) -> CacheSpec:
    """Scale levels about the mean, by numbers or by "fit" (per block, data-free)."""
    visual = spec.visual
    key, value = visual.key.replace(gain=key_gain), visual.value.replace(gain=value_gain)
    return spec.replace(visual=visual.replace(key=key, value=value))


def with_global_value(spec: CacheSpec) -> CacheSpec:
    """One range for all tokens and channels of V (CalibQuant Table 4's ablation)."""
    value = spec.visual.value.replace(along="span")
    return spec.replace(visual=spec.visual.replace(value=value))


def grid_specs(bits: int) -> dict[str, CacheSpec]:
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


def table_specs(bits: int, tau: tuple[int, int] | None) -> dict[str, CacheSpec]:
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
        "calibquant, no tau, global V of all heads": duotone.scheme(
            "calibquant", bits=bits, channels=False
        ).replace(tau=None),
        "lloyd": lloyd,
    }
    if bits in GAINS:
        rows["lloyd, gain {} / {}".format(*GAINS[bits])] = with_gain(lloyd, *GAINS[bits])
        rows["lloyd, fitted gain"] = with_gain(lloyd, "fit", "fit")
    for name in ("duotone", "duotone-whole"):
        rows[name] = duotone.scheme(name, bits=bits)
    if bits == 1:
        rows["calibquant, no tau, a range per image"] = rows["calibquant, no tau"].replace(
            ranges="run"
        )
        rows |= ablations(rows["duotone-whole"])
    return {f"{name} @{bits}": spec for name, spec in rows.items()}


def ablations(spec: CacheSpec) -> dict[str, CacheSpec]:
    """{label: spec}: `duotone-whole` @1 less one of its parts, at about its true bits."""
    visual = spec.visual

    def without(**fields: Any) -> CacheSpec:
        key, value = (tensor.replace(**fields) for tensor in (visual.key, visual.value))
        return spec.replace(visual=KVSpec(key, value))

    return {
        "duotone-whole, one width for all channels": without(classes=None),
        "duotone-whole, all tokens count alike": without(energy=0.0),
        "duotone-whole, V without gain": with_gain(spec, visual.key.gain, 1.0),
        "duotone-whole, a range per sequence": spec.replace(ranges="sequence"),
    }


def registered(window: int) -> dict[str, CacheSpec]:
    """{label: spec}: all of SCHEMES, at every width for those that have a choice."""
    rows = {}
    for name, entry in SCHEMES.items():
        takes_bits = "bits" in inspect.signature(entry.build).parameters
        for bits in BITS if takes_bits else (None,):
            label = name if bits is None else f"{name} @{bits}"
            knobs = {} if bits is None else {"bits": bits}
            rows[label] = cut(duotone.scheme(name, **knobs), window)
    return rows


def cut(spec: CacheSpec, window: int) -> CacheSpec:
    """`spec` with at most `window` recent tokens and a quarter of that as sinks."""
    return spec.replace(recent=min(spec.recent, window), sink=min(spec.sink, window // 4))


def further(window: int, depth: int) -> dict[str, CacheSpec]:
    """{label: spec}: the papers' other settings in a model of `depth` layers."""
    half = depth // 2
    pairs = {"kq": depth, "vq": half, "km": depth, "vm": half}
    rows = {
        "asymkv, half of K 2": duotone.scheme("asymkv", lk=half),
        "xquant, pairs of V": duotone.scheme("xquant", **pairs),
        "xquant, pairs of V, no eta": duotone.scheme("xquant", **pairs, eta1=0.0, eta2=0.0),
        "innerq @2, symmetric": duotone.scheme("innerq", bits=2, mapping="symmetric"),
    }
    rows = {label: cut(spec, window) for label, spec in rows.items()}
    for name in ("kivi", "kivi-sink", "innerq"):
        rows[f"{name} @2, window as published"] = duotone.scheme(name, bits=2)
    for name in ("kivi", "oscar-scaling"):
        rows[f"{name} @2, window drains"] = duotone.scheme(name, bits=2, released=True)
    own = duotone.scheme("duotone-stream", bits=2)
    rows["duotone-stream @2, own window"] = own
    for recent in (32, 48, 64, 128):
        rows[f"duotone-stream @2, window of {recent}"] = own.replace(recent=recent)
    return rows


def stream(key: TensorSpec, value: TensorSpec, **cache: Any) -> CacheSpec:
    """Everything in one stream."""
    return CacheSpec(visual="text", text=KVSpec(key, value), **cache)


def stream_ingredients(window: int) -> dict[str, CacheSpec]:
    """{label: spec}: two bits, from round-to-nearest per token to everything at once."""
    token, block = TensorSpec(2, "channels"), TensorSpec(2, group=32)
    kivi = stream(block, token, recent=window)
    windows = {"recent": window, "sink": window // 4}

    def both(**fields: Any) -> CacheSpec:
        return stream(block.replace(**fields), token.replace(**fields), **windows)

    return {
        "per token": stream(token, token),
        "per token, window": stream(token, token, recent=window),
        "K along tokens (KIVI's axes)": stream(block, token),
        "KIVI's axes, window": kivi,
        "KIVI's axes, window, sinks": kivi.replace(**windows),
        "the same, lloyd": both(levels="lloyd"),
        "the same, eta .045": both(eta=0.045),
        "the same, symmetric": both(mapping="symmetric"),
        "the same, hybrid": both(mapping="hybrid"),
        "the same, hadamard": both(transform="hadamard"),
        "the same, normalised keys": kivi.replace(**windows, key_norm=True),
        "inner axes (InnerQ's), window, sinks": stream(token, block, **windows),
        "inner axes, hybrid, normalised keys": stream(
            *(t.replace(mapping="hybrid") for t in (token, block)), **windows, key_norm=True
        ),
    }


def visual(key: TensorSpec, value: TensorSpec, **cache: Any) -> CacheSpec:
    """Visual spans packed whole, text in 16 bit."""
    return CacheSpec(visual=KVSpec(key, value), text="dense", **cache)


def visual_ingredients(bits: int) -> dict[str, CacheSpec]:
    """{label: spec}: from min/max per channel to the preset, one step or one idea at a time."""
    plain = TensorSpec(bits)
    fitted = plain.replace(levels="lloyd", gain="fit")
    eta = {2: 0.045, 1: 1 / 6}[bits]

    def both(tensor: TensorSpec, **fields: Any) -> CacheSpec:
        return visual(tensor.replace(**fields), tensor.replace(**fields))

    preset = duotone.scheme("duotone-whole", bits=bits)
    whole = preset.visual.key.replace(group=None)
    rows = {
        "span, min/max": both(plain),
        "span, min/max, tau 0,3": both(plain).replace(tau=(0, 3)),
        "span, min/max, eta": both(plain, eta=eta),
        "span, min/max, groups of 32": both(plain, group=32),
        "span, KIVI's axes": visual(
            plain.replace(group=32), plain.replace(group=32, along="channels")
        ),
        "span, inner axes": visual(
            plain.replace(group=32, along="channels"), plain.replace(group=32)
        ),
        "span, inner axes, hybrid": visual(
            plain.replace(group=32, along="channels", mapping="hybrid"),
            plain.replace(group=32, mapping="hybrid"),
        ),
        "span, symmetric": both(plain, mapping="symmetric"),
        "span, hadamard": both(plain, transform="hadamard"),
        "span, lloyd": both(plain, levels="lloyd"),
        "span, lloyd, hadamard": both(plain, levels="lloyd", transform="hadamard"),
        "span, lloyd, fitted gain": both(fitted),
        "span, lloyd, gain, energy": visual(
            fitted.replace(energy=1.0), fitted.replace(energy=1.5, gain=preset.visual.value.gain)
        ),
        "span, lloyd, gain, energy, unequal channels": visual(whole, preset.visual.value),
        "span, the same, K in groups of 64": visual(preset.visual.key, preset.visual.value),
    }
    return {f"{label} @{bits}": spec for label, spec in rows.items()}


def text_rows(window: int, depth: int) -> dict[str, CacheSpec]:
    """Rows for a model that takes text only: schemes with a policy for text."""
    rows = registered(window) | further(window, depth) | stream_ingredients(window)
    # Of duotone-mixed a text model sees duotone-stream.
    return {
        label: spec
        for label, spec in rows.items()
        if isinstance(spec.text, KVSpec) and spec.visual == "text"
    }


def picture_rows(window: int, depth: int) -> dict[str, CacheSpec]:
    """Rows for a multimodal model."""
    rows = registered(window) | further(window, depth)
    for bits in INGREDIENT_BITS:
        rows |= visual_ingredients(bits)
    return rows | stream_ingredients(window)
