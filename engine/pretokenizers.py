"""How byte-level BPE vocabularies cut text into words before merging, by the name in the file.

Each pattern splits the pieces that the one before left; what no pattern matches stays a piece of
its own. Source of names and patterns: the models' tokenizer.json files, and llama.cpp's list of
`tokenizer.ggml.pre` values.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from engine.requests import TokenizerError

WORDS_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
HAN_AND_HANGUL = "[一-龥ࠀ-一가-\ud7ff]+"
# Cased letters of the Unicode version that the deepseek-llm vocabulary was built with.
CASED_LETTERS = (
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    "ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizerSpec:
    """One way of cutting text.

    patterns: applied in order
    ignore_merges: a word that is in the vocabulary is taken whole, whatever the merges would build
    add_bos: whether such models want BOS where the file does not say
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _words_by_class(digits: str) -> str:
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    return rf"{CONTRACTIONS}|{letters}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"


DEFAULT = PreTokenizerSpec(
    patterns=(r"[\p{P}\$\+<=>\^~\|]+", WORDS_GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
)
GPT2 = PreTokenizerSpec(patterns=(WORDS_GPT2,))
LLAMA3 = PreTokenizerSpec(
    patterns=(_words_by_class(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True
)
SINGLE_DIGITS = PreTokenizerSpec(patterns=(r"\p{N}", WORDS_GPT2))
QWEN2 = PreTokenizerSpec(patterns=(_words_by_class(r"\p{N}"),))
TEKKEN = PreTokenizerSpec(
    patterns=(
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
    ),
    ignore_merges=True,
    add_bos=True,
)
DEEPSEEK_LLM = PreTokenizerSpec(
    patterns=(
        r"[\r\n]",
        rf"\s?[{CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
        r"\s+$",
        HAN_AND_HANGUL,
        r"\p{N}+",
    )
)
DEEPSEEK_CODER = PreTokenizerSpec(
    patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_HANGUL, r"\p{N}")
)

PRE_TOKENIZERS = {
    "default": DEFAULT,
    "gpt-2": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": TEKKEN,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
}


def find_pre_tokenizer(name: str) -> PreTokenizerSpec:
    """Raises TokenizerError for a name that is not in PRE_TOKENIZERS."""
    spec = PRE_TOKENIZERS.get(name)
    if spec is None:
        raise TokenizerError(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is unknown; known are "
            f"{', '.join(PRE_TOKENIZERS)}. If the model was trained with one of these, force it "
            "by its name (pre_tokenizer=...); a wrong one changes the token ids"
        )
    return spec


def build_pre_tokenizer(spec: PreTokenizerSpec) -> PreTokenizer:
    """Splits text by the patterns and writes bytes as the printable characters of GPT-2."""
    splits = [Split(Regex(pattern), "isolated") for pattern in spec.patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
