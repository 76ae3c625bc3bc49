"""`LLM`: the Python API. An engine with the tokenizer and the chat template of its model: text in, text out."""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from tsgg import generation
from tsgg.chat import ChatTemplate, ReasoningSplitter
from tsgg.engine import MOST_UNREAD, Engine
from tsgg.errors import UsageError
from tsgg.generation import Generation
from tsgg.model import Model
from tsgg.notices import Notices
from tsgg.progress import OnProgress
from tsgg.prompts import Prompt, is_batch, naming, token_ids
from tsgg.pull import resolve_model
from tsgg.results import ChatChunk, ChatResult, Chunk, GenerationResult
from tsgg.sampling import Constraints, RowSampler, SamplingKeywords, SamplingParams, file_defaults
from tsgg.sampling.response_format import fields_of
from tsgg.settings import settings
from tsgg.speculative import AUTO, SpeculationOptions
from tsgg.suggest import did_you_mean
from tsgg.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

Prompts = Sequence[Prompt]
Params = SamplingParams | Mapping[str, Any] | None
Messages = Sequence[Mapping[str, Any]]

log = logging.getLogger("tsgg")

# What llama-cpp-python and vLLM call an argument of `LLM`.
ELSEWHERE = {
    "model_path": "model",
    "max_model_len": "n_ctx",
    "type_k": "cache_type_k",
    "type_v": "cache_type_v",
    "max_num_seqs": "n_seq",
}


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
        n_gpu_layers: int | None = None,
        on_progress: OnProgress | None = None,
        **unknown: NoReturn,
    ) -> None:
        """model: a path, a short name (`smollm2-135m`), `user/repo:quant`, or None for smollm2-135m.
        n_ctx: tokens of context, default min(trained, 8192, what fits). speculation: None or "off", "auto" (what
        TS_SPEC_* say, else on), a drafter's name, a mapping of options or `SpeculationOptions`. n_seq: requests that run
        side by side, each with a context of its own; default up to 4 where a quarter of the free memory holds them, 1 for
        recurrent models; more wait. cache_bytes: of beginnings kept outside the slots, see `Engine`.
        n_gpu_layers: 0 is the CPU; any other number says nothing, since all layers lie on the device. on_progress: hears how
        far the download, loading and, on the thread that waits for a token, the reading of a prompt have come.

        Raises `UsageError` for a wrong argument, `ModelFileError`, `UnsupportedError` or `OutOfMemoryError` from loading.
        """
        for name in unknown:
            known = [argument for argument in signature(LLM).parameters if argument != "unknown"]
            raise UsageError(
                f"LLM() has no argument {name}{did_you_mean(name, known, ELSEWHERE)} (valid ones: {', '.join(known)})"
            )
        device = _device(device, n_gpu_layers)
        environment = SpeculationOptions.from_environment(settings.spec)
        if "TS_SPEC" not in settings.spec:
            environment = replace(environment, enabled=True)
        self._environment = environment
        self.speculation = self._options(speculation, environment)
        self.model = Model(
            resolve_model(model, on_progress=on_progress),
            device=device,
            n_ctx=n_ctx,
            n_threads=n_threads,
            cache_type_k=cache_type_k,
            cache_type_v=cache_type_v,
            n_seq=n_seq,
            on_progress=on_progress,
        )
        try:
            metadata = self.model.file.metadata
            self.defaults = file_defaults(metadata)
            """Sampling parameters that a call without them has: those of the file where it names some."""
            self.tokenizer = Tokenizer.from_metadata(metadata, self.model.arch.vocab)
            self.constraints = Constraints(self.tokenizer, self.model.vocab_size)
            """Compiled constraints of answers; for whoever makes samplers of his own."""
            self.template = ChatTemplate.from_tokenizer(self.tokenizer)
            self.engine = Engine(self.model, self.speculation, cache_bytes)
        except BaseException:
            self.model.close()
            raise
        self.last: GenerationResult | None = None  # of the generation that ended last, streamed or not
        self._lock = threading.Lock()  # of `speculation`, which changes are made on top of
        self._finalizer = weakref.finalize(self, Engine.close, self.engine)
        self._on_progress = on_progress
        self._notices = Notices()
        self._notices.loaded(self.engine, n_ctx, n_threads)

    # -- text in, text out -----------------------------------------------------------------------------------------

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, and one prompt
        self, prompt: Prompt, params: Params = None, *, speculation: object = ..., **keywords: Unpack[SamplingKeywords]
    ) -> GenerationResult: ...

    @overload
    def generate(
        self, prompt: Prompts, params: Params = None, *, speculation: object = ..., **keywords: Unpack[SamplingKeywords]
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        prompt: Prompt | Prompts,
        params: Params = None,
        *,
        speculation: object = ...,
        **keywords: Unpack[SamplingKeywords],
    ) -> GenerationResult | list[GenerationResult]:
        """Generates from a text or token ids, or from a list of these (a list of results, in order).

        Keywords are fields of `SamplingParams`, on top of `params`. That is a whole `SamplingParams`, or a mapping of fields
        on top of what the file recommends (`defaults`). `speculation` overrides the LLM's for this call. The prompts of a
        list run side by side, and so do the answers to each where `n` asks for several: `result.choices`. Raises
        `UsageError` or `ContextFullError` before anything is computed; of a list, the error names the prompt by its index.
        """
        parsed = self._parse(params, keywords)
        if not is_batch(prompt):
            return self._run([self._answers(self._ids(prompt), parsed)], speculation)[0]
        asked = []
        for index, item in enumerate(prompt):
            with naming(index):
                asked.append(self._answers(self._ids(item), parsed))
        return self._run(asked, speculation)

    def stream(
        self, prompt: Prompt, params: Params = None, *, speculation: object = ..., **keywords: Unpack[SamplingKeywords]
    ) -> Iterator[Chunk]:
        """Generates one chunk per token, from the first `next` on. Any thread may take the next chunk; closing the iterator
        ends the request. A reader who is slow is waited for, and delays nobody else. Chunks of several answers (`n`) come
        as they are made, each with its `index`. Raises what `generate` raises, at once."""
        if is_batch(prompt):
            raise UsageError("stream() takes one prompt: open a stream for each, or give several to generate()")
        parsed = self._parse(params, keywords)
        return self._chunks(self._answers(self._ids(prompt), parsed), speculation)

    @overload
    def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        stream: Literal[False] = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template: Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        speculation: object = ...,
        **keywords: Unpack[SamplingKeywords],
    ) -> ChatResult: ...

    @overload
    def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        stream: Literal[True],
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template: Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        speculation: object = ...,
        **keywords: Unpack[SamplingKeywords],
    ) -> Iterator[ChatChunk]: ...

    def chat(
        self,
        messages: Messages,
        params: Params = None,
        *,
        stream: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool | None = None,
        template: Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
        speculation: object = ...,
        **keywords: Unpack[SamplingKeywords],
    ) -> ChatResult | Iterator[ChatChunk]:
        """The assistant's turn after `messages` ({"role", "content"} each), by the file's chat template; where the last of
        them is an assistant's, what follows its text.

        `tools`, `enable_thinking` and the entries of `template` reach the template; `chat_template` among them names one of
        several in the file. `response_format` is OpenAI's: {"type": "json_object"}, or {"type": "json_schema", "json_schema":
        {"schema": ...}}, which says the same as `json_schema=`. No text in a message becomes a control token. Tool calls in
        the answer are not parsed. What stands in reasoning tags is `reasoning_content`. Raises `UsageError` for a model without
        a template.
        """
        if self.template is None:
            raise UsageError(
                f"{self.model.file.paths[0].name} has no chat template: use generate() with a plain prompt"
                if self.tokenizer.has_text
                else f"{self.model.file.paths[0].name} has no tokenizer: use generate() with token ids"
            )
        given = _with_format(response_format, keywords)
        keywords_of = dict(template or {})
        self._notices.template(self.template.source(tools, keywords_of.get("chat_template")), tools, enable_thinking)
        prompt = self.template.render(messages, tools=tools, enable_thinking=enable_thinking, **keywords_of)
        ids = self.template.encode(self.tokenizer, prompt)
        answers = self._answers(ids, self._parse(params, given))
        if stream:
            return self._chat(answers, speculation, [self.template.splitter(prompt) for _ in answers])
        first, *others = (
            _turn(result, self.template.splitter(prompt)) for result in self._run([answers], speculation)[0].choices
        )
        return replace(first, others=tuple(others))

    def tokenize(self, text: str, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Token ids of a text. `add_bos` None follows the file's rule."""
        return self.tokenizer.encode(text, add_bos, parse_special)

    def detokenize(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return self.tokenizer.decode(list(ids), skip_special)

    def speculation_report(self) -> str:
        """What speculation runs by default, or why none does."""
        engine = self.engine
        return engine.call(lambda: engine.planner.describe(engine.options))

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

    def save_cache(self, path: str | Path) -> int:
        """Writes what was computed to a file for `restore_cache`; see `Engine.save`. Returns its tokens."""
        return self.engine.save(path)

    def restore_cache(self, path: str | Path) -> int:
        """Brings back what an `LLM` of the same file, cache types and machine has saved; see `Engine.restore`.

        Returns its tokens. Raises `TsggError` where anything differs, with nothing changed.
        """
        return self.engine.restore(path)

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
        return token_ids(prompt, self.tokenizer.encode)

    def _parse(self, params: Params, keywords: SamplingKeywords) -> SamplingParams:
        parsed = SamplingParams.parse(params, self.defaults, **keywords)
        parsed.check_vocab(self.model.vocab_size)
        return parsed

    def _options(self, speculation: object, base: SpeculationOptions) -> SpeculationOptions:
        """None switches off; "auto" is what the environment says, else on; anything else is on top of `base`."""
        if isinstance(speculation, str) and speculation == AUTO:
            return self._environment
        return SpeculationOptions.parse("off" if speculation is None else speculation, base)

    def _answers(self, ids: list[int], params: SamplingParams) -> list[Generation]:
        """What is to be run for a prompt. Raises what the prompt or the parameters are refused for."""
        self.engine.check(ids)
        seed = secrets.randbits(32) if params.seed is None else params.seed
        each = [replace(params, n=1, seed=(seed + i) % 2**64) for i in range(params.n)]
        return [Generation(ids, self._sampler(ids, own), self._text_of, i) for i, own in enumerate(each)]

    def _sampler(self, ids: list[int], params: SamplingParams) -> RowSampler:
        tokenizer, text = self.tokenizer, self.tokenizer.stream()
        return RowSampler(
            params,
            self.model.vocab_size,
            prompt=ids,
            end_of_generation=tokenizer.end_of_generation,
            suppressed=tokenizer.suppressed,
            stop_tokens={token: stop for stop in params.stop or () for token in tokenizer.control_tokens.get(stop, ())},
            decode_step=text.push if tokenizer.has_text else None,
            decode_end=text.flush,
            token_limit=self.model.n_ctx - len(ids) + 1,  # the last token need not lie in memory
            constraint=self.constraints.start(params),
        )

    def _text_of(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def _request_options(self, speculation: object) -> SpeculationOptions | None:
        """Of one call. Raises `UsageError` where the call could never return."""
        if self.engine.here:
            raise UsageError("a logits processor runs on the engine's thread: it cannot wait for another generation")
        return None if speculation is ... else self._options(speculation, self.speculation)

    def _run(self, asked: list[list[Generation]], speculation: object) -> list[GenerationResult]:
        """All answers to all prompts, side by side."""
        options = self._request_options(speculation)
        generation.run([answer for answers in asked for answer in answers], self.engine, options, self._on_progress)
        results = [generation.result(answers) for answers in asked]
        self.last = results[-1]
        return results

    def _chunks(self, answers: list[Generation], speculation: object) -> Generator[Chunk]:
        options = self._request_options(speculation)
        try:
            with closing(generation.stream(answers, self.engine, options, MOST_UNREAD, self._on_progress)) as chunks:
                yield from chunks
        finally:
            if all(answer.succeeded for answer in answers):
                self.last = generation.result(answers)

    def _chat(
        self, answers: list[Generation], speculation: object, splitters: list[ReasoningSplitter]
    ) -> Iterator[ChatChunk]:
        with closing(self._chunks(answers, speculation)) as chunks:
            for chunk in chunks:
                splitter = splitters[chunk.index]
                content, reasoning = splitter.push(chunk.text)
                if chunk.finish_reason is not None:
                    rest = splitter.flush()
                    content, reasoning = content + rest[0], reasoning + rest[1]
                yield ChatChunk(content, reasoning, chunk)


def _turn(result: GenerationResult, splitter: ReasoningSplitter) -> ChatResult:
    """One answer as an assistant's turn."""
    content, reasoning = splitter.whole(result.text)
    return ChatResult("assistant", content, reasoning or None, result)


def _with_format(response_format: Mapping[str, Any] | None, keywords: SamplingKeywords) -> SamplingKeywords:
    """Keywords with what the response format asks for."""
    wanted = fields_of(response_format)
    if twice := wanted.keys() & keywords.keys():
        raise UsageError(f"{', '.join(twice)} is given and response_format too: leave one of them out")
    return {**keywords, **wanted}


def _device(device: str, n_gpu_layers: object) -> str:
    """The device of a caller who counts layers, as llama.cpp's users do."""
    if n_gpu_layers is None:
        return device
    if not isinstance(n_gpu_layers, int) or isinstance(n_gpu_layers, bool) or n_gpu_layers < -1:
        raise UsageError(f"n_gpu_layers is {n_gpu_layers!r}; expected -1 (all) or 0 (none); device= names a device")
    if n_gpu_layers > 0:
        log.warning("n_gpu_layers=%d: a model lies on one device with all its layers; device= chooses it", n_gpu_layers)
    if n_gpu_layers != 0:
        return device
    if device.lower() not in ("auto", "cpu"):
        raise UsageError(f"n_gpu_layers=0 keeps the model on the CPU and device={device!r} does not: give one of them")
    return "cpu"
