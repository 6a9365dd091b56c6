"""Schemes for callers that name none, as NAME@BITS.

The one place of these names: `recommend`, `enable` without a spec and commands read them here.
"""

# Visual tokens of a model alone, text in 16 bit.
PICTURES = "duotone@1"
# Visual tokens, text and generated tokens of a model that takes pictures.
CONVERSATIONS = "duotone-mixed@4"
# All tokens of a text model; of any other one, visual tokens in the same stream.
TEXT = "duotone-stream@2"


def name_of(scheme: str) -> str:
    """The name in NAME@BITS."""
    return scheme.partition("@")[0]
