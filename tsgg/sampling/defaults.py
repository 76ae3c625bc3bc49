"""What a file says of sampling itself: its `general.sampling.*` keys, which stand for what a caller does not give."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tsgg.errors import UsageError
from tsgg.sampling.params import SamplingParams

log = logging.getLogger("tsgg.sampling")

PREFIX = "general.sampling."
FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_last_n": "penalty_last_n",
    "penalty_repeat": "repetition_penalty",
}


def file_defaults(metadata: Mapping[str, Any]) -> SamplingParams:
    """The defaults of `SamplingParams` with what the file recommends.

    A value out of range and a key of a sampler that does not exist here (XTC, Mirostat) are left out, with a log line:
    a recommendation is no reason to refuse a model.
    """
    params = SamplingParams()
    for key in metadata:
        if not key.startswith(PREFIX):
            continue
        field, value = FIELDS.get(key.removeprefix(PREFIX)), metadata[key]
        if field is None:
            log.info("%s = %r is left out: there is no such sampler", key, value)
            continue
        try:
            short = float(f"{value:.7g}") if isinstance(value, float) else value  # 0.6, not float32's 0.60000002
            params = SamplingParams.parse(params, **{field: short})
        except UsageError as error:
            log.warning("%s is left out: %s", key, error)
    return params
