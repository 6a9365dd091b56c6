"""Decode steps of a `StaticDecoder`, begun as `hf.graphs.decode_steps` begins them."""

from duotone.attention.static import StaticDecoder


def begin(at: StaticDecoder) -> None:
    """Flush where it is due, and make room for one token per sequence."""
    if at.starts_with_flush():
        at.flush()
    at.advance()
    at.steps += 1
