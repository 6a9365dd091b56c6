"""Losses and speeds of the recommended schemes, which the package carries.

    python -m benchmarks.measured      writes src/duotone/planning/measured.json anew

A result counts for a scheme if its row has the scheme's codes for pictures of its lengths; its
window may be shorter, which loses more. Run it when results, presets or `duotone.defaults` change.
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from duotone.defaults import CONVERSATIONS, TEXT
from duotone.quant import CacheSpec
from duotone.quant.schemes import named
from duotone.report.generate import fastest_plain, rows_by_name, title
from duotone.report.markdown import Result
from duotone.report.tables import read_results

FILE = Path("src/duotone/planning/measured.json")
RESULTS = Path("results")
REFERENCE = "16-bit"
# Fields of former specs that no spec has any more, with the only value they may have had.
FORMER = {"dense_dtype": "model"}
OF_TASKS, OF_TEXT = ("duotone.schemes/1", "duotone.quality/1"), "duotone.text/1"
OF_TALKS = "duotone.conversation/1"
# Tokens of a span in all other results with pictures: one tile of InternVL's structure or several.
TILES = range(256, 8192 + 1, 256)
OF_SPEED, WEIGHTS = "duotone.generate/1", "16 bit"
# The metric of a task, where it is not the headline: CIDEr rises where a model only rephrases.
METRICS = {"captions": "object_recall"}


def measured(results: list[Result]) -> dict[str, Any]:
    """{"loss": {scheme: entries}, "speed": {scheme: entries}} of the recommended schemes."""
    schemes = {name: named(name) for name in (CONVERSATIONS, TEXT)}
    return {
        "loss": {name: losses(results, spec) for name, spec in schemes.items()},
        "speed": {name: speeds(results, spec) for name, spec in schemes.items()},
    }


def losses(results: list[Result], spec: CacheSpec) -> list[dict[str, Any]]:
    """The entry of most samples, then of the longest window, of every task and model."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in sorted(_losses(results, spec), key=lambda one: (one["samples"], one["window"])):
        best[entry["task"], entry["model"]] = entry
    return [best[key] for key in sorted(best)]


def _losses(results: list[Result], spec: CacheSpec) -> Iterator[dict[str, Any]]:
    for result in results:
        if result["schema"] in OF_TASKS and result["later_question"]:
            yield from _of_task(result, spec)
        elif result["schema"] == OF_TEXT:
            yield from _of_text(result, spec)
        elif result["schema"] == OF_TALKS:
            yield from _of_talks(result, spec)


def _of_task(result: Result, spec: CacheSpec) -> Iterator[dict[str, Any]]:
    metric = METRICS.get(result["task"], result["headline"])
    for label, row in result["schemes"].items():
        ran = _spec_of(row["configuration"]["spec"])
        if ran is None or not has_codes_of(ran, spec, spans_of(result)):
            continue
        yield {
            "task": result["task"],
            "model": row["configuration"]["model"]["name"],
            "parameters": row["configuration"]["model"]["parameters"],
            "metric": metric.replace("_", " "),
            "value": row["metrics"][metric]["value"],
            "reference": result["schemes"][REFERENCE]["metrics"][metric]["value"],
            "difference": result["differences"][f"{label} - {REFERENCE}"][metric],
            "kl": row["metrics"]["kl"],
            "samples": result["samples"],
            "window": ran.recent,
            **_source(result),
        }


def _of_text(result: Result, spec: CacheSpec) -> Iterator[dict[str, Any]]:
    for row in result["schemes"].values():
        ran = _spec_of(row.get("spec"))
        if ran is not None and has_codes_of(ran, spec, spans_of(result)):
            yield {
                "task": "text",
                "model": result["model"],
                "metric": "perplexity",
                "value": row["perplexity"]["value"],
                "reference": result["schemes"][REFERENCE]["perplexity"]["value"],
                "difference": row["difference"],
                "samples": result["documents"],
                "window": ran.recent,
                **_source(result),
            }


def _of_talks(result: Result, spec: CacheSpec) -> Iterator[dict[str, Any]]:
    rows = rows_by_name(result)
    for row in rows.values():
        ran = _spec_of(row.get("spec"))
        if ran is not None and has_codes_of(ran, spec, spans_of(result)):
            yield {
                "task": "conversations",
                "model": f"a small {result['model']}",
                "metric": "answer tokens right",
                "value": row["accuracy"],
                "reference": rows["16 bit"]["accuracy"],
                "kl": {"value": row["kl"]},
                "samples": result["conversations"],
                "window": ran.recent,
                **_source(result),
            }


def speeds(results: list[Result], spec: CacheSpec) -> list[dict[str, Any]]:
    """Milliseconds per token of `model.generate`, plain and with the spec, 16-bit weights."""
    return [
        {
            "load": title(result),
            "ms_per_token": row["ms_per_token"],
            **fastest_plain(result),
            **_source(result),
        }
        for result in results
        if result["schema"] == OF_SPEED and result["weights"] == WEIGHTS
        for row in rows_by_name(result).values()
        if row["weights"] == WEIGHTS and "no graphs" not in row["row"]
        if (ran := _spec_of(row.get("spec"))) is not None
        if (ran.recent, ran.sink) == (spec.recent, spec.sink)
        if has_codes_of(ran, spec, spans_of(result))
    ]


def has_codes_of(ran: CacheSpec, spec: CacheSpec, spans: Collection[int]) -> bool:
    """True where specs differ in windows alone, and the one that ran has no longer ones.

    spans: tokens of the visual spans that it ran on. Shares of other lengths do not count.
    """
    shorter = ran.recent <= spec.recent and ran.sink <= spec.sink
    fields = {name: getattr(spec, name) for name in ("recent", "sink", "short_foreground")}
    alike = all(ran.foreground_of(tokens) == spec.foreground_of(tokens) for tokens in spans)
    return shorter and alike and ran.replace(**fields) == spec


def spans_of(result: Result) -> Collection[int]:
    """Tokens that a visual span of a result may have."""
    if result.get("schema") == OF_TEXT:
        return ()
    if result.get("schema") != OF_TALKS:
        return TILES
    from training.zoo.unseen import EVERY  # which loads models' libraries

    shapes = EVERY[result["model"]].shapes
    return [shape.visual_tokens for shape in shapes if shape.visual_tokens]


def _spec_of(fields: dict[str, Any] | None) -> CacheSpec | None:
    """A row's spec; None where it has none, or one that this version does not read."""
    if fields is None or any(fields.get(name, was) != was for name, was in FORMER.items()):
        return None
    try:
        return CacheSpec.from_dict({k: x for k, x in fields.items() if k not in FORMER})
    except ValueError:
        return None


def _source(result: Result) -> dict[str, str]:
    commit = (result["commit"] or "")[:10]
    return {"device": result["device"], "commit": commit, "created": result["created"][:10]}


def text_of(found: dict[str, Any]) -> str:
    """The file's content."""
    return json.dumps(found, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text_of(measured(read_results(RESULTS))), encoding="utf-8")
