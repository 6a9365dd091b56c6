"""`memory()` is what a cache keeps in memory, after every operation on it."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from held_still import HeldStill
from small_specs import NAMES, small
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import duotone
from duotone import CacheSpec, QuantizedCache
from held import held_bytes, listing

from families import FAMILIES, IMAGE, inputs, tiny_model

# One of every kind: spans, a background, windows, norms, shared codes, 8 bit, evicted tokens.
WALKED = ["minmax", "duotone", "kivi", "innerq", "xquant", "duotone-mixed", "vl-cache"]
PROMPT = [[3, "image", 60], ["image", 44]]


def check(cache: QuantizedCache, what: str = "") -> None:
    report, held = cache.memory(), held_bytes(cache)
    assert report.total_bytes == held, f"{what}\n{report}\nis held:\n{listing(cache)}"


class Walk:
    """A cache and the mask of its tokens, and what can be done to both."""

    def __init__(self, spec: CacheSpec, seed: int, folder: Path) -> None:
        self.spec, self.folder, self.random = spec, folder, random.Random(seed)
        self.model = tiny_model("internvl")
        self.cache = QuantizedCache(self.model, spec)
        self.mask = torch.zeros(2, 0, dtype=torch.long)
        self.prompt = 0

    def step(self, ids: Tensor, mask: Tensor, **more: Tensor) -> None:
        self.mask = torch.cat([self.mask, mask], 1)
        with torch.no_grad():
            given = {"input_ids": ids, "attention_mask": self.mask, **more}
            self.model(**given, past_key_values=self.cache)

    def begin(self) -> None:
        given = inputs("internvl", PROMPT)
        self.step(given.pop("input_ids"), given.pop("attention_mask"), **given)
        self.prompt = self.mask.shape[1]

    def decode(self) -> None:
        for _ in range(self.random.randint(1, 20)):
            ids = torch.randint(2, 280, (len(self.mask), 1))
            self.step(ids, torch.ones_like(ids))

    def turn(self) -> None:
        ids = torch.randint(2, 280, (len(self.mask), self.random.randint(2, 50)))
        self.step(ids, torch.ones_like(ids))

    def picture(self) -> None:
        given = inputs("internvl", [[self.random.randint(0, 9), "image"]] * len(self.mask))
        pixels = FAMILIES["internvl"].pixels(len(self.mask))
        self.step(given["input_ids"], given["attention_mask"], **pixels)

    def crop(self) -> None:
        length = self.mask.shape[1]
        # Prompts that lost tokens, and spans with a background, are kept whole.
        whole = self.spec.evict is not None or self.spec.background is not None
        least = length if whole and self.prompt else 1
        kept = self.random.randint(min(least, length), length)
        self.cache.crop(kept - length)
        self.mask = self.mask[:, :kept]

    def pick(self, index: Tensor) -> None:
        self.mask = self.mask[index]

    def reorder(self) -> None:
        rows = len(self.mask)
        index = torch.tensor([self.random.randrange(rows) for _ in range(rows)])
        self.cache.reorder_cache(index)
        self.pick(index)

    def select(self) -> None:
        index = torch.tensor([self.random.randrange(len(self.mask))])
        self.cache.batch_select_indices(index)
        self.pick(index)

    def repeat(self) -> None:
        self.cache.batch_repeat_interleave(2)
        self.pick(torch.arange(len(self.mask)).repeat_interleave(2))

    def copied(self) -> None:
        self.cache = copy.deepcopy(self.cache)

    def disk(self) -> None:
        self.cache.save(self.folder / "cache.safetensors")
        self.cache = QuantizedCache.load(self.folder / "cache.safetensors", self.model)

    @property
    def doings(self) -> list[Callable[[], None]]:
        pieces = [self.decode, self.turn, self.picture, self.crop, self.crop]
        return [*pieces, self.reorder, self.select, self.repeat, self.copied, self.disk]


def walk(name: str, seed: int, folder: Path, length: int = 12) -> None:
    going = Walk(small(name), seed, folder)
    going.begin()
    check(going.cache, "prompt")
    done = ["prompt"]
    for _ in range(length):
        many = len(going.mask) > 4
        what = going.random.choice([x for x in going.doings if not many or x != going.repeat])
        what()
        done.append(what.__name__)
        check(going.cache, " ".join(done))
    going.decode()
    check(going.cache, " ".join(done))


@pytest.mark.parametrize("name", WALKED)
def test_a_walk_over_its_operations(name: str, tmp_path: Path) -> None:
    walk(name, 0, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("name", NAMES)
def test_walks_over_the_operations_of_all_schemes(name: str, seed: int, tmp_path: Path) -> None:
    walk(name, seed, tmp_path, length=20)


@pytest.mark.parametrize("name", WALKED)
def test_caches_that_hold_still(name: str) -> None:
    model, given = tiny_model("internvl"), inputs("internvl", PROMPT)
    cache = QuantizedCache(model, small(name))
    with torch.no_grad():
        model(**given, past_key_values=cache)
    step = HeldStill(model, cache, 40)
    for _ in range(36):
        step(torch.full((2, 1), 7))
        check(cache)
    cache.timeline.thaw()
    check(cache, "36 steps")


@pytest.mark.parametrize("name", ["duotone", "minmax", "duotone-mixed", "innerq"])
def test_a_first_step_of_visual_tokens_alone(name: str) -> None:
    """A store without tokens keeps no view of the step's K and V."""
    model = tiny_model("internvl")
    ids = torch.full((1, 32), IMAGE)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = QuantizedCache(model, duotone.scheme(name))
    with torch.no_grad():
        model(**given, **FAMILIES["internvl"].pixels(8), past_key_values=cache)
    check(cache)
    report = cache.memory()
    if name in ("duotone", "minmax"):
        assert report.dense_bytes == 0
        assert report.total_bytes < report.dense_equivalent_bytes / 2
    cache.timeline.hold_still(3)
    check(cache)


