"""A headless Chromium, driven over the W3C WebDriver protocol of chromedriver; nothing else to install."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM, CHROMEDRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """One tab. Scripts are bodies of functions, and may `await`."""

    def __init__(self, url: str):
        self.url = url

    def send(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(
            f"{self.url}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.loads(reply.read())["value"]

    def open(self, path: Path, hash_: str = "") -> None:
        """Open a file anew, and wait until its script has drawn it."""
        self.send("POST", "/url", url="about:blank")
        self.send("POST", "/url", url=f"{path.resolve().as_uri()}{hash_}")
        self.wait("document.documentElement.dataset.ready || document.querySelector('.problem[role]')")

    def run(self, script: str) -> Any:
        """Return what the script returns."""
        body = f"const done = arguments[0]; (async () => {{ {script} }})().then(done, (e) => done(String(e)))"
        return self.send("POST", "/execute/async", script=body, args=[])

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + 60
        while not self.run(f"return !!({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.05)

    def press(self, *keys: str) -> None:
        """Press and release keys, in order, wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.send("POST", "/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the page in pixels, and the colours that it is asked for."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def devtools(self, command: str, params: dict[str, Any]) -> Any:
        return self.send("POST", "/goog/cdp/execute", cmd=command, params=params)

    def screenshot(self) -> bytes:
        """Return the picture of what is seen, a PNG."""
        return base64.b64decode(self.send("GET", "/screenshot"))

    def console(self) -> list[str]:
        """Return warnings and errors since the last call: of scripts, of the policy, of the network."""
        entries = self.send("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]


def start_problem() -> str:
    """Return why Chromium does not start on this machine; "" = it does."""
    command = [CHROMIUM, *FLAGS, "--dump-dom", "about:blank"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "Chromium does not start within 60 s"
    return f"Chromium does not start: {done.stderr[-300:]}" if done.returncode else ""


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Start chromedriver and a browser with a profile of its own; end both."""
    with tempfile.TemporaryDirectory() as profile:
        driver = subprocess.Popen([CHROMEDRIVER, "--port=0"], stdout=subprocess.PIPE, text=True)
        try:
            started = next(line for line in driver.stdout if "started successfully on port" in line)
            port = started.split()[-1].strip(".")
            options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            root = Browser(f"http://127.0.0.1:{port}")
            session = root.send("POST", "/session", capabilities={"alwaysMatch": wanted})["sessionId"]
            browser = Browser(f"{root.url}/session/{session}")
            try:
                yield browser
            finally:
                browser.send("DELETE", "")
        finally:
            driver.terminate()
            driver.wait()
            driver.stdout.close()
