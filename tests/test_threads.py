"""The crew of threads: it gives way to busy processes and to nothing else."""

from __future__ import annotations

from tsgg.ggml.threads import FIRST_HOLD, LONGEST_HOLD, PATIENCE, SETTLE, Crew, Pace


class Machine:
    """Times of a graph that takes one second on all of `cores` alone, and a crew that sees them."""

    def __init__(self, cores: int) -> None:
        self.cores, self.pace, self.busy = cores, Pace(), False
        self.calls: list[int] = []
        self.crew = Crew(cores, self.calls.append)

    def run(self, computes: int) -> list[int]:
        """The threads of each compute. Beside a busy process all threads are four times slower, one fewer is not."""
        used = []
        for _ in range(computes):
            used.append(self.crew.threads)
            seconds = self.cores / self.crew.threads
            self.crew.observe(self.pace, seconds * (4.0 if self.busy and self.crew.threads == self.cores else 1.0))
        return used


def test_a_machine_of_its_own_keeps_all_threads() -> None:
    machine = Machine(4)
    assert set(machine.run(1000)) == {4} and machine.calls == []


def test_a_busy_core_is_left_alone_after_a_few_slow_computes_and_taken_back_when_it_is_free() -> None:
    machine = Machine(2)
    machine.run(SETTLE + 10)
    machine.busy = True
    used = machine.run(PATIENCE + FIRST_HOLD - 1)
    assert used[:PATIENCE] == [2] * PATIENCE and set(used[PATIENCE:]) == {1}
    machine.busy = False
    assert machine.run(FIRST_HOLD + 5)[-1] == 2


def test_one_stall_changes_nothing() -> None:
    machine = Machine(2)
    machine.run(SETTLE + 10)
    for _ in range(50):
        machine.crew.observe(machine.pace, 100.0)
        machine.run(1)
    assert machine.calls == []


def test_a_core_that_stays_busy_is_tried_ever_more_seldom() -> None:
    machine = Machine(2)
    machine.run(SETTLE + 10)
    machine.busy = True
    used = machine.run(8 * LONGEST_HOLD)
    assert used[-LONGEST_HOLD:].count(2) <= PATIENCE
    assert used.count(2) < 0.01 * len(used)


def test_a_slow_start_is_not_taken_for_the_graphs_pace() -> None:
    crew, pace = Crew(2, lambda _: None), Pace()
    for seconds in (9.0, 7.0, 5.0, *[1.0] * 20, 1.9, 1.9, 1.9, 1.9):
        crew.observe(pace, seconds)
    assert crew.threads == 2


def test_a_single_thread_is_never_taken_away() -> None:
    crew, pace = Crew(1, lambda _: None), Pace()
    for _ in range(100):
        crew.observe(pace, 1.0)
    for _ in range(100):
        crew.observe(pace, 9.0)
    assert crew.threads == 1
