"""Comparison of the same questions through a 16-bit and a few-bit cache."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duotone.inference.batch import (
    Batch,
    SeenPictures,
    ask_later,
    decode_answers,
    encode,
    generate,
    make_cache,
    prepare,
    share_pictures,
)
from duotone.inference.calibrated import calibration_data
from duotone.inference.memory import cache_memory, total_memory
from duotone.loading import Loaded
from duotone.tasks import open_picture

EXAMPLES = Path(__file__).parents[1] / "examples"
DEFAULT_QUESTION = "Describe the picture."


@dataclass(frozen=True)
class Prompt:
    """One question about one or more pictures, shown under `picture`."""

    picture: str
    images: tuple[Path, ...]
    question: str

    def messages(self) -> list[dict[str, Any]]:
        """The chat conversation; raises ValueError for a file that is no picture."""
        pictures = [{"type": "image", "image": open_picture(path)} for path in self.images]
        return [{"role": "user", "content": [*pictures, {"type": "text", "text": self.question}]}]


def prompts_of(images: Sequence[str | Path], questions: Sequence[str]) -> list[Prompt]:
    """Every question about every picture, one picture per prompt."""
    return [
        Prompt(Path(image).name, (Path(image),), question)
        for image in images
        for question in (questions or [DEFAULT_QUESTION])
    ]


def bundled_prompts() -> list[Prompt]:
    """The questions that ship with the package."""
    entries = json.loads((EXAMPLES / "examples.json").read_text(encoding="utf-8"))
    return [
        Prompt(name, tuple(EXAMPLES / file for file in entry["files"]), asked["question"])
        for name, entry in entries.items()
        for asked in entry["questions"]
    ]


@dataclass(frozen=True)
class Answer:
    """One row: the answers of both caches."""

    picture: str
    question: str
    reference: str
    answer: str

    @property
    def same(self) -> bool:
        """True if the texts are equal."""
        return self.reference == self.answer


@dataclass(frozen=True)
class Comparison:
    """All answers with their bytes and times.

    memory: the few-bit caches of all answers summed (fields of MemoryReport).
    ms_per_token: median over answers of the time between tokens, prefill left out; on `device`.
    calibrated_on: the data of the spec's bases; "" for a spec without bases.
    """

    model: str
    device: str
    scheme: str
    spec: dict[str, Any]
    later_question: bool
    answers: list[Answer]
    memory: dict[str, float]
    reference_ms_per_token: float | None
    ms_per_token: float | None
    parameters: int = 0
    calibrated_on: str = ""

    @property
    def bits(self) -> float:
        """The papers' count of bits."""
        return self.memory["nominal_bits"]

    @property
    def same_answers(self) -> int:
        """Number of answers equal to the 16-bit answers."""
        return sum(answer.same for answer in self.answers)

    def ratio(self, part: str) -> float:
        """16-bit bytes over few-bit bytes of 'visual' or 'total'."""
        dense = {"visual": "visual_dense_equivalent_bytes", "total": "dense_equivalent_bytes"}
        stored = self.memory[f"{part}_bytes"]
        return self.memory[dense[part]] / stored if stored else 1.0

    def asked(self) -> str:
        """The questions, the pictures and the model in plain words."""
        pictures = list(dict.fromkeys(answer.picture for answer in self.answers))
        count = len(self.answers)
        size = f", {self.parameters / 1e6:,.1f} M parameters" if self.parameters else ""
        return (
            f"{count} question{'' if count == 1 else 's'} about {', '.join(pictures)}, "
            f"answered by {self.model}{size}."
        )

    def sentence(self) -> str:
        """The outcome in plain words."""
        same = f"{self.same_answers} of {len(self.answers)} answers are word for word the same"
        if self.memory["visual_bytes"]:
            saved = f"The pictures' cache is {self.ratio('visual'):.1f}x smaller"
        else:
            saved = f"The cache is {self.ratio('total'):.1f}x smaller"
        width = f"{self.bits:.2g}"
        bits = f"{width} bit{'' if width == '1' else 's'}"
        calibrated = f" Calibrated on {self.calibrated_on}." if self.calibrated_on else ""
        return f"{saved} at {bits}, and {same}.{calibrated}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe data with every number of the table and the summary."""
        data = asdict(self)
        data["answers"] = [asdict(answer) | {"same": answer.same} for answer in self.answers]
        return data | {
            "same_answers": self.same_answers,
            "visual_ratio": self.ratio("visual"),
            "total_ratio": self.ratio("total"),
            "sentence": self.sentence(),
        }


