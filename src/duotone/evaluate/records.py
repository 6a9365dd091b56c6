"""Records of evaluations: the compared schemes, the model's identity, the result files."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone import CacheSpec, scheme
from duotone.hf.model.facts import model_facts
from duotone.hf.model.identity import weights_digest
from duotone.hf.model.spec_checks import check_spec
from duotone.inference.memory import total_memory
from duotone.report.provenance import write_new_json
from duotone.tasks.metrics import Score, confidence_interval
from duotone.tools import json_text

REFERENCE = "16-bit"


def resolve_schemes(schemes: Sequence | Mapping) -> dict[str, CacheSpec | None]:
    """{label: spec}, the 16-bit reference first; None and '16-bit' stand for the reference.

    Accepts names, specs and None in a sequence, or {label: name, spec or None}.
    """
    if isinstance(schemes, Mapping):
        items = list(schemes.items())
    else:
        items = [(s if isinstance(s, str) else f"spec-{i}", s) for i, s in enumerate(schemes)]
    resolved: dict[str, CacheSpec | None] = {REFERENCE: None}
    for label, spec in items:
        if spec is not None and spec != REFERENCE:
            resolved[label] = scheme(spec) if isinstance(spec, str) else spec
    return resolved


def check_schemes(model: Any, specs: Mapping[str, CacheSpec | None]) -> None:
    """Raise for a scheme that does not fit the model, before the first one runs."""
    facts = model_facts(model)
    for spec in specs.values():
        if spec is not None:
            check_spec(facts, spec)


def describe(model: Any, name: str | None) -> dict[str, Any]:
    """Identity of a result's model; other weights under the same name are another model."""
    return {
        "name": name or model.config.name_or_path or model.config.model_type,
        "family": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "weights": weights_digest(model),
    }


def file_stem(configuration: Mapping[str, Any]) -> str:
    """The name of a result's files: task, scheme and a digest of the configuration."""
    canonical = json.dumps(configuration, sort_keys=True)
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:10]
    return f"{configuration['task']}-{configuration['scheme']}-{digest}"


def finished(out: Path | None, configurations: Mapping[str, dict]) -> dict[str, dict[str, Any]]:
    """Results of earlier calls with exactly these configurations."""
    if out is None or not out.exists():
        return {}
    found = {}
    for label, configuration in configurations.items():
        path = out / f"{file_stem(configuration)}.json"
        if path.exists():
            found[label] = _read(path)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json_text.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"a result file is JSON; got {str(path)!r}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"a result file holds an object; got none in {str(path)!r}. Remove it.")
    return found


def result_data(
    header: Mapping[str, Any],
    configuration: Mapping[str, Any],
    samples: int,
    headline: str,
    scores: Mapping[str, Score],
    memory: Sequence[dict[str, float]],
    seconds: float,
) -> dict[str, Any]:
    """The JSON of one scheme on one task.

    metrics: {name: {value, low, high}}; memory: bytes over all batches and true bits;
    configuration: all arguments of a repeated run.
    """
    seed = configuration["seed"]
    intervals = {name: confidence_interval(s, seed=seed).to_dict() for name, s in scores.items()}
    return {
        "schema": "duotone.evaluate/1",
        **header,
        "configuration": configuration,
        "samples": samples,
        "complete": samples == configuration["samples"],
        "headline": headline,
        "metrics": intervals,
        "memory": total_memory(memory),
        "seconds": round(seconds, 3),
    }


def write_result(out: Path, result: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Write a new JSON of the result and, if there are any, a .jsonl of rows per sample."""
    stem = file_stem(result["configuration"])
    if not result["complete"]:
        stem += f"-first-{result['samples']}"
    write_new_json(out / f"{stem}.json", result)
    lines = [json.dumps(row) + "\n" for row in rows]
    if lines:
        with (out / f"{stem}.jsonl").open("x", encoding="utf-8") as file:
            file.writelines(lines)
