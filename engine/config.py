"""Configuration: every knob of the engine with its default and its limits, and the shape of a model."""

from __future__ import annotations

import ast
import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DTYPES = ("auto", "float32", "bfloat16")
OPS_BACKENDS = ("auto", "reference", "cpu", "triton")
DEVICES = ("auto", "cpu", "cuda")
BATCHING = ("continuous", "static")
KV_CHANNELS = ("auto", "nixl", "distributed")
DEFAULT_KV_CACHE_BYTES = 1 << 30


class ConfigError(ValueError):
    """An option, or a combination of options, that the engine cannot honour."""


@dataclass(frozen=True)
class EngineConfig:
    """Every knob of the engine.

    Attributes:
        dtype: Type of weights, activations and KV: ``float32``, ``bfloat16``, or ``auto`` (the checkpoint's own).
        max_model_len: Most tokens, prompt and output together, of one request; None takes the model's own limit.
        block_size: Tokens per KV block.
        num_kv_blocks: Blocks in the KV pool; excludes ``kv_cache_bytes``.
        kv_cache_bytes: Bytes for the KV pool; excludes ``num_kv_blocks``. With neither, the pool holds
            ``max_num_seqs`` requests of full length, or as much of that as fits 1 GiB.
        batching: ``continuous`` lets requests join and leave at every step; ``static`` forms a batch when nothing is
            running and keeps its seats and blocks until its last row ends (the baseline that the lab measures against).
        max_num_seqs: Most requests that run at once.
        enable_chunked_prefill: Split prompts over steps, so that a step never exceeds ``max_num_batched_tokens`` and
            decodes do not wait for long prompts. False computes every prompt whole.
        max_num_batched_tokens: Most tokens of one step, decodes and prefills together: the chunk size. Without chunked
            prefill a prompt that is longer runs in a step in which it is the only prefill.
        enable_prefix_caching: Reuse the KV of prompts that begin alike, block by block, until it is overwritten.
        device: ``cpu``, ``cuda`` (rank r takes GPU r, modulo their number), or ``auto`` (a GPU where there is one).
        ops: Op set: ``cpu`` (compiled on first use), ``triton`` (a GPU), ``reference`` (torch, any device, slow), or
            ``auto`` (the fastest that is available).
        num_threads: Threads of the ops on the CPU, of each rank; None takes torch's own choice, divided by the ranks.
        tensor_parallel_size: Ranks that share the model, a process each. The outputs do not depend on it.
        enforce_eager: True never pads decode steps to a graph's batch size; False captures and replays them: CUDA
            graphs on a GPU, the calls of the compiled kernels on a CPU (with several ranks there, or the reference ops,
            the same padded batches run without a capture). None takes graphs on a GPU alone.
        graph_capture_sizes: Batch sizes that get a graph, ascending; ``max_num_seqs`` always does, and every decode
            step is padded to the next. None leaves it to the ops: 1, 2, 4 and the multiples of 8, on a CPU also every
            size up to 8. Excludes ``enforce_eager=True``.
        disaggregated: Prefill in one process and decode in another (1P1D): an engine each, with these options, its own
            KV pool, ranks and threads; the KV of every prompt travels from the first to the second.
        kv_channel: How it travels: ``nixl``, ``distributed`` (torch.distributed), or ``auto`` (NIXL where installed).
        kv_transfer_timeout: Seconds after which a transfer has failed: its request ends with an error, and the
            connection is made anew.
        prefill_address: ``host:port`` on which ``python -m engine.disaggregated --role prefill`` listens; None starts
            both instances on this host.
        decode_address: The same for ``--role decode``.
        check_invariants: Assert the conservation laws after every step (slow; for tests and debugging).
    """

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    batching: Literal["continuous", "static"] = "continuous"
    max_num_seqs: int = 32
    enable_chunked_prefill: bool = True
    max_num_batched_tokens: int = 128
    enable_prefix_caching: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    ops: Literal["auto", "reference", "cpu", "triton"] = "auto"
    num_threads: int | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool | None = None
    graph_capture_sizes: Sequence[int] | None = None
    disaggregated: bool = False
    kv_channel: Literal["auto", "nixl", "distributed"] = "auto"
    kv_transfer_timeout: float = 30.0
    prefill_address: str | None = None
    decode_address: str | None = None
    check_invariants: bool = False

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "num_kv_blocks", "kv_cache_bytes", "max_num_seqs",
                     "max_num_batched_tokens", "num_threads", "tensor_parallel_size"):  # fmt: skip
            value = getattr(self, name)
            optional = type(self).__dataclass_fields__[name].default is None
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name}={value!r} is not an integer; give a whole number of at least 1")
            if value < 1:
                raise ConfigError(f"{name}={value} is below 1, the least the engine can work with; raise it")
        choices_of = {"dtype": DTYPES, "device": DEVICES, "ops": OPS_BACKENDS, "batching": BATCHING,
                      "kv_channel": KV_CHANNELS}  # fmt: skip
        for name, choices in choices_of.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "check_invariants", "disaggregated",
                     "enforce_eager"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name != "enforce_eager"):
                raise ConfigError(f"{name}={value!r} is not a bool; give True or False")
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ConfigError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_cache_bytes={self.kv_cache_bytes} both size the KV pool; "
                "give only one of them"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: a "
                "step could not hold one token of every running request; raise the first or lower the second"
            )
        if self.device == "cuda" and self.ops == "cpu":
            raise ConfigError("ops='cpu' cannot run on device='cuda'; choose 'auto', 'triton' or 'reference'")
        self._check_graphs()
        self._check_disaggregation()

    def _check_graphs(self) -> None:
        sizes = self.graph_capture_sizes
        if sizes is None:
            return
        if self.enforce_eager:
            raise ConfigError(
                f"graph_capture_sizes={sizes!r} needs graphs, which enforce_eager=True turns off; drop one"
            )
        integers = isinstance(sizes, list | tuple) and all(type(size) is int for size in sizes)
        if not integers:
            raise ConfigError(f"graph_capture_sizes={sizes!r} is no list of integers; give sizes such as (1, 2, 4)")
        sizes = tuple(sizes)
        if list(sizes) != sorted(set(sizes)) or not all(1 <= size <= self.max_num_seqs for size in sizes):
            raise ConfigError(
                f"graph_capture_sizes={sizes} do not ascend from at least 1 to at most max_num_seqs="
                f"{self.max_num_seqs}; sort them, drop repeats, and leave out those no step can have"
            )
        object.__setattr__(self, "graph_capture_sizes", sizes)

    def _check_disaggregation(self) -> None:
        timeout = self.kv_transfer_timeout
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < float("inf"):
            raise ConfigError(f"kv_transfer_timeout={timeout!r} is not a time; give seconds above 0")
        addresses = {"prefill_address": self.prefill_address, "decode_address": self.decode_address}
        for name, address in addresses.items():
            if address is not None:
                parse_address(address, name)
        given = [name for name, address in addresses.items() if address is not None]
        if given and not self.disaggregated:
            raise ConfigError(f"{given[0]}={addresses[given[0]]!r} needs disaggregated=True; give both or neither")
        if len(given) == 1:
            raise ConfigError(f"{given[0]} is given without the other instance's address; give both or neither")
        if self.disaggregated and self.batching == "static":
            raise ConfigError("batching='static' cannot be disaggregated: requests join one by one as their KV arrives")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build a config from keyword options.

        Raises:
            ConfigError: An option does not exist (the message names the nearest one that does) or is out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(sorted(known))}"
                raise ConfigError(f"unknown engine option {name}={options[name]!r}; {hint}")
        return cls(**options)


