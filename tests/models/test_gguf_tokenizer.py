"""Tokenizers of GGUF files give the ids of the model's own tokenizer, and of llama.cpp."""

from __future__ import annotations

import itertools
import json
import logging
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gguf_headers import write
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from weir.errors import WeirError
from weir.models.gguf import config as reading
from weir.models.gguf import find_gguf, read_tokenizer
from weir.models.gguf.pretokenizers import PRE_TOKENIZERS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "llamacpp_native" / "bin" / "python"
SIDE = ROOT / "bench" / "weir_bench" / "peers" / "sides" / "llamacpp_tokens.py"

WORDS = """the river runs past the mill, and the miller's 12 sacks of flour cost 3456 pounds;
  they've counted 1234567 of them -- (don't ask WHY) == x1y22z333 != [CamelCase] über straße ½ éà"""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level(**more: Any) -> dict[str, Any]:
    """Return the keys of a small byte-level BPE whose special tokens come after its words.

    In the names of more keys, `__` stands for a dot.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    made.train_from_iterator([WORDS], trainer)
    model = json.loads(made.to_str())["model"]
    words = [word for word, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    special = {"<|im_end|>": CONTROL, "<s>": CONTROL, "<note>": USER_DEFINED, "<0x00>": UNUSED}
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": words + list(special),
        "tokenizer.ggml.token_type": [NORMAL] * len(words) + list(special.values()),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(words) + 1,
        "tokenizer.ggml.eos_token_id": len(words),
    }
    return keys | {f"tokenizer.{name.replace('__', '.')}": value for name, value in more.items()}


def sentence_piece(**more: Any) -> dict[str, Any]:
    """Return the keys of a small SentencePiece vocabulary with a token for each byte.

    In the names of more keys, `__` stands for a dot.
    """
    words = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    words |= {f"<0x{n:02X}>": BYTE for n in range(256)}
    letters = sorted(set("the river runs past mill,and12WHYß▁"))
    joined = [
        "▁t",
        "he",
        "▁the",
        "er",
        "▁r",
        "iv",
        "▁river",
        "▁▁",
        "▁▁▁▁",
        "in",
        "ll",
        "mill",
        "ri",
    ]
    joined += ["ver", "iver", "▁▁▁", "11", "111", "▁a", "an", "▁an", "and", "nd", "▁and"]
    scored = letters + joined
    scores = [0.0] * len(words) + [-float(n) for n in range(len(joined) + 1, len(scored) + 1)]
    scores += [-float(n) for n in range(1, len(joined) + 1)]
    words |= dict.fromkeys(scored, NORMAL) | {"<note>": USER_DEFINED}
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(words),
        "tokenizer.ggml.token_type": list(words.values()),
        "tokenizer.ggml.scores": [*scores, 0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return keys | {f"tokenizer.{name.replace('__', '.')}": value for name, value in more.items()}


KINDS = {"gpt2": byte_level, "llama": sentence_piece}


def save(path: Path, keys: dict[str, Any], architecture: str = "llama") -> Path:
    needed = {".context_length": 256, ".block_count": 1, ".embedding_length": 4}
    needed |= {".feed_forward_length": 4, ".attention.head_count": 1}
    needed |= {".attention.layer_norm_rms_epsilon": 1e-6}
    embedding = {"token_embd.weight": (len(keys["tokenizer.ggml.tokens"]), 4)}
    given = {key: value for key, value in (needed | keys).items() if value is not None}
    return write(path / "tiny.gguf", architecture, given, embedding)


def read(path: Path, keys: dict[str, Any], architecture: str = "llama") -> Any:
    return read_tokenizer(save(path, keys, architecture))


def cut(path: Path, name: str, text: str) -> list[str]:
    """Return the words into which a pre-tokenizer cuts a text."""
    backend = read(path, byte_level(ggml__pre=name)).backend_tokenizer
    return [text[start:stop] for _, (start, stop) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("names", "text", "words"),
    [
        ("gpt-2 olmo mpt exaone4", "a  1234's B", ["a", " ", " 1234", "'s", " B"]),
        ("smollm starcoder refact command-r", "a  12's", ["a", "  ", "1", "2", "'s"]),
        ("llama-bpe dbrx", "x 1234'S\n\n B", ["x", " ", "123", "4", "'S", "\n\n", " B"]),
        ("qwen2 stablelm2", "x 12'S\n\n B", ["x", " ", "1", "2", "'S", "\n\n", " B"]),
        ("gpt-4o", "x 1234 CamelCase's", ["x", " ", "123", "4", " Camel", "Case's"]),
        ("tekken", "x 12 CamelCase's", ["x", " ", "1", "2", " Camel", "Case", "'s"]),
        ("falcon", "a -12345", ["a", " ", "-", "123", "45"]),
        ("default", "a -12345", ["a", " ", "-", "123", "45"]),
        ("deepseek-llm", "a 12\n.", ["a", " ", "1", "2", "\n", "."]),
        ("deepseek-coder", "a 12\n.", ["a", " ", "1", "2", "\n", "."]),
        ("deepseek-v3", "a 1234\n.b", ["a", " ", "123", "4", "\n", ".b"]),
        ("bloom", "a b.", ["a", " b", "."]),
        ("viking", "a 12.", ["a", " ", "1", "2", "."]),
        ("qwen35", "e\u0301a 12", ["e\u0301a", " ", "1", "2"]),
        ("bailingmoe", "a12\n x", ["a", "1", "2", "\n", " x"]),
        ("seed-coder", "a12.\n", ["a", "1", "2", ".", "\n"]),
    ],
)
def test_rules_cut_words_as_the_models_do(
    names: str, text: str, words: list[str], tmp_path: Path
) -> None:
    for name in names.split():
        assert cut(tmp_path, name, text) == words, name


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_rule_keeps_every_character(name: str, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, byte_level(ggml__pre=name))
    for text in itertools.islice(nasty(3), 300):
        if not PRE_TOKENIZERS[name].composed:
            assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_words_are_merged_as_the_file_says(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, byte_level())
    keys = byte_level()
    first = keys["tokenizer.ggml.merges"][0]
    assert len(tokenizer.tokenize(first.replace(" ", "").replace("Ġ", " "))) == 1
    keys["tokenizer.ggml.merges"] = [first]
    assert first == "h e"
    assert read(tmp_path, keys).tokenize("the river") == ["t", "he", *"Ġriver"]


def test_a_word_that_is_a_token_needs_no_merges(tmp_path: Path) -> None:
    for name, whole in (("llama-bpe", True), ("gpt-2", False)):
        keys = byte_level(ggml__pre=name)
        keys["tokenizer.ggml.tokens"][-1] = "zebra"
        keys["tokenizer.ggml.token_type"][-1] = NORMAL
        assert (read(tmp_path, keys).tokenize("zebra") == ["zebra"]) == whole


def test_characters_are_composed_only_where_the_model_does_it(tmp_path: Path) -> None:
    apart, composed = "e\u0301", "\u00e9"
    for name in ("qwen2", "llama-bpe"):
        tokenizer = read(tmp_path, byte_level(ggml__pre=name))
        same = tokenizer.tokenize(apart) == tokenizer.tokenize(composed)
        assert same == (name == "qwen2")


def naive_pieces(text: str, keys: dict[str, Any]) -> list[str]:
    """Merge neighboring tokens as SentencePiece does: at each step the pair that makes the token
    with the best score, and of equal ones the leftmost.
    """
    words, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    score = dict(zip(words, scores, strict=True))
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-score[first + second], at)
            for at, (first, second) in enumerate(itertools.pairwise(pieces))
            if first + second in score
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    known = []
    for piece in pieces:
        if piece in score:
            known.append(piece)
        else:
            known += [f"<0x{byte:02X}>" for byte in piece.encode()]
    return known


def test_sentence_piece_merges_by_scores(tmp_path: Path) -> None:
    keys = sentence_piece()
    tokenizer, rng = read(tmp_path, keys), random.Random(0)
    for _ in range(300):
        text = "".join(rng.choice("the river, mill 111and WHYßé") for _ in range(30))
        assert tokenizer.tokenize(text) == naive_pieces(f" {text}", keys), text
        assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("prefixed", [True, False, None])
def test_a_space_in_front(prefixed: bool | None, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, sentence_piece(ggml__add_space_prefix=prefixed))
    ids = tokenizer("the<note>the", add_special_tokens=False).input_ids
    pieces = tokenizer.convert_ids_to_tokens(ids)
    if prefixed is False:
        assert pieces == ["t", "he", "<note>", "t", "he"]
    else:
        assert pieces == ["▁the", "<note>", "▁the"]
    assert tokenizer.decode(tokenizer("the mill", add_special_tokens=False).input_ids) == "the mill"


@pytest.mark.parametrize(
    ("kind", "more", "front", "back"),
    [
        ("gpt2", {}, False, False),
        ("gpt2", {"ggml__pre": "llama-bpe"}, True, False),
        ("gpt2", {"ggml__pre": "tekken"}, True, False),
        ("gpt2", {"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, False, False),
        ("gpt2", {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, True, True),
        ("llama", {}, True, False),
        ("llama", {"ggml__add_bos_token": False}, False, False),
        ("llama", {"ggml__add_eos_token": True}, True, True),
    ],
)
def test_tokens_at_the_beginning_and_the_end(
    kind: str, more: dict[str, Any], front: bool, back: bool, tmp_path: Path
) -> None:
    tokenizer = read(tmp_path, KINDS[kind](**more))
    plain = tokenizer("the mill", add_special_tokens=False).input_ids
    bos, eos = [tokenizer.bos_token_id] * front, [tokenizer.eos_token_id] * back
    assert tokenizer("the mill").input_ids == bos + plain + eos
    assert tokenizer("", add_special_tokens=False).input_ids == []


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_found_in_a_text(kind: str, tmp_path: Path) -> None:
    keys = KINDS[kind]()
    tokenizer, words = read(tmp_path, keys), keys["tokenizer.ggml.tokens"]
    ids = tokenizer("<s>the <note><s>", add_special_tokens=False).input_ids
    assert [words[id] for id in (ids[0], ids[-2], ids[-1])] == ["<s>", "<note>", "<s>"]
    assert "<s>" not in tokenizer.decode(ids, skip_special_tokens=True)
    assert "<note>" in tokenizer.decode(ids, skip_special_tokens=True)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", words[tokenizer.eos_token_id])
    assert len(tokenizer) == len(words)
    assert tokenizer.convert_tokens_to_ids(words) == list(range(len(words)))


def test_special_tokens_of_phi_3_swallow_spaces(tmp_path: Path) -> None:
    for architecture, swallowed in (("phi3", True), ("llama", False)):
        keys = sentence_piece()
        tokenizer = read(tmp_path, keys, architecture)
        same = tokenizer("</s>  the").input_ids == tokenizer("</s>the").input_ids
        assert same == swallowed
        assert tokenizer("<s>  the").input_ids != tokenizer("<s>the").input_ids


def test_chat_templates(tmp_path: Path) -> None:
    one, two = "{{ messages[0]['content'] }}", "tools: {{ messages[0]['content'] }}"
    message = [{"role": "user", "content": "hi"}]
    tokenizer = read(tmp_path, byte_level(chat_template=one))
    assert tokenizer.apply_chat_template(message, tokenize=False) == "hi"
    both = read(tmp_path, byte_level(chat_template=one, chat_template__tool_use=two))
    assert both.apply_chat_template(message, tokenize=False) == "hi"
    named = both.apply_chat_template(message, tokenize=False, chat_template="tool_use")
    assert named == "tools: hi"
    assert read(tmp_path, byte_level()).chat_template is None


def test_a_file_that_does_not_say_its_rule_is_read_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(tmp_path, byte_level(ggml__pre=None))
    log = logging.getLogger("weir.models.gguf.tokenizer")
    log.addHandler(caplog.handler)
    try:
        tokenizer = read_tokenizer(path)
    finally:
        log.removeHandler(caplog.handler)
    assert "does not say how words are cut" in caplog.text
    assert tokenizer.tokenize("12345") == read(tmp_path, byte_level(ggml__pre="default")).tokenize(
        "12345"
    )


def twice() -> dict[str, Any]:
    keys = byte_level()
    keys["tokenizer.ggml.tokens"][5] = keys["tokenizer.ggml.tokens"][6]
    return keys


def without_a_product() -> dict[str, Any]:
    keys = byte_level()
    keys["tokenizer.ggml.merges"].append("Ð Ð")
    return keys


def with_numbers(
    make: Callable[[], dict[str, Any]], name: str, change: Callable[[list[Any]], Any]
) -> Callable[[], dict[str, Any]]:
    """Return a function that makes the keys of a file and changes one list of numbers in them."""

    def changed() -> dict[str, Any]:
        keys = make()
        key = f"tokenizer.ggml.{name}"
        numbers = list(keys.get(key) or [1] * len(keys["tokenizer.ggml.tokens"]))
        keys[key] = change(numbers)
        return keys

    return changed


NUMBERS = {
    "fewer": (lambda numbers: numbers[:-1], r"items in {}, where one number for each"),
    "more": (lambda numbers: [*numbers, numbers[0]], r"items in {}, where one number for each"),
    "texts": (lambda numbers: ["1"] * len(numbers), r"says {} = .* an array of numbers is expect"),
    "one": (lambda numbers: numbers[0], r"says {} = .*, where an array of numbers is expected"),
    "no number": (
        lambda numbers: [*map(float, numbers[:-1]), float("nan")],
        r"says {} = nan for the token .*, where a finite number",
    ),
}


@pytest.mark.parametrize("kind", [byte_level, sentence_piece])
@pytest.mark.parametrize("name", ["token_type", "scores"])
@pytest.mark.parametrize("change", NUMBERS)
def test_every_token_has_one_number(
    kind: Callable[[], dict[str, Any]], name: str, change: str, tmp_path: Path
) -> None:
    changed, message = NUMBERS[change]
    with pytest.raises(WeirError, match=message.format(rf"tokenizer\.ggml\.{name}")):
        read(tmp_path, with_numbers(kind, name, changed)())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: byte_level(ggml__pre="mystery"), r"by the rule 'mystery'.*It knows a\.x-4\.0"),
        (lambda: byte_level(ggml__model="bert"), r"of the kind 'bert'.*'gpt2' and 'llama'"),
        (lambda: byte_level(ggml__model="t5"), r"of the kind 't5'"),
        (lambda: byte_level(ggml__model=None), r"of the kind None"),
        (lambda: byte_level(ggml__merges=None), r"lacks tokenizer\.ggml\.merges"),
        (lambda: sentence_piece(ggml__scores=None), r"lacks tokenizer\.ggml\.scores"),
        (lambda: byte_level(ggml__add_sep_token=True), r"add_sep_token = True"),
        (lambda: byte_level(ggml__remove_extra_whitespaces=True), r"remove_extra_whitespaces"),
        (lambda: byte_level(ggml__suppress_tokens=[1]), r"suppress_tokens = an array of 1"),
        (lambda: byte_level(ggml__normalizer__lowercase=True), r"normalizer\.lowercase = True"),
        (
            lambda: byte_level(ggml__bos_token_id=None, ggml__add_bos_token=True),
            r"the token bos in every text, but does not say which",
        ),
        (twice, r"has the token .* twice"),
        (without_a_product, r"is broken.*out of vocabulary"),
        (
            lambda: byte_level(ggml__add_bos_token="true"),
            r"= 'true', where true or false is expected",
        ),
        (lambda: byte_level(ggml__add_eos_token=1), r"add_eos_token = 1, where true or false"),
        (lambda: byte_level(ggml__pre=3), r"pre = 3, where text is expected"),
        (
            lambda: byte_level(ggml__merges=[1, 2]),
            r"an array of 2, where an array of texts",
        ),
        (lambda: byte_level(ggml__token_type="all"), r"'all', where an array of numbers is"),
        (lambda: byte_level(chat_template=4), r"chat_template = 4, where text is expected"),
        (lambda: byte_level(chat_template__tools=4), r"chat_template\.tools = 4, where text is"),
        (
            lambda: byte_level(ggml__eos_token_id=-1),
            r"= -1, where the id of a token is expected\. Use",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(
    make: Callable[[], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeirError, match=message) as refused:
        read(tmp_path, make())
    assert str(refused.value).count("Use another file") + str(refused.value).count("or Hub") == 1


@pytest.mark.parametrize(("id", "told"), [(9999, True), ((1 << 32) - 1, False)])
def test_an_id_of_no_token_is_told(
    id: int,
    told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = read(tmp_path, byte_level(ggml__bos_token_id=id))
    assert tokenizer.bos_token is None
    assert ("bos_token_id = 9,999, but has only" in caplog.text) == told


def test_keys_that_change_nothing_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read(tmp_path, byte_level()).backend_tokenizer.to_str()
    more = {"ggml__mask_token_id": 3, "ggml__add_sep_token": False, "huggingface__json": "{}"}
    assert read(tmp_path, byte_level(**more)).backend_tokenizer.to_str() == plain
    monkeypatch.setenv(reading.IGNORED, "tokenizer.ggml.suppress_tokens")
    ignored = read(tmp_path, byte_level(ggml__suppress_tokens=[1]))
    assert ignored.backend_tokenizer.to_str() == plain


PIECES = [
    *["hello", " world", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "123", "1", "12345678", "3.14"],
    *[
        "'s",
        "'S",
        "'re",
        "'LL",
        "’s",
        "don't",
        "I'M",
        "éà",
        "日本語",
        "한국어",
        "русский",
        "हिन्दी",
        "ไทย",
    ],
    *[
        "😀",
        "👩‍👩‍👧",
        "العربية",
        "▁",
        "_",
        "..",
        "...",
        "!?",
        "=>",
        "!=",
        "(x)",
        "[]",
        "//",
        "#",
        "@",
    ],
    *[
        "CamelCase",
        "snake_case",
        "\u00a0",
        "\u200b",
        "\ufeff",
        "½",
        "Ⅷ",
        "٣",
        "\x01",
        "ǅ",
        "ß",
        "İ",
    ],
    *["$", "€", "+", "^", "~", "`", "|", "<", ">", "<note>", "<s>", "x" * 20, " " * 17],
]


def nasty(seed: int) -> Iterator[str]:
    """Yield texts that different pre-tokenizers cut differently."""
    rng = random.Random(seed)
    yield from PIECES
    while True:
        yield "".join(rng.choice(PIECES) for _ in range(rng.randint(2, 12)))


# For these, llama.cpp treats only the case of ASCII letters exactly, or knows the name only in very
# recent versions.
APPROXIMATED = {"tekken", "gpt-4o", "llama4", "kanana2", "mellum2", "joyai-llm", "deepseek-llm"}
COMPARED = {
    **{name: byte_level(ggml__pre=name) for name in sorted(PRE_TOKENIZERS.keys() - APPROXIMATED)},
    "a space in front": sentence_piece(),
    "no space in front": sentence_piece(ggml__add_space_prefix=False),
}
"""Keys of tokenizers that llama.cpp can read too."""


@pytest.fixture(scope="module")
def of_llama_cpp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """For each tokenizer, a file and the ids into which llama.cpp converts the texts."""
    folder, texts = tmp_path_factory.mktemp("compared"), list(itertools.islice(nasty(7), 400))
    paths = []
    for name, keys in COMPARED.items():
        (folder / name).mkdir()
        paths.append(save(folder / name, keys))
    answered = subprocess.run(
        [str(PYTHON), str(SIDE), *map(str, paths)],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in answered.stdout.splitlines()]
    return dict(zip(COMPARED, zip(paths, lines, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make peers`")
@pytest.mark.parametrize("name", COMPARED)
def test_ids_are_those_of_llama_cpp(name: str, of_llama_cpp: dict[str, tuple[Path, Any]]) -> None:
    path, expected = of_llama_cpp[name]
    tokenizer = read_tokenizer(path)
    for text, ids in zip(itertools.islice(nasty(7), 400), expected["ids"], strict=True):
        assert tokenizer(text).input_ids == ids, text
    assert expected["ends"] == [tokenizer.eos_token_id]


@pytest.mark.models
def test_smollm2_cuts_numbers_into_digits() -> None:
    path = find_gguf("smollm2")
    assert path is not None
    tokenizer = read_tokenizer(path)
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("in 1984").input_ids) == "in 1984"
