"""A headless Chromium, driven through its DevTools pipe by the standard library alone."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def executable() -> str | None:
    """Path of a Chromium; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page: commands of the DevTools protocol and their answers, one at a time."""

    def __init__(self, write: Any, read: Any) -> None:
        self._write, self._read, self._number = write, read, 0
        self._session: dict[str, str] = {}
        self._rest = b""
        # Messages of errors and of console.error.
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; returns its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Value of JavaScript in the page."""
        done = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        """Wait until JavaScript is true. Errors: AssertionError after so many seconds."""
        end = time.monotonic() + seconds
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} did not become true"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Set the width and height of the view, and whether it is dark."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


@contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """A tab of a new browser, whose profile is a folder that need not exist."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")
    script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["bash", "-c", script, executable(), *options, f"--user-data-dir={profile}"]
    browser = subprocess.Popen(command, pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL)
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        yield Tab(ours_out, ours_in)
    finally:
        browser.terminate()
        browser.wait()
        os.close(ours_out)
        os.close(ours_in)
