"""A headless Chromium, driven by its DevTools protocol over a pair of pipes, and a TensorBoard for it to look at.

Pipes need neither a port nor a package: messages are JSON, each ended by a zero byte. Both programs talk to loopback
only.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.helpers.time_limits import PATIENCE

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe", "about:blank",
)  # fmt: skip
# TensorBoard's elements are inside shadow roots, where querySelector does not look
HELPERS = """
function* all(root) {
    for (const node of root.querySelectorAll('*')) {
        yield node;
        if (node.shadowRoot) yield* all(node.shadowRoot);
    }
}
const seen = node => { const box = node.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
const tagged = name => [...all(document)].filter(node => node.localName === name && seen(node));
const words = node => [...node.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join(' ');
const text = () => [...all(document)].filter(node => !['style', 'script'].includes(node.localName) && seen(node))
    .map(words).join(' ').replace(/\\s+/g, ' ');
"""


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One window. `look(expression)` evaluates JavaScript in its page, `wait(expression)` until that is true."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        program = chromium()
        assert program is not None
        self._profile = tempfile.mkdtemp(prefix="curvmon-chromium-")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # the protocol has fixed places for them; higher ones first, lest one be put where the other still is
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (theirs_in, theirs_out)]
        silence = os.open(os.devnull, os.O_RDWR)
        moves = [(os.POSIX_SPAWN_DUP2, old, new) for old, new in zip((silence, silence, *ends), (1, 2, 3, 4))]
        arguments = [program, *FLAGS, f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
        self._process = os.posix_spawn(program, arguments, os.environ, file_actions=moves, setpgroup=0)
        for end in (theirs_in, theirs_out, silence, *ends):
            os.close(end)
        self._count, self._held = 0, b""
        self.errors: list[str] = []
        """what pages have written to the console as errors, and what they have raised"""
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._message(deadline)
            self._note(answer)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                found: dict[str, Any] = answer["result"]
                return found

    def _note(self, event: dict[str, Any]) -> None:
        method, parameters = event.get("method"), event.get("params", {})
        level = parameters.get("type") or parameters.get("entry", {}).get("level")
        if method == "Runtime.exceptionThrown" or (
            method in ("Runtime.consoleAPICalled", "Log.entryAdded") and level == "error"
        ):
            self.errors.append(json.dumps(parameters))

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                raise TimeoutError("Chromium has closed its pipe" if ready else "Chromium does not answer")
            self._held += more
        message, _, self._held = self._held.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, address: str) -> None:
        """Afresh: pages that differ behind # alone are otherwise not loaded again."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)

    def look(self, expression: str) -> Any:
        """The value of an expression, which may use `all`, `tagged` and `text`."""
        code = f"(() => {{ {HELPERS} return {expression}; }})()"
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := self.look(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}\nThe page reads: {self.look('text()')[:3000]}")
            time.sleep(0.1)
        return found

    def screenshot(self) -> bytes:
        """A PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def tensorboard(logs: Path) -> Iterator[str]:
    """The address of a TensorBoard that shows `logs`, on a free port of this machine."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--samples_per_plugin", "images=100"]
    command += ["--host", "127.0.0.1", "--port", "0"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                log.seek(0)
                output = log.read()
                if found := re.search(r"http://127\.0\.0\.1:\d+/", output):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"TensorBoard did not start:\n{output}")
                time.sleep(0.1)
            yield found[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
