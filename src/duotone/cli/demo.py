"""`duotone demo`: a local page with two answers side by side."""

import os
import sys
import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    SPEC_SUFFIX,
    BitsOption,
    DeviceOption,
    ModelOption,
    SchemeOption,
    TokensOption,
    error_console,
    load_model,
    recommended_spec,
    scheme_spec,
    user_errors,
)

PORT = 8321


@user_errors
def command(
    model: ModelOption = None,
    scheme: SchemeOption = None,
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
    spec = None if scheme is None else scheme_spec(scheme, bits)
    loaded = load_model(model, device)
    if scheme is None:
        scheme, spec = recommended_spec(loaded.model, bits)
    with tempfile.TemporaryDirectory(prefix="duotone-demo-") as folder:
        demo = _demo(loaded, scheme, spec, max_new_tokens, Path(folder))
        with _server(demo, host, port) as server:
            _warm_up(demo)
            typer.echo(f"{loaded.name} answers at {server.url} (Ctrl+C ends it)")
            if browser and _has_screen():
                webbrowser.open(server.url)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                typer.echo("ended", err=True)


def _demo(loaded: Any, scheme: str, spec: Any, max_new_tokens: int, folder: Path) -> Any:
    """The page's contents. Errors: ValueError for a scheme that does not fit the model."""
    from duotone.demo.answers import Answers
    from duotone.demo.choices import Choices
    from duotone.demo.gallery import Gallery
    from duotone.demo.server import Demo
    from duotone.inference.compare import check_scheme_fits

    check_scheme_fits(loaded, spec, has_images=True)
    name = Path(scheme).name if scheme.endswith(SPEC_SUFFIX) else scheme
    choices = Choices(loaded)
    begin, bits = choices.add(name, spec)
    return Demo(Answers(loaded, max_new_tokens), Gallery(folder), choices, begin, bits)


def _server(demo: Any, host: str, port: int) -> Any:
    """The server at an address. Errors: ValueError where it cannot be had."""
    from duotone.demo.server import DemoServer

    try:
        return DemoServer(demo, host, port)
    except OSError as error:
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
