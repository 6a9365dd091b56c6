"""`duotone recommend`: the spec for a model, its bytes, loss and speed, and why."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .card import MemoryOption, ReserveOption, WeightsOption, config_of, memory_of
from .common import JsonOption, print_json, show_paths, user_errors
from .plan import show_plan


@user_errors
def command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, config.json or hub name; only its config is read. Or internvl2.5-8b, "
            "internvl2.5-26b.",
            show_default="the embedded duotone-tiny",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Memory for caches, e.g. 20GB or 24GiB.", show_default="none"),
    ] = None,
    memory: MemoryOption = None,
    weights: WeightsOption = None,
    reserve: ReserveOption = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=32,
            help="Tokens of a sequence with its answer.",
            show_default="4096, or all that the model has positions for",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="New .json file for the spec, which every --scheme takes."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Say which spec [bold]duotone.enable(model)[/bold] takes, and what it costs and gives.

    Bytes are computed from the config. Losses and speeds are measured ones, of other models: how
    your model bears few bits is measured by [bold]duotone evaluate[/bold].

    [bold]Examples[/bold]

      duotone recommend Qwen/Qwen2.5-VL-7B-Instruct --budget 20GB

      duotone recommend ./my-model --tokens 32768 --out spec.json

      duotone recommend ./my-model --memory 24GB --weights mquant-w4a8
    """
    of_card = memory_of(budget, memory, weights, reserve)
    given, refused = _checked(model, memory is not None)
    if refused is not None and json_output:
        print_json(refused)
        return
    if refused is not None:
        typer.echo(f"{refused['model_type']}: refused: {refused['refused']}")
        return
    found = _found(given, tokens, of_card)
    if out is not None:
        _write(out, found["chosen"].spec)
    if json_output:
        print_json(_plain(found))
    else:
        _show(found, model)


def _checked(name: str | None, with_weights: bool) -> tuple[Any, dict[str, Any] | None]:
    """Find what to recommend for, and the words of a refusal, as `duotone supports` does.

    The config itself is enough, and has the dtype of the cache, unless only the model's forward
    pass says which tokens are visual.
    """
    import torch
    import transformers

    import duotone
    from duotone.defaults import CONVERSATIONS
    from duotone.hf.verdict import model_on_meta, refusal
    from duotone.planning.shapes import SHAPES
    from duotone.quant.schemes import named

    transformers.utils.logging.set_verbosity_error()
    if name in SHAPES:
        return SHAPES[name], None
    config = config_of(name, with_weights)
    made = config if hasattr(config, "state_dict") else model_on_meta(config)
    why = refusal(duotone.recommend, made)
    spec = named(CONVERSATIONS) if why else duotone.recommend(made).spec
    row = duotone.supports(made, spec)
    if words := row.cache or why:
        return made, {"model_type": row.model_type, "refused": words}
    if refusal(duotone.recommend, config) is None:
        return config, None
    return made.to(config.dtype or torch.bfloat16), None


def _found(given: Any, tokens: int | None, of_card: dict[str, Any]) -> dict[str, Any]:
    """Recommendation, plan or the words against one, decode attention, and what was measured."""
    import duotone
    from duotone.hf.model.facts import ModelFacts, model_facts
    from duotone.hf.recommended import calibrates
    from duotone.planning.measured import measured
    from duotone.planning.memory import attention_paths
    from duotone.quant.schemes import named

    chosen = duotone.recommend(given, tokens=tokens)
    facts = given if isinstance(given, ModelFacts) else model_facts(given)
    try:
        plan = duotone.plan(given, chosen.spec, **vars(chosen.usual), **of_card)
        no_plan = None
    except ValueError as error:
        plan, no_plan = None, str(error)
    is_as_named = chosen.spec == named(chosen.name)
    return {
        "chosen": chosen,
        "scheme": chosen.name if is_as_named else "SPEC.json",
        "of_pictures": facts.is_multimodal,
        "calibrates": facts is not given and calibrates(facts),
        "plan": plan,
        "no_plan": no_plan,
        "attention": attention_paths(facts, chosen.spec),
        "measured": measured(chosen.name) if is_as_named else {"loss": [], "speed": []},
    }


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    plan = found["plan"]
    return {
        **found["chosen"].to_dict(),
        "plan": None if plan is None else plan.to_dict(),
        "no_plan": found["no_plan"],
        "attention": found["attention"],
        "measured": found["measured"],
    }


def _write(path: Path, spec: Any) -> None:
    if path.exists():
        raise ValueError(f"--out must be a new file; {str(path)!r} exists. Name another one")
    path.write_text(spec.to_json() + "\n", encoding="utf-8")


def _show(found: dict[str, Any], model: str | None) -> None:
    from duotone.hf.recommended import SMALLER
    from duotone.loading import EMBEDDED
    from duotone.planning.measured import loss_words, speed_words

    chosen = found["chosen"]
    typer.echo(str(chosen))
    if found["plan"] is None:
        typer.echo(f"\nNo sequences are counted: {found['no_plan']}")
    else:
        show_plan(found["plan"], chosen.name)
    of = f"--model {model or EMBEDDED}"
    task = "captions" if found["of_pictures"] else "perplexity --data TEXT"
    losses = loss_words(found["measured"]["loss"], found["of_pictures"])
    _section("Loss", list(losses), f"duotone evaluate {task} {of} --scheme {found['scheme']}")
    if found["calibrates"]:
        own = f"duotone calibrate {model or EMBEDDED} --text calibrated@2 -o mine"
        typer.echo(f"{SMALLER}: {own}, or duotone.calibrated(model, processor)")
    speeds = speed_words(found["measured"]["speed"])
    _section("Speed", list(speeds), f"duotone bench generate {of} --spec {found['scheme']}")
    typer.echo("\nOn an H200:")
    show_paths(found["attention"])
    typer.echo("\nduotone.enable(model) takes this spec; --out SPEC.json writes it.")


def _section(title: str, lines: list[str], command: str) -> None:
    """Print what was measured, and the command that measures the model at hand."""
    said = ", as measured; your model may differ:" if lines else ": not measured in this version."
    typer.echo(f"\n{title}{said}")
    for line in lines:
        typer.echo(f"- {line}")
    typer.echo(f"For this model: {command}")
