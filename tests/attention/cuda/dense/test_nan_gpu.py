"""Keys of windows and streams that are not numbers reach the output of the CUDA kernels."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from large_cases import GQA, HEAD_DIM, KV_HEADS, PROMPT, STEPS, layer_spec, steps

pytestmark = NEEDS_KERNELS


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("name", ["kivi", "duotone", "duotone-stream", "dense"])
def test_what_is_no_number_is_none_in_the_output(name: str, which: int, static: bool) -> None:
    states = [torch.randn(1, KV_HEADS, PROMPT + STEPS, HEAD_DIM).half().cuda() for _ in range(2)]
    states[which][0, 1, PROMPT + 2, 7] = torch.nan
    seen = steps(layer_spec(name), *states, "auto", static)
    for t, (_, out, _) in enumerate(seen):
        own = out[0, GQA:]
        assert out[0, :GQA].isfinite().all()
        assert not (own if which == 0 else own[..., 7]).isfinite().any() or t < 2
        if t == 20:  # before a stream takes the token in, where growing stores refuse it
            break
