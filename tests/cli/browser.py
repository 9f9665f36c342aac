"""A headless Chromium, driven through two pipes: no port, no driver, nothing to install."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PATIENCE = 60
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe")

_LAUNCH = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for number, theirs in zip(ours, (3, 4)):
    os.dup2(number, theirs)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""The protocol is spoken over descriptors 3 and 4: ours are put there before the browser starts."""


def find_browser() -> str:
    """KVTIDE_BROWSER, or a Chromium on the path; skips the test if there is neither."""
    given = os.environ.get("KVTIDE_BROWSER")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: KVTIDE_BROWSER is not set, and no {', '.join(NAMES)} on the path")
    return found


class Page:
    """One tab: commands of the DevTools protocol, and the events that came meanwhile."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read, self._buffer = write, read, b""
        self._count, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path: Path) -> None:
        """Load a file, and wait until it is there."""
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self._next()

    def evaluate(self, script: str) -> Any:
        """The value of an expression, in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"]["value"]

    def of(self, method: str) -> list[dict[str, Any]]:
        """What the events of one kind said, since the page was opened."""
        return [event["params"] for event in self.events if event["method"] == method]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _PATIENCE)
            assert ready, f"the browser has said nothing for {_PATIENCE} s"
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has gone"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        read = json.loads(message)
        if "method" in read:
            self.events.append(read)
        return read


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A tab of a fresh browser whose profile is in `folder`."""
    program = find_browser()
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    profile = f"--user-data-dir={folder / 'profile'}"
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, str(their_in), str(their_out), program, *_FLAGS, profile],
        pass_fds=(their_in, their_out),
        stderr=subprocess.DEVNULL,
    ) as process:
        os.close(their_in)
        os.close(their_out)
        try:
            yield Page(our_out, our_in)
        finally:
            process.kill()
            os.close(our_out)
            os.close(our_in)
