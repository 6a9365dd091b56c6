import copy

import pytest
import torch

from benchmarks.mquant.outliers import grow_outliers
from duotone.hf.weights.weight_maps import weight_map
from duotone.loading import visual_mask
from duotone.weights.equivalences.module_map import at

from families import tiny_model
from mquant_setups import tiny_data, tiny_loaded


def test_outliers_change_no_logit_and_stand_out_at_visual_tokens():
    loaded = tiny_loaded()
    data, grown = tiny_data(loaded), copy.deepcopy(loaded.model)
    channels = grow_outliers(grown, data.batches, 64, channels=2)
    blocks = weight_map(grown).stream("language").blocks
    assert [len(of_layer) for of_layer in channels] == [2] * len(blocks)
    batch, seen = data.batches[0], []
    keep = at(grown, blocks[0].mlp_output).register_forward_pre_hook(
        lambda _, args: seen.append(args[0].flatten(0, 1).abs())
    )
    with torch.no_grad():
        assert torch.equal(grown(**batch).logits, loaded.model(**batch).logits)
    keep.remove()
    visual = visual_mask(grown.config, batch["input_ids"]).flatten()
    others = torch.ones(seen[0].shape[1], dtype=torch.bool)
    others[channels[0]] = False
    assert seen[0][visual][:, ~others].max() > 10 * seen[0][:, others].max()


def test_other_factors_and_fused_gates_are_refused():
    loaded = tiny_loaded()
    with pytest.raises(ValueError, match="power of two"):
        grow_outliers(loaded.model, [], 3)
    with pytest.raises(ValueError, match="power of two"):
        grow_outliers(loaded.model, [], 0)
    with pytest.raises(ValueError, match="gate_up_proj"):
        grow_outliers(tiny_model("glm4v"), [], 2)
