"""Tokenizers of GGUF files, built from the header alone.

Two kinds are read: byte-level BPE (`gpt2`), whose words are cut by a rule that the file names, and
SentencePiece's BPE (`llama`), which merges by the scores of tokens. A vocabulary of 128,000 tokens
takes about a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import logging

from weir.errors import WeirError
from weir.models.gguf.config import ignored_keys, refuse_key
from weir.models.gguf.header import GGUFArray, GGUFHeader, read_header
from weir.models.gguf.pretokenizers import PRE_TOKENIZERS
from weir.models.gguf.special_tokens import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    SpecialTokens,
)
from weir.models.library_errors import report_as

SPACE = "▁"
"""SentencePiece's sign for a space."""

_LIST = "tokenizer.ggml.tokens"
_FOLLOWED = frozenset(
    """model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id
    eom_token_id unknown_token_id padding_token_id add_bos_token add_eos_token add_space_prefix
    fim_pad_token_id fim_rep_token_id fim_sep_token_id eos_token_ids""".split()
)
_DESCRIBING = frozenset(
    """token_type_count seperator_token_id cls_token_id mask_token_id fim_pre_token_id
    fim_suf_token_id fim_mid_token_id prefix_token_id suffix_token_id middle_token_id
    add_padding_token add_unknown_token add_mask_token""".split()
)
"""Keys below `tokenizer.ggml.` that do not change the tokens of a text."""
_NEUTRAL = {"add_sep_token": (False,), "remove_extra_whitespaces": (False,)}
"""Values with which a key below `tokenizer.ggml.` does not change the tokens of a text."""
_TEXTS, _NUMBERS, _BOOL = "an array of texts", "an array of numbers", "true or false"
_KINDS_OF_VALUES = {
    f"tokenizer.ggml.{name}": kind
    for names, kind in (
        ("tokens merges", _TEXTS),
        ("scores token_type eos_token_ids", _NUMBERS),
        ("add_bos_token add_eos_token add_space_prefix", _BOOL),
        ("model pre", "text"),
    )
    for name in names.split()
}
"""Kind of value by key."""
_IS_OF_KIND: dict[str, Callable[[Any], bool]] = {
    _TEXTS: lambda value: isinstance(value, GGUFArray) and value.of_texts,
    _NUMBERS: lambda value: isinstance(value, GGUFArray) and not value.of_texts,
    _BOOL: lambda value: isinstance(value, bool),
    "text": lambda value: isinstance(value, str),
}
_UNSTRIPPED = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi 3 that do not absorb the spaces after them."""


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Read a model's tokenizer from the header of a GGUF file, or of its shards.

    Raises WeirError if the header is damaged, the tokenizer is incomplete, or weir does not support
    its kind or one of its keys.
    """
    return tokenizer_of(read_header(path))


def tokenizer_of(header: GGUFHeader) -> PreTrainedTokenizerBase:
    """Build the tokenizer that a header describes. Raises the same errors as `read_tokenizer`."""
    kind = header.fields.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise WeirError(
            f"{header.path} has a tokenizer of the kind {kind!r}, but weir reads only "
            f"{' and '.join(map(repr, _KINDS))} from GGUF files. Load the model's folder or Hub id "
            "instead."
        )
    _check_kinds(header)
    _check_keys(header)
    words, types = _vocabulary(header)
    special = SpecialTokens.of(header)
    with report_as(f"the tokenizer in {header.path} is broken", ". Use another file of the model."):
        made, bos = _KINDS[kind](header, words, types, special)
        made.add_special_tokens(
            [
                _added(header, word, special=True)
                for word in _of_type(words, types, CONTROL, UNKNOWN)
            ]
        )
        made.add_tokens(
            [_added(header, word, special=False) for word in _of_type(words, types, USER_DEFINED)]
        )
        _add_ends(header, made, words, special, bos)
        named = {
            "bos_token": special.bos,
            "eos_token": special.eos,
            "unk_token": special.unknown,
            "pad_token": special.pad,
        }
        found = PreTrainedTokenizerFast(
            tokenizer_object=made,
            clean_up_tokenization_spaces=False,
            model_max_length=header.fields.get(f"{header.architecture}.context_length", int(1e30)),
            **{name: words[id] for name, id in named.items() if id is not None},
        )
    if (template := _templates(header)) is not None:
        found.chat_template = template
    return found


