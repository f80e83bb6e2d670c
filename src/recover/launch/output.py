"""The children's output, line by line with a prefix, without ever holding up a child.

Theory of operation
-------------------
* One thread reads all pipes as fast as they fill; a pipe is never left full, so a child that prints never waits for
  somebody's terminal.
* One thread per stream of ours (stdout, stderr) writes. Between them is a queue bounded in bytes: when the terminal is
  too slow, lines are dropped and counted, and the count is said as soon as there is room. When nobody reads any more
  (`| head`), all that follows is thrown away.
* A carriage return ends a line too (progress bars); an endless line is cut into pieces.
"""
from __future__ import annotations

import os
import select
import selectors
import subprocess
import threading
import time
from collections import deque
from typing import Final

READ: Final = 1 << 16
MAX_LINE: Final = 1 << 13
MAX_QUEUED: Final = 4 << 20
SHOWN: Final = 300
"""Characters of a child's last words that are repeated."""


class Sink:
    """Writes lines to a file descriptor from a thread of its own."""

    def __init__(self, file: int, limit: int = MAX_QUEUED) -> None:
        self._file, self._limit = file, limit
        self._lines: deque[bytes] = deque()
        self._bytes = self._dropped = 0
        self._changed = threading.Condition()
        self._closed = self._broken = False
        self._thread = threading.Thread(target=self._write, name=f"recover-output-{file}", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Enqueue a line, line feed included; never waits for the reader."""
        with self._changed:
            if self._broken or self._closed:
                return
            if self._bytes + len(line) > self._limit:
                self._dropped += 1
                return
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Write what is enqueued, for at most `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _take(self) -> bytes | None:
        with self._changed:
            while not (self._lines or self._dropped or self._closed):
                self._changed.wait()
            data = b"".join(self._lines)
            self._lines.clear()
            self._bytes = 0
            if self._dropped:
                data += b"[launch] %d lines of output dropped: nobody read them in time\n" % self._dropped
                self._dropped = 0
            return data or None

    def _write(self) -> None:
        while (data := self._take()) is not None:
            try:
                _write_all(self._file, data)
            except OSError:                     # nobody reads any more
                with self._changed:
                    self._broken = True
                    self._lines.clear()
                return


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view[:READ]):]
        except BlockingIOError:                 # somebody made our terminal non-blocking
            select.select([], [file], [], 1.0)


TRACEBACK: Final = b"Traceback (most recent call last):"


class Source:
    """One pipe: bytes in, whole lines out. `last`: what was said last, an exception rather than what follows it."""

    def __init__(self, prefix: bytes, sink: Sink) -> None:
        self._prefix, self._sink = prefix, sink
        self._rest = b""
        self._line_said = self._exception = b""
        self._tracing = False
        self.ended = threading.Event()

    @property
    def last(self) -> str:
        return (self._exception or self._line_said).decode(errors="replace").strip()[:SHOWN]

    def _remember(self, text: bytes) -> None:
        if text.startswith(TRACEBACK):
            self._tracing = True
        elif self._tracing and text and not text[:1].isspace():
            self._exception, self._tracing = text, False
        if text.strip():
            self._line_said = text

    def feed(self, data: bytes) -> None:
        parts = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = parts.pop()
        for part in parts:
            self._line(part)
        while len(self._rest) >= MAX_LINE:
            self._line(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]

    def finish(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = b""
        self.ended.set()

    def _line(self, text: bytes) -> None:
        self._remember(text)
        for start in range(0, len(text) or 1, MAX_LINE):
            self._sink.put(self._prefix + text[start:start + MAX_LINE] + b"\n")


class Output:
    """All of it: `follow` a child's pipes, `say` something of our own, `close` at the end."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        self._sinks = {"stdout": Sink(stdout), "stderr": Sink(stderr)}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()           # around the selector's table
        self._wake_reading, self._wake_writing = os.pipe()
        os.set_blocking(self._wake_writing, False)
        self._selector.register(self._wake_reading, selectors.EVENT_READ)
        self._closing: float | None = None
        self._thread = threading.Thread(target=self._read, name="recover-output-reader", daemon=True)
        self._thread.start()

    def follow(self, file: int, prefix: str, stream: str) -> Source:
        """Read a pipe to its end and close it then; `stream` is "stdout" or "stderr". The descriptor becomes ours."""
        os.set_blocking(file, False)
        with self._lock:
            source = Source(prefix.encode(), self._sinks[stream])
            self._selector.register(file, selectors.EVENT_READ, source)
        self._wake()
        return source

    def follow_child(self, process: subprocess.Popen[bytes], prefix: str) -> Source:
        """Follow both pipes of a child; returns that of its errors."""
        assert process.stdout is not None and process.stderr is not None
        self.follow(os.dup(process.stdout.fileno()), prefix, "stdout")
        errors = self.follow(os.dup(process.stderr.fileno()), prefix, "stderr")
        process.stdout.close()
        process.stderr.close()
        return errors

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        for line in text.splitlines():
            self._sinks["stderr"].put(f"[launch] {line}\n".encode())

    def close(self, timeout: float = 2.0) -> None:
        """Read what is left in the pipes and write all out, for at most `timeout` seconds each."""
        self._closing = time.monotonic() + timeout
        self._wake()
        self._thread.join(timeout + 0.5)
        for sink in self._sinks.values():
            sink.close(timeout)

    def _wake(self) -> None:
        try:
            os.write(self._wake_writing, b"x")
        except BlockingIOError:
            pass                                # it is awake enough

    def _read(self) -> None:
        while True:
            closing = self._closing
            ready = self._selector.select(None if closing is None else 0.05)
            sources = [(key.fd, key.data) for key, _ in ready if key.data is not None]
            for file, source in sources:
                self._drain(file, source)
            if any(key.data is None for key, _ in ready):
                os.read(self._wake_reading, READ)
            if closing is not None and (not sources or time.monotonic() > closing):
                self._finish()
                return

    def _drain(self, file: int, source: Source) -> None:
        try:
            data = os.read(file, READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        source.feed(data)
        if not data:
            source.finish()
            with self._lock:
                self._selector.unregister(file)
            os.close(file)

    def _finish(self) -> None:
        with self._lock:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    key.data.finish()
                    os.close(key.fd)
            self._selector.close()
