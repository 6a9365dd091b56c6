"""`duotone bench serve`: vLLM's own client against `vllm serve`, row by row at equal cache memory.

A row is a cache dtype of vLLM. Its server starts once and answers every request rate. A row that
could not run holds a "reason", and a later run measures it again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from duotone.report.provenance import commit, stamp
from duotone.tools import json_text

SCHEMA = "duotone.serve/1"
# {row: options of its server}
ROWS: dict[str, tuple[str, ...]] = {
    "bf16": ("--kv-cache-dtype", "auto", "--attention-backend", "FLASH_ATTN"),
    "fp8": ("--kv-cache-dtype", "fp8"),
    "int4_per_token_head": ("--kv-cache-dtype", "int4_per_token_head"),
    "turboquant_3bit_nc": ("--kv-cache-dtype", "turboquant_3bit_nc"),
    "duotone_4bit": ("--kv-cache-dtype", "duotone_4bit", "--attention-backend", "CUSTOM"),
    "duotone_2bit": ("--kv-cache-dtype", "duotone_2bit", "--attention-backend", "CUSTOM"),
}
# Fields of the client's JSON, by the names that results give them.
FIELDS = {
    "tokens_per_s": "output_throughput",
    "requests_per_s": "request_throughput",
    "completed": "completed",
    "failed": "failed",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "tpot_p50_ms": "median_tpot_ms",
    "tpot_p99_ms": "p99_tpot_ms",
    "itl_p99_ms": "p99_itl_ms",
}
_CAPACITY = re.compile(r"KV cache size: ([\d,]+) tokens")
# Of language layers, in the words of vLLM 0.33; a vision tower's line says "for vit attention".
_BACKEND = re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z]\w*) (?:attention )?backend")
_RUNNING = re.compile(r"^vllm:num_requests_running(?:{[^}]*})? (\S+)$", re.MULTILINE)
_ERROR = re.compile(r"^(?!.*\bWARNING\b).*\b[A-Z]\w*(?:Error|Exception)\b")
LOG_LINES = 15
POLL_S, STOP_S, CLIENT_S = 0.1, 30.0, 3600.0
# Requests before those that count: first calls of kernels.
WARMUPS = 4
SPARE_TOKENS = 64


@dataclass(frozen=True)
class Load:
    """Requests of every row; cache_bytes: of the server's KV cache, per GPU.

    prompts: per rate. waves: in their place, so many times the requests that a row's cache holds.
    server_options: more options of every row's server.
    """

    model: str
    cache_bytes: int
    input_tokens: int
    output_tokens: int
    prompts: int | None
    rates: tuple[str, ...]
    seed: int = 0
    max_model_len: int | None = None
    server_options: tuple[str, ...] = ()
    waves: int | None = None

    def __post_init__(self) -> None:
        if (self.prompts is None) == (self.waves is None):
            raise ValueError(
                f"a load has either prompts or waves; got {self.prompts} and {self.waves}. Give "
                "one of them."
            )

    def requests(self, cache_tokens: int | None) -> int:
        """Requests per rate of a row whose cache holds so many tokens."""
        if self.waves is None:
            return self.prompts
        if cache_tokens is None:
            raise RowError("waves need the size of the cache, which the server's log does not say")
        return self.waves * max(1, cache_tokens // (self.input_tokens + self.output_tokens))

    @property
    def length(self) -> int:
        """Tokens a request may have; the client's prompts may be a few tokens longer than asked."""
        return self.max_model_len or self.input_tokens + self.output_tokens + SPARE_TOKENS


class RowError(Exception):
    """Reason why a row could not run."""


