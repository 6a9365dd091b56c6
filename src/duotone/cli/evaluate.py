"""`duotone evaluate`: scores of schemes on a task."""

from pathlib import Path
from typing import Annotated, Any

import typer

from duotone.defaults import PICTURES, TEXT, name_of

from .common import (
    SPEC_SUFFIX,
    DeviceOption,
    JsonOption,
    LaterOption,
    ModelOption,
    check_folder,
    load_model,
    print_json,
    progress_bar,
    say,
    scheme_spec,
    user_errors,
)
from .memory import explained_out_of_memory, token_counts
from .results import show_results

PERPLEXITY = "perplexity"
# Few-bit schemes by default: one for pictures, one for text.
DEFAULT_SCHEME, DEFAULT_TEXT_SCHEME = name_of(PICTURES), name_of(TEXT)
DTYPES = ("bfloat16", "float16", "float32", "float64")


@user_errors
def command(
    task: Annotated[
        str,
        typer.Argument(
            help="captions, documents, sequences, perplexity; or a .jsonl file of your own."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="File of a text to predict (perplexity).", show_default=False),
    ] = None,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            "-s",
            help="Name, or .json file of a CacheSpec; repeat for more.",
            show_default="duotone; text alone: kivi",
        ),
    ] = None,
    bits: Annotated[
        list[int] | None,
        typer.Option("--bits", "-b", help="Bits; repeat for more.", show_default="scheme's"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, show_default="500, or all of a file")
    ] = None,
    split: Annotated[str, typer.Option(help="heldout, calibration or train.")] = "heldout",
    model: ModelOption = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    kl: Annotated[
        bool, typer.Option("--kl", help="Also score next-token agreement by teacher forcing.")
    ] = False,
    later_question: LaterOption = False,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of a window of text (perplexity).",
            show_default="2048, or what the model takes",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: " + ", ".join(DTYPES))] = DTYPES[0],
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for one JSON per scheme; existing files are kept. Interrupted, the same "
            "command goes on."
        ),
    ] = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Score schemes on a task with 95 % intervals, against the 16-bit cache.

    A .jsonl file has one {"images": [...], "question": ..., "answers": [...]} per line, with
    image paths relative to the file.

    Perplexity is teacher-forced through the cache, as if every token had been generated. Its data
    are a .json list of lists of token ids, a .jsonl file of {"text": ...}, or plain text.

    Text benchmarks (GSM8K, TruthfulQA, LongBench and others) are run by lm-eval inside
    duotone.enable (docs/evaluating.md).

    Results are written at the end. Until then --out keeps every finished batch in a .partial
    folder. After an interruption, the same command goes on after these batches.

    [bold]Examples[/bold]

      duotone evaluate documents -s duotone -s calibquant -b 1 -b 2 -n 100

      duotone evaluate mine.jsonl --model OpenGVLab/InternVL3-1B-hf --out results/mine

      duotone evaluate perplexity --data wiki.txt --model my-llama -s kivi -b 2 -b 4
    """
    check_folder(out)
    loading = {"model": model, "device": device, "dtype": _dtype(dtype)}
    common = {"out": out, "batch_size": batch_size, "seed": seed, "say": say}
    if task == PERPLEXITY:
        refused = {"--kl": kl, "--later-question": later_question, "--split": split != "heldout"}
        _refuse(refused, "perplexity reads text by teacher forcing already")
        schemes = _labelled(scheme or [DEFAULT_TEXT_SCHEME], bits)
        evaluation = _perplexity(data, context, samples, schemes, loading, common)
    else:
        from duotone.tasks import get_task

        chosen = get_task(task)
        _refuse({"--context": context is not None}, "only perplexity cuts text into windows")
        _refuse({"--data": data is not None}, "only perplexity reads a text from a file")
        common |= {"split": split, "kl": kl, "later_question": later_question}
        evaluation = _answers(chosen, samples, scheme, bits, loading, common)
    if json_output:
        print_json(evaluation.results)
    else:
        show_results(evaluation.results)


def _refuse(given: dict[str, bool], why: str) -> None:
    wrong = [name for name, present in given.items() if present]
    if wrong:
        raise ValueError(f"{wrong[0]} does not go with this task: {why}; leave it out")


def _dtype(name: str) -> dict[str, Any]:
    """The option of `load_model` for a dtype; none for the default."""
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {DTYPES}, got {name!r}")
    if name == DTYPES[0]:
        return {}
    import torch

    return {"dtype": getattr(torch, name)}


def _labelled(names: list[str], bits: list[int] | None) -> dict[str, Any]:
    """{label: spec}. Labels become names of files; a spec file's label is its own name."""
    schemes: dict[str, Any] = {}
    for name in names:
        short = Path(name).stem if name.endswith(SPEC_SUFFIX) else name
        for b in bits or [None]:
            label = short if b is None else f"{short}-{b}bit"
            if schemes.setdefault(label, scheme_spec(name, b)) != scheme_spec(name, b):
                raise ValueError(f"two schemes would be called {label!r}; rename a spec file")
    return schemes


