"""A decoder that a CPU decodes with, and specs of all kinds of stores."""

import torch

import duotone
from duotone.planning.shapes import DecoderShape, Load

CPU = torch.device("cpu")
TINY = DecoderShape("tiny", 3, 32, 4, 2, 32, 64, 97, element_bytes=4)
LOAD = Load(visual=70, prompt=20, new=90)
SPECS = {
    "minmax": duotone.scheme("minmax", bits=1),
    "calibquant": duotone.scheme("calibquant"),
    "kivi": duotone.scheme("kivi", bits=2).replace(recent=16),
    "mixed": duotone.scheme("kivi", bits=2).replace(
        recent=16, visual=duotone.scheme("minmax").visual
    ),
    "sinks": duotone.scheme("innerq").replace(recent=16, sink=4),
    "xquant": duotone.scheme("xquant", km=1, vm=1).replace(recent=16),
    "dense containers": duotone.scheme("dense"),
}
