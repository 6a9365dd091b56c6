"""Members of the zoo with few layers, where a test is of what each layer does alike."""

from dataclasses import replace
from typing import Any

from training.zoo.members import MEMBERS, Member

LAYERS = 3


def short(name: str, **shape: Any) -> Member:
    """Return a member of three layers. shape: changes of its first shape."""
    member = MEMBERS[name]

    def config(side: int) -> Any:
        made = member.config(side)
        text = made.text_config
        text.num_hidden_layers = LAYERS
        if name == "gemma3":
            text.layer_types = text.layer_types[1 : 1 + LAYERS]  # of both sorts
        return made

    return replace(member, config=config, shapes=(replace(member.shapes[0], **shape),))
