"""Transforms of a model that keep its outputs: norms, rotations, orders of rows."""
