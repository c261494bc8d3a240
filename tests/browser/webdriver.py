"""As much of a WebDriver client as the tests need, on the standard library alone.

Drives Debian's `chromium` through its `chromedriver`. Nothing is downloaded and nothing leaves the
machine.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-device-scale-factor=1",
    "--hide-scrollbars",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key that WebDriver gives elements


def missing() -> str | None:
    """Why there is no browser to test with, or None."""
    if not any(shutil.which(name) for name in _CHROMIUM_NAMES):
        return "no chromium: apt-get install chromium"
    if not shutil.which("chromedriver"):
        return "no chromedriver: apt-get install chromium-driver"
    return None


class Browser:
    """One headless chromium with a fresh profile in `folder`; a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._session = ""

    def __enter__(self) -> Browser:
        binary = next(path for name in _CHROMIUM_NAMES if (path := shutil.which(name)))
        # Its own process group, so that the browser it starts goes with it.
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port(), timeout=120)
            options = {
                "binary": binary,
                "args": [*_FLAGS, f"--user-data-dir={self._folder / 'profile'}"],
            }
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            capabilities = {"capabilities": {"alwaysMatch": wanted}}
            answer = self._call("POST", "/session", capabilities)
            self._session = f"/session/{answer['sessionId']}"
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._call("DELETE", "")
        finally:
            self._stop()

    def _port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return int(found.group(1))
        raise RuntimeError("chromedriver did not start")

    def _stop(self) -> None:
        os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()
        if self._driver.stdout is not None:
            self._driver.stdout.close()

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        text = json.dumps(body if body is not None else {}) if method == "POST" else None
        headers = {"Content-Type": "application/json"} if text else {}
        self._connection.request(method, self._session + path, text, headers)
        value = json.loads(self._connection.getresponse().read())["value"]
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{method} {path}: {value['error']}: {value['message']}")
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the Chrome DevTools protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def show(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Sets the size of the window and the colour scheme that the user prefers."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path) -> None:
        """Loads a file and waits until it is complete."""
        self._call("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that the body of a function returns in the page."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def click(self, selector: str) -> None:
        """A real click in the middle of the element, scrolled to first."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/click")

    def type(self, selector: str, text: str) -> None:
        """Real key presses into the element."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/value", {"text": text})

    def console(self) -> list[str]:
        """What the console has said since the last call: errors, warnings, refused requests."""
        log = self._call("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in log]

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """The page, to its end with `whole`, as a PNG file."""
        shot = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
