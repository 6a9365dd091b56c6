"""Former name of `duotone.hf.weights.reorder`."""

from duotone.hf.weights.reorder import visual_first as visual_first
