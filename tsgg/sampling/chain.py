"""One row of logits -> one token: top_k, top_p, min_p, temperature and the draw, without sorting the vocabulary.

Numbers for 262,144 tokens are why this is written as it is: a full argsort costs 15 ms, numpy's argpartition 2 ms, one
pass over the row 0.02 ms and exp over it 0.13 ms. So survivors are found by passes over the row, and only a few hundred
of them are ever sorted. Survivors are drawn from in the order of their ids, never of their rank: a filter that removes
nothing changes no draw. Of equal logits the lower id ranks first, everywhere (the rule of np.argmax).
"""

from __future__ import annotations

import math
import threading

import numpy as np
from numpy.typing import NDArray

from tsgg.errors import TsggError

Logits = NDArray[np.float32]
Ids = NDArray[np.intp]

_GROUPS = 4096  # groups whose maxima bound the k-th greatest logit: more cost more passes, fewer give more candidates
_NUCLEUS = 256  # tokens in which top_p is nearly always reached; past it a histogram is cheaper than ever more sorting
_BUCKETS = 4096  # of that histogram, over a logit range of:
_BUCKET_SPAN = 32.0  # e**-32 is 1e-14 of the greatest probability: the last bucket takes everything below
_PIECE = 32768  # tokens of one pass over the histogram
_BLOCK = 512  # weights summed in float32 before float64 takes over: one float64 running sum over a row costs 2.5 ms


class _Buffers(threading.local):
    """Work arrays of the running thread, empty between calls. Fresh megabytes for every row cost their page faults."""

    def __init__(self) -> None:
        self._weights: Logits = np.empty(0, np.float32)
        self._buckets: NDArray[np.uint16] = np.empty(0, np.uint16)

    def take(self, size: int) -> Logits:
        """`size` weights, of any content."""
        if self._weights.size < size:
            self._weights = np.empty(size, np.float32)
        return self._weights[:size]

    def take_buckets(self, size: int) -> NDArray[np.uint16]:
        """`size` bucket numbers, of any content."""
        if self._buckets.size < size:
            self._buckets = np.empty(size, np.uint16)
        return self._buckets[:size]


_buffers = _Buffers()


def greatest(logits: Logits) -> int:
    """The id of the first greatest logit. Raises TsggError for a row from which nothing can be drawn."""
    token = int(np.argmax(logits))  # argmax returns a NaN where there is one
    if not math.isfinite(logits[token]):
        raise TsggError(
            f"the greatest of {logits.size} logits is {logits[token]} (token {token}); expected a finite number: "
            "either logit_bias forbids every token (that the constraint allows), or the forward is broken "
            "(the file is damaged: fetch it again)"
        )
    return token


def draw(logits: Logits, temperature: float, top_k: int, top_p: float, min_p: float, fraction: float) -> int:
    """Draw one token of `logits` [vocab] f32 by the inverse distribution function at `fraction` in [0, 1).

    Filters apply in the order top_k (0: off), top_p (1: off), min_p (0: off), then temperature (> 0). The row is only
    read. Raises TsggError where the row holds NaN or no finite logit.
    """
    peak = float(logits[greatest(logits)])
    ids = survivors(logits, peak, top_k, top_p, min_p)
    values = logits if ids is None else logits[ids]
    weights = np.subtract(values, peak, out=_buffers.take(values.size))
    weights /= temperature
    np.exp(weights, out=weights)
    index = locate(weights, fraction)
    return index if ids is None else int(ids[index])


def log_sum_exp(logits: Logits) -> float:
    """ln(sum(exp(`logits`))): a logit minus this is the token's log-probability. Raises TsggError as `draw` does."""
    peak = float(logits[greatest(logits)])
    weights = np.subtract(logits, peak, out=_buffers.take(logits.size))
    return peak + math.log(float(np.exp(weights, out=weights).sum()))


def survivors(logits: Logits, peak: float, top_k: int, top_p: float, min_p: float) -> Ids | None:
    """Ids that the filters leave, ascending; None: all of them. `peak` is the greatest logit."""
    floor = peak + math.log(min_p) if min_p > 0.0 else -math.inf
    if 0 < top_k < logits.size:
        ids = ranked_top(logits, top_k)
        if top_p < 1.0:
            weights = np.exp(logits[ids] - peak)
            ids = ids[: _prefix(weights, top_p * float(weights.sum(dtype=np.float64)))]
        ids.sort()
    elif top_p < 1.0:
        ids = _nucleus(logits, peak, top_p)
    elif min_p > 0.0:
        return np.flatnonzero(logits >= floor)
    else:
        return None
    return ids[logits[ids] >= floor] if min_p > 0.0 else ids


