"""Pre-tokenizers of byte-level BPE, by the names that GGUF files give them.

A file names the rule that cuts a text into words before pairs are merged (`tokenizer.ggml.pre`).
Several names can mean the same rule, because llama.cpp has a name for each model that was
converted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _modern(digits: str, contractions: str = f"{_CONTRACTIONS}|", signs: str = r"[\r\n]*") -> str:
    """Return the rule of Llama 3 and Qwen 2.

    Args:
        digits: how many digits a word can have, in the syntax of regular expressions: "" for one,
            "{1,3}" for up to three.
        contractions: the pattern of contractions, such as 's, before the other patterns.
        signs: the pattern of what can follow punctuation in the same word.
    """
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{signs}|{_TAIL}"
    )


def _cased(digits: str, contractions: str = "") -> str:
    """Return the rule that cuts in front of capital letters.

    Args:
        digits: as for `_modern`.
        contractions: the pattern of contractions at the end of a word.
    """
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}[{_UPPER}]*[{_LOWER}]+{contractions}|{before}[{_UPPER}]+[{_LOWER}]*{contractions}"
        rf"|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


_CJK = "[\u0800-\u9fa5\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376-\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183-\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2-\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
"""Letters with a case, as DeepSeek's rule lists them; newer letters of Unicode are missing."""
_DEEPSEEK_SIGNS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """Rule that cuts a text into words.

    Attributes:
        patterns: regular expressions, applied one after the other. Each match is a word, and so is
            the text between two matches.
        whole_words: whether a word that is in the vocabulary becomes one token, even if no merges
            lead to it.
        bos: whether the beginning token is added if the file does not say.
        composed: whether characters are composed first (Unicode's form NFC).
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    composed: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return the normalizer that runs before the rule."""
        return normalizers.NFC() if self.composed else None

    def make(self) -> pre_tokenizers.PreTokenizer:
        """Return the rule, followed by the step that writes each byte as one character of BPE's
        alphabet.
        """
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*cuts, alphabet])


_RULES: Mapping[str, PreTokenizer] = {
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2": PreTokenizer(
        (_modern("{1,3}"),), whole_words=True, bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": PreTokenizer((_modern("{1,3}"),)),
    "glm4": PreTokenizer((_modern("{1,3}"),), whole_words=True),
    # These models' tokenizers compose characters; llama.cpp does not.
    "qwen2": PreTokenizer((_modern(""),), composed=True),
    "deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2": PreTokenizer(
        (_modern(""),)
    ),
    "qwen35": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}",
        )
    ),
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}",
        )
    ),
    "bailingmoe bailingmoe2 llada-moe": PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": PreTokenizer((_cased(""),), whole_words=True, bos=True),
    "gpt-4o llama4 kanana2": PreTokenizer((_cased("{1,3}", f"{_CONTRACTIONS}?"),)),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais trillion "
    "granite-docling": PreTokenizer((_GPT2,)),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": PreTokenizer(
        (r"\p{N}", _GPT2)
    ),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", _DEEPSEEK_LETTERS, _DEEPSEEK_SIGNS, r"\s+$", _CJK, r"\p{N}")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm": PreTokenizer(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK_V3)
    ),
    "bloom gpt3-finnish poro-chat": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "viking": PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: rule for names, rule in _RULES.items() for name in names.split()
}
"""Rules by the names in files."""
