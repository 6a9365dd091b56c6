"""Builders of schemes of 2026, faithful to released code; `schemes` registers them.

Each quantizes all tokens, with the windows of its code. `on_visual_spans` has the same quantizers
on visual spans alone, for comparisons at equal bits.
"""

from __future__ import annotations

from duotone.quant.bases import KIND, bases
from duotone.quant.ranges import LLOYD_EDGE
from duotone.quant.rotation import HADAMARD
from duotone.quant.spec import CacheSpec, KVSpec, LayerRule, TensorSpec
from duotone.quant.spec_base import require


def _all_tokens(key: TensorSpec, value: TensorSpec, **cache: object) -> CacheSpec:
    return CacheSpec(visual="text", text=KVSpec(key, value), scale_keys="never", **cache)  # type: ignore[arg-type]


# OSCAR's code: outermost Lloyd-Max level, its factor, and the edge of a cell (`quant.ranges`).
LLOYD_GAIN = 1.16 * (2 * 1.5095585584640503 / 3) / LLOYD_EDGE


def oscar_rotation(bits: int = 2, file: str | None = None, lloyd: bool = False) -> CacheSpec:
    """Spec of OSCAR (arXiv 2605.17757): a range per token of rotated channels, clipped by rank.

    file: rotations of a model (`calibrate.oscar`); None: a Hadamard matrix, the code's data-free
    baseline. lloyd: steps by the deviation of a token, of 2 bits (`SGLANG_LLOYD_MAX`).
    """
    fields = {"ends": "deviations", "gain": LLOYD_GAIN} if lloyd else {}
    key = TensorSpec(bits, along="channels", clip=0.96, transform=HADAMARD, **fields)  # type: ignore[arg-type]
    spec = _all_tokens(key, key.replace(clip=0.92), sink=64, recent=256)
    return spec if file is None else _rotated(spec, file)


def _rotated(spec: CacheSpec, file: str) -> CacheSpec:
    """Spec with the rotations of a file, a rule per layer."""
    rules = []
    for layer in range(len(bases(file).key)):
        own = {
            name: getattr(spec.text, name).replace(transform=f"{KIND}:{file}#{layer}.{name}")
            for name in ("key", "value")
        }
        rules.append(LayerRule(layer, layer + 1, text=KVSpec(**own)))
    return spec.replace(layers=tuple(rules))


def oscar_scaling(bits: int = 2, released: bool = False) -> CacheSpec:
    """Spec of OScaR (arXiv 2605.19660): KIVI's groups after a rotation, tokens of K of norm 1.

    Zero-points are whole steps. released: the code's window, which drains and holds 0 to 127
    tokens; ours holds 128 to 159.
    """
    fields = {"group": 32, "grid": "zero", "ties": "even", "transform": HADAMARD}
    key = TensorSpec(bits, along="tokens", factors="norm", **fields)  # type: ignore[arg-type]
    value = TensorSpec(bits, along="channels", **fields)  # type: ignore[arg-type]
    window = {"flush": 128} if released else {"recent": 128}
    return _all_tokens(key, value, **window)


def kvarn(key_bits: int = 4, value_bits: int = 2) -> CacheSpec:
    """Spec of KVarN (arXiv 2606.03458): rotated tiles of 128 tokens with balanced deviations.

    The first tile stays in 16 bit, and so does the last one until it is whole.
    """
    fields = {"factors": "balanced", "ties": "even", "transform": HADAMARD}
    key = TensorSpec(key_bits, along="tokens", group=128, **fields)  # type: ignore[arg-type]
    value = TensorSpec(value_bits, along="channels", tile=128, **fields)  # type: ignore[arg-type]
    return _all_tokens(key, value, sink=128)


def turboquant(key_bits: int = 3, value_bits: int = 3) -> CacheSpec:
    """Spec of TurboQuant (arXiv 2504.19874) as vLLM has it: `turboquant_3bit_nc`, `4bit_nc`.

    Rotated keys have the levels of a Gaussian, scaled to their norm; values a range per token.
    vLLM leaves the first and the last two layers in 16 bit; here all layers are quantized.
    """
    gaussian = {"mapping": "symmetric", "codebook": "gaussian", "transform": HADAMARD}
    key = TensorSpec(key_bits, along="channels", **gaussian)  # type: ignore[arg-type]
    return _all_tokens(key, TensorSpec(value_bits, along="channels"))


def on_visual_spans(spec: CacheSpec) -> CacheSpec:
    """Spec with a stream's quantizers on visual spans, each packed whole; text stays in 16 bit."""
    ok = spec.visual == "text" and isinstance(spec.text, KVSpec)
    require(ok, "visual tokens must be part of a quantized stream", spec.visual, "E.g. kivi.")
    rules = tuple(
        rule.replace(visual=rule.text, text=None) for rule in spec.layers if rule.text is not None
    )
    return CacheSpec(visual=spec.text, layers=rules, scale_keys=spec.scale_keys)
