"""Decode steps as real CUDA graphs: long answers, many calls, models that ask the host."""

import threading
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from replay_double import growing
from torch import Tensor, nn
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.hf.graphs import decode_steps, kept_steps
from duotone.tools.cuda_graph import CudaGraph
from duotone.tools.slow_paths import SlowPathWarning

from exactly import rounding_as
from families import TEXT_ONLY, exact_model, inputs, new_model, typed

pytestmark = pytest.mark.gpu

TWO = TensorSpec(2)
MIXED = CacheSpec(
    visual=KVSpec(TWO, TensorSpec(2, along="channels")),
    text=KVSpec(TensorSpec(2, group=32), TensorSpec(2, along="channels", group=8)),
    sink=2,
    recent=30,
    ranges="run",
)
# As a calibration gives them to text: a group is a span of the kernels' records.
UNEQUAL = TensorSpec(group=64, levels="lloyd", energy=1.0, classes=((4, 1 / 4), (2, 1 / 4)))
CLASSES = CacheSpec(visual="text", text=KVSpec(UNEQUAL, UNEQUAL), sink=2, recent=30)
FEW = ("internvl", "qwen2_vl", "llama")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraph]:
    """The graphs that are captured in a test."""
    made: list[CudaGraph] = []

    def capture(*args: Any) -> CudaGraph:
        made.append(CudaGraph(*args))
        return made[-1]

    monkeypatch.setattr(decode_steps, "capture", capture)
    # Models are shared by tests; their captures are not.
    monkeypatch.setattr(kept_steps, "_KEPT", weakref.WeakKeyDictionary())
    return made


class Asks(nn.Module):
    """A layer that asks the device for a number at every step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 if float(x.sum()) > -1e30 else 0)


def prompt_of(name: str, rows: int = 2, seed: int = 1) -> dict[str, Tensor]:
    texts = [[23], [9], [16]] if name in TEXT_ONLY else [[3, "image", 9, "image", 4], [11], [7]]
    return {n: x.cuda() for n, x in inputs(name, texts[:rows], seed=seed).items()}


def answer(
    model: PreTrainedModel, given: dict, graphs: bool, spec: CacheSpec = MIXED, **settings: Any
) -> Tensor:
    call = {"max_new_tokens": 512, "do_sample": False, **settings}
    path = nullcontext() if graphs else growing()
    with rounding_as(model.dtype), path, duotone.enable(model, spec):
        torch.manual_seed(3)
        return model.generate(**typed(model, given), **call)


HOW = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "max_new_tokens": 120},
}
CASES = [(name, "greedy") for name in FEW] + [("internvl", "sampled"), ("internvl", "beams")]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_512_tokens_are_those_of_step_by_step(
    name: str, how: str, captures: list[CudaGraph]
) -> None:
    """In float64, where no last digit of a sum decides a code."""
    model, given = exact_model(name).cuda(), prompt_of(name)
    try:
        ours = answer(model, given, True, **HOW[how])
        assert len(captures) == 2
        assert torch.equal(ours, answer(model, given, False, **HOW[how]))
    finally:
        model.cpu()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["internvl", "llama"])
def test_streams_of_unequal_channels_are_captured(
    name: str, dtype: torch.dtype, captures: list[CudaGraph]
) -> None:
    """In bfloat16 by kernels, whose sums have another order with buffers of another size."""
    model = (exact_model(name) if dtype == torch.float64 else new_model(name).to(dtype)).cuda()
    given = prompt_of(name)
    try:
        ours = answer(model, given, True, CLASSES)
        assert len(captures) == 2
        theirs = answer(model, given, False, CLASSES)
        if dtype == torch.float64:
            assert torch.equal(ours, theirs)
        assert ours.shape == theirs.shape
    finally:
        model.cpu()


def test_many_calls_hold_no_more_than_the_first(captures: list[CudaGraph]) -> None:
    """With other batch sizes between, too."""
    model, held, made = new_model("internvl").cuda(), [], []
    with duotone.enable(model, MIXED):
        for call in range(12):
            given = prompt_of("internvl", rows=1 if call % 4 == 3 else 2, seed=call)
            model.generate(**given, max_new_tokens=80, do_sample=False)
            del given
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            made.append(len(captures))
            captures[:] = [None] * len(captures)
    assert held[4:7] == held[8:11]
    assert held[5] == held[6]
    # Only another batch size makes new ones, once.
    assert made[:3] == [made[0]] * 3
    assert made[3:] == [made[3]] * 9


@pytest.mark.parametrize("asks", [False, True])
def test_memory_stays_where_every_call_is_captured_anew(asks: bool) -> None:
    """Also where the capture breaks off."""
    model, reserved = new_model("llama").cuda(), []
    if asks:
        model.model.layers[1].mlp = Asks(model.model.layers[1].mlp)
    with warnings.catch_warnings(), duotone.enable(model, MIXED) as session:
        warnings.simplefilter("ignore", SlowPathWarning)
        for call in range(60):
            session.free_graphs()
            model.generate(**prompt_of("llama"), max_new_tokens=20 + call % 3, do_sample=False)
            reserved.append(torch.cuda.memory_reserved())
    assert reserved[-1] <= reserved[2] + 2**22


def test_graphs_that_are_gone_give_their_memory_back() -> None:
    model, held = new_model("llama").cuda(), []
    for _ in range(3):  # the first call makes what libraries keep
        with duotone.enable(model, MIXED) as session:
            model.generate(**prompt_of("llama"), max_new_tokens=20, do_sample=False)
            assert session.graph_bytes() > 0
        session.cache = None
        session.free_graphs()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[1] == held[2]


def test_a_model_that_asks_the_host_runs_step_by_step() -> None:
    model, given = new_model("llama").cuda(), prompt_of("llama")
    model.model.layers[0].mlp = Asks(model.model.layers[0].mlp)
    with warnings.catch_warnings(), growing(), duotone.enable(model, MIXED):
        warnings.simplefilter("ignore", SlowPathWarning)
        theirs = model.generate(**given, max_new_tokens=40, do_sample=False)
    with duotone.enable(model, MIXED), pytest.warns(SlowPathWarning, match="cannot be captured"):
        ours = model.generate(**given, max_new_tokens=40, do_sample=False)
    assert torch.equal(ours, theirs)
    del model.model.layers[0].mlp
    after = new_model("llama").cuda()
    with duotone.enable(after, MIXED):  # the device goes on working
        assert after.generate(**given, max_new_tokens=40, do_sample=False).shape[1] == 63


def test_a_step_that_is_not_captured_leaves_random_numbers_alone() -> None:
    model, given, drawn = new_model("llama").cuda(), prompt_of("llama"), []
    model.model.layers[0].mlp = Asks(model.model.layers[0].mlp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        for graphs in (True, False):
            with duotone.enable(model, MIXED, graphs=graphs):
                torch.manual_seed(7)
                drawn.append(model.generate(**given, max_new_tokens=40, do_sample=True))
                drawn.append(torch.rand(3, device="cuda"))
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])


class Draws(nn.Module):
    """A layer that draws numbers at every step, as dropout does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 0.01 * torch.randn_like(x)


