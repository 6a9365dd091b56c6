"""Without a GPU, Triton kernels run in its interpreter: to be chosen before the import."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
