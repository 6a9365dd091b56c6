"""Two unrelated pictures in one prompt: each question names its picture.

Trains a model to look at the right one of several images in a conversation.
"""

from dataclasses import replace
from random import Random

from duotone.tasks.synthetic import documents, scenes
from duotone.tasks.synthetic.sample import Sample, Turn


def generate(seed: int) -> Sample:
    """Return two pictures, scene or document, and six questions about either."""
    rng = Random(seed)
    makers = [rng.choice((documents, scenes)) for _ in range(2)]
    parts = [maker.generate(seed + 7919 * i) for i, maker in enumerate(makers)]
    turns = [
        Turn(f"In the {name} picture: {turn.question}", turn.answers, "pair")
        for name, part in zip(("first", "second"), parts, strict=True)
        for turn in part.turns
        if turn.kind not in ("transcript", "caption")
    ]
    rng.shuffle(turns)
    images = [part.images[0] for part in parts]
    marks = [replace(mark, picture=i) for i, part in enumerate(parts) for mark in part.marks]
    return Sample(images, turns[:6], parts[0].objects | parts[1].objects, marks)
