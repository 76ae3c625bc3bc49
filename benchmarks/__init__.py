"""Measurements and checks that are run by hand: `python -m benchmarks SCENARIO ...`. One module per scenario."""
