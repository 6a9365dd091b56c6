"""`QuantizedCache`: the cache that users make."""

from __future__ import annotations

from duotone.hf.growing import GrowingCache
from duotone.hf.static import StaticQuantizedCache


class QuantizedCache(GrowingCache):
    """Few-bit cache for one model and one batch of sequences.

    Pass it as `past_key_values` to `model.generate` or to the model itself. It listens to the
    model's inputs to learn which tokens are visual and which are padding.

    model: any supported transformers model. spec: what to do with which tokens.
    visual_mask: [batch, tokens] True at visual tokens, for callers with `inputs_embeds` (the ids,
        and so the positions, are unknown then). Rows may be fewer than the batch by an integer
        factor (beams, num_return_sequences).
    impl: the decode attention ("auto", "reference", "triton", "cuda").
    Errors: ValueError for a model or a combination that is not supported, and for impl="cuda" where
    the CUDA kernels would leave tokens to others.
    """

    def freeze(self, max_new_tokens: int) -> StaticQuantizedCache:
        """Copy of these tokens in fixed buffers with room for `max_new_tokens` more.

        For CUDA graphs and torch.compile: `hf.static`. This cache must not be used afterwards.
        Errors: ValueError for an empty cache, and what `StaticQuantizedCache` refuses.
        """
        return StaticQuantizedCache.of(self, max_new_tokens)
