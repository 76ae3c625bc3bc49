"""What is generated in the benchmarks: prompts as data, with the kind of continuation that they call for.

Raw prompts, not chats: a small model that is asked to quote seldom does, but one that has begun to copy goes on. So the
quoting prompts hold a text and the first lines of its copy.
"""

from __future__ import annotations

from dataclasses import dataclass

CODE = '''def load_inventory(path):
    """Read the warehouse inventory from a CSV file."""
    items = []
    with open(path, newline="") as handle:
        for row in csv.DictReader(handle):
            items.append({
                "sku": row["sku"].strip(),
                "name": row["name"].strip(),
                "quantity": int(row["quantity"]),
                "unit_price": float(row["unit_price"]),
            })
    return items


def total_value(items):
    """Sum of quantity times unit price over all items."""
    return sum(item["quantity"] * item["unit_price"] for item in items)


def restock(items, minimum):
    """Yield (sku, missing) for every item below the minimum."""
    for item in items:
        if item["quantity"] < minimum:
            yield item["sku"], minimum - item["quantity"]
'''
LOG = "\n".join(
    f"2026-03-{1 + i // 24:02d} {i % 24:02d}:15:0{i % 10} INFO worker-{i % 4} finished job {4100 + 7 * i} in {120 + i % 9} ms"
    for i in range(36)
)
PROSE = "The old lighthouse keeper had not spoken to anyone for eleven days when the storm finally broke. He"
FACTS = "A list of countries and their capitals:\nFrance: Paris\nGermany: Berlin\nItaly: Rome\nSpain: Madrid\n"
TOOL = '{"calls": [{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}},\n' * 3


@dataclass(frozen=True, slots=True)
class Workload:
    """A prompt and how many tokens to generate after it.

    `after` names a workload that is answered first and stays in memory: the prompt follows its answer, or, if it is a new chat,
    has nothing to do with it.
    """

    name: str
    prompt: str
    tokens: int = 128
    after: str | None = None
    new_chat: bool = False


WORKLOADS = {
    load.name: load
    for load in (
        Workload("short", "The capital of France is", 24),
        Workload("long", f"{LOG}\n\nSummary of the log above: the workers", 96),
        Workload("tool", TOOL, 96),
        Workload("quote-prompt", f"{CODE}\n\n# A copy of the file above:\n{CODE[:300]}", 192),
        Workload(
            "code-edit",
            f"{CODE}\n\n# The same file with type hints:\ndef load_inventory(path: str) -> list[dict]:",
            192,
        ),
        Workload("prose", PROSE, 512),
        Workload("facts", FACTS, 96),
        Workload("quote-own", "\n\nThe same list once more:\nFrance: Paris\n", 96, after="facts"),
        Workload("newchat", "Three facts about the moon:\n1.", 96, after="facts", new_chat=True),
        Workload("mixed", f"{PROSE} said:\n{LOG[:900]}\nAnd again, line by line:\n{LOG[:160]}", 256),
    )
}
