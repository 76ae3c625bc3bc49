"""Sampling: what a request asks for (`SamplingParams`) and the object that draws its tokens (`RowSampler`).

params.py   the request's numbers, checked in one place
constraint_fields.py  those of them that say what an answer must look like
constraint.py  which tokens may come next in a constrained answer (grammar.py: its grammar; conflicts.py: what contradicts it)
keywords.py the same as keywords of a call, for type checkers
response_format.py  OpenAI's way to ask for JSON
defaults.py what a file recommends
chain.py    one row of logits -> one token, without sorting the vocabulary
uniform.py  the random number of a draw: a pure function of (seed, sample, position)
processors.py  functions of the caller's that change a row
memory.py   what depends on the tokens already emitted: penalties, the repetition guard
stopping.py stop strings across token borders, and the text that may be shown
row.py      RowSampler: the above, for one request
"""

from __future__ import annotations

from tsgg.sampling.constraint import Constraints, Matcher
from tsgg.sampling.defaults import file_defaults
from tsgg.sampling.keywords import SamplingKeywords
from tsgg.sampling.params import LogitsProcessor, RepetitionGuard, SamplingParams
from tsgg.sampling.row import RowLogprobs, RowSampler
from tsgg.sampling.stopping import StopText
from tsgg.sampling.uniform import uniform

__all__ = [
    "Constraints",
    "LogitsProcessor",
    "Matcher",
    "RepetitionGuard",
    "RowLogprobs",
    "RowSampler",
    "SamplingKeywords",
    "SamplingParams",
    "StopText",
    "file_defaults",
    "uniform",
]
