"""A browser without a window, driven over WebDriver: Chromium and its chromedriver,
where they are installed.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAMS = (("chromium", "google-chrome", "chromium-browser"), ("chromedriver",))
"""Names of the browser, and of its driver."""
MISSING = "needs Chromium and chromedriver (Debian: apt install chromium chromium-driver)"
SETTLED = 30.0
"""Seconds in which a page must have drawn itself."""
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element in WebDriver's JSON."""


def programs() -> list[str] | None:
    """Return the paths of browser and driver, or ``None`` if one is missing."""
    paths = [next(filter(None, map(shutil.which, names)), None) for names in PROGRAMS]
    return [path for path in paths if path] if all(paths) else None


class Browser:
    """One window, which closes at the end of a ``with`` block."""

    def __init__(self, folder: Path, dark: bool = False) -> None:
        """Start the browser; ``folder`` takes its profile. Raises RuntimeError if
        it is not installed.
        """
        paths = programs()
        if paths is None:
            raise RuntimeError(MISSING)
        chromium, driver = paths
        self._driver = subprocess.Popen(
            [driver, "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        assert self._driver.stdout
        port = next(
            line.split()[-1].rstrip(".")
            for line in self._driver.stdout
            if "started successfully" in line
        )
        self._at = f"http://127.0.0.1:{port}/session"
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars=0",
            f"--user-data-dir={folder}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        ]
        flags += ["--blink-settings=preferredColorScheme=0"] if dark else []
        options = {"binary": chromium, "args": flags}
        asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self._send("POST", "", {"capabilities": {"alwaysMatch": asked}})
        self._at += f"/{session['sessionId']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()

    def open(self, page: Path, width: int, height: int = 900) -> None:
        """Show a page at this width, and wait until its plots are drawn. Raises TimeoutError."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._cdp("Emulation.setDeviceMetricsOverride", size)
        self._send("POST", "/url", {"url": page.absolute().as_uri()})
        self.wait(
            "[...document.querySelectorAll('.plot')].every(it => it.querySelector('.main-svg'))"
        )

    def wait(self, condition: str) -> None:
        """Return when the JavaScript ``condition`` is true. Raises TimeoutError."""
        end = time.monotonic() + SETTLED
        while not self.run(f"return Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not true after {SETTLED} s: {condition}")
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """Run JavaScript in the page and return what it returns."""
        return self._send("POST", "/execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """Click on the first element of a CSS selector, as a hand with a mouse would."""
        element = self._send("POST", "/element", {"using": "css selector", "value": selector})[
            ELEMENT
        ]
        self._send("POST", f"/element/{element}/click", {})

    def point(self, x: float, y: float) -> None:
        """Move the pointer to a place of the window."""
        for at in (x - 3, x):  # a page hears of a movement, not of a place
            self._cdp("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": at, "y": y})

    def console(self) -> list[str]:
        """Return the messages in the console since the last call."""
        return [str(line["message"]) for line in self._send("POST", "/se/log", {"type": "browser"})]

    def picture(self, selector: str | None = None) -> bytes:
        """Return the whole page, or one element of it, as PNG."""
        place = (
            f"document.querySelector({json.dumps(selector)})"
            if selector
            else "document.documentElement"
        )
        box = self.run(
            f"const b = {place}.getBoundingClientRect(); return [b.x, b.y + scrollY, b.width,"
            " b.height]"
        )
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
        taken = self._cdp("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
        return base64.b64decode(taken["data"])

    def _cdp(self, command: str, values: dict[str, Any]) -> Any:
        return self._send("POST", "/goog/cdp/execute", {"cmd": command, "params": values})

    def _send(self, method: str, path: str, values: dict[str, Any] | None = None) -> Any:
        body = None if values is None else json.dumps(values).encode()
        request = urllib.request.Request(
            self._at + path, body, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]
