"""Errors of exhausted memory, with the sizes that would fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .common import megabytes


def _free_bytes(device: Any) -> int:
    import torch

    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def what_fits(model: Any, spec: Any, counts: dict[str, int], budget_bytes: int) -> str:
    """Sentence with the number of such sequences that fit into `budget_bytes` of cache."""
    import duotone

    plan = duotone.plan(model, spec, budget_bytes=budget_bytes, **counts)
    shape = f"{counts['visual_tokens']} visual + {counts['text_tokens']} text tokens"
    return (
        f"a sequence of {shape} and {counts['new_tokens']} new ones takes "
        f"{megabytes(plan.bytes_per_sequence)} of cache, so {plan.max_batch} fit into the free "
        f"{megabytes(budget_bytes)}"
    )


@contextmanager
def explained_out_of_memory(model: Any, spec: Any, counts: dict[str, int]) -> Iterator[None]:
    """Turn CUDA's out of memory into a ValueError that names the sizes that would fit."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        fits = what_fits(model, spec, counts, _free_bytes(model.device))
        raise ValueError(
            f"the device has not enough memory; {fits}; use a smaller batch, shorter answers, "
            "fewer bits or --device cpu"
        ) from error


def token_counts(model: Any, encoded: dict[str, Any], new_tokens: int) -> dict[str, int]:
    """Visual, text and new tokens of one encoded prompt, as `duotone.plan` takes them."""
    from duotone.loading import visual_mask

    ids = encoded["input_ids"]
    visual = int(visual_mask(model.config, ids).sum())
    return {"visual_tokens": visual, "text_tokens": ids.numel() - visual, "new_tokens": new_tokens}
