"""Measured schemes: the storage of K and V, as data, without their quality."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import duotone
from duotone.attention.cuda.spans.layout import WIDTHS
from duotone.bench.problems import Problem, random_dense, random_packed, random_query
from duotone.bench.shapes import Shape
from duotone.cache import PackedSegment, PackedTensor
from duotone.quant import KVSpec, TensorSpec

TAU = (0.0, 3.0)
# The head_dim that fixed classes of channels are defined for.
TRANSFORMED_HEAD_DIM = 128


@dataclass(frozen=True)
class BenchScheme:
    """One row's K and V.

    window: tokens that stay in 16 bit, in a second segment.
    shared: K and V read the codes of another layer with scales of their own.
    channels: coded channels of a transformed head; other channels have 0 bits and are not stored.
        The transform of q and of the output is not measured. None: all of head_dim.
    """

    name: str
    key: TensorSpec
    value: TensorSpec
    tau: tuple[float, float] | None = None
    window: int = 0
    key_norm: bool = False
    shared: bool = False
    channels: int | None = None

    def reason(self, shape: Shape) -> str | None:
        """Reason why this scheme has no such shape, or None."""
        if self.channels is not None and shape.head_dim != TRANSFORMED_HEAD_DIM:
            return f"{self.channels} coded channels are defined for head_dim {TRANSFORMED_HEAD_DIM}"
        if shape.tokens <= self.window:
            return f"all {shape.tokens} tokens are in the window of {self.window}"
        return None

    @property
    def bits(self) -> float:
        """Nominal bits of the packed tokens, codes alone, over all channels of the head."""
        coded = (self.key.nominal_bits + self.value.nominal_bits) / 2
        return coded if self.channels is None else coded * self.channels / TRANSFORMED_HEAD_DIM

    def problem(self, shape: Shape, device: torch.device) -> Problem:
        """A call of this shape, canonical codes."""
        head_dim, tokens = self.channels or shape.head_dim, shape.tokens - self.window
        key, value = (
            self._packed(shape, tokens, head_dim, s, device) for s in (self.key, self.value)
        )
        norm = None
        if self.key_norm:
            norm = torch.rand(shape.batch, shape.kv_heads, head_dim, device=device) + 0.5
        lengths = torch.full((shape.batch,), tokens, device=device)
        segment = PackedSegment(key, value, lengths, visual=True, key_norm=norm)
        window = (random_dense(shape, self.window, device),) if self.window else ()
        query = random_query(shape, device, head_dim)
        return Problem(query, (segment, *window), shape.head_dim**-0.5, self.tau)

    def _packed(
        self, shape: Shape, tokens: int, head_dim: int, spec: TensorSpec, device: torch.device
    ) -> PackedTensor:
        size = (shape.batch, shape.kv_heads, tokens, head_dim)
        own = random_packed(*size, spec, device)
        if not self.shared:
            return own
        return own.without_codes().with_codes(random_packed(*size, spec, device))


def _whole_spans() -> list[BenchScheme]:
    return [
        BenchScheme(f"{bits} bit{', tau' if tau else ''}", TensorSpec(bits), TensorSpec(bits), tau)
        for bits in WIDTHS
        for tau in (None, TAU)
    ]


def _kivi() -> list[BenchScheme]:
    """KIVI at 2 bits without and with its window of 128."""
    text = duotone.scheme("kivi", bits=2).text
    packed = BenchScheme("kivi-2", text.key, text.value)
    return [packed, replace(packed, name="kivi-2, window 128", window=128)]


def _innerq() -> list[BenchScheme]:
    """InnerQ at 2 bits by mapping, and whole InnerQ: its windows of 32 + 96, its key norms."""
    rows = []
    for mapping in ("hybrid", "symmetric"):
        text = duotone.scheme("innerq", bits=2, mapping=mapping).text
        rows.append(BenchScheme(f"innerq-2 {mapping}", text.key, text.value))
    full = replace(rows[0], name="innerq-2, windows 128", window=128, key_norm=True)
    return [*rows, full]


def _xquant() -> BenchScheme:
    """An odd layer: K of 2 bits and V of 1 bit in groups of 32, both with the codes before it."""
    text = duotone.scheme("xquant", kq=32, km=0, vm=0).text
    return BenchScheme("xquant shared 2/1", text.key, text.value, shared=True)


def _in_8_bits(visual: KVSpec) -> list[TensorSpec]:
    return [x.replace(param_dtype="float8") for x in (visual.key, visual.value)]


def bench_schemes() -> list[BenchScheme]:
    """All schemes, in the order of measurement."""
    presets = {bits: duotone.scheme("duotone-whole", bits=bits).visual for bits in (1, 2)}
    quarter = TensorSpec(4)
    by_span = replace(presets[1], key=presets[1].key.replace(group=None))
    coefficients = TensorSpec(classes=((4, 1 / 8), (2, 1 / 8), (1, 1 / 4)))
    return [
        *_whole_spans(),
        BenchScheme("32 of 128 channels at 4 bit", quarter, quarter, channels=32),
        *_kivi(),
        *_innerq(),
        _xquant(),
        BenchScheme("duotone-whole", presets[1].key, presets[1].value),
        BenchScheme("duotone-whole, 2 bit", presets[2].key, presets[2].value),
        BenchScheme("duotone-whole, K by span", by_span.key, by_span.value),
        *(
            BenchScheme(f"{name}, 8-bit parameters", *_in_8_bits(visual))
            for name, visual in (
                ("duotone-whole", presets[1]),
                ("duotone-whole, K by span", by_span),
            )
        ),
        *_parts(),
        BenchScheme("transform coded, 1 bit", coefficients, coefficients),
    ]


def _parts() -> list[BenchScheme]:
    """Both parts of `duotone` at 1 and 2 bits, each as a span of its own."""
    rows = []
    for bits, said in ((1, ""), (2, ", 2 bit")):
        spec = duotone.scheme("duotone", bits=bits)
        for name, kv in (("front", spec.visual), ("back", spec.background)):
            rows.append(BenchScheme(f"duotone{said}, {name}", kv.key, kv.value))
    return rows


def select(names: list[str] | None) -> list[BenchScheme]:
    """The named schemes; None: all. Errors: ValueError for an unknown name."""
    known = {scheme.name: scheme for scheme in bench_schemes()}
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ValueError(f"--scheme must be among {sorted(known)}; got {unknown}")
    return list(known.values()) if names is None else [known[name] for name in names]
