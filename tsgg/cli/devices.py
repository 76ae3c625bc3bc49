"""`tsgg devices`: what this build of ggml can compute on."""

from __future__ import annotations

import argparse

from tsgg.cli.arguments import print_json
from tsgg.ggml.devices import devices
from tsgg.ggml.library import GGML_VERSION, cpu_features, variant
from tsgg.platform import usable_cores

HELP = "list the devices of this build"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags of its own."""


def run(arguments: argparse.Namespace) -> int:
    found = devices()
    features = [name for name, value in cpu_features().items() if value == "1"]
    if arguments.json:
        rows = [
            {
                "name": d.name,
                "kind": d.kind,
                "description": d.description,
                "free": d.memory_free,
                "total": d.memory_total,
            }
            for d in found
        ]
        print_json(
            {
                "ggml": GGML_VERSION,
                "devices": rows,
                "cpu_features": features,
                "cpu_build": variant,
                "threads": usable_cores(),
            }
        )
        return 0
    for d in found:
        memory = f"{d.memory_free / 2**30:.1f} of {d.memory_total / 2**30:.1f} GiB free"
        print(f"{d.name:<10} {d.kind:<6} {memory:<26} {d.description}")
    print(f"ggml {GGML_VERSION}, {usable_cores()} threads, CPU build {variant}: {' '.join(features)}")
    return 0
