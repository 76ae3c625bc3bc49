"""Messages and pages name commands that there are."""

from __future__ import annotations

import re
from pathlib import Path

from tsgg.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]


def test_every_command_that_is_named_exists() -> None:
    files = [
        ROOT / "README.md",
        *(path for top in ("tsgg", "models", "speculative") for path in ROOT.glob(f"{top}/**/*.py")),
    ]
    named = {
        (word, path.name)
        for path in files
        for group in re.findall(r"`tsgg ([a-z]+(?: \| [a-z]+)*)", path.read_text(encoding="utf-8"))
        for word in group.split(" | ")
    }
    assert {word for word, _ in named} >= {"generate", "chat", "inspect", "devices"}
    assert [entry for entry in sorted(named) if entry[0] not in COMMANDS] == []
