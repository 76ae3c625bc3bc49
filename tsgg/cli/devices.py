"""`tsgg devices`: what this build of ggml can compute on."""

from __future__ import annotations

import argparse

from tsgg.cli.arguments import print_json
from tsgg.ggml.devices import devices
from tsgg.ggml.library import GGML_VERSION, cpu_features
from tsgg.platform import usable_cores

HELP = "list the devices of this build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags of its own."""


def run(arguments: argparse.Namespace) -> int:
    rows = [
        {"name": d.name, "kind": d.kind, "description": d.description, "free": d.memory_free, "total": d.memory_total}
        for d in devices()
    ]
    features = [name for name, value in cpu_features().items() if value == "1"]
    if arguments.json:
        print_json({"ggml": GGML_VERSION, "devices": rows, "cpu_features": features, "threads": usable_cores()})
        return 0
    for row in rows:
        print(f"{row['name']:<10} {row['kind']:<6} {row['free'] / 2**30:7.1f} of {row['total'] / 2**30:.1f} GiB free  "
              f"{row['description']}")  # fmt: skip
    print(f"ggml {GGML_VERSION}, {usable_cores()} threads, CPU features: {' '.join(features)}")
    return 0
