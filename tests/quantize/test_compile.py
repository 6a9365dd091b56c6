"""Quantized models under torch.compile: each linear breaks the graph, the numbers stay."""

import pytest
import torch

from duotone.inference.batch import encode
from tiny_vlm import tiny_example

from mquant_setups import quantized

# Tracing takes ten seconds; weights/modules/test_linear_compile has the linears.
pytestmark = pytest.mark.slow


@torch.no_grad()
@pytest.mark.parametrize("name", ["mquant-w4a8", "dynamic-w8a8", "w4a16-g128"])
def test_a_compiled_model_says_what_the_eager_one_says(name):
    torch.compiler.reset()
    loaded, _ = quantized(name, **({"group": 16} if name == "w4a16-g128" else {}))
    inputs = encode(loaded.processor, [tiny_example("heldout", i).messages() for i in (1, 1)])
    wanted = loaded.model(**inputs, use_cache=False).logits
    compiled = torch.compile(loaded.model, backend="eager")
    for _ in range(2):
        found = compiled(**inputs, use_cache=False).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
