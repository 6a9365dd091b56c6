"""A prompt's layers, which pack its pictures in two parts, without a model."""

import torch

import duotone
from duotone.attention.plan import Shape, resolve
from duotone.cache import LayerStore, Ledger
from duotone.quant import CacheSpec, KVSpec, LayerRule, TensorSpec
from duotone.quant.checks import Checks, put_off

from cases import device

PARTS, WIDER = (duotone.scheme("duotone", bits=bits) for bits in (1, 2))
FIRST = LayerRule(0, 1, visual=WIDER.visual, background=PARTS.at_layer(0).background)
IN_BASIS = KVSpec(PARTS.visual.key.replace(transform="hadamard"), PARTS.visual.value)
PLAIN = KVSpec(TensorSpec(2), TensorSpec(2))
SPECS = {
    "parts": PARTS,  # its first layer has a rule for its back
    "two bits": WIDER,
    "short ones whole": PARTS.replace(short_foreground=(600, 1.0)),  # one of "ragged"
    "short ones in steps": PARTS.replace(short_foreground=((600, 1.0), (800, 0.2))),  # "ragged"
    "first layer": PARTS.replace(layers=(FIRST,)),
    "basis": PARTS.replace(visual=IN_BASIS),
    "spans": PARTS.replace(visual=PLAIN, background=PLAIN, layers=()),
}
# Pictures of the first sequence. Another one has a picture and padding before it.
PROMPTS = {"one": ((20, 788),), "some": ((20, 788), (800, 1568)), "ragged": ((9, 800), (850, 1400))}
# Of SmolVLM: pictures of 81 tokens, which fill no records.
SHORT = {"short": tuple((start, start + 81) for start in range(20, 1500, 83))}
TOKENS, HEADS, HEAD_DIM, LAYERS = 1600, 2, 128, 5


def masks(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(visual, real) of a prompt."""
    visual = torch.zeros(1 + (name == "ragged"), TOKENS, dtype=torch.bool, device=device())
    real = torch.ones_like(visual)
    for start, end in (PROMPTS | SHORT)[name]:
        visual[0, start:end] = True
    visual[1:, 305:1305], real[1:, :300] = True, False
    return visual, real


class Prompt:
    """Stores of a prompt's layers, and the step's plan for them."""

    def __init__(self, spec: CacheSpec, name: str) -> None:
        visual, real = masks(name)
        self.ledger, self.checks = Ledger(spec, len(visual), device()), Checks()
        shape = Shape(HEAD_DIM, 2 * HEADS, HEADS, torch.bfloat16)
        each = [spec.at_layer(index) for index in range(LAYERS)]
        self.stores = [LayerStore(own, resolve(own, shape).layouts) for own in each]
        self.begin(visual, real)

    def begin(self, visual: torch.Tensor, real: torch.Tensor) -> None:
        """Begin a step of these tokens, [batch, tokens]."""
        self.plan = self.ledger.plan(visual, real)
        # Heads after tokens in memory, as models make them.
        size = (*real.shape, HEADS, HEAD_DIM)
        states = torch.randn(2, *size, device=device(), dtype=torch.bfloat16)
        self.key, self.value = states.transpose(2, 3)

    def apply(self, layers: range) -> None:
        """Store the states in some layers, as a step does, which checks numbers at its end."""
        with put_off(self.checks):
            for layer in layers:
                self.stores[layer].apply(self.plan, self.key, self.value)
