"""Rules for decode steps by CUDA graphs that no other test of `enable` meets."""

import pytest
import torch

from duotone.hf.graphs import rules
from duotone.hf.model.text_attention import NAME

from families import new_model


def test_a_model_that_is_offloaded_as_a_whole_has_no_fixed_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "text_implementation", lambda model: NAME)
    model = new_model("llama").to("meta")
    reason = rules.reason_against_buffers(model, torch.device("meta"))
    assert "weights" in str(reason)
    assert str(reason).endswith("they are on meta")
