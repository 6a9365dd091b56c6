"""Host code of packing a stream of text, without a GPU: nothing is launched."""

import ctypes

import pytest
import torch
from no_launches import leave_out_launches
from no_questions import NoQuestions
from parts_cases import LAYERS
from stream_cases import NAMES, STEPS, STREAMS, Conversation

import duotone
from duotone.attention.cuda.groups.pack import SCALE_TOO_LARGE
from duotone.cache.pair import PackedPair

# Operations of torch in a layer that make no view: of the stream, and of pictures in two parts too.
MOST = {"stream": 24, "mixed": 76, "classes": 60}
TWO = "stream@2, 96 recent"


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", STREAMS)
def test_layers_after_the_second_ask_the_host_nothing(policy, name, step, monkeypatch) -> None:
    launches = leave_out_launches(monkeypatch)
    given = Conversation(STREAMS[policy], name, STEPS[step])
    assert any(given.leaving)
    given.apply(range(2))
    kind = policy.replace(",", "@").split("@")[0]
    kernel = "class_pack" if kind == "classes" else "group_pack"
    before = launches.count(kernel)
    with NoQuestions() as layers:
        given.apply(range(2, LAYERS))
    assert launches.count(kernel) == before + LAYERS - 2
    assert all(store.stream.records is not None for store in given.stores)
    assert layers.computed <= MOST[kind] * (LAYERS - 2)


def test_a_prompt_leaves_whole_and_odd_groups_of_64_tokens() -> None:
    """Both kinds are among the cases above."""
    given = [Conversation(STREAMS[policy], name, None) for policy in STREAMS for name in NAMES]
    odd = {tokens % 64 > 0 for prompt in given for tokens in prompt.leaving}
    assert odd == {False, True}


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scale of a stream is too large."""

    def launch(name, given) -> None:
        if name == "group_pack":
            ctypes.c_int.from_address(given.overflow).value = SCALE_TOO_LARGE

    leave_out_launches(monkeypatch, launch)


@pytest.mark.usefixtures("too_large")
def test_scales_beyond_fp16_show_at_the_end_of_the_step() -> None:
    given = Conversation(STREAMS[TWO], "one", None)
    given.apply(range(LAYERS))
    with pytest.raises(ValueError, match="K or V of the text stream"):
        given.checks.settle()


@pytest.mark.usefixtures("too_large")
def test_scales_beyond_fp16_are_left_to_torch_where_no_step_checks_later() -> None:
    """Torch raises with the place of the number."""
    given = Conversation(STREAMS[TWO], "one", None)
    given.key[0, 0, 700, 3] = torch.inf
    with pytest.raises(ValueError, match="got inf at index"):
        given.stores[0].apply(given.plan, given.key, given.value)


@pytest.mark.usefixtures("too_large")
def test_scales_that_the_kernel_alone_cannot_hold_are_left_to_torch(monkeypatch) -> None:
    """Torch takes them, so the layer waits and the step goes on."""
    packed, pack = [], PackedPair.pack
    monkeypatch.setattr(PackedPair, "pack", lambda *given: packed.append(given) or pack(*given))
    given = Conversation(duotone.scheme("innerq"), "one", None)
    given.apply(range(LAYERS))
    given.checks.settle()
    assert len(packed) == LAYERS
