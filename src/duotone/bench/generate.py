"""`duotone bench generate`: rows of `model.generate`, as a user calls it.

A row is called several times with one prompt. The first call has never seen its length; later ones
are warm. Times are between tokens, taken by a stopping criterion that waits for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any

import torch

import duotone
from duotone.bench.budget import begin_peak, end_peak, release
from duotone.bench.generate_rows import RANDOM_BASES, STATIC, Row
from duotone.bench.generate_watch import FEWEST_TOKENS, WARM_TOKENS, Watch
from duotone.bench.questions import question_ms
from duotone.hf.model.cache_argument import CACHE
from duotone.hf.model.layers import layer_configs, layer_kinds, layer_shape, packed_layers
from duotone.hf.weights.checkpoint import quantization_of
from duotone.inference.memory import cache_memory
from duotone.loading import image_token_ids
from duotone.quant import CacheSpec
from duotone.report.provenance import stamp

SCHEMA = "duotone.generate/1"
METHOD = (
    "model.generate, greedy, without an end; medians: of warm calls to the first token, and "
    "between tokens of the last call after its first ones; of three questions in words after the "
    "last answer to their first tokens; peak: above what was there before the row"
)
BITS_16 = "16 bit"

Inputs = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Load:
    """Question to every row: batch, tokens of a prompt, new tokens, calls.

    seconds: after so many a row begins no further call, beyond its second, and cuts the one that
    runs; None: it takes its time. picture_tokens: of a picture, where words stand for pictures.
    """

    batch: int
    tokens: int
    new_tokens: int
    padded: bool = False
    calls: int = 3
    seconds: float | None = None
    picture_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.new_tokens < FEWEST_TOKENS or self.calls < 2 or self.batch < 1:
            raise ValueError(
                f"a row needs a batch, 2 calls and {FEWEST_TOKENS} new tokens; got {self}"
            )


@dataclass(frozen=True)
class Subject:
    """A model with a prompt to generate from.

    inputs: of `generate`, but for its settings. visual_mask: [batch, tokens] for `enable`, where
    the ids do not say which tokens are visual. quantize: quantizes the model's weights in place by
    the recipe of a name. calibrated: makes the spec of a row of RANDOM_BASES for the model as it
    is, by the row's base.
    """

    name: str
    model: Any
    inputs: Inputs
    visual_mask: torch.Tensor | None = None
    quantize: Callable[[str], None] | None = None
    calibrated: Callable[[str], CacheSpec] | None = None


class Bench:
    """Rows of one subject under one load."""

    def __init__(self, subject: Subject, load: Load) -> None:
        self.subject, self.load = subject, load
        self.model, self.device = subject.model, subject.model.device
        self.weights = _weights(self.model)
        self._on_gpu = self.device.type == "cuda"

    @property
    def takes_images(self) -> bool:
        """True where tokens of the prompt can be visual."""
        return self.subject.visual_mask is not None or bool(image_token_ids(self.model.config))

    def check(self, rows: Sequence[Row]) -> None:
        """Raise ValueError for rows that this model cannot have, before any work."""
        for row in rows:
            with row.enabled(self.model, self.subject.visual_mask):
                pass
        random = [row.base for row in rows if row.base in RANDOM_BASES]
        if random and self.subject.calibrated is None:
            raise ValueError(
                f"the row {random[0]!r} has random bases, for a model of random weights; got "
                f"{self.subject.name!r}. Give the file of duotone calibrate as a row."
            )
        if any(row.recipe for row in rows) and self.weights != BITS_16:
            raise ValueError(
                f"rows of quantized weights need a model in {BITS_16}; got one in {self.weights}. "
                "Leave the recipe out of --row."
            )

    def row(
        self, row: Row, measure: Callable[[Row], dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        """Measure a row; where it cannot run, its "reason" instead.

        measure: takes a row whose spec and weights are there; by default, `calls` of one prompt.
        """
        try:
            if row.recipe is not None and self.weights == BITS_16:
                self.subject.quantize(row.recipe)
                self.weights = row.recipe
            # A name alone would mean another spec once a preset changes.
            spec = {} if row.spec is None else {"spec": row.spec.to_dict()}
            if row.base in RANDOM_BASES:
                row = replace(row, spec=self.subject.calibrated(row.base))
            with _unending(self.model):
                measured = (measure or self._measure)(row)
            return {"row": row.name, "weights": self.weights, **spec, **measured}
        # Caches of others raise anything; a table does not end with one row.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return {"row": row.name, "failed": True, "reason": reason}
        finally:
            release()

    def _measure(self, row: Row) -> dict[str, Any]:
        base = begin_peak(self.device)
        begin, calls = perf_counter(), []

        def is_late() -> bool:
            return self.load.seconds is not None and perf_counter() - begin > self.load.seconds

        with (
            row.block(self.model, self.subject.visual_mask) as opened,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always", category=duotone.SlowPathWarning)
            while len(calls) < self.load.calls and (len(calls) < 2 or not is_late()):
                made = None  # two caches at once would be no user's
                call, made = self._call(row, is_late, base, opened)
                calls.append(call)
            later = {} if is_late() else self._later(row, made)
        slow = {str(w.message) for w in said if issubclass(w.category, duotone.SlowPathWarning)}
        notes = [*sorted(slow), *later.pop("notes", [])]
        if row.base == STATIC and not self._on_gpu:
            notes.append("not compiled: generate compiles on a GPU")
        return {**summary(calls, self.load.batch), **later, "notes": notes}

    def _later(self, row: Row, made: Any) -> dict[str, Any]:
        """Times of questions after an answer, where the cache of a row can go on."""
        if row.base == STATIC:
            return {}
        try:
            times = question_ms(self.model, made, self.subject.inputs.get("attention_mask"))
        # Caches and models of others raise anything.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            return {"notes": [f"no question after the answer: {reason}"]}
        return {"question_ttft_ms": median(times), "question_ttfts_ms": times}

    def _call(
        self, row: Row, is_late: Callable[[], bool], base: int, opened: Any
    ) -> tuple[dict[str, Any], Any]:
        """Numbers of a call, and the output of `generate`."""
        watch = Watch(self.device, is_late)
        begin_peak(self.device)
        begin = perf_counter()
        made = self.model.generate(
            **self.subject.inputs,
            **row.settings(),
            max_new_tokens=self.load.new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            stopping_criteria=[watch],
        )
        at = watch.times_s
        call = {
            "ttft_ms": 1e3 * (at[0] - begin),
            "steps_ms": [1e3 * (b - a) for a, b in pairwise(at)],
            "peak_bytes": end_peak(self.device, base),
            **_memory(made[CACHE], opened),
        }
        return call, made


def summary(calls: Sequence[Mapping[str, Any]], batch: int) -> dict[str, Any]:
    """Numbers of a row of its calls, at least two."""
    first, last = calls[0], calls[-1]
    ms, first_ms = (median(call["steps_ms"][WARM_TOKENS:]) for call in (last, first))
    tokens = len(last["steps_ms"]) + 1
    answer_ms = last["ttft_ms"] + sum(last["steps_ms"])
    peaks = [call["peak_bytes"] for call in calls]
    return {
        "ttft_ms": median(call["ttft_ms"] for call in calls[1:]),
        "first_ttft_ms": first["ttft_ms"],
        "ms_per_token": ms,
        "first_ms_per_token": first_ms,
        "longest_ms": max(last["steps_ms"][WARM_TOKENS:]),
        "first_step_ms": last["steps_ms"][0],
        "first_call_step_ms": max(first["steps_ms"][:WARM_TOKENS]),
        "tokens_per_s": 1e3 * batch / ms,
        "answer_tokens": tokens,
        "answer_tokens_per_s": 1e3 * batch * tokens / answer_ms,
        "peak_bytes": None if None in peaks else max(peaks),
        **{name: last[name] for name in MEMORY if name in last},
        "calls": [
            {
                "ttft_ms": call["ttft_ms"],
                "tokens": len(call["steps_ms"]) + 1,
                "first_steps_ms": call["steps_ms"][:4],
            }
            for call in calls
        ],
    }


MEMORY = ("cache_bytes", "cache_bytes_16_bit", "graph_bytes")


def _memory(cache: Any, opened: Any) -> dict[str, int]:
    """Bytes of the cache at the end of a call; inside `enable`, also of 16 bit and of graphs."""
    if opened is None:
        return {"cache_bytes": cache_memory(cache)["total_bytes"]}
    report = opened.memory()
    found = (report.total_bytes, report.dense_equivalent_bytes, opened.graph_bytes())
    return dict(zip(MEMORY, found, strict=True))


@contextmanager
def _unending(model: Any) -> Iterator[None]:
    """Inside, answers have no end, no visual tokens and no settings of the model's own."""
    own = model.generation_config
    visual = list(image_token_ids(model.config))
    given = type(own)(pad_token_id=0 if own.pad_token_id is None else own.pad_token_id)
    given.suppress_tokens = visual or None
    model.generation_config = given
    try:
        yield
    finally:
        model.generation_config = own


