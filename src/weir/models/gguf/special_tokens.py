"""Special tokens of a GGUF file: the beginning of a text, the ends of an answer, and padding.

Few files name every token that ends an answer. So, as in llama.cpp, the vocabulary is searched for
tokens whose text is known to end one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from weir.errors import WeirError
from weir.models.gguf.header import GGUFArray, GGUFHeader

ENDS = frozenset(
    """<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn>
    <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance>
    <eos> <｜end▁of▁sentence｜> <|fim_pad|> <|repo_name|> <|file_sep|>""".split()
)
"""Texts of tokens that end an answer, or end a file within a repository."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Numbers of token types (`tokenizer.ggml.token_type`)."""

_EOS_IDS = "tokenizer.ggml.eos_token_ids"
"""Key under which Ollama's converter writes several ids."""

_NONE = (1 << 32) - 1
"""The id that some converters write for a special token that does not exist."""

_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids that apply in a SentencePiece file that names none."""


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens; None for a token that the file does not have.

    Attributes:
        bos: the token at a text's beginning.
        eos: the token at a text's end.
        unknown: the token for characters that no token represents.
        pad: the padding token.
        ends: all tokens that end an answer, `eos` first if there is one.
    """

    bos: int | None
    eos: int | None
    unknown: int | None
    pad: int | None
    ends: tuple[int, ...]

    @classmethod
    def of(cls, header: GGUFHeader) -> SpecialTokens:
        """Read a header; WeirError for a value that cannot be an id."""
        fields = header.fields
        if not isinstance(fields.get("tokenizer.ggml.tokens"), GGUFArray):
            return cls(None, None, None, None, ())
        words, types = header.array("tokenizer.ggml.tokens"), _types(header)
        defaults = _DEFAULTS if fields.get("tokenizer.ggml.model") == "llama" else {}

        def named(name: str) -> int | None:
            key = f"tokenizer.ggml.{name}_token_id"
            found = fields.get(key)
            if found is None:
                default = defaults.get(name, len(words))
                if types is not None and types[default : default + 1] not in ([CONTROL], [UNKNOWN]):
                    return None
                return default if default < len(words) else None
            return _check_id(header, key, found, len(words))

        eos = named("eos")
        ends = [eos, *(named(name) for name in ("eot", "eom", "fim_pad", "fim_rep", "fim_sep"))]
        if isinstance(fields.get(_EOS_IDS), GGUFArray):
            ends += [_check_id(header, _EOS_IDS, id, len(words)) for id in header.array(_EOS_IDS)]
        ends += _by_text(words, types)
        found = tuple(dict.fromkeys(end for end in ends if end is not None))
        return cls(named("bos"), eos, named("unknown"), named("padding"), found)

    def for_config(self) -> dict[str, Any]:
        """Return attributes for a configuration, which makes a model stop at each of `ends`."""
        eos: Any = list(self.ends) if len(self.ends) > 1 else self.eos
        if self.eos is None and self.ends:
            eos = list(self.ends)
        return {"bos_token_id": self.bos, "eos_token_id": eos, "pad_token_id": self.pad}


def _check_id(header: GGUFHeader, key: str, id: Any, tokens: int) -> int | None:
    """Return the id that a key has. None for an id beyond the vocabulary, with a warning unless it
    is `_NONE`.
    """
    if type(id) is not int or not 0 <= id < 1 << 32:
        raise WeirError(
            f"{header.path} says {key} = {id!r}, where the id of a token is expected. Use another "
            "file of the model."
        )
    if id < tokens:
        return id
    if id != _NONE:  # Like llama.cpp, ignore an id beyond the vocabulary.
        logging.get_logger(__name__).warning_once(
            f"{header.path} says {key} = {id:,}, but has only {tokens:,} tokens, so weir ignores "
            "this id"
        )
    return None


def _types(header: GGUFHeader) -> list[int] | None:
    """Read the types of all tokens; None if the file has none."""
    key = "tokenizer.ggml.token_type"
    return header.array(key) if isinstance(header.fields.get(key), GGUFArray) else None


def _by_text(words: list[str], types: list[int] | None) -> list[int]:
    """Return the special tokens whose text says that they end an answer."""
    found = {word: n for n, word in enumerate(words) if word in ENDS}
    if types is not None:
        special = ([CONTROL], [USER_DEFINED])
        found = {word: n for word, n in found.items() if types[n : n + 1] in special}
    # In the format of gpt-oss, this token ends a message, but the answer goes on.
    if "<|end|>" in found and (
        {"<|return|>", "<|call|>"} <= found.keys()
        or ("<|flush|>" in found and found.keys() & {"<|call|>", "<|calls|>"})
    ):
        del found["<|end|>"]
    return list(found.values())