def ranked_top(logits: Logits, count: int) -> Ids:
    """Ids of the `count` greatest of `logits`, greatest first, the lower id first among equals; never one at -inf."""
    candidates = np.flatnonzero(logits >= _lower_bound(logits, count))
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    top: Ids = candidates[order]
    return top


def _lower_bound(logits: Logits, count: int) -> float:
    """A finite number that the `count` greatest finite logits reach, and few others.

    The row is cut into groups (the columns of a [rows, groups] view: a maximum over rows is one streaming pass). The
    count-th greatest of the groups' maxima is reached by `count` different tokens.
    """
    lowest = float(np.finfo(np.float32).min)  # tokens at -inf are forbidden: sorting a row full of them takes 25 ms
    size = logits.size
    if count >= size:
        return lowest
    if count * 4 > _GROUPS or size < 4 * _GROUPS:
        return max(lowest, float(np.partition(logits, size - count)[size - count]))
    rows = size // _GROUPS
    maxima = logits[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)  # leaving out a rest only lowers the bound
    return max(lowest, float(np.partition(maxima, _GROUPS - count)[_GROUPS - count]))


def _prefix(weights: NDArray[np.float32], need: float) -> int:
    """How many of `weights`, from the first on, reach the sum `need`; all where rounding leaves it short."""
    reached = int(np.searchsorted(np.cumsum(weights, dtype=np.float64), need, side="left"))
    return min(reached + 1, weights.size)


def _nucleus(logits: Logits, peak: float, top_p: float) -> Ids:
    """Ids of the fewest greatest logits whose probabilities, of the whole row, sum to at least `top_p`, ascending."""
    weights = np.subtract(logits, peak, out=_buffers.take(logits.size))
    np.exp(weights, out=weights)
    need = top_p * float(weights.sum())
    ids = ranked_top(logits, min(_NUCLEUS, logits.size))
    if float(weights[ids].sum(dtype=np.float64)) >= need:
        ids = ids[: _prefix(weights[ids], need)]
        ids.sort()
        return ids
    # A flat row: weigh buckets of equal logit, keep whole buckets and sort only the one in which the sum is reached.
    bucket, mass = _histogram(logits, peak, weights)
    last = min(int(np.searchsorted(mass, need, side="left")), _BUCKETS - 1)
    before = float(mass[last - 1]) if last else 0.0
    edge = np.flatnonzero(bucket == last)
    edge = edge[np.argsort(-logits[edge], kind="stable")]
    edge = edge[: _prefix(weights[edge], need - before)]
    kept = bucket < last
    kept[edge] = True
    return np.flatnonzero(kept)


def _histogram(logits: Logits, peak: float, weights: Logits) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
    """The bucket of every token, 0 for the greatest logits, and the running sum of the buckets' weights.

    In pieces that stay in the cache: whole-row temporaries make this four times slower.
    """
    bucket = _buffers.take_buckets(logits.size)
    mass = np.zeros(_BUCKETS, np.float64)
    for start in range(0, logits.size, _PIECE):
        piece = slice(start, start + _PIECE)
        scaled = (peak - logits[piece]) * np.float32(_BUCKETS / _BUCKET_SPAN)
        bucket[piece] = np.minimum(scaled, _BUCKETS - 1, out=scaled)
        mass += np.bincount(bucket[piece], weights=weights[piece], minlength=_BUCKETS)
    return bucket, np.cumsum(mass)


def locate(weights: NDArray[np.float32], fraction: float) -> int:
    """The first index at which the running sum of `weights` (>= 0, sum > 0) exceeds `fraction` of their sum."""
    if weights.size <= 2 * _BLOCK:
        sums = np.cumsum(weights, dtype=np.float64)
        return _first_above(sums, fraction * float(sums[-1]))
    rows = weights.size // _BLOCK
    whole = weights[: rows * _BLOCK].reshape(rows, _BLOCK).sum(axis=1)
    sums = np.cumsum(np.append(whole, weights[rows * _BLOCK :].sum()), dtype=np.float64)
    goal = fraction * float(sums[-1])
    row = _first_above(sums, goal)
    before = float(sums[row - 1]) if row else 0.0
    block = np.cumsum(weights[row * _BLOCK : (row + 1) * _BLOCK], dtype=np.float64)
    return row * _BLOCK + _first_above(block, goal - before)


def _first_above(sums: NDArray[np.float64], goal: float) -> int:
    """The first index whose running sum exceeds `goal`; where rounding leaves none, the last that adds anything."""
    index = int(np.searchsorted(sums, goal, side="right"))
    return min(index, int(np.searchsorted(sums, sums[-1], side="left")))
