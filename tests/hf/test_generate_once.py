"""`generate` in a process of its own: nothing that an earlier call left behind helps it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from generate_once import check_same

SCRIPT = Path(__file__).with_name("generate_once.py")
WAYS = ("enable", "growing")


def run(way: str, device: str) -> str:
    """Output of the script. Errors: AssertionError with its complaint."""
    command = [sys.executable, str(SCRIPT), way, device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("way", [*WAYS, "cuda"])
def test_a_fresh_process_generates_on_a_gpu(way: str) -> None:
    assert run(way, "cuda").startswith("same")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_fresh_process_generates_on_a_cpu(way: str) -> None:
    assert run(way, "cpu").startswith("same")


def test_another_answer_shows() -> None:
    logits = torch.tensor([[9.0, 8.9, 0.0, 0.0, 0.0], [9.0, 1.0, 0.0, 0.0, 0.0]])
    right = (torch.tensor([0, 0]), logits)
    check_same(right, right)
    check_same((torch.tensor([1, 3]), logits), right)  # a near tie; what follows is another text
    with pytest.raises(AssertionError, match="step 1: 1, not 0"):
        check_same((torch.tensor([0, 1]), logits), right)
    with pytest.raises(AssertionError, match="logits differ"):
        check_same((torch.tensor([0, 0]), logits + torch.tensor([0.0, 0, 0, 0, 3])), right)
