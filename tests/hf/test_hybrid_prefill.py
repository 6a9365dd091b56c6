"""InnerQ's hybrid-prefill through `generate`, save and load, crop and reorder."""

import torch

from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.quant import unpack

from families import inputs, tiny_model

PREFILL = {"mapping": "hybrid", "hybrid_at": "prefill"}
HYBRID, SYMMETRIC = {"mapping": "hybrid"}, {"mapping": "symmetric"}
PROMPTS = [[3, "image", 9], [4, 11, "image", 13]]


def spec_of(**fields: str) -> CacheSpec:
    text = KVSpec(TensorSpec(2, "channels", 8, **fields), TensorSpec(2, group=4, **fields))
    return CacheSpec(visual="text", text=text, sink=2, recent=3, key_norm=True)


def generate(spec: CacheSpec, forced: torch.Tensor | None = None, steps: int = 14):
    """(cache, new tokens); `forced` are fed instead of what the model would choose."""
    model, given = tiny_model("internvl"), inputs("internvl", PROMPTS)
    cache, prompt = QuantizedCache(model, spec), given["input_ids"].shape[1]

    def only(_, ids):
        return forced[0, ids.shape[0] - prompt, None].tolist()

    rule = {} if forced is None else {"prefix_allowed_tokens_fn": only}
    out = model.generate(
        **given,
        past_key_values=cache,
        max_new_tokens=steps,
        min_new_tokens=steps,
        do_sample=False,
        **rule,
    )
    return cache, out[:, prompt:]


def modes(packed) -> torch.Tensor:
    return unpack(packed.symmetric, 1, packed.scale.shape[-1]).bool()


def test_generate_packs_prompts_as_hybrid_and_new_tokens_as_symmetric() -> None:
    forced = torch.randint(5, 40, (1, 14))
    ours, prompt, symmetric = (
        generate(spec_of(**fields), forced, steps)[0]
        for fields, steps in ((PREFILL, 14), (HYBRID, 1), (SYMMETRIC, 14))
    )
    for which in ("key", "value"):
        for index, layer in enumerate(ours.layers):
            mine = getattr(layer.store.stream, which)
            first = getattr(prompt.layers[index].store.stream, which)
            plain = getattr(symmetric.layers[index].store.stream, which)
            for b in range(2):
                n, m = int(first.blocks.lengths[b]), int(mine.blocks.lengths[b])
                assert m > n > 0
                got, want = mine.dequantize()[b], first.dequantize()[b]
                assert torch.equal(got[:, :n], want[:, :n])
                rows = slice(n, m) if mine.per_token else slice(n // 4, m // 4)
                assert modes(mine)[b, :, rows].all()
                if index == 0:
                    # The first layer sees the same tokens and so the same K and V.
                    assert torch.equal(got[:, n:m], plain.dequantize()[b, :, n:m])
    assert not modes(ours.layers[1].store.stream.value)[:, :, :2].all()


def test_it_goes_on_from_the_disk_and_after_a_crop(tmp_path) -> None:
    cache, _ = generate(spec_of(**PREFILL))
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-3)
    cache.save(tmp_path / "cache.safetensors")
    model = tiny_model("internvl")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.memory() == cache.memory()
    mask = inputs("internvl", PROMPTS)["attention_mask"].flip(0)
    mask = torch.cat([mask, mask.new_ones(2, cache.get_seq_length() - mask.shape[1])], 1)
    last = []
    for each in (cache, loaded):
        steps = torch.arange(9).view(9, 1, 1).expand(-1, 2, -1) + 7
        for step, ids in enumerate(steps, 1):
            longer = torch.cat([mask, mask.new_ones(2, step)], 1)
            out = model(input_ids=ids, attention_mask=longer, past_key_values=each)
        last.append(out.logits)
        key = each.layers[0].store.stream.key
        for b, n in enumerate(key.blocks.lengths.tolist()):
            assert modes(key)[b, :, n - 8 : n].all()
    assert torch.equal(*last)
