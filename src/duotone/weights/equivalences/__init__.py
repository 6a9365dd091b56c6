"""Transforms of a model that leave its outputs as they are: norms, rotations, orders of rows."""
