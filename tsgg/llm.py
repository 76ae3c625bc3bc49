"""`LLM`: the Python API. An engine with the tokenizer and the chat template of its model: text in, text out."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from tsgg.chat import ChatTemplate, ReasoningSplitter
from tsgg.engine import MOST_UNREAD, Engine
from tsgg.errors import TsggError, UsageError
from tsgg.generation import Generation
from tsgg.model import Model
from tsgg.notices import Notices
from tsgg.pull import resolve_model
from tsgg.results import ChatChunk, ChatResult, Chunk, GenerationResult
from tsgg.sampling import RowSampler, SamplingParams
from tsgg.settings import settings
from tsgg.speculative import AUTO, SpeculationOptions
from tsgg.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A GGUF model ready to generate, for any number of threads: calls run side by side, each with the tokens that it would
    give alone. What was computed stays in memory as long as there is room: the beginning of a prompt that was seen before is
    not computed again.
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
        n_seq: int | None = None,
        cache_bytes: int | None = None,
    ) -> None:
        """model: a path, a short name (`smollm2-135m`), `user/repo:quant`, or None for smollm2-135m.
        n_ctx: tokens of context, default min(trained, 8192, what fits). speculation: None or "off", "auto" (what
        TS_SPEC_* say, else on), a drafter's name, a mapping of options or `SpeculationOptions`. n_seq: requests that run
        side by side, each with a context of its own; default up to 4 where a quarter of the free memory holds them, 1 for
        recurrent models; more wait. cache_bytes: of beginnings kept outside the slots, see `Engine`.

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
            n_seq=n_seq,
        )
        try:
            metadata = self.model.file.metadata
            self.tokenizer = Tokenizer.from_metadata(metadata)
            self.template = ChatTemplate.from_tokenizer(self.tokenizer)
            self.engine = Engine(self.model, self.speculation, cache_bytes)
        except BaseException:
            self.model.close()
            raise
        self.last: GenerationResult | None = None  # of the generation that ended last, streamed or not
        self._lock = threading.Lock()  # of `speculation`, which changes are made on top of
        self._finalizer = weakref.finalize(self, Engine.close, self.engine)
        self._notices = Notices()
        self._notices.loaded(self.engine, n_ctx, n_threads)

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

        `params` and keywords are fields of `SamplingParams`; `speculation` overrides the LLM's for this call. The texts of a
        list run side by side. Raises `UsageError` or `ContextFullError` before anything is computed.
        """
        parsed = SamplingParams.parse(params, **keywords)
        if isinstance(prompt, list) and prompt and all(isinstance(item, str) for item in prompt):
            return self._run([self._ids(text) for text in prompt], parsed, speculation)
        return self._run([self._ids(prompt)], parsed, speculation)[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, speculation: object = ..., **keywords: Any
    ) -> Iterator[Chunk]:
        """Generates one chunk per token, from the first `next` on. Any thread may take the next chunk; closing the iterator
        ends the request. A reader who is slow is waited for, and delays nobody else."""
        ids = self._ids(prompt)
        parsed = SamplingParams.parse(params, **keywords)
        self._sampler(ids, parsed)  # bad input is told here, not at the first chunk
        return self._chunks(ids, parsed, speculation)

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
        self._notices.template(self.tokenizer.chat_template or "", tools, enable_thinking)
        text = self.template.render(messages, tools=tools, enable_thinking=enable_thinking, **(template or {}))
        ids = self.template.encode(self.tokenizer, text)
        parsed = SamplingParams.parse(params, **keywords)
        splitter = self.template.splitter(text)
        if stream:
            self._sampler(ids, parsed)
            return self._chat(ids, parsed, speculation, splitter)
        result = self._run([ids], parsed, speculation)[0]
        parts = splitter.push(result.text), splitter.flush()
        content, reasoning = ("".join(part) for part in zip(*parts, strict=True))
        return ChatResult("assistant", content, reasoning or None, result)

    def tokenize(self, text: str, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Token ids of a text. `add_bos` None follows the file's rule."""
        return self.tokenizer.encode(text, add_bos, parse_special)

    def detokenize(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special)

    def speculation_report(self) -> str:
        """What speculation runs by default, or why none does."""
        engine = self.engine
        return engine.call(lambda: engine.planner.execution(engine.options).describe())

    def update_speculation(self, speculation: object) -> str:
        """Replaces the LLM's speculation: what the constructor takes, on top of what is set now. Returns its report.

        Requests that run, but for those with options of their own, go on with it from their next step. Nothing has to be
        loaded again, except the weights of a new drafter. Raises `UsageError`, and what loading a drafter raises; then all
        stays as it was.
        """
        with self._lock:
            options = self._options(speculation, self.speculation)
            report = self.engine.update_speculation(options)
            self.speculation = options
        self._notices.speculation(self.engine)
        return report

    def forget(self) -> None:
        """Forgets what was computed: the next prompt is computed whole. Requests that run go on."""
        self.engine.forget()

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends what runs with a `TsggError`, and frees the model's memory; a second call does nothing."""
        self._finalizer()

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

    def _options(self, speculation: object, base: SpeculationOptions) -> SpeculationOptions:
        """None switches off; "auto" is what the environment says, else on; anything else is on top of `base`."""
        if isinstance(speculation, str) and speculation == AUTO:
            return self._environment
        return SpeculationOptions.parse("off" if speculation is None else speculation, base)

    def _sampler(self, ids: list[int], params: SamplingParams) -> RowSampler:
        """Raises what the prompt or the parameters are refused for."""
        self.engine.check(ids)
        text = self.tokenizer.stream()
        return RowSampler(
            params,
            self.model.vocab_size,
            prompt=ids,
            end_of_generation=self.tokenizer.end_of_generation,
            suppressed=self.tokenizer.suppressed,
            decode_step=text.push,
            decode_end=text.flush,
            token_limit=self.model.n_ctx - len(ids) + 1,  # the last token need not lie in memory
        )

    def _run(self, prompts: list[list[int]], params: SamplingParams, speculation: object) -> list[GenerationResult]:
        """All prompts side by side, waited for. Nothing is computed where one is refused; where one fails, all end."""
        options = None if speculation is ... else self._options(speculation, self.speculation)
        samplers = [self._sampler(ids, params) for ids in prompts]
        started: list[Generation] = []
        try:
            for ids, sampler in zip(prompts, samplers, strict=True):
                stream = self.engine.submit(ids, sampler, options, most_unread=None)
                started.append(Generation(stream, sampler, len(ids)))
            for generation in started:
                generation.stream.wait()
        finally:
            for generation in started:
                generation.stream.cancel()  # after its end: nothing
        results = [generation.result() for generation in started]
        self.last = results[-1]
        return results

    @contextmanager
    def _streaming(self, ids: list[int], params: SamplingParams, speculation: object) -> Iterator[Generation]:
        """A request that ends when its reader leaves."""
        options = None if speculation is ... else self._options(speculation, self.speculation)
        sampler = self._sampler(ids, params)
        stream = self.engine.submit(ids, sampler, options, most_unread=MOST_UNREAD)
        generation = Generation(stream, sampler, len(ids))
        try:
            yield generation
        finally:
            stream.cancel()
            if not self.engine.here:  # where a garbage collection found the stream
                with suppress(TsggError):  # it was raised in the reader's loop, or nobody reads any more
                    stream.wait()
            if stream.ended and stream.error is None:
                self.last = generation.result()

    def _chunks(self, ids: list[int], params: SamplingParams, speculation: object) -> Generator[Chunk]:
        with self._streaming(ids, params, speculation) as generation:
            yield from generation

    def _chat(
        self, ids: list[int], params: SamplingParams, speculation: object, splitter: ReasoningSplitter
    ) -> Iterator[ChatChunk]:
        with closing(self._chunks(ids, params, speculation)) as chunks:
            for chunk in chunks:
                content, reasoning = splitter.push(chunk.text)
                if chunk.finish_reason is not None:
                    rest = splitter.flush()
                    content, reasoning = content + rest[0], reasoning + rest[1]
                yield ChatChunk(content, reasoning, chunk)


def _is_id(item: object) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool)
