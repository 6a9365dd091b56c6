"""Conversations of all families by real CUDA graphs, greedy and sampled."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from replay_double import growing
from small_specs import MIXED
from test_conversations import DENSE, NAMES, conversation, of_its_own, turn_of
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec
from duotone.hf.graphs.kept_steps import KeptSteps
from duotone.tools.slow_paths import SlowPathWarning

from exactly import rounding_as
from families import exact_model, logit_error

pytestmark = pytest.mark.gpu
NEAR = 1e-6


def said(model: PreTrainedModel, name: str, spec: CacheSpec, graphs: bool, sampled: bool) -> Tensor:
    settings = {"do_sample": True, "temperature": 1.3} if sampled else {}
    path = nullcontext() if graphs else growing()
    with rounding_as(model.dtype), path, duotone.enable(model, spec), warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        torch.manual_seed(3)
        return conversation(name, turn_of(model, **settings), None)


@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_say_the_same(name: str) -> None:
    """Captured 16 bit says as the own cache does, captured few bits as steps one by one do."""
    model = exact_model(name).cuda()
    try:
        with rounding_as(model.dtype):
            own = of_its_own(name)
        assert logit_error(said(model, name, DENSE, True, False), own) < NEAR
        for sampled in (False, True):
            ours = said(model, name, MIXED, True, sampled)
            assert KeptSteps.of(model).nbytes > 0
            assert logit_error(ours, said(model, name, MIXED, False, sampled)) < NEAR
    finally:
        model.cpu()
