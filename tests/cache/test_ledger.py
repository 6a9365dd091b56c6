"""The ledger's invariants, over random sequences of steps, against a list of token numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duotone.cache import LayerStore, Ledger
from duotone.quant import CacheSpec, KVSpec, TensorSpec

GROUPED = KVSpec(TensorSpec(8, group=4), TensorSpec(8, "channels", 8))
PLAIN = KVSpec(TensorSpec(8), TensorSpec(8))
SPECS = {
    "visual": CacheSpec(visual=PLAIN),
    "runs": CacheSpec(visual=KVSpec(TensorSpec(8), TensorSpec(8)), ranges="run"),
    "background": CacheSpec(visual=PLAIN, background=PLAIN, foreground=0.4),
    "background-runs": CacheSpec(
        visual=PLAIN, background=PLAIN, foreground=0.6, ranges="run", text=GROUPED, recent=2
    ),
    "stream": CacheSpec(visual="text", text=GROUPED, sink=3, recent=5),
    "stream-no-window": CacheSpec(visual="text", text=GROUPED),
    "stream-drains": CacheSpec(visual="text", text=GROUPED, sink=1, flush=12),
    "mixed": CacheSpec(visual=KVSpec(TensorSpec(8), TensorSpec(8)), text=GROUPED, recent=2),
    "text-only": CacheSpec(visual="dense", text=GROUPED, sink=1, recent=4),
    "dense": CacheSpec(visual="dense"),
}
BATCH, HEADS, DIM = 2, 1, 8


class Model:
    """Feeds a ledger and one layer with tokens whose K is their own number."""

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self.ledger = Ledger(spec, BATCH, torch.device("cpu"))
        self.store = LayerStore(spec)
        self.real: list[list[bool]] = [[] for _ in range(BATCH)]
        self.visual: list[list[bool]] = [[] for _ in range(BATCH)]

    def step(self, visual: Tensor, real: Tensor) -> None:
        seen, tokens = self.ledger.state.seen, visual.shape[1]
        plan = self.ledger.plan(visual, real)
        numbers = torch.arange(seen, seen + tokens).float()
        states = numbers[:, None].expand(BATCH, HEADS, -1, DIM).clone()
        states[~real[:, None].expand(-1, HEADS, -1)] = float("nan")
        self.store.apply(plan, states, states)
        for b in range(BATCH):
            self.real[b] += real[b].tolist()
            self.visual[b] += visual[b].tolist()

    def stored(self, b: int) -> list[int]:
        """Logical indices of all tokens that attention would read, from the ledger."""
        found = []
        for segment, roll in self.store.placed_segments(self.ledger.state):
            n = int(segment.lengths[b])
            found += roll.positions[b, :n].tolist()
        return found

    def check(self) -> None:
        for b in range(BATCH):
            expected = [i for i, real in enumerate(self.real[b]) if real]
            assert sorted(self.stored(b)) == expected, "a token was lost, kept twice or is padding"
            self.check_values(b)
            self.check_window(b)

    def check_values(self, b: int) -> None:
        spans = []
        for segment, roll in self.store.placed_segments(self.ledger.state):
            key = segment.key if isinstance(segment.key, Tensor) else segment.key.dequantize()
            n = int(segment.lengths[b])
            got, want = key[b, 0, :n, 0], roll.positions[b, :n].float()
            tolerance = 0.0 if isinstance(segment.key, Tensor) else 0.51
            if segment.visual and self.spec.background is not None:
                spans.append((got, want))  # Only a span as a whole has a place.
            else:
                assert ((got - want).abs() <= tolerance).all()
        if spans:
            got, want = (torch.cat(part).sort().values for part in zip(*spans, strict=True))
            assert ((got - want).abs() <= 0.51).all()

    def check_window(self, b: int) -> None:
        """The last `recent` stream tokens and the first `sink` ones are in 16 bit."""
        if not isinstance(self.spec.text, KVSpec):
            return
        whole = self.spec.visual == "text"
        pairs = zip(self.real[b], self.visual[b], strict=True)
        stream = [i for i, (real, visual) in enumerate(pairs) if real and (whole or not visual)]
        state = self.ledger.state
        dense = set(state.dense.positions[b, : int(state.dense.lengths[b])].tolist())
        assert set(stream[: self.spec.sink]) <= dense
        middle = stream[self.spec.sink :]
        assert set(middle[len(middle) - min(self.spec.recent, len(middle)) :]) <= dense
        held = [i for i in middle if i in dense]
        assert len(held) <= self.spec.recent + self.spec.flush_tokens


STEPS = st.lists(st.sampled_from([1, 1, 1, 1, 2, 5, 13]), min_size=1, max_size=25)


@given(st.sampled_from(sorted(SPECS)), STEPS, st.integers(0, 9999))
def test_every_token_is_in_exactly_one_place(name: str, steps: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = Model(SPECS[name])
    for tokens in steps:
        shape = (BATCH, tokens)
        visual = (torch.rand(shape, generator=generator) < 0.5) & (tokens > 1)
        real = (torch.rand(shape, generator=generator) < 0.8) | (tokens == 1)
        model.step(visual, real)
        model.check()


@given(st.sampled_from(sorted(SPECS)), STEPS, st.integers(1, 20), st.integers(0, 9999))
def test_crop_and_go_on(name: str, steps: list[int], removed: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = Model(SPECS[name])
    for tokens in [*steps, 6]:
        visual = (torch.rand((BATCH, tokens), generator=generator) < 0.5) & (tokens > 1)
        model.step(visual, torch.ones(BATCH, tokens, dtype=torch.bool))
    end = max(0, model.ledger.state.seen - removed)
    if any(first < end < last for first, last in model.ledger.state.wholes):
        with pytest.raises(ValueError, match="can only be kept whole"):
            model.ledger.crop(end)
        return
    before = model.ledger.state
    model.ledger.crop(end)
    model.store.truncate(model.ledger.state, before)
    for b in range(BATCH):
        assert sorted(model.stored(b)) == list(range(end))
        model.check_values(b)
        model.real[b], model.visual[b] = model.real[b][:end], model.visual[b][:end]
    for _ in range(6):
        model.step(torch.zeros(BATCH, 1, dtype=torch.bool), torch.ones(BATCH, 1, dtype=torch.bool))
    for b in range(BATCH):
        assert sorted(model.stored(b)) == list(range(end + 6))
        model.check_values(b)


BACKGROUND = sorted(name for name, spec in SPECS.items() if spec.background is not None)


@pytest.mark.parametrize("name", BACKGROUND)
def test_text_after_a_picture_can_be_cropped(name: str) -> None:
    """As drafts of assisted decoding are, which come with the prompt; its packed tokens stay."""
    model = Model(SPECS[name])
    visual = torch.tensor(
        [[False] * 3 + [True] * 9 + [False] * 5, [False] * 2 + [True] * 7 + [False] * 8]
    )
    model.step(visual, torch.ones_like(visual))
    before, packed = model.ledger.state, (model.store.visual, model.store.background)
    assert before.wholes == ((2, 12),)  # runs of two sequences overlap
    with pytest.raises(ValueError, match="can only be kept whole: expected a crop to >= 12"):
        model.ledger.crop(11)
    model.ledger.crop(13)
    model.store.truncate(model.ledger.state, before)
    assert all(
        x is y for x, y in zip((model.store.visual, model.store.background), packed, strict=True)
    )
    assert [sorted(model.stored(b)) for b in range(BATCH)] == [list(range(13))] * 2


@pytest.mark.parametrize("name", BACKGROUND)
def test_whole_pictures_can_be_cropped(name: str) -> None:
    """Drafts hold a placeholder where the prompt that they were copied from has a picture."""
    model = Model(SPECS[name])
    visual = torch.tensor([[False] * 3 + [True] * 9 + [False] * 4 + [True] * 2]).expand(BATCH, -1)
    model.step(visual, torch.ones_like(visual))
    by_run = SPECS[name].ranges == "run"
    assert model.ledger.state.wholes == (((3, 12), (16, 18)) if by_run else ((3, 18),))
    for end in (16, 14, 3, 2):
        if not by_run and end > 3:
            continue
        before = model.ledger.state
        model.ledger.crop(end)
        model.store.truncate(model.ledger.state, before)
        assert [sorted(model.stored(b)) for b in range(BATCH)] == [list(range(end))] * BATCH
    assert model.ledger.state.wholes == ()


@given(st.sampled_from(sorted(SPECS)), st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_rows_moves_ledger_and_layer_together(name: str, index: list[int]) -> None:
    model = Model(SPECS[name])
    visual = torch.tensor([[False] * 3 + [True] * 9 + [False] * 8, [False] * 12 + [True] * 8])
    real = torch.ones_like(visual)
    real[1, :5] = False
    model.step(visual, real)
    before = [sorted(model.stored(b)) for b in range(BATCH)]
    picked = torch.tensor(index)
    model.ledger.rows(picked)
    model.store.rows(picked)
    assert [sorted(model.stored(b)) for b in range(len(index))] == [before[i] for i in index]
    for b in range(len(index)):
        model.check_values(b)


def test_decoding_writes_in_place_between_moves() -> None:
    ledger, store = Ledger(SPECS["dense"], BATCH, torch.device("cpu")), LayerStore(SPECS["dense"])
    pointers = set()
    for tokens in [256] + [1] * 40:
        new = torch.ones(BATCH, tokens, dtype=torch.bool)
        states = torch.randn(BATCH, HEADS, tokens, DIM)
        store.apply(ledger.plan(~new, new), states, states)
        pointers.add(store.key.data_ptr())
    assert len(pointers) <= 4


@pytest.mark.parametrize(("size", "front"), [(1, 1), (2, 1), (5, 2), (10, 4), (63, 26)])
def test_the_foreground_is_a_share_rounded_up(size: int, front: int) -> None:
    model = Model(SPECS["background"])
    shown = torch.ones(BATCH, size, dtype=torch.bool)
    model.step(shown, shown)
    state = model.ledger.state
    assert state.visual.lengths.tolist() == [front] * BATCH
    assert state.background.lengths.tolist() == [size - front] * BATCH


def test_short_spans_have_a_share_of_their_own() -> None:
    spec = SPECS["background-runs"].replace(short_foreground=(8, 0.2))
    model = Model(spec)
    shown = torch.tensor([[True] * 5 + [False] + [True] * 10, [False] * 8 + [True] * 8])
    model.step(shown, torch.ones_like(shown))
    assert model.store.visual.key.blocks.offsets.tolist() == [[0, 1, 7], [0, 5, 5]]
    assert [spec.foreground_of(size) for size in (0, 5, 7, 8, 10)] == [0, 1, 2, 5, 6]


@pytest.mark.parametrize("multiple", [1, 4])
def test_short_spans_may_be_whole(multiple: int) -> None:
    changes = {"short_foreground": (10, 1.0), "foreground_multiple": multiple}
    spec = SPECS["background-runs"].replace(**changes)
    shown = torch.tensor([[True] * 9 + [False] * 2 + [True] * 15, [True] * 4 + [False] * 22])
    model = Model(spec)
    model.step(shown, torch.ones_like(shown))
    front = spec.foreground_of(15)
    assert (spec.foreground_of(4), spec.foreground_of(9)) == (4, 9)
    assert model.store.visual.key.blocks.offsets.tolist() == [[0, 9, 9 + front], [0, 4, 4]]
    back = model.store.background.key.blocks
    assert back.lengths.tolist() == [15 - front, 0]
    assert [size for size in back.sizes[0].tolist() if size] == [15 - front]


STEPS = ((60, 0.08), (128, 1.0))


@pytest.mark.parametrize("multiple", [1, 7, 64])
@pytest.mark.parametrize(
    "steps", [None, (60, 0.08), STEPS, ((2, 1.0), *STEPS, (500, 0.07), (599, 1))]
)
def test_every_size_has_the_foreground_of_the_spec(steps: object, multiple: int) -> None:
    changes = {"short_foreground": steps, "foreground_multiple": multiple, "foreground": 0.37}
    spec, sizes = SPECS["background-runs"].replace(**changes), torch.arange(1, 601)
    ledger = Ledger(spec, BATCH, torch.device("cpu"))
    expected = [spec.foreground_of(size) for size in sizes.tolist()]
    assert ledger._in_front(sizes).tolist() == expected
    assert ledger._in_front(sizes.view(2, 300)).flatten().tolist() == expected


def test_spans_of_one_sequence_are_divided_in_steps() -> None:
    changes = {"short_foreground": STEPS, "foreground_multiple": 64, "foreground": 0.37}
    model = Model(SPECS["background-runs"].replace(**changes))
    shown = torch.zeros(BATCH, 400, dtype=torch.bool)
    for start, size in ((3, 49), (60, 64), (130, 256)):
        shown[0, start : start + size] = True
    shown[1, 10:74] = True
    model.step(shown, torch.ones_like(shown))
    model.check()
    front, back = model.store.visual.key.blocks, model.store.background.key.blocks
    assert front.offsets.tolist() == [[0, 4, 68, 132], [0, 64, 64, 64]]
    assert back.lengths.tolist() == [45 + 192, 0]
    assert [size for size in back.sizes[0].tolist() if size] == [45, 192]
    one = torch.ones(BATCH, 1, dtype=torch.bool)
    model.step(~one, one)
    model.check()


def test_no_background_is_stored_where_all_spans_are_whole() -> None:
    spec = SPECS["background-runs"].replace(short_foreground=(10, 1.0))
    shown = torch.ones(BATCH, 9, dtype=torch.bool)
    model = Model(spec)
    model.step(shown, shown)
    assert model.store.visual.key.tokens == 9
    assert model.store.background is None


@pytest.mark.parametrize("share", [0.02, 0.4, 0.98])
def test_long_spans_have_a_multiple_of_tokens_in_front(share: float) -> None:
    spec = SPECS["background-runs"].replace(foreground=share, foreground_multiple=4)
    for size in (*range(1, 24), 40):
        front = spec.foreground_of(size)
        assert front == math.ceil(share * size) if size < 8 else front % 4 == 0
        assert 0 < front < size or size < 8
        model = Model(spec)
        shown = torch.ones(BATCH, size, dtype=torch.bool)
        model.step(shown, shown)
        assert model.ledger.state.visual.lengths.tolist() == [front] * BATCH
    assert spec.foreground_of(40) == {0.02: 4, 0.4: 16, 0.98: 36}[share]


def test_every_run_has_a_foreground_of_its_own() -> None:
    model = Model(SPECS["background-runs"])
    shown = torch.tensor([[True] * 5 + [False] + [True] * 10, [False] * 9 + [True] * 7])
    model.step(shown, torch.ones_like(shown))
    assert model.store.visual.key.blocks.offsets.tolist() == [[0, 3, 9], [0, 5, 5]]
    assert model.store.background.key.blocks.offsets.tolist() == [[0, 2, 6], [0, 2, 2]]


@pytest.mark.parametrize("name", ["visual", "background-runs"])
def test_visual_policies_ask_the_device_nothing_more_while_decoding(name: str, monkeypatch) -> None:
    """Every answer is a synchronisation, and every step waits for it."""
    asked = []
    answer = Tensor.__bool__
    monkeypatch.setattr(Tensor, "__bool__", lambda x: asked.append(1) or answer(x))
    counts = {}
    for policy in (name, "mixed" if name == "background-runs" else "dense"):
        model = Model(SPECS[policy])
        shown = torch.tensor([[False] * 3 + [True] * 9 + [False] * 8] * BATCH)
        model.step(shown, torch.ones_like(shown))
        one = torch.ones(BATCH, 1, dtype=torch.bool)
        asked.clear()
        model.ledger.plan(~one, one)
        counts[policy] = len(asked)
    assert len(set(counts.values())) == 1, counts
    assert min(counts.values()) > 0


@pytest.mark.parametrize("prompt", [5, 12, 29])
def test_a_window_that_drains_packs_as_kivis_code_packs_k(prompt: int) -> None:
    """Whole blocks of a prompt at once; then a block each time that so many tokens wait."""
    spec = CacheSpec(visual="text", text=GROUPED, flush=12)
    model, one = Model(spec), torch.ones(BATCH, 1, dtype=torch.bool)
    every = torch.ones(BATCH, prompt, dtype=torch.bool)
    model.step(~every, every)
    waiting = prompt % 12
    for _ in range(30):
        assert model.ledger.state.dense.lengths.tolist() == [waiting] * BATCH
        # A full window leaves before the next token enters, after attention has read it.
        model.step(~one, one)
        waiting = waiting % 12 + 1
