"""Teacher-forced perplexity through the cache: every token is predicted from the quantized past.

A token is scored as if the tokens before it had been generated one at a time. Tokens that have left
the window are read from codes, the window and the token itself as stored. Steps of several tokens
are faster and give the same result (`steps`).

A model in float64 gives what single tokens give to 1e-9. In float32 a step's length and the rows
beside a window choose orders of summation. K and V then differ in their last bits, a code flips
here and there, and perplexity is off by some 1e-6.

Where keys are normalised, a prompt must give the norm. This prompt is the content of the windows
before the first flush, read in one step whatever comes after it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from duotone import CacheSpec, KVSpec
from duotone.hf.model.cache_argument import CACHE
from duotone.inference.batch import Batch, make_cache
from duotone.inference.memory import cache_memory
from duotone.inference.prompts import right_padded
from duotone.report.provenance import stamp
from duotone.tasks import Passages
from duotone.tasks.metrics import Score
from duotone.tasks.metrics.score import ratio_of_sums
from duotone.tools.resume import Say

from .kept_batches import Batches, identity
from .loop import Evaluation, Progress
from .records import check_schemes, describe, finished, resolve_schemes, result_data, write_result
from .steps import flush_steps

# Bounds the logits of one step, [B, tokens, vocabulary]; has no influence on the result.
LONGEST_STEP = 256


@dataclass(frozen=True)
class PerplexitySettings:
    """Settings of a perplexity in addition to its data and schemes.

    samples: documents, the first ones. batch_size: windows read side by side. seed: of the
    bootstrap. impl: the decode attention of the few-bit caches.
    """

    samples: int
    batch_size: int = 16
    seed: int = 0
    impl: str = "auto"

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1, got {self.batch_size}; one window at least")


def window_steps(spec: CacheSpec | None, tokens: int, longest: int) -> Iterator[slice]:
    """Steps over a window's tokens whose result equals single steps, after a prompt if need be."""
    prompt = 0
    if spec is not None and spec.key_norm:
        # A prompt that fills a group flushes it at once, as a prompt's.
        until_flush = spec.sink + spec.recent + spec.flush_tokens
        prompt = min(until_flush - spec.tells_phases_apart, tokens)
    return flush_steps(spec, tokens, prompt=prompt, streamed=(prompt,), longest=longest)


def _read(model: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor, step: slice):
    """Logits [B, tokens of the step, vocabulary], in float32 at least."""
    positions = torch.arange(step.start, step.stop, device=ids.device).expand(len(ids), -1)
    output = model(
        input_ids=ids[:, step],
        attention_mask=mask[:, : step.stop],
        position_ids=positions,
        **{CACHE: cache},
        use_cache=True,
    )
    return output.logits.float() if output.logits.dtype.itemsize < 4 else output.logits


def window_logits(
    model: Any,
    windows: Sequence[Sequence[int]],
    spec: CacheSpec | None = None,
    *,
    impl: str = "auto",
    longest: int = LONGEST_STEP,
) -> tuple[Iterator[tuple[slice, torch.Tensor]], torch.Tensor, Any]:
    """(steps and their logits, mask [B, T - 1] of what is predicted, the cache); `token_losses`.

    The cache is filled while the steps are taken; take them in inference mode.
    """
    # Padding on the right, so that all windows flush together.
    ids, mask = right_padded(windows, model.device)
    mask = mask.long()
    past = ids[:, :-1]
    batch = Batch({"input_ids": past}, torch.zeros_like(past, dtype=torch.bool), mask[:, :-1])
    cache = make_cache(model, spec, batch, impl)
    steps = window_steps(spec, past.shape[1], longest)
    read = ((step, _read(model, cache, past, mask, step)) for step in steps)
    return read, mask[:, 1:], cache


@torch.inference_mode()
def token_losses(
    model: Any,
    windows: Sequence[Sequence[int]],
    spec: CacheSpec | None = None,
    *,
    impl: str = "auto",
    longest: int = LONGEST_STEP,
) -> tuple[torch.Tensor, Any]:
    """Negative log-likelihoods in nats [B, T - 1] of all tokens but the first, and the cache.

    They are float64, of logits in the model's type.
    windows: B lists of token ids, T the longest; entries after a window's end are 0. spec: the
    cache; None: 16 bit. The last token is predicted but never read.
    """
    read, mask, cache = window_logits(model, windows, spec, impl=impl, longest=longest)
    targets = right_padded(windows, model.device)[0][:, 1:]
    losses = [_step_losses(logits, targets[:, step]) for step, logits in read]
    return torch.cat(losses, 1) * mask, cache


def _step_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Losses [B, tokens] of a step in float64, in pieces that bound what is widened at a time.

    In float32 they would all be off in one direction, by some 3e-7 nats.
    """
    pieces = zip(
        logits.flatten(0, 1).split(LONGEST_STEP), targets.flatten().split(LONGEST_STEP), strict=True
    )
    losses = [
        torch.nn.functional.cross_entropy(rows.double(), ids, reduction="none")
        for rows, ids in pieces
    ]
    return torch.cat(losses).view(targets.shape)


def exp_of_mean(sums: np.ndarray) -> np.ndarray:
    """sums [..., 2] of (nats, tokens) -> exp(nats / tokens)."""
    return np.exp(ratio_of_sums(sums))


def perplexity_score(rows: np.ndarray) -> Score:
    """Perplexity over all predicted tokens from rows [documents, 2] of (nats, tokens)."""
    return Score(np.asarray(rows, dtype=np.float64), exp_of_mean)


@dataclass
class _Reading:
    """One scheme's sums per document [documents, 2], bytes and time."""

    spec: CacheSpec | None
    rows: np.ndarray
    memory: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0

    def read(self, model: Any, windows: Sequence[Any], impl: str) -> dict[str, Any]:
        """Read a batch of windows; sums [windows, 2], bytes and time, JSON-safe."""
        started = perf_counter()
        losses, cache = token_losses(model, windows, self.spec, impl=impl)
        nats = losses.double().sum(1).tolist()
        seconds = perf_counter() - started
        sums = [[n, len(window) - 1] for n, window in zip(nats, windows, strict=True)]
        return {"sums": sums, "memory": cache_memory(cache), "seconds": seconds}

    def add(self, owners: Sequence[int], found: Mapping[str, Any]) -> None:
        """Add what was read to the documents that own the windows."""
        np.add.at(self.rows, list(owners), np.asarray(found["sums"]))
        self.memory.append(found["memory"])
        self.seconds += found["seconds"]


