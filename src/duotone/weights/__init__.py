"""Weights and activations on few bits: what makes a linear layer cheap without changing a model.

This room knows tensors and `torch.nn` modules, never transformers: which module plays which part
is told by `weights.structure`, and `hf.weight_maps` fills that in per family.
"""