@pytest.mark.parametrize("name", ["kivi", "minmax", "dense"])
def test_a_crop_lets_go_of_what_it_empties(name: str) -> None:
    model, given = tiny_model("internvl"), inputs("internvl", [[2, "image", 200]])
    cache = QuantizedCache(model, duotone.scheme(name))
    with torch.no_grad():
        model(**given, past_key_values=cache)
    before = held_bytes(cache)
    cache.crop(2 - given["input_ids"].shape[1])
    check(cache)
    assert held_bytes(cache) < before / 10
    cache.crop(-2)
    check(cache)


def test_heads_that_lie_side_by_side() -> None:
    """The first tokens of a buffer are contiguous with one sequence and one kv head."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()
    cache = QuantizedCache(model, small("kivi"))
    with torch.no_grad():
        model(torch.randint(1, 300, (1, 100)), past_key_values=cache)
    for _ in range(9):
        cache.crop(-11)
        check(cache)


def test_absorbed_caches_keep_nothing_of_what_they_absorbed() -> None:
    model, given, dense = tiny_model("llama"), inputs("llama", [[60], [41]]), DynamicCache()
    with torch.no_grad():
        model(**given, past_key_values=dense)
    for name in ("kivi", "innerq", "duotone-stream"):
        cache = QuantizedCache(model, small(name))
        cache.absorb(dense, attention_mask=given["attention_mask"])
        check(cache, name)


def test_views_of_something_larger_are_found() -> None:
    model, given = tiny_model("internvl"), inputs("internvl", PROMPT)
    cache = QuantizedCache(model, small("kivi"))
    with torch.no_grad():
        model(**given, past_key_values=cache)
    check(cache)
    store = cache.layers[1].store
    store.key = torch.cat([store.key, store.key], 2)[:, :, : store.key.shape[2]]
    with pytest.raises(AssertionError, match=r"stores\[1\]\.key"):
        check(cache)
