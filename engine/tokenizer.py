"""Text to token ids and back, with the model's own Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from engine.request import RequestError

ChatMessage = Mapping[str, str]
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(folder: Path | None) -> Tokenizer | None:
    """The folder's tokenizer, or None where there is none: such a model takes token ids only."""
    if folder is None or not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return None
    return Tokenizer(folder)


class Tokenizer:
    """A thin owner of a Hugging Face tokenizer folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._hf.encode(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation under the model's chat template, ready for the assistant's answer.

        Raises:
            RequestError: The model has no chat template, or the template rejects the messages.
        """
        if not self._hf.chat_template:
            raise RequestError("the model has no chat template; give text or token ids instead of messages")
        template_input = [dict(message) for message in messages]
        try:
            encoded = self._hf.apply_chat_template(template_input, add_generation_prompt=True, return_dict=False)
            return tuple(cast(list[int], encoded))
        except Exception as error:  # whatever the template's Jinja code raises
            raise RequestError(f"the chat template rejects the messages {list(messages)!r}: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._hf.decode(list(token_ids), skip_special_tokens=True))


class IncrementalDecoder:
    """The text that each further token of one request adds.

    Only a short window is decoded again: from the last place where text was complete. A token that ends inside a
    character adds nothing until the rest of it arrives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = ""

    def push(self, token_id: int, last: bool = False) -> str:
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_UNFINISHED) and not last:
            return ""
        added = text[len(self._shown) :]
        # The newest token stays in the window: some tokenizers join a token to the one before it.
        self._window = self._window[-1:]
        self._shown = self._tokenizer.decode(self._window)
        return added
