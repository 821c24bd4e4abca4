"""Headless Chromium, driven over its DevTools protocol: how a report is checked the way a reader sees it.

Protocol reference: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import websocket

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)


class BrowserError(RuntimeError):
    """Chromium did not start, did not answer in time, or a script in the page failed."""


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome on PATH, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


def count_pdf_pages(pdf: bytes) -> int:
    """Pages of a PDF as Chromium prints it (page objects lie uncompressed in it)."""
    return len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf))


@dataclass
class Page:
    """One tab. ``console`` collects errors and warnings with uncaught exceptions, ``requests`` every URL asked for."""

    socket: websocket.WebSocket
    timeout_s: float
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _last_id: int = 0
    _loads: int = 0

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends one command and returns its result; events that arrive meanwhile are collected."""
        self._last_id += 1
        self.socket.send(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while (message := self._receive(method)).get("id") != self._last_id:
            self._collect(message)
        if "error" in message:
            raise BrowserError(f"{method}: {message['error']['message']}")
        return dict(message["result"])

    def open(self, url: str, *, offline: bool = True, ready: str = "true") -> None:
        """Loads ``url`` (network off unless told) and waits until the JavaScript expression ``ready`` holds."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions", offline=offline, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        loads = self._loads
        self.call("Page.navigate", url=url)
        while self._loads == loads:
            self._collect(self._receive(f"loading {url}"))
        self.wait_for(ready)

    def wait_for(self, expression: str) -> None:
        """Polls until the JavaScript ``expression`` is true; raises :class:`BrowserError` after the timeout."""
        deadline = time.monotonic() + self.timeout_s
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {self.timeout_s:g} s: {expression}; console: {self.console}")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression (promises are awaited)."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if failure := answer.get("exceptionDetails"):
            raise BrowserError(str(failure.get("exception", failure).get("description", failure)))
        return answer["result"].get("value")

    def emulate(self, scheme: Literal["light", "dark"] = "light", width: int = 1280, height: int = 900) -> None:
        """What the reader's system prefers, and the window's size in CSS pixels."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, *, whole_page: bool = False) -> bytes:
        """PNG bytes of the window, or of the page from top to end."""
        clip = self._clip() if whole_page else {}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page, **clip)
        return base64.b64decode(shot["data"])

    def print_pdf(self) -> bytes:
        """The page printed on A4 with the margins its style sheet sets."""
        answer = self.call(
            "Page.printToPDF", printBackground=True, preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69
        )
        return base64.b64decode(answer["data"])

    def _clip(self) -> dict[str, Any]:
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _receive(self, purpose: str) -> dict[str, Any]:
        try:
            return dict(json.loads(self.socket.recv()))
        except websocket.WebSocketTimeoutException as error:
            raise BrowserError(f"{purpose}: no answer within {self.timeout_s:g} s") from error

    def _collect(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Page.loadEventFired":
                self._loads += 1
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.console.append(details.get("exception", {}).get("description") or details["text"])
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.console.append(" ".join(str(item.get("value", item)) for item in parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.console.append(parameters["entry"]["text"])


@contextmanager
def open_page(executable: str | None = None, timeout_s: float = 60) -> Iterator[Page]:
    """A fresh Chromium (its own profile) with one tab; ended when the block ends.

    Raises :class:`BrowserError` when there is no Chromium or it does not start.
    """
    executable = executable or find_chromium()
    if executable is None:
        raise BrowserError(f"no Chromium found (looked for {', '.join(_NAMES)} on PATH); install one to check reports")
    with tempfile.TemporaryDirectory(prefix="lab-chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = _debugging_port(Path(profile) / "DevToolsActivePort", process, timeout_s)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=timeout_s) as answer:
                tab = next(target for target in json.load(answer) if target["type"] == "page")
            socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=timeout_s)
            try:
                yield Page(socket, timeout_s)
            finally:
                socket.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _debugging_port(announcement: Path, process: subprocess.Popen[bytes], timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BrowserError(f"Chromium ended with status {process.returncode} before it was ready")
        lines = announcement.read_text().splitlines() if announcement.exists() else []
        if len(lines) >= 2:
            return int(lines[0])
        time.sleep(0.05)
    raise BrowserError(f"Chromium was not ready within {timeout_s:g} s")
