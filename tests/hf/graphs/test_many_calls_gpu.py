"""Many calls of every kind on a model that changes: captures are right, and memory stays."""

import gc
import random
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone.tools.slow_paths import SlowPathWarning

from families import inputs, new_model

pytestmark = pytest.mark.gpu
SPEC = duotone.scheme("duotone-mixed", bits=2)
CALLS, WARM, FLAT_BYTES = 300, 60, 20 * 2**20


def with_adapters(model: PreTrainedModel) -> Any:
    """The model in PEFT's wrapper with adapters "one" and "two", which change its answers."""
    peft = pytest.importorskip("peft")
    # PEFT asks transformers for something by its former name.
    warnings.simplefilter("ignore", FutureWarning)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config, adapter_name="one")
    wrapped.add_adapter("two", config)
    return wrapped


def change(wrapped: Any, model: PreTrainedModel, dice: random.Random) -> None:
    """Do one of the things that people do to a model between two calls, or nothing."""
    kind = dice.choice(["none", "none", "none", "adapter", "scale", "reload"])
    if kind == "adapter":
        wrapped.set_adapter(dice.choice(["one", "two"]))
    elif kind == "scale":
        model.model.layers[1].self_attn.scaling *= dice.choice([0.8, 1.25])
    elif kind == "reload":
        name = "model.layers.0.mlp.up_proj.weight"
        shift = 0.01 * dice.choice([-1, 1])
        state = {n: x.clone() + shift * (n == name) for n, x in model.state_dict().items()}
        model.load_state_dict(state, assign=True)


def logits(model: PreTrainedModel, given: dict[str, Tensor], new: int, graphs: bool) -> Tensor:
    with duotone.enable(model, SPEC, graphs=graphs):
        call = {"max_new_tokens": new, "do_sample": False, "output_logits": True}
        return torch.stack(model.generate(**given, **call, return_dict_in_generate=True).logits)


@pytest.mark.parametrize("samplers", [0, 2])
def test_calls_of_a_changing_model_are_those_without_graphs(samplers: int) -> None:
    """samplers: threads that sample from another model meanwhile."""
    model, dice, reserved = new_model("llama").cuda(), random.Random(samplers), []
    with warnings.catch_warnings():
        wrapped = with_adapters(model)
    over, failures = threading.Event(), []
    other = new_model("llama").cuda()

    def sample(seed: int) -> None:
        try:
            while not over.is_set():
                with duotone.enable(other, SPEC):
                    prompt = {n: x.cuda() for n, x in inputs("llama", [[30 + seed]]).items()}
                    other.generate(**prompt, max_new_tokens=20, do_sample=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sample, args=(seed,)) for seed in range(samplers)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        for thread in threads:
            thread.start()
        try:
            for call in range(CALLS // (4 if samplers else 1)):
                change(wrapped, model, dice)
                rows = [[dice.randint(20, 200)] for _ in range(dice.randint(1, 4))]
                given = {n: x.cuda() for n, x in inputs("llama", rows, seed=call).items()}
                new = dice.randint(4, 24)
                ours, plain = (logits(model, given, new, graphs) for graphs in (True, False))
                assert torch.equal(ours, plain), call
                del given, ours, plain
                gc.collect()
                reserved.append(torch.cuda.memory_reserved())
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert not failures, failures
    if not samplers:
        assert max(reserved[WARM:]) - min(reserved[WARM:]) <= FLAT_BYTES
