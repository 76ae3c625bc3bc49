"""Sampling: what a request asks for (`SamplingParams`) and the object that draws its tokens (`RowSampler`).

params.py   the request's numbers, checked in one place
chain.py    one row of logits -> one token, without sorting the vocabulary
uniform.py  the random number of a draw: a pure function of (seed, sample, position)
memory.py   what depends on the tokens already emitted: penalties, the repetition guard
stopping.py stop strings across token borders, and the text that may be shown
row.py      RowSampler: the above, for one request
"""

from __future__ import annotations

from tsgg.sampling.params import RepetitionGuard, SamplingParams
from tsgg.sampling.row import RowSampler, TokenLogprobs
from tsgg.sampling.stopping import StopText
from tsgg.sampling.uniform import uniform

__all__ = ["RepetitionGuard", "RowSampler", "SamplingParams", "StopText", "TokenLogprobs", "uniform"]
