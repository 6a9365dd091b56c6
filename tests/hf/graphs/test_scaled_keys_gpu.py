"""Scaled keys by CUDA kernels and graphs: answers, windows in 16 bit, and weights that change."""

import copy
from typing import Any

import pytest
import torch
from replay_double import growing
from test_scaled_keys import SPEC, grow
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.graphs import decode_steps
from duotone.hf.model import key_scales
from duotone.tools.cuda_graph import CudaGraph

from exactly import rounding_as
from families import FAMILIES, inputs, logit_error, new_exact_model, typed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:K that has channels far larger"),
    pytest.mark.filterwarnings("ignore::duotone.tools.slow_paths.SlowPathWarning"),
]
WIDE = {"head_dim": 64, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
EIGHT = TensorSpec(8, "channels")
PRESETS = {
    "duotone@1": duotone.scheme("duotone"),
    "duotone-whole@1": duotone.scheme("duotone-whole"),
    "duotone@2": duotone.scheme("duotone", bits=2),
    "8 bits": CacheSpec(visual=KVSpec(EIGHT, EIGHT), text="dense"),
}


def prompt(model: PreTrainedModel, rows: int = 2) -> dict[str, Tensor]:
    given = typed(model, inputs("internvl", [[5, "image", 9], [4]][:rows]))
    return {name: x.cuda() for name, x in given.items()}


def asked(model: PreTrainedModel, spec: CacheSpec = SPEC, **more: Any) -> Tensor:
    call = {"max_new_tokens": 64, "do_sample": False, "output_logits": True, **more}
    with rounding_as(model.dtype), duotone.enable(model, spec) as session:
        out = model.generate(**prompt(model), return_dict_in_generate=True, **call)
    assert None not in session.cache.timeline.scales.each
    return torch.stack(out.logits)


@pytest.mark.parametrize("beams", [1, 3])
def test_graphs_answer_as_steps_do_also_after_a_change(
    monkeypatch: pytest.MonkeyPatch, beams: int
) -> None:
    made: list[CudaGraph] = []

    def capture(*args: Any) -> CudaGraph:
        made.append(CudaGraph(*args))
        return made[-1]

    monkeypatch.setattr(decode_steps, "capture", capture)
    model = new_exact_model("internvl").cuda()
    for channels in ([1, 9], [2, 10]):
        grow(model, channels, 8.0)
        with growing():
            expected = asked(model, num_beams=beams)
        for _ in range(2):
            found = asked(model, num_beams=beams)
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert len(made) == 2  # the model's step and the flush


def wide(dtype: torch.dtype) -> PreTrainedModel:
    """InternVL with heads of 64 channels, whose keys grew."""
    from duotone.hf.weights.checkpoint import model_class

    config = FAMILIES["internvl"].config()
    for name, value in WIDE.items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    model = model_class(config).from_config(config).eval().cuda()
    model.generation_config.eos_token_id = None
    grow(model, [3, 35, 8, 40], 8.0)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", PRESETS)
def test_kernels_read_scaled_keys_as_the_reference_does(preset: str, dtype: torch.dtype) -> None:
    model = wide(dtype)
    later = torch.randint(2, 280, (2, 1), device="cuda")
    cache = QuantizedCache(model, PRESETS[preset])
    with torch.no_grad():
        model(**prompt(model), past_key_values=cache)
        same = copy.deepcopy(cache)  # codes and all
        same.timeline.impl = "reference"
        logits = [model(input_ids=later, past_key_values=each).logits for each in (cache, same)]
    assert None not in cache.timeline.scales.each
    assert logit_error(*logits) < (0.02 if dtype == torch.float16 else 0.15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_8_bit_codes_are_near_16_bit(dtype: torch.dtype) -> None:
    model = wide(dtype)
    later = torch.randint(2, 280, (1, 1), device="cuda")
    logits = []
    for cache in (DynamicCache(), QuantizedCache(model, PRESETS["8 bits"])):
        with torch.no_grad():
            model(**prompt(model, 1), past_key_values=cache)
            logits.append(model(input_ids=later, past_key_values=cache).logits.float())
    assert logit_error(*logits) < 0.2


def test_scales_of_a_model_are_on_its_device() -> None:
    model = wide(torch.float16)
    scales = QuantizedCache(model, PRESETS["8 bits"]).timeline.scales
    assert {(w.device.type, w.dtype) for w in scales.tensors} == {("cuda", torch.float16)}
    assert {number for number, _ in key_scales._FOUND[model][1]} == {0, 1, 2}
