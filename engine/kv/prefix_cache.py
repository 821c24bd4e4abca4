"""Prefix cache: which blocks are known to hold the KV of a prompt's beginning.

A full block is known by a chained hash of its parent's hash and its own tokens; the chain starts from a fingerprint of
the model and the request's salt (automatic prefix caching of vLLM; PagedAttention, Kwon et al., SOSP 2023). The hash
only finds candidates: a hit has been compared token by token along its whole chain, so that a collision can hide an
entry but never return another prompt's KV.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.request import Request

HASH_BYTES = 16
HASH_SCHEME = f"BLAKE2b of {HASH_BYTES} bytes, chained over tokens of 8"
ChainedHash = Callable[[bytes, bytes], bytes]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Something that happened to the cache, in the order in which it did.

    admit: the request joined with ``index`` hit blocks. publish: its block number ``index`` became known, in ``block``.
    evict: ``block`` is reused, and no longer known.
    """

    kind: Literal["admit", "publish", "evict"]
    request_id: str | None
    index: int | None
    block: int | None


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache did since it was last asked, and the seconds that it took."""

    events: tuple[CacheEvent, ...] = ()
    seconds: float = 0.0


class PrefixCacheLike(Protocol):
    """What the scheduler loop asks of a cache."""

    def match(self, request: Request) -> Sequence[int]:
        """Blocks, in order, that hold the KV of the request's first full blocks; never its last token."""

    def admitted(self, request: Request, num_hits: int) -> None:
        """The request has joined with that many of the matched blocks."""

    def publish(self, request: Request, num_computed_before: int) -> None:
        """A step has moved the request's computed tokens on: blocks that became full and computed may be shared."""

    def drain(self) -> CacheStats:
        """What happened since the last call."""

    def check(self) -> None:
        """Assert the cache's own laws (O(blocks); for tests and debugging)."""


class NoPrefixCache:
    """Nothing is ever known."""

    def match(self, request: Request) -> Sequence[int]:
        return ()

    def admitted(self, request: Request, num_hits: int) -> None:
        return None

    def publish(self, request: Request, num_computed_before: int) -> None:
        return None

    def drain(self) -> CacheStats:
        return CacheStats()

    def check(self) -> None:
        return None


def chained_hash(parent: bytes, tokens: bytes) -> bytes:
    """128 bits of BLAKE2b: the same in every process, whatever PYTHONHASHSEED."""
    return hashlib.blake2b(parent + tokens, digest_size=HASH_BYTES).digest()


@dataclass(slots=True, eq=False)
class _Entry:
    """A known prefix: its last block's tokens, and the entry before it (the salt, before the first).

    ``blocks`` all hold the KV of that block, the oldest first: identical prompts that ran side by side each published
    their own, and each keeps the prefix known when another is reused.
    """

    key: bytes
    parent: _Entry | str
    tokens: bytes
    blocks: dict[int, None] = field(default_factory=dict)


class PrefixCache:
    """Knows which blocks of ``pool`` hold which prefix, held or free.

    A freed block stays known until the pool reuses it. The pool reuses the least recently freed first and requests free
    their tails before their heads, so a prefix is forgotten from its end, and an entry outlives those that follow it.

    Args:
        pool: Tells the cache when it reuses a block.
        block_size: Tokens per block.
        fingerprint: What besides the tokens decides the KV: the model, the dtype, the ops.
        hash_block: Tests pass a weak one, so that hashes collide.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, fingerprint: str, hash_block: ChainedHash = chained_hash
    ) -> None:
        self._block_size, self._fingerprint, self._hash = block_size, fingerprint.encode(), hash_block
        self._entries: dict[bytes, _Entry] = {}
        self._by_block: dict[int, _Entry] = {}
        self._events: list[CacheEvent] = []
        self._seconds = 0.0
        pool.contents = self

    def match(self, request: Request) -> Sequence[int]:
        start = time.perf_counter()
        # The last token is always computed: its row gives the next one. A prompt that another instance has computed
        # comes with its first output token, so all of the prompt can be a hit.
        limit = (request.num_tokens - 1) // self._block_size
        self._extend_hashes(request, limit)
        blocks: list[int] = []
        parent: _Entry | str = request.params.cache_salt
        for key, tokens in request.block_hashes[:limit]:
            entry = self._entries.get(key)
            if entry is None or entry.tokens != tokens or entry.parent != parent:
                break
            blocks.append(next(iter(entry.blocks)))
            parent = entry
        self._seconds += time.perf_counter() - start
        return blocks

    def admitted(self, request: Request, num_hits: int) -> None:
        self._events.append(CacheEvent("admit", request.request_id, num_hits, None))

    def publish(self, request: Request, num_computed_before: int) -> None:
        first, last = num_computed_before // self._block_size, request.num_computed_tokens // self._block_size
        if first == last:
            return
        start = time.perf_counter()
        self._extend_hashes(request, last)
        for index in range(first, last):
            if not self._publish(request, index):
                break  # another prefix has this one's hash: the chain ends here
        self._seconds += time.perf_counter() - start

    def is_known(self, block: int) -> bool:
        """Whether the block holds a known prefix."""
        return block in self._by_block

    def forget(self, block: int) -> None:
        """The pool reuses a known block."""
        entry = self._by_block.pop(block)
        del entry.blocks[block]
        if not entry.blocks:
            del self._entries[entry.key]
        self._events.append(CacheEvent("evict", None, None, block))

    def drain(self) -> CacheStats:
        stats = CacheStats(tuple(self._events), self._seconds)
        self._events.clear()
        self._seconds = 0.0
        return stats

    def check(self) -> None:
        """What is known is reachable, and each block by one entry."""
        for key, entry in self._entries.items():
            assert entry.key == key and entry.blocks, "an entry without blocks is forgotten"
            assert all(self._by_block[block] is entry for block in entry.blocks)
            assert isinstance(entry.parent, str) or self._entries.get(entry.parent.key) is entry.parent, (
                "a prefix is forgotten from its end"
            )
        assert sum(len(entry.blocks) for entry in self._entries.values()) == len(self._by_block)

    def _publish(self, request: Request, index: int) -> bool:
        parent = self._by_block.get(request.block_table[index - 1]) if index > 0 else request.params.cache_salt
        if parent is None:
            return False
        (key, tokens), block = request.block_hashes[index], request.block_table[index]
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = _Entry(key, parent, tokens)
        elif entry.parent != parent or entry.tokens != tokens:
            return False
        entry.blocks[block] = None
        self._by_block[block] = entry
        self._events.append(CacheEvent("publish", request.request_id, index, block))
        return True

    def _extend_hashes(self, request: Request, count: int) -> None:
        """Hash the request's first ``count`` blocks, each once in its life."""
        hashes, size = request.block_hashes, self._block_size
        while len(hashes) < count:
            start = len(hashes) * size
            tokens = b"".join(token.to_bytes(8, "little") for token in request.token_ids[start : start + size])
            parent = hashes[-1][0] if hashes else self._hash(self._fingerprint, request.params.cache_salt.encode())
            hashes.append((self._hash(parent, tokens), tokens))


def make_prefix_cache(config: EngineConfig, pool: BlockPool, fingerprint: str) -> PrefixCacheLike:
    """The cache that ``config.enable_prefix_caching`` chooses."""
    return PrefixCache(pool, config.block_size, fingerprint) if config.enable_prefix_caching else NoPrefixCache()
