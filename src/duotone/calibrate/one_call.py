"""`duotone.calibrated`: from a model to the spec of whole conversations in one call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from duotone.hf.model.attentions import attentions
from duotone.hf.model.facts import ModelFacts, model_facts
from duotone.hf.model.fitting import check_is_model
from duotone.hf.model.identity import is_in_memory
from duotone.hf.session import is_enabled
from duotone.inference.batch import encode
from duotone.inference.prompts import tokenizer_of
from duotone.loading import Loaded, visual_mask
from duotone.quant import CacheSpec
from duotone.tasks import MADE_UP
from duotone.tools.digest import digest
from duotone.tools.tensor_file import damage_named

from .data import SPLIT, calibration_data, usual_samples
from .files import files_of, write
from .kept import folder_of, read, writing
from .moments import output_weight
from .run import check_settings
from .settings import TEXT_BITS, Settings
from .whole import End, data_of_words, heldout_of, silent, whole
from .written import Written, never_written

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEEN = 3  # made-up samples that a processor is known by: one of each kind of pictures
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class _Asked:
    """Settings of pictures, or of a text model's stream; words: of text next to pictures."""

    task: Any
    settings: Settings
    words: Settings | None


def calibrated(
    model: PreTrainedModel,
    processor: Any = None,
    *,
    text: float | None = TEXT_BITS,
    bits: float | None = None,
    folder: str | Path | None = None,
    progress: Progress | None = None,
) -> CacheSpec:
    """Calibrate a model without data; the spec for `enable`, `QuantizedCache` and `plan`.

    A model with pictures answers made-up ones, and writes the text itself that its text is
    calibrated on. A text model needs that text alone. Both calibrations end with a comparison on
    samples that they did not use. A preset of as many true bits or less that is nearer to 16 bit
    takes the place. This is `duotone calibrate MODEL --text calibrated@2` (of a text model without
    `--text`), with the seeds of the command. It takes some minutes.

    Files are kept: a second call with an unchanged model, processor and arguments reads them and
    returns at once. The spec names its bases by their paths, so the files must stay.

    processor: the model's processor, or the tokenizer of a text model, which may go without.
    text: code bits per number of text and answers. None: 16 bit; a text model needs a number.
    bits: code bits per number of pictures, None: as many true bits as `duotone@1`.
    folder: where to keep files, in a folder for each model. None: $DUOTONE_CACHE/calibrated, by
    default ~/.cache/duotone/calibrated.
    progress: called with (stage, done, total). Without it, stderr has one line at the start and one
    for each comparison.
    Errors: ValueError, before the model runs, for

    - a model that is quantized, offloaded, in training mode or inside of `enable`,
    - layers that calibrations do not know,
    - a model with pictures without its processor,
    - bits that heads of this size do not allow,
    - a folder that cannot be written, or with a damaged calibration.

    Source: `duotone.calibrate`; docs/calibrate.md has the formulas and what it gives.
    """
    check_is_model(model)
    _check_runs(model)
    facts = model_facts(model, visual_mask=torch.zeros(1, 1, dtype=torch.bool))
    loaded = Loaded(model.name_or_path or facts.model_type, model, processor)
    asked = _asked(loaded, facts, text, bits)
    _check_layers(model, facts, asked)
    at = folder_of(model, _given(loaded, asked), folder)
    spec = read(at, model, facts)
    if spec is not None:
        return spec
    with writing(at) as out:
        what = f"{facts.model_type} without data, some minutes"
        _say(progress, f"calibrating {what}; to be kept in {at}")
        end = _end(loaded, asked, out, _stages(progress))
        call = f"duotone.calibrated(model, processor, text={text!r}, bits={bits!r})"
        write(end.bases, end.spec, out, end.report | {"command": call}, end.found, end.text)
    for of, report in (("", end.report), ("text: ", end.report["text"])):
        if isinstance(report, dict):
            _say(progress, of + report["verdict"]["sentences"][0])
    return read(at, model, facts)


def _check_runs(model: PreTrainedModel) -> None:
    """Raise ValueError for a model that does not answer as it will in use."""
    kind = model.config.model_type
    for broken, rule, got, remedy in (
        (not is_in_memory(model), "have all weights in memory", "some on meta", "Load it whole"),
        (model.training, "be in evaluation mode", "training mode", "Call model.eval()"),
        (is_enabled(model), "be outside of enable", "an open block", "Call before the block"),
    ):
        if broken:
            raise ValueError(
                f"a model must {rule} to be calibrated; got {kind!r} with {got}. {remedy}."
            )


