"""Launches go to the stream that torch calls current."""

import torch
from cuda_device import NEEDS_KERNELS

from duotone.tools.devices import stream_handle

pytestmark = NEEDS_KERNELS


def test_a_handle_is_the_current_stream_s() -> None:
    own = torch.cuda.Stream()
    assert stream_handle(0) == torch.cuda.current_stream(0).cuda_stream
    with torch.cuda.stream(own):
        assert stream_handle(0) == own.cuda_stream
    assert stream_handle(0) != own.cuda_stream
