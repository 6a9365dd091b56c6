"""A sequence of a left-padded batch has the logits that it has alone, under every scheme.

In float64, where rounding differs by 1e-15 and no code flips.
"""

from functools import cache

import pytest
import torch
from held_still import HeldStill
from small_specs import NAMES, small
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec

from families import inputs, new_model

STEPS = 32
# The first is longer than the windows below, the second leaves them while tokens are generated.
PROMPTS = [[3, "image", 40], [4, "image", 6]]
# No visual spans: a prompt of one token is a step like those after it.
ONE_TOKEN = [[50], [1]]
TOLERANCE = 1e-9

NORMED = CacheSpec(
    visual=KVSpec(TensorSpec(4, "channels"), TensorSpec(4)),
    text=KVSpec(TensorSpec(4, "channels", 8), TensorSpec(4, group=4)),
    sink=2,
    recent=3,
    key_norm=True,
)
KINDS = pytest.mark.parametrize("static", [False, True], ids=["growing", "held still"])


@cache
def model() -> PreTrainedModel:
    made = new_model("internvl").double()
    for layer in made.get_decoder().layers:  # channels that stand out, which norms are for
        layer.self_attn.k_proj.weight.data[::7] *= 4
    return made


def prefill(given: dict[str, Tensor], cache, chunk: int | None = None) -> Tensor:
    """Logits of the last token; chunk: tokens of one step, all by default."""
    position = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    width = position.shape[1]
    for start in range(0, width, chunk or width):
        end = start + (chunk or width)
        step = {name: given[name][:, start:end] for name in ("input_ids",)}
        step["attention_mask"] = given["attention_mask"][:, :end]
        if start == 0 and "pixel_values" in given:
            step["pixel_values"] = given["pixel_values"].double()
        with torch.no_grad():
            out = model()(**step, position_ids=position[:, start:end], past_key_values=cache)
    return out.logits[:, -1]


def decode(given: dict[str, Tensor], cache, steps: Tensor, static: bool = False) -> list[Tensor]:
    """Logits after each of `steps` [batch, n]; static: in fixed buffers."""
    mask, outputs = given["attention_mask"], []
    if static:
        place, step = mask.sum(-1, keepdim=True), HeldStill(model(), cache, STEPS)
        return [step(x, place + n).logits[:, -1] for n, x in enumerate(steps.split(1, 1))]
    for token in steps.split(1, 1):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        step = {"input_ids": token, "attention_mask": mask}
        with torch.no_grad():
            out = model()(
                **step, position_ids=mask.sum(-1, keepdim=True) - 1, past_key_values=cache
            )
        outputs.append(out.logits[:, -1])
    return outputs


def logits(
    given: dict[str, Tensor], cache, steps: Tensor, chunk: int | None = None, static: bool = False
) -> Tensor:
    """Logits of the prompt's last token and of each of `steps`."""
    return torch.stack([prefill(given, cache, chunk), *decode(given, cache, steps, static)], 1)


def alone(given: dict[str, Tensor], row: int) -> dict[str, Tensor]:
    """One row of a batch without its padding; of the pixels, its own picture."""
    real = given["attention_mask"][row].bool()
    own = {name: given[name][row : row + 1, real] for name in ("input_ids", "attention_mask")}
    if "pixel_values" in given:
        own["pixel_values"] = given["pixel_values"][row : row + 1]
    return own


def difference(spec: CacheSpec, prompts: list, static: bool, chunk: int | None = None) -> float:
    """Largest one of all rows and steps."""
    given = inputs("internvl", prompts)
    steps = torch.randint(2, 280, (len(prompts), STEPS))
    together = logits(given, QuantizedCache(model(), spec), steps, chunk, static)
    apart = [
        logits(
            alone(given, row), QuantizedCache(model(), spec), steps[row : row + 1], static=static
        )
        for row in range(len(prompts))
    ]
    return float((together - torch.cat(apart)).abs().max())


@KINDS
@pytest.mark.parametrize("name", NAMES)
def test_a_row_of_a_batch_is_the_row_alone(name: str, static: bool) -> None:
    assert difference(small(name), PROMPTS, static) < TOLERANCE


@KINDS
def test_packed_pictures_beside_a_normalised_stream(static: bool) -> None:
    """Also of a sequence that is all picture, whose stream comes later."""
    assert difference(NORMED, [["image", 20], ["image"]], static) < TOLERANCE


@KINDS
@pytest.mark.parametrize("name", ["innerq", "kivi-sink"])
def test_prompts_of_one_token(name: str, static: bool) -> None:
    assert difference(small(name), ONE_TOKEN, static) < TOLERANCE


def test_a_prompt_in_chunks_beside_a_short_one() -> None:
    """The short one is padding at first; its norm comes with the chunk that it is in."""
    given = inputs("internvl", [[64], [14]])
    steps = torch.randint(2, 280, (2, STEPS))
    spec = small("innerq")
    together = logits(given, QuantizedCache(model(), spec), steps, chunk=16)
    for row, chunk in ((0, 16), (1, None)):
        own = logits(alone(given, row), QuantizedCache(model(), spec), steps[row : row + 1], chunk)
        assert float((together[row] - own[0]).abs().max()) < TOLERANCE


def test_the_norm_is_of_the_prompt_and_stays() -> None:
    """Per row, over all its tokens, also those that stay in the windows; later turns keep it."""
    given = inputs("internvl", [[30], [12]])
    cache, dense = QuantizedCache(model(), small("innerq")), DynamicCache()
    prefill(given, dense)
    prefill(given, cache)
    norms = [layer.store.key_norm.clone() for layer in cache.layers]
    for norm, layer in zip(norms, dense.layers, strict=True):
        real = given["attention_mask"].bool()
        for row in range(2):
            top = layer.keys[row][:, real[row]].abs().amax(1).sqrt()
            assert torch.equal(norm[row], top.to(norm.dtype))
    mask = torch.cat([given["attention_mask"], torch.ones(2, 50).long()], 1)
    turn = {"input_ids": torch.randint(2, 280, (2, 50)), "attention_mask": mask}
    with torch.no_grad():
        model()(**turn, past_key_values=cache)
    cache.crop(-60)
    for norm, layer in zip(norms, cache.layers, strict=True):
        assert torch.equal(norm, layer.store.key_norm)


def test_a_row_that_a_crop_empties_begins_anew() -> None:
    """A crop to another row's tokens leaves only padding of this one."""
    given = inputs("internvl", [[30], [12]])
    cache = QuantizedCache(model(), small("innerq"))
    prefill(given, cache)
    before = cache.layers[0].store.key_norm.clone()
    cache.crop(-12)
    turn = {
        "input_ids": torch.randint(2, 280, (2, 20)),
        "attention_mask": torch.cat(
            [given["attention_mask"][:, :-12], torch.ones(2, 20).long()], 1
        ),
    }
    with torch.no_grad():
        model()(**turn, past_key_values=cache)
    after = cache.layers[0].store.key_norm
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_a_neighbours_norm_is_found() -> None:
    given = inputs("internvl", [[20], [16]])
    steps, spec = torch.randint(2, 280, (2, STEPS)), small("innerq")
    right, wrong = (QuantizedCache(model(), spec) for _ in range(2))
    prefill(given, right)
    prefill(given, wrong)
    for layer in wrong.layers:
        layer.store.key_norm = layer.store.key_norm.flip(0)
    found, expected = (torch.stack(decode(given, x, steps)) for x in (wrong, right))
    assert float((found - expected).abs().max()) > 1e-3