def check_scheme_fits(loaded: Loaded, spec: Any, has_images: bool) -> None:
    """Raise if a scheme does not fit the model, or would find no visual tokens to quantize."""
    from duotone.hf.model.fitting import fitting_facts

    if spec.text == "dense" and spec.visual != "dense":
        _check_pictures(loaded, has_images)
    if has_images and not loaded.takes_images:
        raise ValueError(
            f"pictures need a multimodal model, got {loaded.name!r}, which takes text only; choose "
            "another --model"
        )
    fitting_facts(loaded.model, spec)


def _check_pictures(loaded: Loaded, has_images: bool) -> None:
    rule = "this scheme quantizes visual tokens only"
    remedy = "pick a scheme that also quantizes text (duotone schemes), e.g. --scheme kivi"
    if not loaded.takes_images:
        family = loaded.model.config.model_type
        raise ValueError(
            f"{rule}, so the model must take pictures, got {loaded.name!r} ({family}), which has "
            f"no visual tokens; use a multimodal model, or {remedy}"
        )
    if not has_images:
        raise ValueError(f"{rule}, got a prompt without a picture; add --image, or {remedy}")


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


class _Side:
    """One cache's answers, times and bytes."""

    def __init__(self, loaded: Loaded, spec: Any, max_new_tokens: int):
        self.loaded, self.spec, self.max_new_tokens = loaded, spec, max_new_tokens
        self.texts: list[str] = []
        self.times_ms: list[float | None] = []
        self.memory: list[dict[str, float]] = []

    def answer(self, batch: Batch) -> None:
        """Answer a batch of one."""
        cache = make_cache(self.loaded.model, self.spec, batch)
        done = generate(self.loaded.model, batch, cache, self.max_new_tokens, timed=True)
        self.times_ms.append(done.ms_per_token)
        self.memory.append(cache_memory(cache))
        self.texts += decode_answers(self.loaded.processor, done.token_ids)


def compare(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    specs: Mapping[str, Any],
    max_new_tokens: int = 64,
    progress: Callable[[int, int], None] | None = None,
    *,
    later_question: bool = False,
) -> list[Comparison]:
    """Answer every prompt from a 16-bit cache, once for all, and from one of each {name: spec}.

    progress: called with (prompts done, prompts in all).
    later_question: read the question after the pictures' cache was quantized (`ask_later`).
    """
    if not prompts:
        raise ValueError("compare needs at least one prompt, got none; give a picture")
    for spec in specs.values():
        check_scheme_fits(loaded, spec, all(prompt.images for prompt in prompts))
    reference = _Side(loaded, None, max_new_tokens)
    sides = {name: _Side(loaded, spec, max_new_tokens) for name, spec in specs.items()}
    batches = _batches(loaded, prompts, later_question)
    for done, batch in enumerate(batches, start=1):
        for side in (reference, *sides.values()):
            side.answer(batch)
        if progress:
            progress(done, len(prompts))
    return [
        _comparison(name, prompts, reference, side, later_question) for name, side in sides.items()
    ]


def _batches(loaded: Loaded, prompts: Sequence[Prompt], later_question: bool) -> Iterator[Batch]:
    """Batches of one. Questions about the same pictures share computed features."""
    seen, previous = SeenPictures(), None
    for messages in [prompt.messages() for prompt in prompts]:
        batch = prepare(loaded.model, encode(loaded.processor, [messages]), seen)
        if later_question:
            batch = previous = share_pictures(ask_later(batch), previous)
        yield batch


def _comparison(
    scheme: str,
    prompts: Sequence[Prompt],
    reference: _Side,
    quantized: _Side,
    later_question: bool,
) -> Comparison:
    texts = zip(prompts, reference.texts, quantized.texts, strict=True)
    return Comparison(
        model=quantized.loaded.name,
        device=quantized.loaded.model.device.type,
        scheme=scheme,
        spec=quantized.spec.to_dict(),
        later_question=later_question,
        answers=[Answer(p.picture, p.question, theirs, ours) for p, theirs, ours in texts],
        memory=total_memory(quantized.memory),
        reference_ms_per_token=_median(reference.times_ms),
        ms_per_token=_median(quantized.times_ms),
        parameters=quantized.loaded.model.num_parameters(),
        calibrated_on=calibration_data(quantized.spec),
    )
