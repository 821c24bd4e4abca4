"""Checkpoints: what is read is what is stored, and what is wrong is said at open with names and a remedy."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import ModelConfig
from engine.models.checkpoint import open_checkpoint
from engine.models.hub import ModelError, ModelSource, resolve_model
from engine.models.weights import expected_tensors

SHAPES = {"model.embed_tokens.weight": (6, 4), "model.norm.weight": (4,), "model.layers.0.mlp.up_proj.weight": (8, 4)}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def source(folder: Path) -> ModelSource:
    return ModelSource("test", {}, folder, random_seed=None)


def save_sharded(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    """One file per tensor, and the index that Hugging Face writes beside them."""
    files = {name: f"model-{i:05}-of-{len(stored):05}.safetensors" for i, name in enumerate(stored, 1)}
    for name, file in files.items():
        save_file({name: stored[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["single", "sharded", "other-name"])
def test_reads_what_is_stored(tmp_path: Path, dtype: torch.dtype, layout: str) -> None:
    stored = tensors(dtype)
    if layout == "sharded":
        save_sharded(tmp_path, stored)
    else:
        save_file(stored, tmp_path / ("model.safetensors" if layout == "single" else "weights.safetensors"))
    checkpoint = open_checkpoint(source(tmp_path), SHAPES)
    for name, values in stored.items():
        read = checkpoint.read(name)
        assert (read.dtype, read.device.type) == (dtype, "cpu")
        torch.testing.assert_close(read, values, rtol=0, atol=0)


def test_reading_an_unexpected_name_is_refused(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    for checkpoint in (
        open_checkpoint(source(tmp_path), SHAPES),
        open_checkpoint(resolve_model("random:tiny"), SHAPES),
    ):
        with pytest.raises(ModelError, match=r"'lm_head\.weight' was not among the expected ones"):
            checkpoint.read("lm_head.weight")


def test_tied_head_and_rotary_buffers_may_be_left_over(tmp_path: Path) -> None:
    extra = {"lm_head.weight": torch.zeros(6, 4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file(tensors() | extra, tmp_path / "model.safetensors")
    open_checkpoint(source(tmp_path), SHAPES)


def test_missing_and_extra_tensors_are_counted_and_named(tmp_path: Path) -> None:
    stored = tensors()
    del stored["model.norm.weight"]
    extra = {f"model.layers.{i}.mlp.up_proj.qweight": torch.zeros(1) for i in range(9)}
    save_file(stored | extra, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_checkpoint(source(tmp_path), SHAPES)
    message = str(caught.value)
    assert "1 missing tensors (model.norm.weight)" in message
    assert "9 extra tensors (model.layers.0.mlp.up_proj.qweight, " in message
    assert "model.layers.8" not in message, "only the first few are named"
    assert str(tmp_path) in message
    assert "fetch both again" in message


def test_untied_model_without_head_names_it(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 missing tensors \(lm_head\.weight\)"):
        open_checkpoint(source(tmp_path), SHAPES | {"lm_head.weight": (6, 4)})


def test_wrong_shape_and_type_say_found_and_expected(tmp_path: Path) -> None:
    stored = tensors()
    stored["model.norm.weight"] = torch.zeros(5)
    stored["model.layers.0.mlp.up_proj.weight"] = torch.zeros(8, 4, dtype=torch.int8)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_checkpoint(source(tmp_path), SHAPES)
    assert "model.norm.weight is [5], expected [4]" in str(caught.value)
    assert "model.layers.0.mlp.up_proj.weight is I8, expected one of F64, F32, F16, BF16" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=rf"{path} \(\d+ bytes\) is not a whole safetensors file .*fetch it again"):
        open_checkpoint(source(tmp_path), SHAPES)


def test_garbage_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors(), path)
    content = bytearray(path.read_bytes())
    content[8:16] = b"\xff" * 8
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        open_checkpoint(source(tmp_path), SHAPES)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 files \(model-00002-of-00003\.safetensors\) of model\.safetensors\.index"):
        open_checkpoint(source(tmp_path), SHAPES)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": {}}}'])
def test_unreadable_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not a readable index"):
        open_checkpoint(source(tmp_path), SHAPES)


def test_shards_without_index_are_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors())
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"3 safetensors files .* but no model\.safetensors\.index\.json"):
        open_checkpoint(source(tmp_path), SHAPES)


@pytest.mark.parametrize(
    ("file", "has"), [("pytorch_model.bin", r"only 1 files \(pytorch_model\.bin\)"), (None, "no weights")]
)
def test_folder_without_safetensors_says_what_there_is(tmp_path: Path, file: str | None, has: str) -> None:
    if file:
        (tmp_path / file).touch()
    with pytest.raises(ModelError, match=rf"has {has}.*safetensors alone.*save_pretrained"):
        open_checkpoint(source(tmp_path), SHAPES)


# --- random weights ---------------------------------------------------------------------------------------------------


def test_random_weights_depend_on_seed_name_and_shape_alone() -> None:
    def read(name: str, shape: tuple[int, ...], seed: int = 3) -> torch.Tensor:
        model = ModelSource("random", {}, folder=None, random_seed=seed)
        return open_checkpoint(model, {"other": (5,), name: shape, "another": (7,)}).read(name)

    base = read("a.weight", (300, 40))
    assert torch.equal(base, read("a.weight", (300, 40)))
    for other in (read("b.weight", (300, 40)), read("a.weight", (300, 40), seed=4), read("a.weight", (600, 20))):
        assert not torch.equal(base.flatten(), other.flatten())


def test_random_weights_are_the_same_in_another_process() -> None:
    """Also beyond one chunk of the generator, where threads share the work."""
    code = (
        "import hashlib\n"
        "from engine.models.checkpoint import open_checkpoint\n"
        "from engine.models.hub import ModelSource\n"
        "source = ModelSource('random', {}, folder=None, random_seed=3)\n"
        "weight = open_checkpoint(source, {'w': (1500, 1000)}).read('w')\n"
        "print(hashlib.sha256(weight.numpy().tobytes()).hexdigest())"
    )
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    model = ModelSource("random", {}, folder=None, random_seed=3)
    weight = open_checkpoint(model, {"w": (1500, 1000)}).read("w")
    assert hashlib.sha256(weight.numpy().tobytes()).hexdigest() == there
    assert not torch.equal(weight[:40], weight[-40:]), "chunks have streams of their own"


@pytest.mark.parametrize(
    ("name", "shape", "mean", "std"),
    [
        ("model.layers.0.mlp.down_proj.weight", (256, 400), 0.0, 0.05),
        ("model.embed_tokens.weight", (1000, 100), 0.0, 0.1),
        ("model.layers.0.self_attn.o_proj.weight", (256, 400), 0.0, 0.1),
        ("model.layers.0.self_attn.q_norm.weight", (4000,), 2.0, 0.2),
        ("model.layers.0.input_layernorm.weight", (4000,), 1.0, 0.1),
        ("model.layers.0.self_attn.q_proj.bias", (4000,), 0.0, 0.1),
    ],
)
def test_random_weights_have_the_scale_of_their_kind(
    name: str, shape: tuple[int, ...], mean: float, std: float
) -> None:
    weight = open_checkpoint(resolve_model("random:tiny"), {name: shape}).read(name)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, weight.bfloat16().float()), "bfloat16 runs the same model"
    assert float(weight.mean()) == pytest.approx(mean, abs=0.01)
    assert float(weight.std()) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("shape", ["tiny", "tiny-llama3-rope", "tiny-qwen2", "tiny-qwen3"])
def test_random_models_write_varied_text(shape: str) -> None:
    """Greedy decoding by transformers: a model that repeats one token would hide errors of position and context."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = resolve_model(f"random:{shape}")
    expected = expected_tensors(ModelConfig.from_hf(model.hf_config, model.name))
    checkpoint = open_checkpoint(model, expected)
    reference = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.hf_config), dtype=torch.float32)
    missing, unexpected = reference.load_state_dict({name: checkpoint.read(name) for name in expected}, strict=False)
    assert (set(missing), unexpected) == ({"lm_head.weight"} if model.hf_config["tie_word_embeddings"] else set(), [])
    prompts = torch.randint(3, 512, (4, 8), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ids = reference.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        spread = float(reference(prompts).logits.std())
    assert min(len(row[8:].unique()) for row in ids) >= 8
    assert len({tuple(row[8:].tolist()) for row in ids}) == 4
    assert 0.5 < spread < 3.0
