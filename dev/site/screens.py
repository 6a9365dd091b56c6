"""Every page of the built site in a headless Chromium: light and dark, desktop and phone.

    make docs && python dev/site/screens.py /tmp/screens [quickstart.html ...]

Writes a picture per page, ground and width; ends with 1 where a page logs an error, loads from
elsewhere or is wider than its window. Needs chromium, and websocket-client from pip.
"""

import base64
import contextlib
import functools
import http.server
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import websocket

SITE = Path(__file__).resolve().parents[2] / "site"
WIDTHS, GROUNDS = (1280, 390), ("light", "dark")
TALLEST = 6000


class Browser:
    """A tab of a headless Chromium, by its DevTools protocol."""

    def __init__(self, port: int) -> None:
        address = f"http://127.0.0.1:{port}/json/new?about:blank"
        request = urllib.request.Request(address, method="PUT")
        tab = json.load(urllib.request.urlopen(request))
        self._socket = websocket.create_connection(
            tab["webSocketDebuggerUrl"], suppress_origin=True, timeout=60
        )
        self._number = itertools.count(1)
        self.events: list[dict] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        # The ground that a reader chose earlier would be kept.
        self.call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")

    def call(self, method: str, **params: object) -> dict:
        """Result of one command; events that come before it are kept."""
        number = next(self._number)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("id") == number:
                return answer.get("result", answer)
            self.events.append(answer)

    def value(self, expression: str) -> object:
        """Value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def open(self, address: str, width: int, ground: str) -> None:
        """Open a page and wait for it."""
        self.events.clear()
        feature = {"name": "prefers-color-scheme", "value": ground}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self._resize(width, 900)
        self.call("Page.navigate", url=address)
        while self.value("document.readyState + location.href") != f"complete{address}":
            time.sleep(0.02)
        time.sleep(0.1)

    def picture(self, width: int) -> bytes:
        """PNG of the whole page."""
        tall = min(TALLEST, int(self.value("document.documentElement.scrollHeight")))
        self._resize(width, tall)
        time.sleep(0.1)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def faults(self, home: str) -> list[str]:
        """Errors, requests elsewhere, and what is wider than the window."""
        found = []
        for event in self.events:
            method, params = event["method"], event["params"]
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                found += [f"loads {url}"] * (not url.startswith((home, "data:", "blob:")))
            elif method == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["text"])
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        over = int(self.value(wide))
        return found + [f"{over} px wider than its window"] * (over > 0)


@contextlib.contextmanager
def served(folder: Path):
    """Address of a server of a folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextlib.contextmanager
def chromium():
    """Port of a headless Chromium."""
    with tempfile.TemporaryDirectory() as home:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        command = ["chromium", *options, f"--user-data-dir={home}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        port = Path(home) / "DevToolsActivePort"
        while not (port.is_file() and port.read_text().strip()):
            time.sleep(0.1)
        try:
            yield int(port.read_text().split()[0])
        finally:
            process.terminate()
            process.wait()


def main() -> int:
    """Take all pictures; returns 1 where a page has a fault."""
    out, names = Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    pages = names or sorted(p.relative_to(SITE).as_posix() for p in SITE.rglob("*.html"))
    failed = False
    with served(SITE) as home, chromium() as port:
        browser = Browser(port)
        for page, width, ground in itertools.product(pages, WIDTHS, GROUNDS):
            browser.open(f"{home}/{page}", width, ground)
            for fault in browser.faults(home):
                failed = True
                print(f"{page}, {width}, {ground}: {fault}")
            name = page.removesuffix(".html").replace("/", "-")
            (out / f"{name}-{width}-{ground}.png").write_bytes(browser.picture(width))
    print(f"{len(pages)} pages in {out}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