def _batches(passages: Passages, settings: PerplexitySettings) -> list[list[tuple[int, Any]]]:
    """Batches of (document, window); windows of like length together."""
    documents = enumerate(passages.documents[: settings.samples])
    owned = [(i, window) for i, document in documents for window in document]
    owned.sort(key=lambda pair: len(pair[1]))
    size = settings.batch_size
    return [owned[i : i + size] for i in range(0, len(owned), size)]


def check_passages(model: Any, passages: Passages, specs: Mapping[str, CacheSpec | None]) -> None:
    """Raise for tokens or windows that the model does not take, and for schemes without effect."""
    for label, spec in specs.items():
        if spec is not None and spec.evict is not None:
            raise ValueError(
                f"perplexity needs a scheme that keeps all tokens, got {label!r}, which drops some "
                "of a prompt by the attention after it; here every token is predicted and there "
                "is no prompt; use a generation task (duotone evaluate documents)"
            )
        if spec is not None and isinstance(spec.visual, KVSpec) and spec.text == "dense":
            raise ValueError(
                f"perplexity needs a scheme that quantizes text, got {label!r}, which quantizes "
                "visual tokens only; pick another (duotone schemes), e.g. --scheme kivi"
            )
    text = model.config.get_text_config(decoder=True)
    top = max(max(window) for document in passages.documents for window in document)
    if top >= text.vocab_size:
        raise ValueError(
            f"token ids must be below the model's vocabulary of {text.vocab_size}, got {top}; "
            "were they made by another tokenizer?"
        )
    limit = getattr(text, "max_position_embeddings", None)
    if limit is not None and passages.context > limit:
        raise ValueError(
            f"context must be at most the {limit} tokens that the model takes, got "
            f"{passages.context}; give a smaller --context"
        )


def evaluate_perplexity(
    model: Any,
    passages: Passages,
    schemes: Sequence | Mapping,
    samples: int | None = None,
    *,
    model_name: str | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    say: Say | None = None,
    **settings: Any,
) -> Evaluation:
    """Perplexity of every scheme on the first `samples` documents (None: all), and of 16 bit.

    schemes, out, say: as for `evaluate`; the .jsonl beside a result has a document's nats and
    tokens per line. settings: the other fields of `PerplexitySettings`. progress: called with
    (windows, in all).
    """
    chosen = PerplexitySettings(samples or len(passages.documents), **settings)
    passages.check_documents(chosen.samples)
    specs = resolve_schemes(schemes)
    check_passages(model, passages, specs)
    check_schemes(model, specs)
    described = describe(model, model_name)
    about = {"task": "perplexity", "data": passages.fingerprint, "context": passages.context}
    about |= {"model": described, **asdict(chosen)}
    configurations = {
        label: {**about, "scheme": label, "spec": spec and json.loads(spec.to_json())}
        for label, spec in specs.items()
    }
    out = Path(out) if out is not None else None
    evaluation = Evaluation(results=finished(out, configurations))
    pending = {k: v for k, v in specs.items() if k not in evaluation.results}
    if pending:
        header = stamp(model.device)
        total = len(_batches(passages, chosen))
        kept = Batches(out, identity(configurations, header), pending, total, say)
        with kept.noted():
            readings = _run(model, passages, pending, chosen, kept, progress)
            for label, reading in readings.items():
                _conclude(evaluation, label, reading, header, configurations[label], out)
        kept.remove()
    return evaluation


def _run(
    model: Any,
    passages: Passages,
    specs: Mapping[str, CacheSpec | None],
    settings: PerplexitySettings,
    kept: Batches,
    progress: Progress | None,
) -> dict[str, _Reading]:
    readings = {k: _Reading(spec, np.zeros((settings.samples, 2))) for k, spec in specs.items()}
    batches = _batches(passages, settings)
    done, total = 0, sum(map(len, batches))
    for number, batch in enumerate(batches):
        owners, windows = zip(*batch, strict=True)
        if number == len(kept.done):
            kept.add({k: r.read(model, windows, settings.impl) for k, r in readings.items()})
        for label, reading in readings.items():
            reading.add(owners, kept.done[number][label])
        done += len(batch)
        if progress:
            progress(done, total)
    return readings


def _conclude(
    evaluation: Evaluation,
    label: str,
    reading: _Reading,
    header: dict[str, Any],
    configuration: dict[str, Any],
    out: Path | None,
) -> None:
    scores = {"perplexity": perplexity_score(reading.rows)}
    samples = len(reading.rows)
    result = result_data(
        header, configuration, samples, "perplexity", scores, reading.memory, reading.seconds
    )
    evaluation.scores[label], evaluation.results[label] = scores, result
    if out is not None:
        rows = ({"nats": nats, "tokens": int(tokens)} for nats, tokens in reading.rows)
        write_result(out, result, rows)
