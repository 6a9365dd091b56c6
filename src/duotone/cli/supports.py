"""`duotone supports`: which parts of duotone take a model, judged by its config."""

from typing import Annotated

import typer

from .common import (
    BitsOption,
    JsonOption,
    SchemeOption,
    print_json,
    recommended_spec,
    scheme_spec,
    user_errors,
)

LABELS = {
    "cache": "few-bit cache",
    "graphs": "decode by CUDA graphs",
    "weights": "duotone quantize",
    "video": "video inputs",
}


@user_errors
def command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, config.json or hub name; only its config is read.",
            show_default="the embedded duotone-tiny",
        ),
    ] = None,
    scheme: SchemeOption = None,
    bits: BitsOption = None,
    json_output: JsonOption = False,
) -> None:
    """Say which parts of duotone take a model, and why others refuse it.

    The checks are those of [bold]enable[/bold], its graphs and [bold]duotone quantize[/bold], on a
    model without numbers. "Untested" types pass them, and no test of duotone runs one.

    [bold]Examples[/bold]

      duotone supports Qwen/Qwen2.5-VL-7B-Instruct

      duotone supports ./my-model --scheme kivi --bits 2 --json
    """
    import transformers

    import duotone
    from duotone.defaults import CONVERSATIONS, name_of
    from duotone.hf.verdict import refusal
    from duotone.loading import load_config

    transformers.utils.logging.set_verbosity_error()
    config = load_config(model)
    if scheme is None and refusal(duotone.recommend, config) is not None:
        scheme = name_of(CONVERSATIONS)  # whose refusal is the row's
    if scheme is None:
        scheme, spec = recommended_spec(config, bits)
    else:
        spec = scheme_spec(scheme, bits)
    row = duotone.supports(config, spec)
    if json_output:
        print_json({"scheme": scheme, **row.to_dict(), "words": row.words()})
        return
    typer.echo(f"{row.model_type}, {scheme}")
    for name, words in row.words().items():
        typer.echo(f"{LABELS[name]:22} {words}")
    typer.echo(f"{'tested with':22} {', '.join(row.tested) or 'nothing'}")
