"""What a governor chose, what it cost and what it was to bring: counters beside the policy, read by reports only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tsgg.speculative.stats import StepSample

RUNS = 128  # of equal windows that are remembered


@dataclass(frozen=True, slots=True)
class GovernorReport:
    """What was chosen and why, so far. Times in milliseconds; gains are factors over plain decoding, 1.0 = none."""

    windows: tuple[tuple[int, int], ...]  # (window, steps in a row), oldest first, the last 128 runs
    plain_steps: int  # window 0
    asked_steps: int  # a drafter ran
    verifies: int
    looks: int  # drafts that were compared with what came, and not verified
    plain_ms: float  # per token; 0.0 = not measured
    speculative_ms: float  # per token, over all steps that asked a drafter
    expected_gain: float  # of the verifies that were to pay: plain time of the expected tokens / expected time
    realised_gain: float  # the same of the tokens that came
    purse: float  # plain steps that the latest request may lose now
    idle: str  # why the latest step drafted nothing; "" if it did
    forward_ms: tuple[tuple[int, float], ...]  # (rows, ms) measured, at the latest context and number of sequences
    acceptance: tuple[float, ...]  # conditional, by position, of the latest request


class Journal:
    """Counts the steps of one governor. Bounded."""

    def __init__(self, idle: str) -> None:
        self.idle = idle
        self.verifies = 0
        self.latest = (1, 0)  # sequences and context of the latest step
        self._runs: deque[tuple[int, int]] = deque(maxlen=RUNS)
        self._plain_steps = self._asked = self._looks = 0
        self._tokens, self._seconds = 0, 0.0  # of steps that asked
        self._expected = self._realised = (0.0, 0.0)  # plain seconds of the tokens, seconds

    def step(self, asked: bool, drafted: int, sample: StepSample) -> None:
        """One step, as it came."""
        window = sample.window if asked else 0
        self.latest = (sample.sequences, sample.length)
        steps = self._runs.pop()[1] if self._runs and self._runs[-1][0] == window else 0
        self._runs.append((window, steps + 1))
        if not asked:
            self._plain_steps += 1
            return
        self._asked += 1
        seconds = sample.forward_seconds + sample.draft_seconds
        if 0.0 < seconds < float("inf"):
            self._tokens += max(sample.emitted, 1)
            self._seconds += seconds
        if drafted:
            self.idle = ""
            self.verifies += 1
        elif sample.foreseen is not None:
            self._looks += 1
        else:
            self.idle = sample.silence or "the drafter had nothing"

    def gain(self, expected: tuple[float, float], came: tuple[float, float], plain: float) -> None:
        """Tokens and seconds that were expected of a verify, and those that came of it."""
        self._expected = (self._expected[0] + expected[0] * plain, self._expected[1] + expected[1])
        self._realised = (self._realised[0] + came[0] * plain, self._realised[1] + came[1])

    def report(
        self, plain: float, purse: float, forward: tuple[tuple[int, float], ...], acceptance: tuple[float, ...]
    ) -> GovernorReport:
        """A snapshot; times in seconds."""
        return GovernorReport(
            windows=tuple(self._runs),
            plain_steps=self._plain_steps,
            asked_steps=self._asked,
            verifies=self.verifies,
            looks=self._looks,
            plain_ms=1e3 * plain,
            speculative_ms=1e3 * self._seconds / self._tokens if self._tokens else 0.0,
            expected_gain=_ratio(self._expected),
            realised_gain=_ratio(self._realised),
            purse=purse,
            idle=self.idle,
            forward_ms=tuple((rows, 1e3 * seconds) for rows, seconds in forward),
            acceptance=acceptance,
        )


def _ratio(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] if pair[1] else 1.0
