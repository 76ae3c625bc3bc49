"""Shows the turns of a conversation: the answer on stdout, reasoning and what is said about it on stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing

from tsgg.cli.arguments import print_json
from tsgg.cli.bars import Bars
from tsgg.cli.conversation import Conversation, Turn
from tsgg.cli.writer import Writer
from tsgg.errors import ContextFullError, TsggError
from tsgg.results import ChatChunk

ADVICE = "/new begins afresh, /undo takes a turn back"


class Talk:
    def __init__(
        self, conversation: Conversation, bars: Bars, statistics: bool, show_drafts: bool = False, as_json: bool = False
    ) -> None:
        self.conversation, self._bars = conversation, bars
        self._statistics, self._show_drafts, self._as_json = statistics, show_drafts, as_json
        self.answers, self.notes = Writer(sys.stdout), Writer(sys.stderr)

    def ask(self, text: str) -> None:
        """Asks and shows the answer. Where that fails or is stopped nothing was asked; raises what the model raises."""
        self._answer(self.conversation.question(text))

    def ask_again(self) -> None:
        """Shows another answer to the last question."""
        self._answer(self.conversation.last_question())

    def show_statistics(self) -> None:
        last = self.conversation.llm.last
        self.notes.line("nothing was generated yet" if last is None else last.statistics(), "dim")

    def _answer(self, turn: Turn) -> None:
        finished = None
        try:
            if self._as_json:
                print_json(self.conversation.whole(turn))
            else:
                with closing(self.conversation.stream(turn)) as chunks:
                    finished = self._write(chunks)
        except ContextFullError as error:
            raise ContextFullError(f"{error} (here: {ADVICE})") from error
        finally:
            self._bars.close()
        if finished == "context":
            self.notes.line(f"(the context is full, the answer ends here: {ADVICE})", "dim")
        if self._statistics:
            self.show_statistics()

    def _write(self, chunks: Iterator[ChatChunk]) -> str | None:
        """Reasoning, an empty line, the answer. Returns why it ended."""
        open_line, finished = self.answers, None  # the stream whose line is to be ended
        try:
            for chunk in chunks:
                finished = chunk.chunk.finish_reason
                if chunk.reasoning_content:
                    open_line = self.notes
                    self.notes.write(chunk.reasoning_content, "dim")
                if chunk.content:
                    if open_line is self.notes:
                        self.notes.write("\n\n")
                    open_line = self.answers
                    self.answers.write(chunk.content, "draft" if self._show_drafts and chunk.chunk.from_draft else "")
        except TsggError:
            if open_line.open:
                open_line.line()
            raise
        except KeyboardInterrupt:
            open_line.line()  # behind the ^C of the terminal
            raise
        open_line.line()
        return finished
