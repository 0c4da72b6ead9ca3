"""A headless Chromium driven over its DevTools pipe: what a reader's browser makes of a page."""

import base64
import itertools
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

EXECUTABLE = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


class Browser:
    """One page of a browser, and everything it asked for or complained about."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._ids = itertools.count(1)
        self._rest = b""
        self._session = None
        self.events = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return answer["result"]
            self.events.append(answer)

    def _read(self):
        while b"\0" not in self._rest:
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def open(self, path, width=390, height=844, dark=False, media=""):
        """Loads a file as a phone or a screen of that width would."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=Path(path).resolve().as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read())

    def value(self, expression):
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def requests(self):
        """Addresses the page asked for, itself and its own images aside."""
        asked = (e for e in self.events if e["method"] == "Network.requestWillBeSent")
        urls = [e["params"]["request"]["url"] for e in asked]
        return [url for url in urls[1:] if not url.startswith("data:")]

    def complaints(self):
        """What the console would show: errors of scripts, policies, files."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [e["params"] for e in self.events if e["method"] in kinds]

    def screenshot(self, path):
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(profile):
    """A browser of its own, ended on leaving."""
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()

    def give_pipes():
        # The browser reads commands from descriptor 3 and answers on 4.
        for source, target in ((read_commands, 13), (write_answers, 14), (13, 3), (14, 4)):
            os.dup2(source, target, inheritable=True)

    process = subprocess.Popen(
        [
            EXECUTABLE,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ],
        close_fds=False,
        preexec_fn=give_pipes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(write_commands, read_answers)
    finally:
        process.kill()
        process.wait()
        os.close(write_commands)
        os.close(read_answers)
