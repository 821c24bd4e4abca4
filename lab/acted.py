"""What the steps of a run show for the features: a golden cell whose feature did not act could not have failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core import StepStats


@dataclass
class Acted:
    """Counts over the steps that it has seen; ``see`` takes them in order.

    Attributes:
        steps: Steps.
        joined: Requests that joined a batch which others had already left: continuous batching.
        split: Prompts that were computed in more than one step: chunked prefill.
        mid_block: Chunks after which a prompt stood in the middle of a KV block.
        mixed: Steps that held an unfinished prompt's chunk beside decodes.
        hit_tokens: Prompt tokens that were found in the prefix cache.
        hits_beside_misses: Steps in which a prompt joined of which every full block was found, beside one of which some
            were not.
        moved_blocks: KV blocks that travelled from one instance to another.
        kept_blocks: KV blocks of handed-over prompts that did not have to.
    """

    block_size: int = 16
    steps: int = 0
    joined: int = 0
    split: int = 0
    mid_block: int = 0
    mixed: int = 0
    hit_tokens: int = 0
    hits_beside_misses: int = 0
    moved_blocks: int = 0
    kept_blocks: int = 0
    _running: set[str] = field(default_factory=set)
    _left: bool = False

    def see(self, stats: StepStats) -> None:
        """Take in one step, after it ran."""
        self.steps += 1
        names = {item.request.request_id for item in stats.scheduled}
        if self._running.isdisjoint(names):  # a new batch, whoever ran before
            self._left = False
        if self._left:
            self.joined += len(names - self._running)
        self._see_chunks(stats)
        self._see_hits(stats)
        for transfer in stats.transfers:
            self.moved_blocks += transfer.num_blocks
            self.kept_blocks += transfer.num_blocks_hit
        self._running = names
        self._left |= any(item.request.finish_reason is not None for item in stats.scheduled)

    def _see_chunks(self, stats: StepStats) -> None:
        unfinished = False
        for item in stats.scheduled:
            end, prompt = item.start + item.num_tokens, item.request.num_prompt_tokens
            if item.is_prefill and end < prompt:
                unfinished = True
                self.mid_block += end % self.block_size != 0
            self.split += item.is_prefill and end >= prompt and item.start > item.request.num_cached_tokens
        self.mixed += unfinished and any(not item.is_prefill for item in stats.scheduled)

    def _see_hits(self, stats: StepStats) -> None:
        joined = [item for item in stats.scheduled if item.is_prefill and item.start == item.request.num_cached_tokens]
        found = [item.request.num_cached_tokens for item in joined]
        could = [(item.request.num_prompt_tokens - 1) // self.block_size * self.block_size for item in joined]
        self.hit_tokens += sum(found)
        missing = [most - hit for hit, most in zip(found, could, strict=True) if most > 0]
        self.hits_beside_misses += any(missing) and not all(missing)
