"""Tasks: examples with pictures or text alone, metrics over texts, passages for perplexity.

Knows no model, no cache and no other room of duotone.
"""

from .pictures import open_picture
from .registry import MADE_UP, TASKS, WRITTEN, folder_task, get_task
from .task import METRICS, Example, Task
from .text import Passages, read_passages

__all__ = [
    "MADE_UP",
    "METRICS",
    "TASKS",
    "WRITTEN",
    "Example",
    "Passages",
    "Task",
    "folder_task",
    "get_task",
    "open_picture",
    "read_passages",
]
