"""Weights of transformers models: maps of linears and norms, checkpoints, orders of rows."""
