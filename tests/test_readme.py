"""README's programs run as they stand there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tsgg.results import GenerationResult

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_has_five_programs_and_two_commands() -> None:
    assert len(PROGRAMS) == 5
    assert len(re.findall(r"^    python3 -m venv .*$", README, re.MULTILINE)) == 2


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_readme_program_runs_and_shows_something(number: int, smollm2_path: Path) -> None:
    out = io.StringIO()
    names: dict[str, object] = {"__name__": "readme"}
    with contextlib.redirect_stdout(out):
        exec(compile(PROGRAMS[number], f"README program {number + 1}", "exec"), names)
    if not out.getvalue().strip():  # the one that compares: both results must be there, and one drafted
        plain, fast = (value for value in names.values() if isinstance(value, GenerationResult))
        assert len(plain.tokens) > 1 and fast.tokens == plain.tokens
        assert plain.speculation.drafted == 0 < fast.speculation.drafted
