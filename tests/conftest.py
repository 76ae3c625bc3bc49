"""Fixtures: where the shared golden files and the real models are. Tests that need one that is absent skip with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsgg.errors import TsggError
from tsgg.pull import cache_folder, resolve_model

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of golden answers beside the repository."""
    folder = SHARED / "golden"
    if not folder.is_dir():
        pytest.skip("the golden files (../shared/golden) are not on this machine")
    return folder


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M, pulled into the user's cache when it is not there."""
    return _real_model("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, pulled into the user's cache when it is not there."""
    return _real_model("gemma3-270m")


def _real_model(name: str) -> Path:
    try:
        return resolve_model(name)
    except TsggError as error:
        pytest.skip(f"{name} is not in {cache_folder()} and could not be fetched: {error}")
