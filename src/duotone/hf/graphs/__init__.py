"""Decode steps as replays of CUDA graphs."""
