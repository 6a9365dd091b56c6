"""`python generate_once.py WAY DEVICE`: one answer in a fresh process, and a second look at it.

WAY: "enable", "cuda" (the same by the CUDA kernels or not at all) or "growing" (a QuantizedCache
that the call is given). The second look is of a cache that grows.
"""

import sys
from typing import Any

import torch
from PIL import Image
from torch import Tensor

import duotone
from duotone.loading import load

NEW = 40
# A window so short that a group leaves it while tokens come.
SPEC = duotone.scheme("duotone-mixed", bits=1).replace(sink=4, recent=16)
# Of the logits' spread: what 16-bit rounding in another order may change.
NEAR = 0.05


def prompt(loaded: Any) -> dict[str, Any]:
    """One picture and a question, on the model's device."""
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    chat = [{"role": "user", "content": content}]
    text = loaded.processor.apply_chat_template(chat, add_generation_prompt=True)
    pictures = [Image.new("RGB", (256, 256), "navy")]
    given = loaded.processor(text=[text], images=pictures, return_tensors="pt")
    return given.to(loaded.model.device)


def answer(loaded: Any, way: str) -> tuple[Tensor, Tensor]:
    """(new tokens, logits of each)."""
    model, spec = loaded.model, SPEC
    call = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **prompt(loaded)}
    call |= {"return_dict_in_generate": True, "output_logits": True}
    if way in ("enable", "cuda"):
        with duotone.enable(model, spec, impl="auto" if way == "enable" else way):
            out = model.generate(**call)
    else:
        out = model.generate(**call, past_key_values=duotone.QuantizedCache(model, spec))
    return out.sequences[0, -NEW:].cpu(), torch.cat(out.logits).float().cpu()


def check_same(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """Compare tokens up to the first near tie. Errors: AssertionError."""
    tokens = zip(ours[0].tolist(), theirs[0].tolist(), strict=True)
    for step, (mine, yours) in enumerate(tokens):
        logits = theirs[1][step]
        spread = (logits.max() - logits.median()).item()
        if mine != yours:
            gap = (logits[yours] - logits[mine]).item()
            assert gap < NEAR * spread, (
                f"step {step}: {mine}, not {yours}, {gap / spread:.3f} apart"
            )
            return
        error = (ours[1][step] - logits).abs().max().item()
        assert error < 2 * NEAR * spread, f"step {step}: logits differ by {error / spread:.3f}"


def main(way: str, device: str) -> None:
    """Errors: AssertionError for different answers, and whatever a fresh process stumbles over."""
    loaded = load(device=device)
    first = answer(loaded, way)
    again = answer(loaded, way)
    growing = answer(loaded, "growing")
    for other in (again, growing):
        check_same(first, other)
    print("same", first[0].tolist())


if __name__ == "__main__":
    main(*sys.argv[1:])
