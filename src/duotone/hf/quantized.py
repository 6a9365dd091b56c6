"""Former name of `duotone.hf.weights.checkpoint`."""

from duotone.hf.weights.checkpoint import load as load
from duotone.hf.weights.checkpoint import save as save
