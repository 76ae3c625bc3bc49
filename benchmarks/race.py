"""Races of `python -m benchmarks races`, in a process of their own: `python -m benchmarks.race KIND MODEL SEED COUNT [FORWARD]`.

close      threads generate, another one closes the model; then a second model gives the right answer
body       threads generate, the body of `with` raises: its traceback is the process's last word
exit       daemon threads generate, the interpreter ends
drop       an open stream and its model are dropped without a word, and the interpreter ends
interrupt  the main thread generates and is interrupted, COUNT times; each time the next answer is right and nobody is left

It happens after a random time, or as soon as so many forwards have begun.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections import deque

from tsgg import LLM, SamplingParams, TsggError
from tsgg.model import Model
from tsgg.speculative.protocol import Batch

LONG = SamplingParams(max_tokens=400, temperature=1.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
QUESTION = list(range(7, 60))
N_CTX = 1024
PATIENCE = 60.0  # seconds
LATEST = 0.25  # seconds until what is raced against happens


class Moment:
    """When it happens."""

    def __init__(self, rng: random.Random, forwards: int | None) -> None:
        self._rng, self._forwards, self._begun = rng, forwards, threading.Event()

    def watch(self, llm: LLM) -> None:
        """Counts forwards from now on."""
        self._begun.clear()
        numbers = itertools.count(1)

        def forward(batch: Batch) -> object:
            if next(numbers) == self._forwards:
                self._begun.set()
            return Model.forward(llm.model, batch)

        llm.model.forward = forward  # type: ignore[method-assign, assignment]

    def come(self) -> None:
        """Waits for it."""
        if self._forwards is None:
            time.sleep(LATEST * self._rng.random())
        else:
            self._begun.wait(PATIENCE)


def main(kind: str, model: str, seed: str, count: str, forward: str | None = None) -> None:
    rng = random.Random(int(seed))
    moment = Moment(rng, None if forward is None else int(forward))
    run = {"close": close, "body": body, "exit": leave, "drop": drop, "interrupt": interrupt}[kind]
    run(model, rng, moment, int(count))


def opened(model: str) -> LLM:
    return LLM(model, n_ctx=N_CTX, n_seq=2, n_threads=1)


def answer(llm: LLM) -> tuple[int, ...]:
    return llm.generate(QUESTION, SHORT).tokens


def ask(llm: LLM, rng: random.Random, ends: deque[str]) -> None:
    """A long request, read in one of three ways; how it ended."""
    prompt = rng.choices(range(200), k=rng.choice((5, 60, 500)))
    try:
        way = rng.randrange(3)
        if way == 0:
            llm.generate(prompt, LONG)
        elif way == 1:
            llm.generate([prompt, prompt[::-1]], LONG)
        else:
            for _ in llm.stream(prompt, LONG):
                time.sleep(rng.choice((0, 0, 0.001)))
        ends.append("finished")
    except TsggError:
        ends.append("told")


def start(llm: LLM, rng: random.Random, daemon: bool = False) -> tuple[list[threading.Thread], deque[str]]:
    ends: deque[str] = deque()
    seeds = [rng.random() for _ in range(rng.randint(1, 4))]
    threads = [threading.Thread(target=ask, args=(llm, random.Random(s), ends), daemon=daemon) for s in seeds]
    for thread in threads:
        thread.start()
    return threads, ends


def check(holds: bool, words: str) -> None:
    if not holds:
        sys.exit(words)


def close(model: str, rng: random.Random, moment: Moment, _: int) -> None:
    with opened(model) as llm:
        right = answer(llm)
    llm = opened(model)
    moment.watch(llm)
    threads, ends = start(llm, rng)
    moment.come()
    llm.close()
    for thread in threads:
        thread.join(PATIENCE)
    check(len(ends) == len(threads), f"{len(threads)} requests, of which only {len(ends)} were told: {list(ends)}")
    with opened(model) as llm:
        check(answer(llm) == right, "another answer than before")


def body(model: str, rng: random.Random, moment: Moment, _: int) -> None:
    with opened(model) as llm:
        moment.watch(llm)
        start(llm, rng)
        moment.come()
        raise RuntimeError("the body failed")


def leave(model: str, rng: random.Random, moment: Moment, _: int) -> None:
    llm = opened(model)
    moment.watch(llm)
    start(llm, rng, daemon=True)
    moment.come()


def drop(model: str, rng: random.Random, moment: Moment, _: int) -> None:
    llm = opened(model)
    stream = llm.stream(QUESTION, LONG)
    for _ in range(rng.randint(1, 50)):
        next(stream)
    del llm
    if rng.random() < 0.5:
        del stream
    gc.collect()


def interrupt(model: str, rng: random.Random, moment: Moment, count: int) -> None:
    with opened(model) as llm:
        right = answer(llm)
        for number in range(count):
            if rng.random() < 0.5:
                llm.forget()
            moment.watch(llm)
            other = threading.Thread(target=lambda: (moment.come(), os.kill(os.getpid(), signal.SIGINT)))
            try:
                other.start()
                while True:
                    ask(llm, rng, deque())
            except KeyboardInterrupt:
                other.join()
            check(answer(llm) == right, f"interrupt {number}: another answer than before")
            left = llm.engine.call(lambda: list(llm.engine.scheduler.requests()))
            check(not left, f"interrupt {number}: {len(left)} requests were left behind")
            llm.engine.call(llm.engine.check_integrity)


if __name__ == "__main__":
    main(*sys.argv[1:])
