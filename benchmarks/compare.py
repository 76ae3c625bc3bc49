"""`python -m benchmarks compare A.json B.json`: two reports of the same scenario, number by number.

A report is the last line that a scenario printed; a whole captured output does as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tsgg import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--above", type=float, default=0.0, help="show only changes of more than this share")


def main(arguments: argparse.Namespace) -> int:
    a, b = dict(_numbers(_read(arguments.a))), dict(_numbers(_read(arguments.b)))
    changes = {}
    for name in a.keys() & b.keys():
        ratio = b[name] / a[name] if a[name] else 1.0
        if abs(ratio - 1.0) > arguments.above:
            changes[name] = ratio
    for name in sorted(changes):
        print(f"{name:60} {a[name]:12.4g} {b[name]:12.4g} {changes[name]:7.3f}x")
    for label, only in (("only in A", a.keys() - b.keys()), ("only in B", b.keys() - a.keys())):
        if only:
            print(f"{label}: {', '.join(sorted(only)[:8])}{' ...' if len(only) > 8 else ''}")
    print(json.dumps({"compared": len(a.keys() & b.keys()), "changed": len(changes), "ratios": changes}))
    return 0


def _read(path: Path) -> Any:
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        return json.loads(lines[-1])
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{path} is no report of a scenario: {error}") from error


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a nested report with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)
