"""LLM: the engine's public face. Tokenise, step until done, detokenise."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from tqdm.auto import tqdm

from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.core import Core, PoolUse, StepStats
from engine.disaggregated import DisaggregatedCore
from engine.execution.launch import start_engine
from engine.execution.results import GraphReplay
from engine.models.hub import resolve_model
from engine.request import Request, RequestError, RequestOutput, RequestTiming, SamplingParams, TokenOutput
from engine.tokenizer import ChatMessage, IncrementalDecoder, load_tokenizer

_Event = tuple[str, TokenOutput | None, RequestOutput | None]
"""A request's token, its end, or both."""

Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or the messages of a chat."""


class LLM:
    """A model and the engine around it.

    Args:
        model: ``smollm2-135m``, a Hugging Face folder or hub name, or ``random:<shape>[:seed]``.
        config: The knobs; or give them as keyword options (``LLM(model, max_num_seqs=8)``).

    With ``tensor_parallel_size`` above 1 the other ranks are processes that this one starts, and ends in ``close`` (or
    use the engine in a ``with`` statement), when it is collected, or when it ends itself, however it does. Under
    ``torchrun`` they are torchrun's processes: there ``LLM(...)`` returns on rank 0 alone; on the others it serves
    until rank 0 closes and then ends the program (``SystemExit(0)``).

    Raises:
        ConfigError: An option is unknown, out of range, or contradicts another or the model.
        WorkerError: A rank could not start; from every later call, too, once a rank has failed.
    """

    def __init__(self, model: str = "smollm2-135m", config: EngineConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise ConfigError(f"config and the options {', '.join(sorted(options))} are both given; give only one")
        self.config = EngineConfig.from_options(options) if config is None else config
        self.source = source = resolve_model(model)
        self.model_config = ModelConfig.from_hf(source.hf_config, source.name)
        limit = self.model_config.max_position
        self.max_model_len = limit if self.config.max_model_len is None else self.config.max_model_len
        if self.max_model_len > limit:
            raise ConfigError(f"max_model_len={self.max_model_len} exceeds {limit}, the model's own limit; lower it")
        self.tokenizer = load_tokenizer(source.folder)
        start = DisaggregatedCore.start if self.config.disaggregated else start_engine
        self.core: Core = start(source, self.model_config, self.config, self.max_model_len)
        self._ids = itertools.count()
        self._backlog: list[_Event] = []

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their end.

        Args:
            prompts: One prompt or a list of them.
            sampling_params: One for all prompts, or one each; None is ``SamplingParams()``.
            use_tqdm: Show a progress bar.

        Returns:
            One output for each prompt, in order.

        Raises:
            RequestError: A prompt is refused; then none of them runs. An interrupt aborts this call's requests only.
        """
        many = _as_list(prompts)
        params = _per_prompt(sampling_params, len(many))
        requests = [self._request(prompt, param, None) for prompt, param in zip(many, params, strict=True)]
        for request in requests:
            self.core.validate(request)
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), desc="Generating", unit="request", disable=not use_tqdm) as bar:
            try:
                for request in requests:
                    self.core.add(request)
                mine = {request.request_id for request in requests}
                num_tokens = 0
                while len(done) < len(requests):
                    for request_id, token, output in self._advance(mine):
                        num_tokens += token is not None
                        if output is not None:
                            done[request_id] = output
                            bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                            bar.update()
            finally:
                for request in requests:
                    if request.finish_reason is None:
                        self.core.abort(request.request_id)
        return [done[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TokenOutput]:
        """Run one prompt and yield each token, with the text it adds, as it appears.

        Leaving the iteration early aborts the request.

        Raises:
            RequestError: The request is refused, or failed on its way.
        """
        request = self._request(prompt, sampling_params or SamplingParams(), None)
        self.core.add(request)
        decoder = None if self.tokenizer is None else IncrementalDecoder(self.tokenizer)
        try:
            while request.finish_reason is None:
                for _, token, output in self._advance({request.request_id}):
                    if token is None:
                        assert output is not None
                        raise RequestError(f"request {request.request_id}: {output.error}")
                    text = None if decoder is None else decoder.push(token.token_id, token.finish_reason is not None)
                    yield TokenOutput(token.request_id, token.token_id, token.logprob, token.finish_reason, text)
        finally:
            if request.finish_reason is None:
                self.core.abort(request.request_id)

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt for ``step``; returns its id.

        Raises:
            RequestError: The request is refused; the others go on.
        """
        request = self._request(prompt, sampling_params or SamplingParams(), request_id)
        self.core.add(request)
        return request.request_id

    def step(self) -> tuple[list[TokenOutput], list[RequestOutput], StepStats | None]:
        """Run one step.

        Returns:
            The tokens that appeared, the outputs of the requests that ended, and the step's statistics (None when there
            was nothing to do). What ``add_request``'s requests produced while ``generate`` or ``stream`` drove the
            engine is delivered first.
        """
        stats = self._step_into_backlog()
        backlog, self._backlog = self._backlog, []
        tokens = [token for _, token, _ in backlog if token is not None]
        return tokens, [output for _, _, output in backlog if output is not None], stats

    @property
    def ops_name(self) -> str:
        """The op set in use."""
        return self.core.facts().ops

    @property
    def world_size(self) -> int:
        """Ranks at work, as their group counts them; of each instance where there are two."""
        return self.core.facts().world_size

    @property
    def communication_s(self) -> float:
        """Seconds that rank 0 has spent in exchanges between ranks so far, waiting for the others included."""
        return self.core.facts().communication_s

    @property
    def graph_replays(self) -> tuple[GraphReplay, ...]:
        """How often each graph ran, and how often padded; nothing where ``enforce_eager`` turned graphs off."""
        return self.core.facts().graph_replays

    @property
    def kv_pools(self) -> Mapping[str, PoolUse]:
        """The KV pools by instance: ``engine``, or ``prefill`` and ``decode``."""
        return self.core.pools()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix.

        Raises:
            RequestError: Requests are running, which hold blocks that are known.
        """
        if self.core.has_unfinished:
            raise RequestError("requests are running; let them end or abort them before resetting the prefix cache")
        self.core.forget_prefixes()

    def close(self) -> None:
        """End the other ranks' and instances' processes. An engine of one rank holds none and may go on."""
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished or bool(self._backlog)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Stop a request and free its blocks at once; its output so far, or None when it is unknown or has ended."""
        request = self.core.abort(request_id)
        return None if request is None else self._output(request)

    def next_token_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Float32 logits [vocab] of the token after ``token_ids``, for diagnosis while the engine is idle.

        Raises:
            RequestError: Requests are running, or the tokens are refused as a prompt would be.
        """
        if self.core.has_unfinished:
            raise RequestError("requests are running; let them end or abort them before asking for logits")
        request = self._request(tuple(token_ids), SamplingParams(max_tokens=1), "logits")
        logits: Tensor = self.core.logits(request)
        return logits

    def _advance(self, mine: set[str]) -> Iterator[_Event]:
        self._step_into_backlog()
        backlog, self._backlog = self._backlog, []
        for item in backlog:
            if item[0] in mine:
                yield item
            else:
                self._backlog.append(item)

    def _step_into_backlog(self) -> StepStats | None:
        step = self.core.step()
        if step is None:
            return None
        for request in step.sampled:
            token = TokenOutput(
                request.request_id, request.token_ids[-1], request.logprobs[-1], request.finish_reason, None
            )
            output = None if request.finish_reason is None else self._output(request)
            self._backlog.append((request.request_id, token, output))
        for request, error in step.failed:
            self._backlog.append((request.request_id, None, self._output(request, error)))
        return step.stats

    def _request(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> Request:
        token_ids = self.encode(prompt)
        request_id = f"request-{next(self._ids)}" if request_id is None else request_id
        return Request(request_id, token_ids, params, time.perf_counter())

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt: as given, by the tokenizer, or under the chat template.

        Raises:
            RequestError: The model has no tokenizer or no chat template for what is given.
        """
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not isinstance(prompt, str) and not is_chat:
            return tuple(cast(Sequence[int], prompt))
        if self.tokenizer is None:
            raise RequestError(f"the model has no tokenizer, so {str(prompt)[:40]!r} cannot be encoded; give token ids")
        return self.tokenizer.encode_chat(cast(Any, prompt)) if is_chat else self.tokenizer.encode(cast(str, prompt))

    def _output(self, request: Request, error: str | None = None) -> RequestOutput:
        assert request.finish_reason is not None
        generated = request.token_ids[request.num_prompt_tokens :]
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            text=None if self.tokenizer is None else self.tokenizer.decode(generated),
            token_ids=tuple(generated),
            logprobs=tuple(request.logprobs),
            finish_reason=request.finish_reason,
            num_cached_tokens=request.num_cached_tokens,
            timing=RequestTiming(
                request.arrival_time, request.admitted_time, tuple(request.token_times), request.finish_time
            ),
            error=error,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, ids, messages) becomes a list of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | Mapping)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each prompt")
    return list(params)
