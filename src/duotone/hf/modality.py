"""Former name of `duotone.hf.weights.modality`."""

from duotone.hf.weights.modality import announced as announced
