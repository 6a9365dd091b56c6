"""The evaluation loop: batches outermost, schemes inside, pictures encoded once per batch."""

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from duotone import CacheSpec
from duotone.inference.batch import Batch, ask_later, decode_answers, generate, make_cache, prepare
from duotone.inference.memory import cache_memory
from duotone.loading import image_token_ids
from duotone.report.provenance import stamp
from duotone.tasks import Example, Task
from duotone.tasks.metrics import Score
from duotone.tools.resume import Say

from .forcing import LogitsRecorder, forced_agreement
from .kept_batches import Batches, identity
from .loader import Encoder, default_workers, load_batches
from .records import REFERENCE, check_schemes, describe, finished, resolve_schemes, write_result
from .run import Answered, Run, result_of

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation, in addition to its task and schemes.

    seed: of the bootstrap. kl: also score next-token agreement by teacher forcing.
    later_question: read the question after the pictures' cache was quantized (`ask_later`).
    impl: the decode attention of the few-bit caches.
    minutes: stop after the batch in which this time is over and report all finished batches.
    """

    samples: int = 500
    split: str = "heldout"
    batch_size: int = 32
    seed: int = 0
    kl: bool = False
    later_question: bool = False
    impl: str = "auto"
    max_new_tokens: int | None = None
    workers: int | None = None
    minutes: float | None = None

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}")


@dataclass
class Evaluation:
    """Results by scheme label as JSON-safe data; scores and answers of schemes that ran now."""

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    scores: dict[str, dict[str, Score]] = field(default_factory=dict)
    answers: dict[str, list[str]] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)


def _configuration(
    settings: Settings, task: Task, model: dict[str, Any], label: str, spec: CacheSpec | None
) -> dict[str, Any]:
    kept = asdict(settings)
    for name in ("workers", "minutes"):
        del kept[name]
    kept["max_new_tokens"] = settings.max_new_tokens or task.max_new_tokens
    # No prompt is cut. Names of results digest this entry: without it, earlier ones are not found.
    kept["max_prompt_tokens"] = None
    spec_data = json.loads(spec.to_json()) if spec else None
    about_task = {"task": task.name, "data": task.fingerprint}
    return {**about_task, "model": model, "scheme": label, "spec": spec_data, **kept}


class _Evaluator:
    """State of one call of `evaluate`."""

    def __init__(self, model, processor, task: Task, settings: Settings):
        self.model, self.processor, self.task, self.settings = model, processor, task, settings
        self.max_new_tokens = settings.max_new_tokens or task.max_new_tokens
        self.encoder = Encoder(processor, bool(image_token_ids(model.config)))
        self.started = monotonic()

    def time_is_over(self) -> bool:
        """True if the granted minutes are used up."""
        minutes = self.settings.minutes
        return minutes is not None and monotonic() - self.started > 60 * minutes

    def batches(self, first: int = 0):
        """Examples and encoded tensors, batch by batch, from example `first` on."""
        workers = self.settings.workers
        if workers is None:
            workers = default_workers(self.model.device)
        settings = self.settings
        return load_batches(
            self.task,
            self.encoder,
            settings.split,
            settings.samples,
            settings.batch_size,
            workers,
            first,
        )

    def prepared(self, encoded) -> Batch:
        """The batch on the device, pictures encoded."""
        batch = prepare(self.model, encoded)
        return ask_later(batch) if self.settings.later_question else batch

    def answer(self, run: Run, batch: Batch, processors: Sequence = ()) -> Answered:
        """Let one scheme answer one batch."""
        started = perf_counter()
        cache = make_cache(self.model, run.spec, batch, self.settings.impl)
        generated = generate(
            self.model, batch, cache, self.max_new_tokens, logits_processors=processors
        )
        seconds = perf_counter() - started
        texts = decode_answers(self.processor, generated.token_ids)
        return Answered(generated.token_ids, texts, cache_memory(cache), seconds)

    def all_schemes(self, runs: Sequence[Run], batch: Batch) -> dict[str, Answered]:
        """The reference answers first; every scheme is compared along its answers."""
        recorder = LogitsRecorder()
        reference, *others = runs
        answers = self.answer(reference, batch, [recorder] if self.settings.kl else [])
        done = {reference.label: answers}
        for run in others:
            done[run.label] = self.answer(run, batch)
            if self.settings.kl:
                given = (answers.token_ids, recorder.logits, self.settings.impl)
                rows = forced_agreement(self.model, batch, run.spec, *given)
                done[run.label] = replace(done[run.label], forced=rows.tolist())
        return done


def evaluate(
    model: Any,
    processor: Any,
    task: Task,
    schemes: Sequence | Mapping,
    samples: int = 500,
    *,
    model_name: str | None = None,
    out: str | Path | None = None,
    predictions: bool = True,
    progress: Progress | None = None,
    say: Say | None = None,
    **settings: Any,
) -> Evaluation:
    """Score every scheme on the first `samples` examples of a task, against the 16-bit cache.

    schemes: names, specs or {label: spec}; the 16-bit reference is always among them.
    out: folder for one new JSON per scheme, with a .jsonl of answers next to it if `predictions`.
        Schemes whose file exists already are read and not run again. Until all files are written, a
        partial folder keeps every finished batch. After an interruption, a run with the same
        arguments goes on after these batches.
    settings: the other fields of `Settings` (batch_size, seed, kl, ...).
    progress: called with (samples done, samples in all) after every batch.
    say: receives a sentence if this run goes on from a partial folder. An interrupt carries a note
        of all that it leaves.
    """
    chosen = Settings(samples=samples, **settings)
    task.check_samples(samples)
    task.check_metrics()
    out = Path(out) if out is not None else None
    described = describe(model, model_name)
    specs = resolve_schemes(schemes)
    check_schemes(model, specs)
    configurations = {
        label: _configuration(chosen, task, described, label, spec) for label, spec in specs.items()
    }
    evaluation = Evaluation(results=finished(out, configurations))
    pending = [label for label in specs if label not in evaluation.results]
    if pending:
        runs = [Run(label, specs[label]) for label in dict.fromkeys([REFERENCE, *pending])]
        evaluator = _Evaluator(model, processor, task, chosen)
        header = stamp(model.device)
        labels = [run.label for run in runs]
        total = -(-samples // chosen.batch_size)
        kept = Batches(out, identity(configurations, header), labels, total, say)
        with kept.noted():
            evaluation.examples = _run_batches(evaluator, runs, kept, progress)
            for run in runs:
                _conclude(evaluation, run, runs[0], task, header, configurations[run.label])
                if out is not None and run.label in pending:
                    rows = _rows(evaluation.examples, run, runs[0]) if predictions else ()
                    write_result(out, evaluation.results[run.label], rows)
        if len(evaluation.examples) == samples:
            kept.remove()
    return evaluation


def _run_batches(
    evaluator: _Evaluator, runs: Sequence[Run], kept: Batches, progress: Progress | None
) -> list[Example]:
    """The examples of all batches, an earlier run's included, without pictures."""
    for batch in kept.done:
        _note(runs, {run.label: Answered(**batch[run.label]) for run in runs})
    split, samples = evaluator.settings.split, evaluator.settings.samples
    indices = range(len(runs[0].texts))
    examples = [evaluator.task.example(i, split).without_images() for i in indices]
    for batch_examples, encoded in evaluator.batches(len(examples)):
        answered = evaluator.all_schemes(runs, evaluator.prepared(encoded))
        # A cache and its layers refer to each other: without this their memory lingers.
        gc.collect()
        _note(runs, answered)
        kept.add({label: asdict(one) for label, one in answered.items()})
        examples += batch_examples
        if progress:
            progress(len(examples), samples)
        if evaluator.time_is_over():
            break
    return examples


def _note(runs: Sequence[Run], answered: Mapping[str, Answered]) -> None:
    for run in runs:
        run.add(answered[run.label])


def _conclude(
    evaluation: Evaluation,
    run: Run,
    reference: Run,
    task: Task,
    header: dict[str, Any],
    configuration: dict[str, Any],
) -> None:
    scores = run.scores(task, evaluation.examples, reference)
    evaluation.scores[run.label], evaluation.answers[run.label] = scores, run.texts
    if run.label not in evaluation.results:
        result = result_of(run, scores, task, header, configuration)
        evaluation.results[run.label] = result


def _rows(examples: Sequence[Example], run: Run, reference: Run) -> Iterator[dict[str, Any]]:
    """Rows by sample: question, references, the 16-bit answer and this scheme's."""
    for example, text, reference_text in zip(examples, run.texts, reference.texts, strict=True):
        row = {"name": example.name, "question": example.question}
        yield row | {"answers": example.answers, "answer": text, "answer_16_bit": reference_text}
