"""HTTP of the page: files, pictures, and answers as lines of JSON while they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from duotone.demo.answers import Answers
from duotone.demo.choices import Choices
from duotone.demo.gallery import MOST_BYTES, Gallery, too_large
from duotone.loading import EMBEDDED
from duotone.tools import json_text

PAGE = Path(__file__).parent / "page"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
LOCAL = ("127.0.0.1", "localhost", "::1")
# Bytes of a JSON body; and of a body that is read only to answer that it is too large.
MOST_JSON, MOST_DRAINED = 100_000, 10 * MOST_BYTES
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True)
class Demo:
    """All that the page needs: answers, pictures, schemes, and the scheme to begin with."""

    answers: Answers
    gallery: Gallery
    choices: Choices
    scheme: str
    bits: int | None = None

    def state(self) -> dict[str, Any]:
        """JSON-safe data that the page begins with."""
        loaded = self.answers.loaded
        return {
            "model": loaded.name,
            "embedded": loaded.name == EMBEDDED,
            "parameters": loaded.model.num_parameters(),
            "device": loaded.model.device.type,
            "can_ask_later": self.answers.can_ask_later,
            "most_bytes": MOST_BYTES,
            "scheme": self.scheme,
            "bits": self.bits,
            "schemes": self.choices.to_list(),
            "entries": self.gallery.to_list(),
        }

    def ask(self, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of one question. Errors: ValueError, with the first event, for a bad request."""
        prompt, truth = self.gallery.prompt(asked.get("entry"), asked.get("question"))
        spec = self.choices.spec(asked.get("scheme"), asked.get("bits"))
        later = bool(asked.get("later")) and self.answers.can_ask_later
        for event in self.answers.ask(prompt, spec, later):
            yield event | {"truth": truth} if event["event"] == "done" else event


class Handler(BaseHTTPRequestHandler):
    """One request. Only pages of this server may ask: other sites of a browser are refused."""

    server: DemoServer
    timeout = 60

    def do_GET(self) -> None:
        """Answer with a file of the page, the state, or a picture."""
        path = urlsplit(self.path).path
        if not self._is_ours():
            return
        if path in FILES:
            name, kind = FILES[path]
            self._send(HTTPStatus.OK, kind, (PAGE / name).read_bytes())
        elif path == "/state":
            self._send_json(HTTPStatus.OK, self.server.demo.state())
        elif path.startswith("/picture/"):
            self._picture(path)
        else:
            self._fail(HTTPStatus.NOT_FOUND, f"there is no {path}")

    def do_POST(self) -> None:
        """Take a picture, draw one, or answer a question."""
        url = urlsplit(self.path)
        if not self._is_ours():
            return
        try:
            if url.path == "/picture":
                name = parse_qs(url.query).get("name", [""])[0]
                data = self._body("a picture", MOST_BYTES)
                self._send_json(HTTPStatus.OK, self.server.demo.gallery.add(name, data))
            elif url.path == "/draw":
                kind = self._json().get("kind")
                self._send_json(HTTPStatus.OK, self.server.demo.gallery.draw(kind))
            elif url.path == "/ask":
                self._stream(self.server.demo.ask(self._json()))
            else:
                self._fail(HTTPStatus.NOT_FOUND, f"there is no {url.path}")
        except ValueError as error:
            self._fail(HTTPStatus.BAD_REQUEST, str(error))
        except OSError:
            raise  # the connection's, or the folder's
        except Exception as error:
            self._fail(HTTPStatus.INTERNAL_SERVER_ERROR, str(error) or type(error).__name__)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing about requests."""

    def _is_ours(self) -> bool:
        """Refuse names and pages of other servers, which a browser may be made to send."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin")
        known = not self.server.names or urlsplit(f"//{host}").hostname in self.server.names
        if known and origin in (None, f"http://{host}"):
            return True
        self._fail(HTTPStatus.FORBIDDEN, f"only pages of this server may ask, got {origin or host}")
        return False

    def _picture(self, path: str) -> None:
        key, _, number = path.removeprefix("/picture/").partition("/")
        try:
            file = self.server.demo.gallery.file(key, int(number))
            self._send(HTTPStatus.OK, "image/png", file.read_bytes())
        except (ValueError, FileNotFoundError) as error:
            self._fail(HTTPStatus.NOT_FOUND, str(error))

    def _body(self, what: str, most: int) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise ValueError("a request must say its Content-Length")
        if int(length) > most:
            left = min(int(length), MOST_DRAINED)
            while left > 0 and (part := self.rfile.read(min(left, 1 << 20))):
                left -= len(part)
            raise ValueError(too_large(what, int(length), most))
        return self.rfile.read(int(length))

    def _json(self) -> dict[str, Any]:
        data = json_text.loads(self._body("a request", MOST_JSON))
        if not isinstance(data, dict):
            raise ValueError(f"a request must be a JSON object, got {type(data).__name__}")
        return data

    def _stream(self, events: Iterator[dict[str, Any]]) -> None:
        """Send events as they come; a listener that goes away ends them."""
        first = next(events)
        self._begin(HTTPStatus.OK, "application/x-ndjson")
        try:
            self._line(first)
            for event in events:
                self._line(event)
        except OSError:
            pass
        except Exception as error:
            self._line({"event": "error", "message": " ".join(str(error).split())})
        finally:
            events.close()

    def _line(self, event: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(event).encode() + b"\n")
        self.wfile.flush()

    def _begin(self, status: HTTPStatus, kind: str, **more: str) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._begin(status, kind, **{"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_json(self, status: HTTPStatus, data: Any) -> None:
        self._send(status, "application/json", json.dumps(data).encode())

    def _fail(self, status: HTTPStatus, message: str) -> None:
        self._send_json(status, {"error": " ".join(message.split())})


class DemoServer(ThreadingHTTPServer):
    """The server of one `Demo`.

    port: 0 takes a free one. Errors: OSError where the address cannot be had.
    """

    daemon_threads = True

    def __init__(self, demo: Demo, host: str, port: int) -> None:
        super().__init__((host, port), Handler)
        self.demo = demo
        everywhere = host in ("", "0.0.0.0")
        # Where any address is served, its names are not known.
        self.names = () if everywhere else (host, *LOCAL)

    @property
    def url(self) -> str:
        """Address of the page on this machine."""
        host, port = self.server_address[:2]
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/"
