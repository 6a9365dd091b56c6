"""`duotone demo`: a local page with two answers side by side."""

import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from duotone.defaults import PICTURES

from .common import (
    SPEC_SUFFIX,
    BitsOption,
    DeviceOption,
    ModelOption,
    SchemeOption,
    TokensOption,
    error_console,
    load_model,
    scheme_spec,
    user_errors,
)

PORT = 8321
SCHEME = PICTURES.partition("@")[0]


@user_errors
def command(
    model: ModelOption = None,
    scheme: SchemeOption = SCHEME,
    bits: BitsOption = None,
    max_new_tokens: TokensOption = 96,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    device: DeviceOption = None,
) -> None:
    """Open a local page: ask about pictures, and watch a 16-bit and a few-bit cache answer.

    Both answers run on one model in turns, with their bytes and their own time. Pictures of
    yours stay on this machine. Without arguments: the embedded model, offline.

    [bold]Examples[/bold]

      duotone demo

      duotone demo --model OpenGVLab/InternVL3-1B-hf

      duotone demo --scheme my-spec.json --no-browser --port 9000
    """
    spec = scheme_spec(scheme, bits)
    loaded = load_model(model, device)
    with tempfile.TemporaryDirectory(prefix="duotone-demo-") as folder:
        server = _server(loaded, scheme, bits, spec, max_new_tokens, (host, port), Path(folder))
        with server:
            _warm_up(server.demo)
            typer.echo(f"{loaded.name} answers at {server.url} (Ctrl+C ends it)")
            if browser and _has_screen():
                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("ended", err=True)


def _server(
    loaded: Any,
    scheme: str,
    bits: int | None,
    spec: Any,
    max_new_tokens: int,
    address: tuple[str, int],
    folder: Path,
) -> Any:
    """The server at an address. Errors: ValueError where it cannot begin."""
    from duotone.demo.answers import Answers
    from duotone.demo.choices import Choices
    from duotone.demo.gallery import Gallery
    from duotone.demo.server import Demo, DemoServer
    from duotone.inference.compare import check_scheme_fits
    from duotone.quant.schemes import name_and_bits

    check_scheme_fits(loaded, spec, has_images=True)
    if scheme.endswith(SPEC_SUFFIX):
        name, own = Path(scheme).name, {Path(scheme).name: spec}
    else:
        (name, own_bits), own = name_and_bits(scheme), {}
        bits = own_bits if bits is None else bits
    answers = Answers(loaded, max_new_tokens)
    demo = Demo(answers, Gallery(folder), Choices(loaded, own), name, bits)
    try:
        return DemoServer(demo, *address)
    except OSError as error:
        host, port = address
        raise ValueError(
            f"the page needs an address to listen on, and {host}:{port} cannot be had: {error}; "
            "choose another --port, or 0 for a free one"
        ) from error


def _has_screen() -> bool:
    """False on a machine without a screen, where a browser would take the terminal."""
    return sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))


def _warm_up(demo: Any) -> None:
    """Answer once: a first call finds kernels and buffers, and would show as slow."""
    (key, *_) = (entry["id"] for entry in demo.gallery.to_list())
    asked = {"entry": key, "question": "Describe the picture.", "later": True}
    with error_console().status("warming up"):
        for _ in demo.ask({**asked, "scheme": demo.scheme, "bits": demo.bits}):
            pass
