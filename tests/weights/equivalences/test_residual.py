import pytest
import torch

from duotone.weights.equivalences.norms import RMSNorm
from duotone.weights.equivalences.online import RotatedInput, rotate_input, rotate_values
from duotone.weights.equivalences.residual import rotate_branch_inputs, rotate_stream

from exactly import FP32, assert_same, scramble
from post_norm import PostNormEncoder, stream_of


def encoder(dtype=torch.float64):
    torch.manual_seed(0)
    model = scramble(PostNormEncoder()).to(dtype)
    return model, torch.randn(2, 3, 8, 8, dtype=dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, FP32)])
def test_post_norm_encoder_keeps_its_output(dtype, tolerance):
    model, pixels = encoder(dtype)
    expected = model(pixels)
    stream = stream_of(model)
    rotate_branch_inputs(model, stream)
    for block in stream.blocks:
        rotate_values(model, block)
        rotate_input(model, block.mlp_output)
    assert_same(model(pixels), expected, tolerance)
    block = model.blocks[0]
    assert isinstance(block.input_layernorm, RMSNorm)
    assert block.input_layernorm.bias is not None
    assert all(isinstance(x, RotatedInput) for x in (block.qkv, block.fc1, block.fc2))


def test_its_stream_cannot_be_turned():
    model, _ = encoder()
    with pytest.raises(ValueError, match="use rotate_branch_inputs"):
        rotate_stream(model, stream_of(model))
