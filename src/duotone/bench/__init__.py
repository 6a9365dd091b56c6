"""Measurements on a GPU: how kernels and generation compare with the fastest 16-bit ones.

Nothing here is needed to use a quantized cache. Result files carry where they came from
(`duotone.report.provenance`); tables are rendered from them (`duotone.report`), plots by `bench.plots`.
"""
