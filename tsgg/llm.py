"""`LLM`: the Python API. A model, its tokenizer and chat template, and one sequence that is kept between calls."""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from tsgg.chat import ChatTemplate, ReasoningSplitter
from tsgg.errors import UsageError
from tsgg.generation import Generation
from tsgg.model import Model
from tsgg.pull import resolve_model
from tsgg.results import ChatChunk, ChatResult, Chunk, GenerationResult
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.settings import settings
from tsgg.speculative import (
    AUTO,
    REGISTRY,
    CostGovernor,
    Decline,
    DraftHead,
    SpeculationOptions,
    SpeculativeExecution,
    Speculator,
)
from tsgg.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]

MOST_EXECUTIONS = 16  # sets of options remembered: a caller who varies them with every call must not fill the memory


class LLM:
    """A GGUF model ready to generate. Calls are serialised by a lock; two LLMs run side by side.

    The last sequence stays in memory: the longest common prefix of the next prompt is not computed again.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        device: str = "auto",
        n_ctx: int | None = None,
        n_threads: int | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        speculation: object = "auto",
    ) -> None:
        """model: a path, a short name (`smollm2-135m`), `user/repo:quant`, or None for smollm2-135m.
        n_ctx: tokens of context, default min(trained, 8192, what fits). speculation: None or "off", "auto" (what
        TS_SPEC_* say, else on), a drafter's name, a mapping of options or `SpeculationOptions`.

        Raises `UsageError` for a wrong argument, `ModelFileError`, `UnsupportedError` or `OutOfMemoryError` from loading.
        """
        environment = SpeculationOptions.from_environment(settings.spec)
        if "TS_SPEC" not in settings.spec:
            environment = replace(environment, enabled=True)
        self._environment = environment
        self.speculation = self._options(speculation, environment)
        self.model = Model(
            resolve_model(model),
            device=device,
            n_ctx=n_ctx,
            n_threads=n_threads,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
        )
        try:
            metadata = self.model.file.metadata
            self.tokenizer = Tokenizer.from_metadata(metadata)
            self.template = ChatTemplate.from_tokenizer(self.tokenizer)
            self._sequence = self.model.new_sequence()
            self._executions: OrderedDict[SpeculationOptions, SpeculativeExecution] = OrderedDict()
            self._speculators: dict[SpeculationOptions, Speculator | Decline] = {}
            self._keys = itertools.count()
            self._governors: dict[tuple[str, str | None], CostGovernor] = {}  # by drafter and its file
            self._execution(self.speculation)
        except BaseException:
            self.model.close()
            raise
        self.last: GenerationResult | None = None  # of the latest generation, streamed or not
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread that holds the lock
        self._generation: Generation | None = None  # the one that runs, if it took the LLM's own speculation

    # -- text in, text out -----------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: object = ..., **keywords: Any
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: list[str], params: SamplingParams | None = None, *, speculation: object = ..., **keywords: Any
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | list[str],
        params: SamplingParams | None = None,
        *,
        speculation: object = ...,
        **keywords: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Generates from a text, token ids, or a list of texts (a list of results, in order).

        `params` and keywords are fields of `SamplingParams`; `speculation` overrides the LLM's for this call.
        Raises `UsageError` or `ContextFullError` before anything is computed.
        """
        if isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
            return [self.generate(str(item), params, speculation=speculation, **keywords) for item in prompt]
        ids = self._ids(prompt)
        with self._running(ids, SamplingParams.parse(params, **keywords), speculation) as generation:
            for _ in generation:
                pass
        assert self.last is not None
        return self.last

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: object = ..., **keywords: Any
    ) -> Iterator[Chunk]:
        """Generates one chunk per token. Closing the iterator leaves the sequence committed and reusable."""
        ids = self._ids(prompt)
        parsed = SamplingParams.parse(params, **keywords)

        def chunks() -> Iterator[Chunk]:
            with self._running(ids, parsed, speculation) as generation:
                yield from generation

        return chunks()

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template: Mapping[str, Any] | None = None,
        speculation: object = ...,
        **keywords: Any,
    ) -> ChatResult: ...

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template: Mapping[str, Any] | None = None,
        speculation: object = ...,
        **keywords: Any,
    ) -> Iterator[ChatChunk]: ...

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template: Mapping[str, Any] | None = None,
        speculation: object = ...,
        **keywords: Any,
    ) -> ChatResult | Iterator[ChatChunk]:
        """The assistant's turn after `messages` ({"role", "content"} each), by the file's chat template.

        `tools`, `enable_thinking` and the entries of `template` reach the template; tool calls in the answer are not
        parsed. What stands in reasoning tags is `reasoning_content`. Raises `UsageError` for a model without a template.
        """
        if self.template is None:
            raise UsageError(
                f"{self.model.file.paths[0].name} has no chat template: use generate() with a plain prompt"
            )
        text = self.template.render(messages, tools=tools, enable_thinking=enable_thinking, **(template or {}))
        ids = self.template.encode(self.tokenizer, text)
        parsed = SamplingParams.parse(params, **keywords)
        chunks = self._chat(ids, parsed, speculation, self.template.splitter(text))
        if stream:
            return chunks
        content, reasoning = [], []
        for chunk in chunks:
            content.append(chunk.content)
            reasoning.append(chunk.reasoning_content)
        assert self.last is not None
        return ChatResult("assistant", "".join(content), "".join(reasoning) or None, self.last)

    def tokenize(self, text: str, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Token ids of a text. `add_bos` None follows the file's rule."""
        return self.tokenizer.encode(text, add_bos, parse_special)

    def detokenize(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special)

    def speculation_report(self) -> str:
        """What speculation runs by default, or why none does."""
        return self._execution(self.speculation).describe()

    def update_speculation(self, speculation: object) -> str:
        """Replaces the LLM's speculation: what the constructor takes, on top of what is set now. Returns its report.

        A stream of this thread goes on with it from its next step on; a call of another thread is waited for. Nothing has to
        be loaded again, except the weights of a new drafter. Raises `UsageError`, and what loading a drafter raises; then all
        stays as it was.
        """
        if self._owner == threading.get_ident():
            return self._update(speculation)
        with self._lock:
            return self._update(speculation)

    def forget(self) -> None:
        """Empties the kept sequence: the next prompt is computed whole."""
        with self._lock:
            self._sequence.truncate(0)

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the model's memory; a second call does nothing."""
        self.model.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        spec = self.speculation.type if self.speculation.enabled else "off"
        return f"LLM({self.model!r}, speculation={spec!r})"

    # -- parts -----------------------------------------------------------------------------------------------------

    def _ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes) and all(_is_id(item) for item in prompt):
            return [int(item) for item in prompt]
        raise UsageError(f"a prompt is a text, a list of texts or a list of token ids, got {type(prompt).__name__}")

    def _chat(
        self, ids: list[int], params: SamplingParams, speculation: object, splitter: ReasoningSplitter
    ) -> Iterator[ChatChunk]:
        with self._running(ids, params, speculation) as generation:
            for chunk in generation:
                content, reasoning = splitter.push(chunk.text)
                if chunk.finish_reason is not None:
                    rest = splitter.flush()
                    content, reasoning = content + rest[0], reasoning + rest[1]
                yield ChatChunk(content, reasoning, chunk)

    def _execution(self, options: SpeculationOptions) -> SpeculativeExecution:
        """One execution per set of options, the latest MOST_EXECUTIONS; drafters and what they remember are shared."""
        if options not in self._executions:
            speculator = self._speculator(options)
            policy = self._governor(speculator, options)
            self._executions[options] = SpeculativeExecution(self.model, speculator, options, policy, keys=self._keys)
            while len(self._executions) > MOST_EXECUTIONS:
                self._executions.popitem(last=False)
        self._executions.move_to_end(options)
        return self._executions[options]

    def _speculator(self, options: SpeculationOptions) -> Speculator | Decline:
        """The drafter of these options, or why there is none; one for all that differ in the window only."""
        same = replace(options, draft=None, adaptive=True)
        if same not in self._speculators:
            wants_head = options.enabled and (options.type == AUTO or REGISTRY.requires_draft_head(options.type))
            head = self._head(options) if wants_head else None
            self._speculators[same] = REGISTRY.create(options.type, self.model, options, head)
            while len(self._speculators) > MOST_EXECUTIONS:
                del self._speculators[next(iter(self._speculators))]
        return self._speculators[same]

    def _options(self, speculation: object, base: SpeculationOptions) -> SpeculationOptions:
        """None switches off; "auto" is what the environment says, else on; anything else is on top of `base`."""
        if isinstance(speculation, str) and speculation == AUTO:
            return self._environment
        return SpeculationOptions.parse("off" if speculation is None else speculation, base)

    def _head(self, options: SpeculationOptions) -> DraftHead | None:
        """Drafter weights: those of the file that was named, else those that the model's own file carries."""
        return self.model.draft_head() if options.draft_model is None else self.model.draft_model(options.draft_model)

    def _governor(self, speculator: Speculator | Decline, options: SpeculationOptions) -> CostGovernor | None:
        """What chooses the windows: one per drafter, so that what it has learned of costs serves all options and requests."""
        if isinstance(speculator, Decline) or not options.adaptive:
            return None
        return self._governors.setdefault((speculator.name, options.draft_model), CostGovernor())

    def _update(self, speculation: object) -> str:
        options = self._options(speculation, self.speculation)
        execution = self._execution(options)
        self.speculation = options
        if self._generation is not None:
            self._generation.switch(execution)
        return execution.describe()

    @contextmanager
    def _running(self, ids: list[int], params: SamplingParams, speculation: object) -> Iterator[Generation]:
        """Holds the lock while a generation on the kept sequence runs."""
        if self._owner == threading.get_ident():
            raise UsageError("this LLM is streaming in the same thread: finish or close that stream first")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                options = self.speculation if speculation is ... else self._options(speculation, self.speculation)
                if self.tokenizer.suppressed:
                    never = dict.fromkeys(self.tokenizer.suppressed, -math.inf)
                    params = replace(params, logit_bias={**(params.logit_bias or {}), **never})
                stream = self.tokenizer.stream()
                sampler = RowSampler(
                    params,
                    self.model.vocab_size,
                    prompt=ids,
                    end_of_generation=self.tokenizer.end_of_generation,
                    decode_step=stream.push,
                    decode_end=stream.flush,
                    token_limit=self.model.n_ctx - len(ids) + 1,  # the last token need not lie in memory
                )
                generation = Generation(self.model, self._execution(options), self._sequence, sampler, ids)
                self._generation = generation if speculation is ... else None
                try:
                    yield generation
                finally:  # a closed stream as well
                    self._generation = None
                    self.last = generation.result()
            finally:
                self._owner = None


def _is_id(item: object) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool)