def run(
    load: Load, rows: Sequence[str], path: Path, start_s: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """Measure rows that the file lacks; it is written after each row.

    Errors: ValueError for an unknown row, and for a file of another load or device; ImportError
    without vLLM.
    """
    if unknown := sorted(set(rows) - ROWS.keys()):
        raise ValueError(f"--row must be one of {sorted(ROWS)}; got {unknown}. Name one of them.")
    if shutil.which("vllm") is None:
        raise ImportError(
            "duotone bench serve needs the command vllm, which is not on PATH: "
            "pip install 'duotone[vllm]'"
        )
    result = _continued(path, _header(load))
    for name in rows:
        if any(row["row"] == name for row in result["rows"]):
            continue
        row = {**_row(load, name, start_s), "commit": commit()}
        result["rows"].append(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        say(f"{name}: {row.get('reason', 'measured')}")
    return result


def _header(load: Load) -> dict[str, Any]:
    import torch

    try:
        found = subprocess.run(["vllm", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"`vllm` must be on PATH and run; got {error}. Install duotone[vllm]."
        ) from error
    header = stamp("cuda" if torch.cuda.is_available() else "cpu")
    header["versions"]["vllm"] = found.stdout.strip().splitlines()[-1]
    fields = {**asdict(load), "rates": list(load.rates)}
    fields["server_options"] = list(load.server_options)
    return {"schema": SCHEMA, **header, **fields, "rows": []}


def _continued(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier run, less rows that could not run; else the header."""
    if not path.exists():
        return header
    found = json_text.loads(path.read_text(encoding="utf-8"))
    for name in header.keys() - {"rows", "created", "commit"}:
        if found.get(name) != header[name]:
            raise ValueError(
                f"rows of one file have one {name}: {str(path)!r} has {found.get(name)!r}, these "
                f"would have {header[name]!r}. Give another file as --out."
            )
    return {**found, "rows": [row for row in found["rows"] if "reason" not in row]}


def _row(load: Load, name: str, start_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        try:
            with _server(load, ROWS[name], log, start_s) as port:
                count = load.requests(_cache_tokens(log))
                rates = [
                    _client(load, at, count, port, Path(folder)) for at in range(len(load.rates))
                ]
        except RowError as failure:
            lines = _telling(log.read_text(errors="replace").splitlines())
            return {"row": name, "reason": "\n".join([str(failure), *lines])}
        said, tokens = log.read_text(errors="replace"), _cache_tokens(log)
    return {
        "row": name,
        "options": list(ROWS[name]),
        "backends": sorted(set(_BACKEND.findall(said))),
        "cache_tokens": tokens,
        "rates": rates,
    }


def _cache_tokens(log: Path) -> int | None:
    found = _CAPACITY.search(log.read_text(errors="replace"))
    return int(found[1].replace(",", "")) if found else None


def _telling(lines: Sequence[str]) -> list[str]:
    """The first error of a log with what follows it, and the last lines.

    The server's own last error is that a process of its ended; why is said before.
    """
    first = next((at for at, line in enumerate(lines) if _ERROR.search(line)), len(lines))
    last = max(len(lines) - LOG_LINES, first + LOG_LINES)
    return [*lines[first : first + LOG_LINES], *lines[last:]] or list(lines[-LOG_LINES:])


@contextmanager
def _server(load: Load, options: Sequence[str], log: Path, start_s: float) -> Iterator[int]:
    """Port of a server that answers; its process group ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["vllm", "serve", load.model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--kv-cache-memory-bytes", str(load.cache_bytes), "--seed", str(load.seed)]
    command += ["--max-model-len", str(load.length)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *load.server_options, *options],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with _ended_by_sigterm():
            _wait(process, port, start_s)
            yield port
    finally:
        _stop(process)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM leave the block as an exception, so that servers end; in the main thread alone.

    The exit status is a shell's for SIGTERM, 143.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _most_running(port: int) -> Iterator[list[int]]:
    """A list that gets the most requests that the server ran at once, by its own metrics.

    It stays empty where the server has none.
    """
    most: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            with suppress(OSError):
                url = f"http://127.0.0.1:{port}/metrics"
                with urllib.request.urlopen(url, timeout=5) as found:
                    numbers = _RUNNING.findall(found.read().decode())
                if numbers:
                    most[:] = [max([*most, round(sum(map(float, numbers)))])]

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def _wait(process: subprocess.Popen, port: int, start_s: float) -> None:
    end = time.monotonic() + start_s
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RowError(f"the server ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(POLL_S)
    raise RowError(f"the server did not answer within {start_s:g} s")


def _stop(process: subprocess.Popen) -> None:
    """End all processes of the group: first asked, then killed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue


def _why(errors: Sequence[str]) -> str:
    """The last line of each kind of error, with how often it came."""
    kinds = Counter(lines[-1] for error in errors if (lines := error.strip().splitlines()))
    return "".join(f"; {count} x {kind}" for kind, count in kinds.most_common())


def _client(load: Load, at: int, count: int, port: int, folder: Path) -> dict[str, Any]:
    """Numbers of `count` requests at one rate, whose prompts no prefix cache has seen."""
    rate = load.rates[at]
    name = f"rate-{rate}.json"
    options = {
        "--model": load.model,
        "--base-url": f"http://127.0.0.1:{port}",
        "--dataset-name": "random",
        "--random-input-len": load.input_tokens,
        "--random-output-len": load.output_tokens,
        "--num-prompts": count,
        "--request-rate": rate,
        "--num-warmups": WARMUPS,
        "--seed": load.seed + at,
        "--result-dir": folder,
        "--result-filename": name,
    }
    command = ["vllm", "bench", "serve", "--ignore-eos", "--save-result", "--save-detailed"]
    command += [str(part) for option in options.items() for part in option]
    try:
        with _most_running(port) as most:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_S)
    except subprocess.TimeoutExpired as late:
        raise RowError(f"the client took longer than {CLIENT_S:g} s at rate {rate}") from late
    if done.returncode or not (folder / name).exists():
        last = "\n".join((done.stdout + done.stderr).splitlines()[-LOG_LINES:])
        raise RowError(f"the client ended with {done.returncode} at rate {rate}: {last}")
    found = json_text.loads((folder / name).read_text(encoding="utf-8"))
    if found.get("completed") != count:
        raise RowError(
            f"all {count} requests must be answered; got {found.get('completed')} at rate "
            f"{rate}{_why(found.get('errors', ()))}"
        )
    numbers = {mine: found.get(theirs) for mine, theirs in FIELDS.items()}
    return {"rate": rate, **numbers, "most_running": most[0] if most else None}