def test_a_model_that_draws_numbers_runs_step_by_step() -> None:
    model, given, answers = new_model("llama").cuda(), prompt_of("llama"), []
    model.model.layers[0].mlp = Draws(model.model.layers[0].mlp)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        for graphs in (True, False):
            with duotone.enable(model, MIXED, graphs=graphs):
                torch.manual_seed(7)
                answers.append(model.generate(**given, max_new_tokens=40, do_sample=False))
    assert torch.equal(*answers)


def test_threads_sample_and_train_while_steps_are_captured() -> None:
    failures: list[BaseException] = []
    over = threading.Event()

    def sample(seed: int) -> None:
        try:
            model = new_model("llama").cuda()
            for _ in range(6):
                with duotone.enable(model, MIXED) as session:
                    session.free_graphs()
                    model.generate(**prompt_of("llama"), max_new_tokens=30, do_sample=True)
        except BaseException as error:
            failures.append(error)

    def train() -> None:
        try:
            layer = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).cuda()
            while not over.is_set():
                layer(torch.rand(8, 64, device="cuda")).sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sample, args=(seed,)) for seed in range(3)]
    trainer = threading.Thread(target=train)
    for thread in (*threads, trainer):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    trainer.join()
    assert not failures, failures


def test_a_model_that_moved_and_came_back_is_captured_anew(captures: list[CudaGraph]) -> None:
    model, given, answers = new_model("llama").cuda(), prompt_of("llama"), []
    with duotone.enable(model, MIXED):
        for _ in range(2):
            answers.append(model.generate(**given, max_new_tokens=40, do_sample=False))
            model.cpu()
            torch.cuda.empty_cache()
            filler = torch.full((1 << 22,), float("nan"), device="cuda")
            model.cuda()
            del filler
    assert torch.equal(*answers)


def test_a_model_under_torch_compile_decodes_as_without_it() -> None:
    model, given = new_model("llama").cuda(), prompt_of("llama")
    call = {"max_new_tokens": 8, "do_sample": False}
    with warnings.catch_warnings(), duotone.enable(model, MIXED):
        warnings.simplefilter("ignore", SlowPathWarning)
        plain = model.generate(**given, **call)
        model.compile(backend="eager")
        assert torch.equal(model.generate(**given, **call), plain)


def test_replays_go_on_where_all_workspaces_are_cleared() -> None:
    """As by any module that Inductor compiles with graphs of its own."""
    model, given, answers = new_model("llama").bfloat16().cuda(), prompt_of("llama"), []
    with duotone.enable(model, MIXED):
        for _ in range(3):
            answers.append(model.generate(**given, max_new_tokens=40, do_sample=False))
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
            others = [torch.full((1 << 18,), 7, dtype=torch.int32).cuda() for _ in range(60)]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])
    assert all((x == 7).all() for x in others)


@pytest.mark.parametrize("more", [0, 3], ids="{} tokens of the user".format)
def test_a_later_turn_thaws_and_freezes_again(captures: list[CudaGraph], more: int) -> None:
    """more: tokens beside the last one, which the first call has not cached."""
    model, given, turns = exact_model("internvl").cuda(), prompt_of("internvl"), []
    given = typed(model, given)
    try:
        for graphs in (True, False):
            cache = duotone.QuantizedCache(model, MIXED)
            path = nullcontext() if graphs else growing()
            with rounding_as(model.dtype), path, duotone.enable(model, MIXED):
                call = {"past_key_values": cache, "max_new_tokens": 70, "do_sample": False}
                first = model.generate(**given, **call)
                ids = torch.cat([first, first[:, first.shape[1] - more :]], 1)
                mask = torch.cat([given["attention_mask"], ids.new_ones(2, 70 + more)], 1)
                call |= {"input_ids": ids, "attention_mask": mask}
                turns.append(model.generate(**call))
        assert torch.equal(*turns)
        assert len(captures) >= 3
    finally:
        model.cpu()
