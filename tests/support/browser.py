"""Opens self-contained pages in headless Chromium, where there is one, and drives it over its own pipe (DevTools
protocol)."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.waiting import wait_until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on PATH; install Debian's chromium to check how the page renders"
)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars"]  # fmt: skip
CODES = {
    "ArrowUp": 38,
    "ArrowDown": 40,
    "ArrowLeft": 37,
    "ArrowRight": 39,
    "PageUp": 33,
    "PageDown": 34,
    "Home": 36,
    "End": 35,
}


def assert_renders(page: Path, heading: str, folder: Path) -> None:
    """The page shows this <h2>, is not blank, writes nothing to the console and asks nothing of a network."""
    from matplotlib.image import imread

    with Browser(folder) as browser:
        browser.open(page)
        assert heading in browser.js("[...document.querySelectorAll('h2')].map((h) => h.textContent)")
        assert imread(browser.screenshot(folder / "page.png")).std() > 0.05
        browser.assert_quiet()


class Browser:
    """One Chromium with one page. Everything that it complains about or asks for is kept."""

    def __init__(self, folder: Path, size: tuple[int, int] = (1280, 1000)):
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._ids = itertools.count(1)
        here, theirs = os.pipe(), os.pipe()  # they read from the first, write into the second
        command = [CHROMIUM or "", *FLAGS, f"--window-size={size[0]},{size[1]}", f"--user-data-dir={folder / 'profile'}",
                   "--remote-debugging-pipe", "about:blank"]  # fmt: skip
        shell = ["bash", "-c", f'exec "$0" "$@" 3<&{here[0]} 4>&{theirs[1]}', *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(here[0], theirs[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(here[0])
        os.close(theirs[1])
        self._out, self._in = os.fdopen(here[1], "wb", buffering=0), os.fdopen(theirs[0], "rb", buffering=0)
        self._buffer = b""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()  # the end of its pipe is the end of Chromium
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._in.close()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session and not method.startswith("Target."):
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == number:
                assert "error" not in found, found["error"]
                return found["result"]

    def open(self, page: Path) -> None:
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete'")

    def js(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        wait_until(lambda: self.js(expression), expression, seconds)

    def key(self, name: str, *, shift: bool = False) -> None:
        facts: dict[str, Any] = {
            "key": name,
            "code": name,
            "windowsVirtualKeyCode": CODES.get(name, ord(name.upper()) if len(name) == 1 else 0),
        }
        if len(name) == 1:
            facts["text"] = name
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, modifiers=8 if shift else 0, **facts)

    def mouse(
        self, selector: str, x: float, y: float, *, to: tuple[float, float] | None = None, wheel: float = 0
    ) -> None:
        """Click, drag to `to`, or turn the wheel at a place within an element, as shares of its width and height."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.js(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        box = self.js(
            f"(({{left, top, width, height}}) => [left, top, width, height])({element}.getBoundingClientRect())"
        )
        at = {"x": box[0] + x * box[2], "y": box[1] + y * box[3]}
        if wheel:
            self.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=wheel, **at)
            return
        self.call("Input.dispatchMouseEvent", type="mousePressed", button="left", buttons=1, clickCount=1, **at)
        if to is not None:
            at = {"x": box[0] + to[0] * box[2], "y": box[1] + to[1] * box[3]}
            self.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **at)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **at)

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]))
        return path

    def assert_quiet(self) -> None:
        """No word on the console, no exception, and nothing asked for but the page itself."""
        assert not self.complaints, self.complaints
        assert all(url.startswith(("file:", "data:", "about:")) for url in self.asked), self.asked
        assert sum(url.startswith("file:") for url in self.asked) == 1, self.asked

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = self._in.read(1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        found = json.loads(text)
        self._note(found.get("method", ""), found.get("params", {}))
        return found

    def _note(self, method: str, facts: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.complaints.append(str(facts["args"]))
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(facts["exceptionDetails"]))
        elif (
            method == "Log.entryAdded" and "willReadFrequently" not in facts["entry"]["text"]
        ):  # said of our own looking at pixels
            self.complaints.append(str(facts["entry"]))
        elif method == "Network.requestWillBeSent":
            self.asked.append(facts["request"]["url"])
