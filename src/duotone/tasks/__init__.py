"""Tasks: examples with pictures, prompts as chat messages, metrics over texts.

Knows no model, no cache and no other room of duotone.
"""

from .pictures import open_picture
from .registry import TASKS, folder_task, get_task
from .task import METRICS, Example, Task

__all__ = ["METRICS", "TASKS", "Example", "Task", "folder_task", "get_task", "open_picture"]
