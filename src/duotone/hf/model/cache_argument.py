"""The name by which models and `generate` take a cache, and give it back.

transformers 5.24 calls it `cache`, and takes the name before with a warning.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin

NAMES = ("cache", "past_key_values")
_TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The one of the installed transformers.
CACHE = next(name for name in NAMES if name in _TAKEN)


def given_cache(given: Mapping[str, Any]) -> Any:
    """The cache among named arguments, under either name; None where there is none."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)
