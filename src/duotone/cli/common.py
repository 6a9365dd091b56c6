"""Shared parts of all commands: options, one-line errors, progress on stderr, JSON on stdout."""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

USER_ERROR = 2
SPEC_SUFFIX = ".json"

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Folder or hub name of a transformers model. Default: the embedded duotone-tiny.",
        show_default=False,
    ),
]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help="Folder or hub name of a transformers model.", show_default="the embedded duotone-tiny"
    ),
]
EMBEDDED_TASKS = ("captions", "documents", "sequences")
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        "-t",
        help="captions, documents, sequences, made-up, written; a .jsonl file of your own, a .txt "
        "file, or a .safetensors file of embeddings; repeat for more.",
        show_default="the embedded model's first three; another model's made-up, a text model's "
        "written",
    ),
]
ContextOption = Annotated[int, typer.Option(min=1, help="Tokens of a stretch of a .txt file.")]
SamplesOption = Annotated[int, typer.Option("--samples", "-n", help="Per task.")]
SchemeOption = Annotated[
    str | None,
    typer.Option(
        "--scheme",
        "-s",
        help="Scheme of the cache ([bold]duotone schemes[/bold]), NAME or NAME@BITS, or a .json "
        "file of a CacheSpec.",
        show_default="the recommended one",
    ),
]
BitsOption = Annotated[
    int | None,
    typer.Option("--bits", "-b", help="Bits per number: 1, 2, 3, 4 or 8.", show_default="scheme's"),
]
TokensOption = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
DeviceOption = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...", show_default="cuda if there is one")
]
LaterOption = Annotated[
    bool,
    typer.Option(
        "--later-question",
        help="Read the question after the pictures' cache was quantized, as in a later turn.",
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON with all numbers and nothing else to stdout.")
]


def error_console() -> Console:
    """Console of progress and errors."""
    return Console(stderr=True)


def user_errors(command: Callable) -> Callable:
    """Turn errors that the user can fix into one message and exit code 2; report kept work.

    DUOTONE_DEBUG=1 shows the traceback instead.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (ValueError, OSError, ImportError) as error:
            if os.environ.get("DUOTONE_DEBUG"):
                raise
            error_console().print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(USER_ERROR) from error
        except KeyboardInterrupt as interrupt:
            for note in getattr(interrupt, "__notes__", ()):
                say(note)
            raise

    return wrapped


def say(line: str) -> None:
    """Print a sentence on stderr without markup, above a progress bar."""
    print(line, file=sys.stderr)


@contextmanager
def progress_bars() -> Iterator[Callable[..., None]]:
    """Show a bar on stderr per stage; yields a function of (stage, done, total, its text)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stages: dict[str, Any] = {}
    with Progress(*columns, console=error_console(), transient=True) as bars:

        def show(stage: str, done: int, total: int | None, text: str | None = None) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done, total=total, description=text or stage)

        yield show


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr; yields a function of (done, total)."""
    with progress_bars() as show:
        show(what, 0, None)
        yield lambda done, total: show(what, done, total)


def print_json(data: Any) -> None:
    """Print one JSON document on stdout."""
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")


def scheme_spec(name: str, bits: int | None) -> Any:
    """The scheme's CacheSpec, at its own bits or the given bits; or the CacheSpec of a .json file.

    NAME@BITS is the scheme of that name at these bits.
    """
    import duotone
    from duotone.quant.schemes import name_and_bits

    if name.endswith(SPEC_SUFFIX):
        if bits is not None:
            raise ValueError(f"--bits does not go with the spec file {name!r}, which has its own")
        return duotone.CacheSpec.from_file(name)
    name, own = name_and_bits(name)
    if own is not None and bits is not None:
        raise ValueError(f"--bits does not go with {name}@{own}, which says its own; leave one out")
    bits = own if bits is None else bits
    return duotone.scheme(name) if bits is None else duotone.scheme(name, bits=bits)


def recommended_spec(model_or_config: Any, bits: int | None) -> tuple[str, Any]:
    """(name, CacheSpec) of the recommended scheme, at its own bits or the given bits."""
    import duotone
    from duotone.defaults import name_of

    chosen = duotone.recommend(model_or_config)
    if bits is None:
        return chosen.name, chosen.spec
    return name_of(chosen.name), scheme_spec(name_of(chosen.name), bits)


def load_model(name: str | None, device: str | None, **options: Any) -> Any:
    """The model and its processor, with a line on stderr while the model loads.

    options: of `duotone.loading.load`.
    """
    with error_console().status(f"loading {name or 'the embedded model'}"):
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        from duotone.loading import load

        return load(name, device, **options)


def megabytes(count: float) -> str:
    """Bytes in decimal units."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def check_folder(path: Path | None) -> Path | None:
    """Check that an output folder can be made and written, before any work is lost."""
    if path is None:
        return None
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out must be a folder, got the file {str(path)!r}; name another")
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"--out must be a folder to write to, got {str(path)!r}: {error}"
        ) from error
    return path


def show_paths(paths: list[dict[str, Any]], err: bool = False) -> None:
    """Say what decodes which tokens, and what leaving the CUDA kernels costs."""
    from duotone.tools.slow_paths import COSTS

    layers = len({layer for path in paths for layer in path["layers"]})
    for path in paths:
        where = "" if len(path["layers"]) == layers else f" of layers {_ranges(path['layers'])}"
        who = f"decode attention of {path['tokens']} tokens{where}"
        if path["why"] is None:
            typer.echo(f"{who} runs by the CUDA kernels", err=err)
        else:
            typer.echo(f"{who} {COSTS[path['runs']]}, because {path['why']}", err=err)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as '0-2, 5'."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
