"""Measurements on a GPU: how kernels and generation compare with the fastest 16-bit ones.

Nothing here is needed to use a quantized cache. Result files carry their provenance
(`duotone.report.provenance`); `duotone.report` renders tables and pictures from them.
"""