def _check_kinds(header: GGUFHeader) -> None:
    """Refuse values of the wrong kind."""
    for key, value in header.fields.items():
        kind = "text" if key.startswith("tokenizer.chat_template") else _KINDS_OF_VALUES.get(key)
        if kind is not None and not _IS_OF_KIND[kind](value):
            shown = f"an array of {len(value)}" if isinstance(value, GGUFArray) else repr(value)
            raise WeirError(
                f"{header.path} says {key} = {shown[:60]}, where {kind} is expected. Use another "
                "file of the model."
            )


def _check_keys(header: GGUFHeader) -> None:
    """Refuse keys that change the tokens of a text and that weir does not support."""
    ignored, start = ignored_keys(), "tokenizer.ggml."
    for key, value in header.fields.items():
        name = key.removeprefix(start)
        if not key.startswith(start) or name in _FOLLOWED | _DESCRIBING or key in ignored:
            continue
        if name in _NEUTRAL and value in _NEUTRAL[name]:
            continue
        without = "texts could become other tokens"
        refuse_key(header, key, value, "weir does not support", without)


def _vocabulary(header: GGUFHeader) -> tuple[list[str], list[int]]:
    """Return the tokens' texts and types; WeirError if there are none, or two are the same."""
    if not isinstance(header.fields.get(_LIST), GGUFArray):
        raise WeirError(_without(header, _LIST))
    words = [word or f"[EMPTY_{n}]" for n, word in enumerate(header.array(_LIST))]
    if len(set(words)) < len(words):
        seen: set[str] = set()
        twice = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise WeirError(
            f"{header.path} has the token {twice[:60]!r} twice. Use another file of the model."
        )
    _numbers(header, "scores", len(words))  # checked even if not needed
    return words, _numbers(header, "token_type", len(words)) or []


def _without(header: GGUFHeader, key: str) -> str:
    """Return the error for a file that lacks a part of its tokenizer."""
    return (
        f"{header.path} lacks {key}, so its tokenizer cannot be built. Use another file of the "
        "model."
    )


def _numbers(header: GGUFHeader, name: str, n: int) -> list[Any] | None:
    """Read an array with a number for each token; None if there is none."""
    key = f"tokenizer.ggml.{name}"
    field = header.fields.get(key)
    if field is None:
        return None
    if not isinstance(field, GGUFArray) or field.of_texts or len(field) != n:
        found = f"{len(field):,} items" if isinstance(field, GGUFArray) else repr(field)[:60]
        raise WeirError(
            f"{header.path} has {n:,} tokens, but {found} in {key}, where one number for each is "
            "expected. Use another file of the model."
        )
    numbers = header.array(key)
    wrong = next((at for at, each in enumerate(numbers) if not math.isfinite(each)), None)
    if wrong is not None:
        raise WeirError(
            f"{header.path} says {key} = {numbers[wrong]} for the token {wrong:,}, where a finite "
            "number is expected. Use another file of the model."
        )
    return numbers


def _of_type(words: Sequence[str], types: Sequence[int], *wanted: int) -> list[str]:
    """Return the tokens of certain types."""
    return [word for word, kind in zip(words, types, strict=False) if kind in wanted]


def _added(header: GGUFHeader, word: str, special: bool) -> AddedToken:
    """Return a token that is found in a text before anything is merged."""
    strip = (
        header.architecture == "phi3"
        and header.fields["tokenizer.ggml.model"] == "llama"
        and word not in _UNSTRIPPED
    )
    return AddedToken(word, special=special, normalized=False, rstrip=strip)


def _add_ends(
    header: GGUFHeader, made: Tokenizer, words: Sequence[str], special: SpecialTokens, bos: bool
) -> None:
    """Make the tokenizer add tokens at the beginning and end of a text, if the file says so, or by
    default.

    Args:
        header: the file's header.
        made: the tokenizer.
        words: texts of all tokens.
        special: ids of the special tokens.
        bos: whether the beginning token is added if the file does not say.
    """
    sides = []
    for name, default, id in (("bos", bos, special.bos), ("eos", False, special.eos)):
        wanted = header.fields.get(f"tokenizer.ggml.add_{name}_token", default)
        if wanted and id is None:
            raise WeirError(
                f"{header.path} needs the token {name} in every text, but does not say which token "
                "that is. Use another file of the model."
            )
        sides.append([(words[id], id)] if wanted and id is not None else [])
    front, back = sides
    if front or back:
        first, last = [word for word, _ in front], [word for word, _ in back]
        made.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", "$B", *last],
            special_tokens=list(dict.fromkeys([*front, *back])),
        )


