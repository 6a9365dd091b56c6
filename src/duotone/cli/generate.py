"""`duotone generate`: one answer from a quantized cache."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    BitsOption,
    DeviceOption,
    JsonOption,
    ModelOption,
    SchemeOption,
    TokensOption,
    error_console,
    load_model,
    megabytes,
    print_json,
    scheme_spec,
    user_errors,
)
from .memory import explained_out_of_memory


@user_errors
def command(
    prompt: Annotated[str, typer.Argument(help="The question or instruction.")],
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="Picture; repeat for several in one prompt."),
    ] = None,
    model: ModelOption = None,
    scheme: SchemeOption = "duotone",
    bits: BitsOption = None,
    max_new_tokens: TokensOption = 128,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Answer one prompt from a quantized cache and report the cache's bytes.

    [bold]Examples[/bold]

      duotone generate "What is shown here?" --image cat.jpg

      duotone generate "Which picture is brighter?" -i a.png -i b.png --scheme duotone --bits 2

      duotone generate "Once upon a time" --model my-llama --scheme kivi
    """
    from duotone.inference import compare as comparing

    spec = scheme_spec(scheme, bits)
    question = comparing.Prompt("", tuple(image or ()), prompt)
    messages = question.messages()
    loaded = load_model(model, device)
    comparing.check_scheme_fits(loaded, spec, has_images=bool(image))
    text, memory, milliseconds = _answer(loaded, spec, messages, prompt, max_new_tokens)
    if json_output:
        print_json(
            {
                "model": loaded.name,
                "scheme": scheme,
                "spec": spec.to_dict(),
                "answer": text,
                "memory": memory,
                "ms_per_token": milliseconds,
            }
        )
        return
    typer.echo(text)
    stored, dense = memory["total_bytes"], memory["dense_equivalent_bytes"]
    error_console().print(
        f"[dim]cache: {megabytes(stored)} instead of {megabytes(dense)}, "
        f"{memory['bits_per_element']:.2f} true bits per number[/]"
    )


def _encode(loaded: Any, messages: list[dict], prompt: str) -> dict[str, Any]:
    from duotone.inference.batch import encode
    from duotone.inference.prompts import encode_text

    if loaded.takes_images:
        return encode(loaded.processor, [messages])
    if len(messages[0]["content"]) > 1:
        raise ValueError(
            f"pictures need a multimodal model, got {loaded.name!r}, which takes text only; "
            "leave --image out or choose another --model"
        )
    return encode_text(loaded.processor, [prompt])


def _answer(loaded: Any, spec: Any, messages: list[dict], prompt: str, max_new_tokens: int):
    """Text, memory report and milliseconds per token of one answer."""
    from duotone.inference.batch import decode_answers, generate, make_cache, prepare
    from duotone.inference.memory import cache_memory

    encoded = _encode(loaded, messages, prompt)
    batch = prepare(loaded.model, encoded)
    visual = int(batch.visual_mask.sum())
    counts = {
        "visual_tokens": visual,
        "text_tokens": batch.visual_mask.numel() - visual,
        "new_tokens": max_new_tokens,
    }
    with (
        error_console().status("answering"),
        explained_out_of_memory(loaded.model, spec, counts),
    ):
        cache = make_cache(loaded.model, spec, batch)
        done = generate(loaded.model, batch, cache, max_new_tokens, timed=True)
    text = decode_answers(loaded.processor, done.token_ids)[0]
    return text, cache_memory(cache), done.ms_per_token
