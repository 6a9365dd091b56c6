"""Pairs of K and V specs that group records hold, by name."""

from duotone.quant import TensorSpec

KIVI = (TensorSpec(2, "tokens", 32), TensorSpec(2, "channels", 32))
INNER = (TensorSpec(2, "channels", 32), TensorSpec(2, "tokens", 32))
CASES = {
    "kivi": KIVI,
    "kivi1": tuple(spec.replace(bits=1) for spec in KIVI),
    "kivi4": tuple(spec.replace(bits=4) for spec in KIVI),
    "inner": INNER,
    "inner-hybrid": tuple(spec.replace(mapping="hybrid") for spec in INNER),
    "inner-symmetric": tuple(spec.replace(mapping="symmetric") for spec in INNER),
    "hybrid1": tuple(spec.replace(bits=1, mapping="hybrid") for spec in INNER),
    "hybrid4": tuple(spec.replace(bits=4, mapping="hybrid") for spec in INNER),
    "symmetric1": tuple(spec.replace(bits=1, mapping="symmetric") for spec in INNER),
    "symmetric4": tuple(spec.replace(bits=4, mapping="symmetric") for spec in INNER),
    "inner1": tuple(spec.replace(bits=1) for spec in INNER),
    "inner4": tuple(spec.replace(bits=4) for spec in INNER),
    "k-kivi-v-inner": (KIVI[0], INNER[1]),
    "wide-groups": (TensorSpec(2, "tokens", 64), TensorSpec(2, "channels", 64)),
    "mixed-bits": (TensorSpec(4, "channels", 32, "hybrid"), TensorSpec(1, "tokens", 64)),
}