def parse_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``name=value`` pairs as engine options; values are Python literals, or text.

    Raises:
        ConfigError: One is not such a pair.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"{pair!r} is not OPTION=VALUE, as in max_num_seqs=8")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def parse_address(address: str, name: str = "address") -> tuple[str, int]:
    """``host:port``.

    Raises:
        ConfigError: It is something else.
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{name}={address!r} is not host:port; give one such as 10.0.0.1:7001")
    return host, int(port)


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1's rotary embedding (Llama 3 paper, section 3.4; Hugging Face ``llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder: Llama, Qwen2 and Qwen3 differ in these fields only."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: Literal["float32", "bfloat16"]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], name: str) -> ModelConfig:
        """Read a Hugging Face ``config.json``.

        Args:
            hf: The parsed file. Both the ``rope_theta``/``rope_scaling`` keys and the newer ``rope_parameters`` work.
            name: How errors call the model.

        Raises:
            ConfigError: Unsupported architecture, activation, RoPE type or attention form, or a missing key.
        """
        architecture = (hf.get("architectures") or ["(none)"])[0]
        if architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{name}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        traits = ARCHITECTURES[architecture]

        def need(key: str) -> Any:
            if hf.get(key) is None:
                raise ConfigError(f"{name}: config.json has no {key!r}, which {architecture} needs; add the key")
            return hf[key]

        for key, expected in (("hidden_act", "silu"), ("use_sliding_window", False), ("mlp_bias", False)):
            if hf.get(key, expected) != expected:
                raise ConfigError(f"{name}: {key}={hf[key]!r} is not supported; only {expected!r} is")
        if not traits.qkv_bias and hf.get("attention_bias", False):
            raise ConfigError(f"{name}: attention_bias=True is not supported for {architecture}; only False is")
        heads, kv_heads = need("num_attention_heads"), hf.get("num_key_value_heads") or need("num_attention_heads")
        if heads % kv_heads:
            raise ConfigError(
                f"{name}: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
            )
        rope = hf.get("rope_parameters") or {
            "rope_theta": hf.get("rope_theta", 10000.0),
            **(hf.get("rope_scaling") or {}),
        }
        eos = hf.get("eos_token_id")
        dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
        return cls(
            architecture=architecture,
            vocab_size=need("vocab_size"),
            hidden_size=need("hidden_size"),
            intermediate_size=need("intermediate_size"),
            num_layers=need("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=hf.get("head_dim") or need("hidden_size") // heads,
            max_position=need("max_position_embeddings"),
            rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(rope, name),
            tie_embeddings=hf.get("tie_word_embeddings", False),
            qkv_bias=traits.qkv_bias,
            qk_norm=traits.qk_norm,
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
            dtype="bfloat16" if dtype in ("bfloat16", "float16") else "float32",
        )


@dataclass(frozen=True)
class _Traits:
    qkv_bias: bool
    qk_norm: bool


ARCHITECTURES: Mapping[str, _Traits] = {
    "LlamaForCausalLM": _Traits(qkv_bias=False, qk_norm=False),
    "Qwen2ForCausalLM": _Traits(qkv_bias=True, qk_norm=False),
    "Qwen3ForCausalLM": _Traits(qkv_bias=False, qk_norm=True),
}


def _rope_scaling(rope: Mapping[str, Any], name: str) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position=rope["original_max_position_embeddings"],
        )
    raise ConfigError(f"{name}: RoPE type {kind!r} is not supported; supported: default, llama3")