def _asked(loaded: Loaded, facts: ModelFacts, text: float | None, bits: float | None) -> _Asked:
    """Settings of a call. Errors: ValueError for a processor or bits that do not fit the model."""
    for name, value in (("text", text), ("bits", bits)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(
                f"{name} must be code bits per number, or None; got {value!r}. E.g. {name}=2.0."
            )
    kind = facts.model_type
    if not facts.visual_token_ids:
        if text is None or bits is not None:
            raise ValueError(
                f"a text model has bits of text alone; got text={text} and bits={bits} for "
                f"{kind!r}. Give text=2.0, and no bits."
            )
        return _Asked(Written(), Settings(bits=float(text)), None)
    if loaded.processor is None:
        raise ValueError(
            f"a model with pictures must come with its processor, which encodes made-up ones; got "
            f"{kind!r} without. Give AutoProcessor.from_pretrained(...)."
        )
    words = None if text is None else Settings(bits=float(text), text=True)
    return _Asked(MADE_UP, Settings(bits=None if bits is None else float(bits)), words)


def _check_layers(model: PreTrainedModel, facts: ModelFacts, asked: _Asked) -> None:
    """Raise ValueError for layers that cannot be calibrated, or not with these settings."""
    for settings in (asked.settings, asked.words):
        if settings is not None:
            check_settings(model, settings)
    for attention in attentions(model, facts):
        output_weight(attention, facts)


def _given(loaded: Loaded, asked: _Asked) -> dict[str, Any]:
    """Settings, and the prompts that this processor makes, JSON-safe.

    Errors: ValueError for a processor of another model or kind.
    """
    settings = [one and one.to_dict() for one in (asked.settings, asked.words)]
    if asked.task is MADE_UP:
        pictures = _pictures(loaded)
        return {"settings": settings, "pictures": pictures, "written": _written(loaded)}
    tokenizer = tokenizer_of(loaded.processor)
    if not (tokenizer is None or callable(tokenizer)):
        raise ValueError(
            f"the processor of a text model must be its tokenizer; got a "
            f"{type(tokenizer).__name__}. Give AutoTokenizer.from_pretrained(...)."
        )
    return {"settings": settings, "written": _written(loaded)}


def _written(loaded: Loaded) -> list[Any]:
    """First token of written text, and all tokens that are never written."""
    tokenizer = tokenizer_of(loaded.processor)
    begin = getattr(tokenizer, "bos_token_id", None)
    return [begin, never_written(loaded.model, tokenizer)]


def _pictures(loaded: Loaded) -> str:
    """Digest of the first made-up prompts as tensors."""
    kind = type(loaded.processor).__name__
    rule = f"processor must encode chats with pictures for {loaded.model.config.model_type!r}"
    with damage_named(f"{rule}, as its AutoProcessor does; got a {kind}"):
        examples = [MADE_UP.example(number, SPLIT) for number in range(SEEN)]
        made = encode(loaded.processor, [example.messages() for example in examples])
        tensors = {name: x for name, x in made.items() if isinstance(x, torch.Tensor)}
        if not visual_mask(loaded.model.config, tensors["input_ids"]).any():
            raise ValueError("its prompts have no visual tokens of this model")
        return digest(tensors)


def _end(loaded: Loaded, asked: _Asked, out: Path, stage: Any) -> End:
    """End of all calibrations. Random states stay as they are."""
    sizes = {"samples": usual_samples([asked.task]), "heldout": heldout_of(None, 1)}
    with torch.random.fork_rng(devices=[]):
        data = calibration_data(loaded, [asked.task], **sizes)
        sizes["samples"] = None
        written = data_of_words(asked.words, loaded, data, Written(), sizes)
        name = None if asked.words is None else f"calibrated@{asked.words.bits:g}"
        given = (loaded, data, asked.settings, asked.words, written, files_of(out))
        return whole(*given, name=name, stage=stage)


def _stages(progress: Progress | None) -> Callable[[str], AbstractContextManager[Any]]:
    """Stages that say how far they are."""
    if progress is None:
        return silent

    @contextmanager
    def stage(name: str) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: progress(name, done, total)

    return stage


def _say(progress: Progress | None, line: str) -> None:
    """Print a line on stderr, for a caller who follows nothing."""
    if progress is None:
        print(f"duotone: {line}", file=sys.stderr)
