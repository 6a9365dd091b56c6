"""`enable` decodes by graphs exactly what it decodes step by step.

Growing and fixed buffers sum in orders of their own, and a number that lies on the border between
two codes falls to either side by its last digit. Models that are compared therefore compute in
float64 throughout: their caches differ by 1e-15, so that codes agree on every CPU, and a single
code that does not exceeds the tolerance by far.
"""

import pytest
import torch
from graph_answers import NEW, StopAt, answer, assert_same, batch_of
from replay_double import ReplayDouble, double
from small_specs import MIXED, SPECS, STREAM, VISUAL
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessor

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, Sharing, TensorSpec
from duotone.hf.cache.states import materialize
from duotone.hf.graphs import decode_steps

from exactly import FP64, rounding_as
from families import FAMILIES, IMAGE, TEXT_ONLY, exact_model, inputs, logit_error, typed

__all__ = ["double"]  # a fixture

CASES = [
    pytest.param(n, p, marks=() if p == "mixed" or n in ("llama", "qwen2_vl") else pytest.mark.slow)
    for n in FAMILIES
    for p in SPECS
    if p != "visual" or n not in TEXT_ONLY
]
# Of what many specs do: a group of 8 leaves the window.
FEW = 10
# Of what grows by rooms of 8.
LONGER = 14


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_every_family_answers_as_step_by_step(
    double: type[ReplayDouble], name: str, policy: str
) -> None:
    model, given = exact_model(name), batch_of(name)
    ours = answer(model, SPECS[policy], given)
    assert_same(ours, answer(model, SPECS[policy], given, graphs=False))
    # The first token comes from the prompt, the second from the step that warms up.
    assert double.replays >= NEW - 2
    assert double.captures == (1 if policy == "visual" else 2)


def test_the_comparison_sees_one_code() -> None:
    """The last bit of the visual tokens' packed keys in one layer is far above the tolerance."""
    model, given = exact_model("internvl"), batch_of("internvl")
    runs = []
    for flips in (0, 1):
        cache = QuantizedCache(model, VISUAL)
        with torch.no_grad(), rounding_as(model.dtype):
            model(**typed(model, given), past_key_values=cache)
            cache.layers[0].store.visual.key.codes[0, 0, 0, 0] ^= flips
            runs.append(model(input_ids=torch.full((3, 1), 7), past_key_values=cache).logits)
    assert logit_error(runs[1], runs[0]) > 100 * FP64


OTHER_SPECS = {
    "no window": STREAM.replace(sink=0, recent=0),
    "window shorter than a group": STREAM.replace(recent=2),
    "window of two groups": STREAM.replace(recent=8),
    "two group sizes": STREAM.replace(
        text=KVSpec(TensorSpec(2, group=2), TensorSpec(4, group=3)), recent=4
    ),
    "sinks that fill while decoding": STREAM.replace(sink=12, recent=1),
    "symmetric": STREAM.replace(
        text=KVSpec(
            TensorSpec(2, group=4, mapping="hybrid"),
            TensorSpec(2, along="channels", group=8, mapping="symmetric"),
        )
    ),
    "rotated, one scale per group": STREAM.replace(
        text=KVSpec(
            TensorSpec(4, group=4, transform="hadamard"), TensorSpec(4, along="span", group=2)
        )
    ),
    "shared codes": STREAM.replace(share=Sharing(key=1, value=0, layers=2, dominant=1)),
    "normalised keys": STREAM.replace(key_norm=True, sink=0, recent=1),
    "dense pictures": STREAM.replace(visual="dense"),
    "dense": CacheSpec(visual="dense", text="dense"),
    "evicting": duotone.scheme("vl-cache"),
    "background": duotone.scheme("duotone-whole"),
    "kivi": duotone.scheme("kivi", bits=2),
    "kivi with sinks": duotone.scheme("kivi-sink"),
    "innerq": duotone.scheme("innerq"),
    "xquant": duotone.scheme("xquant"),
}


@pytest.mark.parametrize("spec", OTHER_SPECS.values(), ids=list(OTHER_SPECS))
@pytest.mark.parametrize("room", [8, pytest.param(512, marks=pytest.mark.slow)])
def test_every_scheme_grows_and_thaws_to_where_it_would_be(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch, spec: CacheSpec, room: int
) -> None:
    """After the answer the cache goes on with another turn, and knows the place of every token."""
    monkeypatch.setattr(decode_steps, "MOST_ROOM", room)
    monkeypatch.setattr(decode_steps, "FIRST_ROOM", room)
    monkeypatch.setattr(decode_steps, "MOST_BYTES", 0)
    model = exact_model("internvl")
    prompt = inputs("internvl", [[40, "image", 13], [20, "image", 3, "image", 30]])
    more, states = torch.randint(2, 280, (2, 5)), []
    for graphs in (True, False):
        out = answer(model, spec, prompt, graphs, max_new_tokens=LONGER)
        cache = out.session.cache
        ids = torch.cat([out.sequences, more], 1)
        mask = torch.cat([prompt["attention_mask"], ids.new_ones(2, ids.shape[1])], 1)
        given = {"input_ids": ids, "attention_mask": mask[:, : ids.shape[1]]}
        mine = QuantizedCacheTurn(model, cache, given, graphs)
        states.append((out, mine.out, mine.ledger, mine.length))
    (first, second, ledger, length), theirs = states
    assert_same(first, theirs[0])
    assert_same(second, theirs[1])
    assert length == theirs[3]
    for name in ("visual", "background", "stream", "dense"):
        ours, other = getattr(ledger, name), getattr(theirs[2], name)
        assert torch.equal(ours.lengths, other.lengths)
        for row, n in enumerate(ours.lengths.tolist()):
            assert torch.equal(ours.positions[row, :n], other.positions[row, :n])
    assert double.captures > (2 if room == 8 else 0)


