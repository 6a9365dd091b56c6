"""duotone-tiny as vLLM loads it."""

import shutil
from pathlib import Path

from duotone.models import duotone_tiny_path


def served_tiny(folder: Path) -> Path:
    """A copy of duotone-tiny whose pictures have one name before and after they are expanded.

    vLLM 0.33 asks a processor for that name and puts it into prompts.
    """
    shutil.copytree(duotone_tiny_path(), folder)
    for name in ("processor_config.json", "chat_template.jinja"):
        path = folder / name
        path.write_text(path.read_text().replace("<image>", "<IMG_CONTEXT>"))
    return folder


def prompt_of(question: str) -> str:
    """A question about one picture, as the chat template of `served_tiny` has it."""
    return f"<|im_start|>user\n<IMG_CONTEXT>\n{question}<|im_end|>\n<|im_start|>assistant\n"
