"""Text tasks: GSM8K, TruthfulQA and LongBench from files or the hub, passages for perplexity."""

from .passages import Passages, read_passages
from .registry import TEXT_TASKS, text_task

__all__ = ["TEXT_TASKS", "Passages", "read_passages", "text_task"]