class QuantizedCacheTurn:
    """A later turn with the cache of an earlier answer."""

    def __init__(self, model: PreTrainedModel, cache: QuantizedCache, given: dict, graphs: bool):
        cache._hold(cache._attachment.acquire())  # its block has ended
        few = {"past_key_values": cache, "max_new_tokens": FEW}
        self.out = answer(model, cache.spec, given, graphs, **few)
        self.ledger, self.length = cache.ledger.state, cache.get_seq_length()


class Ban(LogitsProcessor):
    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, ids.shape[1] % scores.shape[1]] = -1e9
        return scores.div_(2)


def test_processors_and_criteria_work(double: type[ReplayDouble]) -> None:
    model, given = exact_model("llama"), inputs("llama", [[23]])
    settings = {"logits_processor": [Ban()], "stopping_criteria": [StopAt()]}
    outs = [answer(model, STREAM, given, graphs, **settings) for graphs in (True, False)]
    assert_same(*outs)
    assert outs[0].sequences.shape[1] == 40
    assert double.replays


@pytest.mark.parametrize("spec", OTHER_SPECS.values(), ids=list(OTHER_SPECS))
def test_beams_move_within_the_buffers(double: type[ReplayDouble], spec: CacheSpec) -> None:
    """Rows of different lengths, whose tokens are then at their places."""
    model, outs = exact_model("internvl"), []
    prompt = inputs("internvl", [[30, "image", 13], [9, "image", 3]])
    beams = {"num_beams": 3, "num_return_sequences": 3, "output_logits": False}
    beams["max_new_tokens"] = 2 * FEW
    for graphs in (True, False):
        out = answer(model, spec, prompt, graphs, **beams)
        outs.append([out.sequences, *_tokens_of(out.session.cache)])
    for ours, theirs in zip(*outs, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-9)
    # All of them: reordering the sequences leaves the cache where it is.
    assert double.replays >= 2 * FEW - 2


def _tokens_of(cache: QuantizedCache) -> list[Tensor]:
    """K and V of all layers, where the tokens are and how many."""
    state = cache.ledger.state
    found = [state.tokens, state.dense.lengths, state.stream.lengths]
    if cache.spec.evict is None:
        shape = cache.facts.shape
        empty = torch.empty(6, shape.kv_heads, 0, shape.head_dim, dtype=torch.float64)
        found += [
            materialize(cache.timeline, index, which, empty)
            for index in range(cache.facts.layers)
            for which in ("key", "value")
        ]
    return found


def test_steps_are_replayed_after_the_callers_mask(double: type[ReplayDouble]) -> None:
    model, given = exact_model("internvl"), batch_of("internvl")
    mask = given["input_ids"] == IMAGE
    ours, theirs = (answer(model, VISUAL, given, on, visual_mask=mask) for on in (True, False))
    assert_same(ours, theirs)
    assert double.replays == NEW - 2


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"num_return_sequences": 2, "do_sample": True},
        {"output_hidden_states": True},
        {"repetition_penalty": 1.3},
        {"max_new_tokens": 3},
    ],
    ids=str,
)
def test_other_ways_to_decode(double: type[ReplayDouble], settings: dict) -> None:
    model, given, outs = exact_model("llama"), inputs("llama", [[23]]), []
    for graphs in (True, False):
        torch.manual_seed(5)
        few = {"max_new_tokens": FEW, "output_logits": False} | settings
        outs.append(answer(model, STREAM, given, graphs, **few))
    assert torch.equal(outs[0].sequences, outs[1].sequences)


def test_placeholders_that_the_model_writes_are_text(double: type[ReplayDouble]) -> None:
    model, given = exact_model("internvl"), inputs("internvl", [[3, "image", 9]])

    class Write(LogitsProcessor):
        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            scores[:, IMAGE] = 1e9 if ids.shape[1] % 3 == 0 else -1e9
            return scores

    settings = {"logits_processor": [Write()]}
    ours = answer(model, MIXED, given, **settings)
    assert_same(ours, answer(model, MIXED, given, graphs=False, **settings))
