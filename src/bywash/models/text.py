"""Prompts to token ids and back: the checkpoint's own tokenizer, or plain UTF-8 bytes where it has none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from bywash.errors import CheckpointError, ConfigError


class Text(Protocol):
    """Text to ids and back."""

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids."""


class ByteText:
    """One id per UTF-8 byte; ids of 256 and more print as U+FFFD. For models without a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """See `Text`."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See `Text`."""
        return bytes(i if i < 256 else 0xFF for i in ids).decode(errors="replace")


class TokenizerText:
    """The tokenizer that lies with the checkpoint."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """See `Text`."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """See `Text`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def text_for(directory: Path, vocab: int) -> Text:
    """The tokenizer of a checkpoint, or bytes.

    Raises:
        CheckpointError: the tokenizer files are there but cannot be used.
        ConfigError: no tokenizer, and a vocabulary too small for bytes.
    """
    if any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        from transformers import AutoTokenizer

        try:
            return TokenizerText(AutoTokenizer.from_pretrained(directory, local_files_only=True))
        except Exception as error:  # transformers raises many types here, all about these files
            raise CheckpointError(f"{directory}: its tokenizer cannot be used ({error})") from error
    if vocab < 256:
        raise ConfigError(f"{directory} has no tokenizer and only {vocab} tokens: give prompts with --prompt-ids")
    return ByteText()


def check_ids(prompts: Sequence[Sequence[int]], vocab: int) -> None:
    """Raise `ConfigError` unless every prompt has tokens, all within the vocabulary."""
    if not prompts:
        raise ConfigError("--prompt: at least one prompt is needed")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {number} is empty: it needs at least one token")
        outside = [i for i in prompt if not 0 <= i < vocab]
        if outside:
            raise ConfigError(f"prompt {number}: token {outside[0]} is outside the vocabulary 0..{vocab - 1}")
