"""Write the bundled demo pictures: held-out seeds that the 16-bit model answers in full.

PYTHONPATH=src python training/examples.py src/duotone/examples
"""

import json
import sys
from pathlib import Path

from duotone.tasks.synthetic import documents, scenes, sequences

DEMOS = {
    "scene": (scenes, 1_500_000_015, ("scene.png",)),
    "document": (documents, 1_500_000_033, ("document.png",)),
    "frames": (sequences, 1_500_000_001, tuple(f"frame{i}.png" for i in range(1, 5))),
}


def main(folder: Path) -> None:
    """Write the pictures and `examples.json`: files, seed, questions with accepted answers."""
    folder.mkdir(parents=True, exist_ok=True)
    examples = {}
    for name, (generator, seed, files) in DEMOS.items():
        sample = generator.generate(seed)
        for picture, file in zip(sample.images, files, strict=True):
            picture.save(folder / file, optimize=True)
        turns = [turn for turn in sample.turns if turn.kind != "transcript"]
        examples[name] = {
            "files": files,
            "seed": seed,
            "questions": [{"question": t.question, "answers": t.answers} for t in turns],
        }
    (folder / "examples.json").write_text(json.dumps(examples, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
