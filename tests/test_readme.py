"""README's programs run as they stand there."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_readme_has_five_programs_and_two_commands() -> None:
    assert len(PROGRAMS) == 5
    assert len(re.findall(r"^    python3 -m venv .*$", README, re.MULTILINE)) == 2


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_readme_program_runs_and_prints(number: int, smollm2_path: Path) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(PROGRAMS[number], f"README program {number + 1}", "exec"), {"__name__": "readme"})
    assert out.getvalue().strip() or "assert" in PROGRAMS[number]