def _templates(header: GGUFHeader) -> str | dict[str, str] | None:
    """Return the chat template, or templates by name if the file names any; None if it has none."""
    key = "tokenizer.chat_template"
    named = {
        field.removeprefix(f"{key}."): str(value)
        for field, value in header.fields.items()
        if field.startswith(f"{key}.")
    }
    usual = header.fields.get(key)
    if usual is not None and not named:
        return str(usual)
    if usual is not None:
        named = {"default": str(usual)} | named
    return named or None


def _byte_level(
    header: GGUFHeader, words: list[str], types: list[int], special: SpecialTokens
) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE, and whether texts begin with a beginning token by default."""
    name = header.fields.get("tokenizer.ggml.pre")
    if name is None:
        logging.get_logger(__name__).warning(
            f"{header.path} does not say how words are cut (tokenizer.ggml.pre). weir uses "
            "llama.cpp's rule 'default', so tokens may differ from those that the model was "
            "trained with. Use a newer file of the model."
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise WeirError(
            f"{header.path} cuts words by the rule {name!r} (tokenizer.ggml.pre), which weir does "
            f"not know. It knows {', '.join(sorted(PRE_TOKENIZERS))}. Load the model's folder or "
            "Hub id instead."
        )
    if not isinstance(header.fields.get("tokenizer.ggml.merges"), GGUFArray):
        raise WeirError(_without(header, "tokenizer.ggml.merges"))
    rule = PRE_TOKENIZERS[name]
    merges = []
    for line in header.array("tokenizer.ggml.merges"):
        cut = line.find(" ", 1)  # the first part of a pair may be a space
        merges.append((line[:cut], line[cut + 1 :]))
    made = Tokenizer(
        models.BPE(
            vocab={word: n for n, word in enumerate(words)},
            merges=merges,
            ignore_merges=rule.whole_words,
        )
    )
    if (normalizer := rule.normalizer()) is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = rule.make()
    made.decoder = decoders.ByteLevel()
    return made, rule.bos


def _sentence_piece(
    header: GGUFHeader, words: list[str], types: list[int], special: SpecialTokens
) -> tuple[Tokenizer, bool]:
    """Return SentencePiece's BPE, and True: texts begin with a beginning token by default."""
    scores = _numbers(header, "scores", len(words))
    if scores is None:
        raise WeirError(_without(header, "tokenizer.ggml.scores"))
    vocabulary = {word: n for n, word in enumerate(words)}
    made = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(words, scores, types),
            unk_token=None if special.unknown is None else words[special.unknown],
            fuse_unk=True,
            byte_fallback=BYTE in types,
        )
    )
    prefixed = header.fields.get("tokenizer.ggml.add_space_prefix", True)
    spaces: list[Any] = [normalizers.Replace(" ", SPACE)]
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), *spaces] if prefixed else spaces
    )
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefixed else parts)
    return made, True


def _merges(
    words: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token, the highest score first.

    SentencePiece always merges the two neighbors that make the token with the highest score.
    """
    known = set(words)
    made: list[tuple[float, int, str, str]] = []
    for n, word in enumerate(words):
        if len(word) < 2 or (n < len(types) and types[n] in (BYTE, CONTROL, UNKNOWN)):
            continue
        score = -scores[n]
        made += [
            (score, -cut, word[:cut], word[cut:])
            for cut in range(1, len(word))
            if word[:cut] in known and word[cut:] in known
        ]
    made.sort()
    return [(first, second) for _, _, first, second in made]


_KINDS: dict[
    Any,
    Callable[[GGUFHeader, list[str], list[int], SpecialTokens], tuple[Tokenizer, bool]],
] = {"gpt2": _byte_level, "llama": _sentence_piece}
"""Kinds of tokenizers (`tokenizer.ggml.model`) that are read."""
