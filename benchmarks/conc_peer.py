"""llama-server with several slots as a client of `conc`: plain HTTP, one connection per request, tokens as they come."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.streams import Event
from tsgg.errors import TsggError

START_SECONDS = 120.0
ANSWER_SECONDS = 600.0


class PeerClient:
    """One server on this machine's loopback with `slots` slots of `n_ctx` tokens each. It never speculates.

    A prompt is computed as a whole outside of `reusing`. Raises `TsggError` when the
    server does not start. `close` ends it.
    """

    def __init__(self, program: Path, model: Path, threads: int, n_ctx: int, slots: int) -> None:
        self._cache = False
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        command = [str(program), "-m", str(model), "-t", str(threads), "-c", str(n_ctx * slots), "-np", str(slots)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--no-webui"]
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise TsggError(f"llama-server does not start: {error}") from error
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def stream(self, ids: Sequence[int], tokens: int, speculate: bool) -> Iterator[Event]:
        body = {
            "prompt": list(ids), "n_predict": tokens, "temperature": 0, "cache_prompt": self._cache, "stream": True,
            "return_tokens": True, "ignore_eos": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise TsggError(f"llama-server answers {answer.status}: {answer.read(300).decode(errors='replace')}")
            for line in answer:
                yield from parse_line(line)
        finally:
            connection.close()

    def forget(self) -> None:
        """Nothing to do: outside of `reusing` no request uses what another left."""

    @contextmanager
    def reusing(self) -> Iterator[None]:
        self._cache = True
        try:
            yield
        finally:
            self._cache = False

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise TsggError("llama-server did not start")


def parse_line(line: bytes) -> list[Event]:
    """The tokens of one line of its event stream; the last event repeats none. Raises `TsggError` for its error event.

    A token that ends within a character is not sent: such a stream is shorter than it was asked to be.
    """
    if line.startswith(b"error:"):
        raise TsggError(f"llama-server: {line[6:].decode(errors='replace').strip()}")
    if not line.startswith(b"data:"):
        return []
    text = line[5:].strip()
    if text == b"[DONE]":
        return []
    event = json.loads(text)
    if "error" in event:
        raise TsggError(f"llama-server: {event['error']}")
    return [] if event.get("stop") else [Event(token) for token in event.get("tokens", ())]
