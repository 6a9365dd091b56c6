"""Decode attention on short spans in canonical order."""
