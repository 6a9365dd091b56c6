"""Threads that run one quantized model wait for each other, and never for a step that is gone."""

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn

from duotone.hf.weights import turns
from duotone.hf.weights.modality import VisualRows
from duotone.hf.weights.turns import Turns
from duotone.weights.modules.modality import Modality

from families import inputs, new_model


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns, self.inside, self.most = Turns(), 0, 0

    def forward(self):
        self.turns.begin(self)
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.02)
        self.inside -= 1
        self.turns.end()


def in_threads(work, count=4):
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.005)


def test_steps_follow_each_other():
    module = Slow()
    in_threads(module)
    assert module.most == 1
    assert not module.turns.is_mine


def test_an_interrupted_step_keeps_nobody_waiting():
    module = Slow()
    module.turns.begin(module)  # and never ended
    in_threads(module)
    assert module.most == 1
    module.turns.begin(module)
    module.turns.begin(module)  # its own thread goes on
    module()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_have_their_own(copied):
    module = Slow()
    module.turns.begin(module)
    assert not copied(module.turns).is_mine


def test_a_models_steps_see_their_own_pictures():
    model = new_model("internvl")
    modality, seen = Modality(), []
    rows = VisualRows.attach(model, modality)
    prompts = [inputs("internvl", [["image", 5]]), inputs("internvl", [[7]])]

    def listen(module, args, kwargs):
        time.sleep(0.01)
        seen.append((kwargs["inputs_embeds"].shape[1], modality.visual is not None))

    model.get_decoder().register_forward_pre_hook(listen, with_kwargs=True)
    lengths = [given["input_ids"].shape[1] for given in prompts]
    threads = [threading.Thread(target=lambda given=given: model(**given)) for given in prompts * 3]
    with torch.no_grad():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    masked = {length: {told for tokens, told in seen if tokens == length} for length in lengths}
    assert len(seen) == 6
    assert masked[lengths[0]] == {True}
    with pytest.raises(ValueError, match="inputs_embeds alone"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    assert not rows._turns.is_mine
    rows.detach(model)
