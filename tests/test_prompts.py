"""The 64 chat prompts of `workloads/prompts.jsonl`: what the golden tests rely on when they use them."""

import json
import re
from collections import Counter
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from engine.tokenizer import Tokenizer

PROMPTS = Path(__file__).parent.parent / "workloads" / "prompts.jsonl"
BLOCK_SIZE = 16
KINDS = {
    "aligned", "chat", "code", "json", "language", "list", "long", "maths",
    "rewrite", "shared_prefix", "short", "summary", "translation",
}  # fmt: skip

Prompt = dict[str, Any]


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


def of_kind(prompts: list[Prompt], kind: str) -> list[Prompt]:
    return [prompt for prompt in prompts if prompt["kind"] == kind]


def test_64_prompts_with_unique_numbered_ids(prompts: list[Prompt]) -> None:
    assert len(prompts) == 64
    for number, prompt in enumerate(prompts):
        assert re.fullmatch(rf"p{number:02d}(-[a-z0-9]+)+", prompt["id"])


def test_schema(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        assert prompt.keys() == {"id", "kind", "messages"}, prompt["id"]
        assert all(message.keys() == {"role", "content"} for message in prompt["messages"]), prompt["id"]
        assert all(message["content"].strip() for message in prompt["messages"]), prompt["id"]
        roles = [message["role"] for message in prompt["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == [("user", "assistant")[i % 2] for i in range(len(turns))], prompt["id"]
        assert turns[-1] == "user", prompt["id"]


def test_no_prompt_occurs_twice(prompts: list[Prompt]) -> None:
    assert len({json.dumps(prompt["messages"]) for prompt in prompts}) == len(prompts)


def test_every_kind_is_present(prompts: list[Prompt]) -> None:
    assert Counter(prompt["kind"] for prompt in prompts).keys() == KINDS
    assert sum(len(prompt["messages"]) > 2 for prompt in prompts) >= 3, "prompts with several turns"
    assert sum(prompt["messages"][0]["role"] == "system" for prompt in prompts) >= 3, "prompts with a system message"


def test_many_scripts(prompts: list[Prompt]) -> None:
    text = "".join(prompt["messages"][-1]["content"] for prompt in of_kind(prompts, "language"))
    for script in ("[а-я]", "[\u4e00-\u9fff]", "[\u3040-\u30ff]", "[\u0900-\u097f]", "[éèêçñ]", "[äöüß]"):
        assert re.search(script, text, re.IGNORECASE), script


def test_shared_prefix_prompts_differ_in_the_question_only(prompts: list[Prompt]) -> None:
    shared = of_kind(prompts, "shared_prefix")
    assert len(shared) >= 8
    assert len({prompt["messages"][0]["content"] for prompt in shared}) == 1
    documents, questions = zip(
        *(prompt["messages"][-1]["content"].split("\n\nQuestion: ") for prompt in shared), strict=True
    )
    assert len(set(documents)) == 1
    assert len(set(questions)) == len(shared)


@pytest.mark.model
def test_shared_prefix_is_longer_than_100_tokens(prompts: list[Prompt], tokenizer: Tokenizer) -> None:
    ids = [tokenizer.encode_chat(prompt["messages"]) for prompt in of_kind(prompts, "shared_prefix")]
    columns = zip(*ids, strict=False)
    assert sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) > 100


@pytest.mark.model
def test_aligned_prompts_lie_on_and_beside_block_boundaries(prompts: list[Prompt], tokenizer: Tokenizer) -> None:
    lengths = []
    for prompt in of_kind(prompts, "aligned"):
        length = len(tokenizer.encode_chat(prompt["messages"]))
        assert prompt["id"].endswith(f"-{length}"), f"{prompt['id']} has {length} tokens"
        lengths.append(length)
    offsets = Counter((length + 1) % BLOCK_SIZE - 1 for length in lengths)
    assert offsets.keys() == {-1, 0, 1}
    assert min(offsets.values()) >= 3
    assert len({(length + 1) // BLOCK_SIZE for length in lengths}) >= 3, "several k"


@pytest.mark.model
def test_long_prompts_have_300_to_700_tokens(prompts: list[Prompt], tokenizer: Tokenizer) -> None:
    for prompt in of_kind(prompts, "long"):
        assert 300 <= len(tokenizer.encode_chat(prompt["messages"])) <= 700, prompt["id"]