def _loaded(loading: dict[str, Any], **options: Any) -> Any:
    return load_model(loading["model"], loading["device"], **loading["dtype"], **options)


def _answers(
    task: Any,
    samples: int | None,
    scheme: list[str] | None,
    bits: list[int] | None,
    loading: dict[str, Any],
    common: dict[str, Any],
) -> Any:
    """Evaluate a task whose answers are generated."""
    from duotone.evaluate import evaluate
    from duotone.evaluate.loader import Encoder
    from duotone.inference.compare import check_scheme_fits
    from duotone.quantize.disjoint import check_evaluation

    samples = samples or task.size or 500
    task.check_samples(samples)
    task.check_metrics()
    first = task.example(0, common["split"])
    schemes = _labelled(scheme or [DEFAULT_SCHEME if first.images else DEFAULT_TEXT_SCHEME], bits)
    loaded = _loaded(loading)
    check_evaluation(loaded.model, task, samples, common["split"])
    for spec in schemes.values():
        check_scheme_fits(loaded, spec, has_images=bool(first.images))
    encoded = Encoder(loaded.processor, loaded.takes_images)([first])
    counts = token_counts(loaded.model, encoded, task.max_new_tokens)
    widest = next(iter(schemes.values()))
    with progress_bar(task.name) as bar, explained_out_of_memory(loaded.model, widest, counts):
        return evaluate(
            loaded.model,
            loaded.processor,
            task,
            schemes,
            samples,
            model_name=loaded.name,
            progress=bar,
            **common,
        )


def _perplexity(
    data: Path | None,
    context: int | None,
    samples: int | None,
    schemes: dict[str, Any],
    loading: dict[str, Any],
    common: dict[str, Any],
) -> Any:
    """Evaluate the perplexity of a file."""
    from duotone.evaluate import evaluate_perplexity
    from duotone.inference.prompts import encoder_of
    from duotone.tasks import read_passages

    if data is None:
        raise ValueError("perplexity needs a text to predict, got none; add --data FILE")
    is_ids = data.suffix == ".json"
    loaded = _loaded(loading, **({"with_processor": False} if is_ids else {}))
    context = context or _default_context(loaded.model)
    encode = None if is_ids else encoder_of(loaded.processor)
    passages = read_passages(data, context, encode)
    counts = {"visual_tokens": 0, "text_tokens": context, "new_tokens": 0}
    widest = next(iter(schemes.values()))
    with progress_bar(PERPLEXITY) as bar, explained_out_of_memory(loaded.model, widest, counts):
        return evaluate_perplexity(
            loaded.model, passages, schemes, samples, model_name=loaded.name, progress=bar, **common
        )


def _default_context(model: Any) -> int:
    text = model.config.get_text_config(decoder=True)
    return min(2048, getattr(text, "max_position_embeddings", None) or 2048)
