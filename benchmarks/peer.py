"""llama.cpp's llama-server, started on this machine's loopback, for comparisons on the same file."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tsgg.errors import TsggError

PEER_DRAFTERS = ("none", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")  # its --spec-type
START_SECONDS = 60.0


class Peer:
    """One server with one slot; `extra` are further flags of it. `close` ends it.

    fresh: it is started anew for every request, so that its drafter remembers none.
    """

    def __init__(
        self, program: Path, model: Path, threads: int, n_ctx: int, drafter: str, *extra: str, fresh: bool = False
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self._drafter, self._fresh = drafter, fresh
        self._command = [str(program), "-m", str(model), "-t", str(threads), "-c", str(n_ctx), "-np", "1"]
        self._command += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
        self._command += [*([] if drafter == "none" else ["--spec-type", drafter]), *extra]
        self._process: subprocess.Popen[bytes] | None = None
        if not fresh:
            self._start()

    def generate(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """Greedy tokens after a prompt that is not cached: tokens, tok/s of decoding, drafted, accepted."""
        if self._fresh:
            self._start()
        try:
            return self._ask(prompt, tokens)
        finally:
            if self._fresh:
                self.close()

    def _ask(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        body = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "cache_prompt": False, "return_tokens": True,
            "ignore_eos": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self.address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            reply = json.load(answer)
        timings = reply["timings"]
        return {
            "tokens": reply["tokens"],
            "tok_s": timings["predicted_per_second"],
            "drafted": timings.get("draft_n", 0),
            "accepted": timings.get("draft_n_accepted", 0),
        }

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=1) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self.close()
        raise TsggError(f"llama-server --spec-type {self._drafter} did not start")
