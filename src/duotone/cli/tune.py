"""`duotone tune`: search for the best cache within a budget, on one's own model and samples."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from .card import ReserveOption
from .common import (
    ContextOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    check_folder,
    load_model,
    print_json,
    progress_bars,
    user_errors,
)
from .joint import check_alone, run_joint
from .samples import named_tasks

DEFAULT_MINUTES = 10.0


@user_errors
def command(
    task: Annotated[
        list[str] | None,
        typer.Argument(
            help="captions, documents, sequences, or files of your own: .jsonl, .txt, or "
            ".safetensors of embeddings; the spec is good for all of them together.",
            show_default="the embedded tasks",
        ),
    ] = None,
    budget_bits: Annotated[
        float | None, typer.Option("--budget-bits", "-b", help="True bits per number of K and V.")
    ] = None,
    budget_bytes: Annotated[
        int | None, typer.Option(help="Instead: bytes per sequence, mean over the samples.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="Instead: all memory of the card, e.g. 24GB; weights are searched, too."),
    ] = None,
    sequences: Annotated[
        int | None, typer.Option(min=1, help="With --memory: to hold at once.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="With --memory: of a sequence with its answer.")
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            help="With --memory: none, or a recipe of duotone quantize; repeat for more.",
            show_default="none, mquant-w8a8, mquant-w4a8",
        ),
    ] = None,
    reserve: ReserveOption = None,
    bits_of: Annotated[
        str | None,
        typer.Option(
            help="visual: all bytes that hold the prompts' visual tokens; cache: all bytes.",
            show_default="visual where every prompt has a picture",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Per task, searched on.")] = 8,
    heldout: Annotated[int, typer.Option(help="Per task, for the report alone.")] = 16,
    minutes: Annotated[
        float | None,
        typer.Option(help="For search and report; the search ends in time.", show_default="10"),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="End the search after so many trials in all.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the search.")] = 0,
    portable: Annotated[
        bool, typer.Option("--portable", help="No rules for single layers; fits any depth.")
    ] = False,
    sampler: Annotated[str, typer.Option(help="nsga2 or tpe.")] = "nsga2",
    ceiling: Annotated[float, typer.Option(help="Times the budget: the front's upper end.")] = 8.0,
    out: Annotated[
        Path, typer.Option(help="New folder; one of an earlier search goes on with it.")
    ] = Path("tuned"),
    model: ModelOption = None,
    context: ContextOption = 1024,
    batch_size: Annotated[int, typer.Option()] = 8,
    scores: Annotated[
        bool, typer.Option(help="Also generate held-out answers with a few specs.")
    ] = True,
    keep_found: Annotated[
        bool, typer.Option(help="Write the spec that was found, also where a preset is better.")
    ] = False,
    plot: Annotated[bool, typer.Option(help="Also draw the front (needs matplotlib).")] = True,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Search for the spec closest to 16 bit within a budget; write it with a report.

    Searches bits by channel and layer, axes, groups, levels, windows, sharing and rotation. The
    objective is next-token divergence from the 16-bit cache on a first part of the samples. All
    reported numbers are of other samples, which the search never sees. A preset within the budget
    that is nearer to 16 bit there takes the place of the found spec. If started again with the same
    --out, the search goes on where it ended.

    --memory searches pairs of weights and caches for --sequences of --tokens tokens. Each recipe
    quantizes the model once, and its caches get what the weights leave. --trials is per recipe;
    nothing is drawn, and no answers are generated.

    [bold]Examples[/bold]

      duotone tune --budget-bits 1.3

      duotone tune mine.jsonl --memory 24GB --sequences 16 --tokens 4096 --model MODEL

      duotone tune mine.jsonl --budget-bits 2 --model OpenGVLab/InternVL3-1B-hf --out tuned/mine

      duotone compare --scheme tuned/spec.json
    """
    from duotone.tune import TuneSettings, make_job, make_report, write_report

    common = {
        "samples": samples,
        "heldout": heldout,
        "batch_size": batch_size,
        "seed": seed,
        "portable": portable,
        "ceiling": ceiling,
        "sampler": sampler,
    }
    alone = {"budget_bits": budget_bits, "budget_bytes": budget_bytes, "bits_of": bits_of}
    found = {"keep_found": keep_found or None}
    load = {"sequences": sequences, "tokens": tokens}
    if minutes is None and trials is None:
        minutes = DEFAULT_MINUTES
    check_folder(out)
    if memory is not None:
        tasks = named_tasks(task, model, context)
        _check_packages(tasks, scores=False)
        of_pair = (memory, reserve, weights, load, alone | found, common, tasks)
        run_joint(*of_pair, model, device, out, (trials, minutes), json_output)
        return
    check_alone({"weights": weights, "reserve": reserve, **load})
    _check_plot(plot)
    settings = TuneSettings(**alone, **common)
    tasks = named_tasks(task, model, context)
    _check_packages(tasks, scores)
    loaded = load_model(model, device)
    with progress_bars() as progress:
        job = make_job(loaded, tasks, settings, out, progress)
        tuned = job.search(trials, minutes)
        report = make_report(job, tuned, scores=scores, keep_found=keep_found)
    files = write_report(report, out, plot=plot)
    if json_output:
        print_json(report)
    else:
        _show(report, files)


def _check_plot(plot: bool) -> None:
    if plot and find_spec("matplotlib") is None:
        raise ImportError(
            "pictures need matplotlib, which is not installed: "
            "pip install 'duotone[tune]', or leave the picture out with --no-plot"
        )


def _check_packages(tasks: list[Any], scores: bool) -> None:
    """Raise ImportError for a package that the search or its held-out answers lack."""
    from duotone.tasks import Task
    from duotone.tune.search import need_optuna

    need_optuna()
    for task in tasks if scores else ():
        if isinstance(task, Task):
            task.check_metrics()


def _show(report: dict[str, Any], files: list[Path]) -> None:
    """Show the chosen spec next to the published schemes, and the use of the spec."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    chosen = report["heldout"]["chosen"]
    table = Table(
        "", "true bits", "KL", "found: bits", "KL", title="held out", title_justify="left"
    )
    for row in report["comparisons"]:
        ours = [f"{row['its_bits']:.2f}", f"{row['its_kl']:.2g}"] if "by" in row else ["-", "-"]
        table.add_row(row["label"], f"{row['bits']:.2f}", f"{row['kl']:.2g}", *ours)
    console.print(table)
    console.print(
        f"Chosen: {chosen['bits']:.3f} true bits, KL {chosen['kl']:.2g} on held-out samples, out "
        f"of {report['trials']['measured']} trials."
    )
    for sentence in report["verdict"]["sentences"]:
        console.print(sentence, style="bold", markup=False, soft_wrap=True)
    console.print("Written: " + ", ".join(str(file) for file in files), soft_wrap=True)
    spec = files[0]
    console.print(f"Use it:  duotone compare --scheme {spec}", soft_wrap=True)
    console.print(
        f"         spec = duotone.CacheSpec.from_json(Path({str(spec)!r}).read_text())",
        soft_wrap=True,
    )