def _weights(model: Any) -> str:
    """Weights of a model in words."""
    known = quantization_of(model)
    if known is None:
        return BITS_16
    recipe = known.header["recipe"]
    mixed = " mixed" if recipe.get("rules") else ""
    return f"W{recipe['bits']}A{16 if recipe['activation'] == 'none' else 8}{mixed}"


def sizes(model: Any) -> dict[str, Any]:
    """Layers and dtype of a model, and heads of its first layer that is packed."""
    config = model.config.get_text_config(decoder=True)
    first = next(iter(packed_layers(config, layer_kinds(config))), 0)
    shape = layer_shape(layer_configs(config)[first])
    return {
        "q_heads": shape.q_heads,
        "kv_heads": shape.kv_heads,
        "layers": config.num_hidden_layers,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def header(bench: Bench) -> dict[str, Any]:
    """Header of a result file, without rows yet."""
    on_gpu = bench.device.type == "cuda"
    return {
        "schema": SCHEMA,
        **stamp(bench.device),
        "method": METHOD,
        "left_out": [] if on_gpu else ["peak_bytes", "graphs"],
        "model": bench.subject.name,
        "weights": bench.weights,
        "prompt_tokens": bench.subject.inputs["input_ids"].shape[1],
        **sizes(bench.model),
        "load": asdict(bench.load),
        "rows": [],
    }
