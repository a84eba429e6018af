from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import RowError, TokenizerError
from engine.gguf_file import GgufFile
from engine.pretokenizers import PRE_TOKENIZERS, build_pre_tokenizer
from engine.tokenizer import Tokenizer
from engine.vocabulary import read_vocabulary
from tests.gguf_factory import write_tiny_model
from tests.golden import GOLDEN
from tests.vocab_factory import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    VOCABULARIES,
    bpe_file,
    open_vocabulary,
    spm_file,
)

LONG_NUM_CHARS = 200_000
# Quadratic time would be hours; linear time is 0.1 to 0.3 s on a quiet machine.
LONG_LIMIT_S = 10


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    folder = tmp_path_factory.mktemp("vocabularies")
    return {name: open_vocabulary(name, folder) for name in VOCABULARIES}


@pytest.fixture(scope="module")
def tokenizers(files: dict[str, GgufFile]) -> dict[str, Tokenizer]:
    return {name: Tokenizer.from_gguf(file) for name, file in files.items()}


@pytest.fixture(params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


def decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode()


# ---- ids -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_equal_the_reference(
    tokenizers: dict[str, Tokenizer], name: str, parse_special: bool
) -> None:
    """Case 49: digits, white space, contractions, scripts, emoji, with special text and without."""
    cases = json.loads((GOLDEN / "tokenizers" / f"tokens-{name}.json").read_text())["cases"]
    key = "ids_parse_special" if parse_special else "ids_plain"
    assert len(cases) == 82
    for case in cases:
        ids = tokenizers[name].encode(case["text"], add_bos=False, parse_special=parse_special)
        assert ids == case[key], case["text"]


@settings(max_examples=150, deadline=None)
@given(text=st.text())
def test_bytes_of_the_ids_are_the_text(tokenizers: dict[str, Tokenizer], text: str) -> None:
    assert decode(tokenizers["llama-bpe"], tokenizers["llama-bpe"].encode(text)) == text
    spm_text = decode(tokenizers["llama-spm"], tokenizers["llama-spm"].encode(text))
    assert spm_text == (" " + text if text else "").replace("▁", " ")


def test_nul_is_kept(tokenizer: Tokenizer) -> None:
    """Case 88: nothing after a NUL is lost."""
    ids = tokenizer.encode("BANANA\0APPLE", add_bos=False)
    assert decode(tokenizer, ids).lstrip(" ") == "BANANA\0APPLE"


def test_trailing_white_space_is_kept(tokenizer: Tokenizer) -> None:
    """Case 110: four texts, four lists of ids."""
    texts = ("Answer:", "Answer: ", "Answer:\n", "Answer:\u00a0")
    ids = [tokenizer.encode(text, add_bos=False) for text in texts]
    assert len(set(map(tuple, ids))) == 4
    assert [decode(tokenizer, each).removeprefix(" ") for each in ids] == list(texts)


@pytest.mark.parametrize("unit", ["a", " ", "\n", "<", "1", "的", "aA", " \t\n", "'", "<s>x", "\0"])
def test_long_text_takes_linear_time(tokenizer: Tokenizer, unit: str) -> None:
    text = unit * (LONG_NUM_CHARS // len(unit))
    begin = time.monotonic()
    ids = tokenizer.encode(text, add_bos=False, parse_special=True)
    assert time.monotonic() - begin < LONG_LIMIT_S
    assert len(ids) > 1_000


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizers_keep_every_character(name: str) -> None:
    splitter = build_pre_tokenizer(PRE_TOKENIZERS[name])
    text = "I'M 12345  don't\r\n\r\n \t日本語, ខ្មែរ Привет 👩‍👩‍👧 naïve!! ½ ²\u00a0\0 x " * 3
    spans = [span for _, span in splitter.pre_tokenize_str(text)]
    assert "".join(text[begin:end] for begin, end in spans) == text


def test_lone_surrogate_is_an_error_of_the_row(tokenizer: Tokenizer) -> None:
    with pytest.raises(RowError, match="U\\+D83D") as caught:
        tokenizer.encode("half an emoji \ud83d")
    assert caught.value.code == "invalid_utf8"


def test_word_of_the_vocabulary_is_taken_whole(
    files: dict[str, GgufFile], tokenizers: dict[str, Tokenizer]
) -> None:
    """Case 50: tokens that no sequence of merges builds."""
    tokenizer = tokenizers["llama-bpe"]
    assert tokenizer.encode(" Tiếng Việc", add_bos=False) == [124942, 114195]
    by_merges = Tokenizer.from_gguf(files["llama-bpe"], pre_tokenizer="qwen2")
    assert len(by_merges.encode(" Tiếng", add_bos=False)) == 3


# ---- pre-tokenizer names and kinds of vocabulary -------------------------------------------


def test_unknown_pre_tokenizer_is_refused_unless_forced() -> None:
    """Case 49: "foo" is refused with the names that are known."""
    file = bpe_file(pre="foo")
    with pytest.raises(TokenizerError, match=r"'foo'.*known are default, gpt-2, llama-bpe"):
        Tokenizer.from_gguf(file)
    forced = Tokenizer.from_gguf(file, pre_tokenizer="qwen2")
    assert forced.warnings == ("pre-tokenizer 'qwen2' is forced; the model file names 'foo'",)
    with pytest.raises(TokenizerError, match="'bar'"):
        Tokenizer.from_gguf(file, pre_tokenizer="bar")


def test_absent_pre_tokenizer_warns() -> None:
    """Case 49: without a name the default one is used, and it is said."""
    merges = ("1 1", "11 1")
    absent = Tokenizer.from_gguf(bpe_file(pre=None, merges=merges))
    assert "names no pre-tokenizer" in absent.warnings[0]
    by_name = Tokenizer.from_gguf(bpe_file(pre="default", merges=merges))
    assert by_name.warnings == ()
    assert absent.encode("1111") == by_name.encode("1111")


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv", "plamo2", None])
def test_other_vocabularies_are_refused_by_name(model: str | None) -> None:
    with pytest.raises(TokenizerError, match=f"{model!r}.*'llama'.*'gpt2'"):
        Tokenizer.from_gguf(bpe_file(model=model))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["ab"]}, "'ab' is not two tokens"),
        ({"token_type": [1]}, "token_type has 1 items for 256 tokens"),
        ({"eos_token_id": 256}, "eos_token_id is 256, but there are 256 tokens"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"add_bos_token": 1}, "add_bos_token is 1, expected true or false"),
    ],
)
def test_damaged_vocabulary_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(bpe_file(**keys))


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_spm_vocabulary_needs_scores_and_types(key: str) -> None:
    with pytest.raises(TokenizerError, match=key):
        Tokenizer.from_gguf(spm_file(**{key: None}))


def test_what_a_bpe_vocabulary_lacks_is_said(tokenizers: dict[str, Tokenizer]) -> None:
    odd = Tokenizer.from_gguf(
        bpe_file(
            merges=["a b", "ab c"], tokens=["a", "b", "ab", "X", "Y"], token_type=[1, 1, 1, 3, 3]
        )
    )
    assert odd.warnings[0].startswith("1 merges of tokens that are not in the vocabulary")
    assert "bytes have no token and are lost" in odd.warnings[1]
    assert odd.encode("ab") == [2]
    assert tokenizers["llama-bpe"].warnings == ()


# ---- BOS -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("add_bos_token", "expected"), [(True, True), (False, False), (None, True)]
)
def test_bos_by_the_models_rule_spm(add_bos_token: bool | None, expected: bool) -> None:
    """Case 4: SentencePiece models want BOS unless they say otherwise."""
    tokenizer = Tokenizer.from_gguf(spm_file(add_bos_token=add_bos_token))
    assert (tokenizer.encode("hi")[0] == tokenizer.bos_id) is expected
    assert tokenizer.add_bos is expected


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "expected"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("tekken", None, True),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_bos_by_the_models_rule_bpe(pre: str, add_bos_token: bool | None, expected: bool) -> None:
    """Case 4: byte-level models, by their pre-tokenizer where the file does not say."""
    file = bpe_file([("<|bos|>", CONTROL)], pre=pre, bos_token_id=256, add_bos_token=add_bos_token)
    assert Tokenizer.from_gguf(file).encode("hi") == [256] * expected + list(b"hi")


def test_bos_of_a_file_that_names_none() -> None:
    """Case 4: SentencePiece files mean `<s>`; a byte-level one says that it lacks it."""
    unnamed = Tokenizer.from_gguf(spm_file(bos_token_id=None, eos_token_id=None))
    assert (unnamed.bos_id, unnamed.eos_id) == (1, 2)
    assert unnamed.encode("hi") == Tokenizer.from_gguf(spm_file()).encode("hi")
    bpe = Tokenizer.from_gguf(bpe_file(pre="llama-bpe"))
    assert bpe.encode("hi") == list(b"hi")
    assert bpe.warnings == (
        "the model wants BOS, but the file names none (tokenizer.ggml.bos_token_id)",
    )


def test_bos_is_never_doubled() -> None:
    """Case 4: text that begins with the text of BOS, read as text and as a mark."""
    tokenizer = Tokenizer.from_gguf(spm_file())
    assert tokenizer.encode("<s>hi", parse_special=True) == tokenizer.encode("hi")
    assert tokenizer.encode("<s><s>hi", parse_special=True) == tokenizer.encode("hi")
    raw = tokenizer.encode("<s>hi")
    assert raw.count(tokenizer.bos_id) == 1
    assert decode(tokenizer, raw) == " <s>hi"


def test_bos_can_be_left_out_or_asked_for() -> None:
    tokenizer = Tokenizer.from_gguf(spm_file(add_bos_token=False))
    assert tokenizer.encode("hi", add_bos=True) == [1, *tokenizer.encode("hi")]
    assert tokenizer.encode("<s>hi", add_bos=False, parse_special=True)[0] == 1
    assert Tokenizer.from_gguf(bpe_file()).encode("a", add_bos=True) == list(b"a")


# ---- special tokens ------------------------------------------------------------------------


@pytest.mark.parametrize("eot_key", [True, False])
def test_every_end_of_turn_counts(eot_key: bool) -> None:
    """Case 5: eos, eot whether the metadata names it or not, and eom."""
    specials = [("<|end_of_text|>", 3), ("<|eot_id|>", 3), ("<|eom_id|>", 3), ("<|x|>", 3)]
    eot_id = 257 if eot_key else None
    tokenizer = Tokenizer.from_gguf(bpe_file(specials, eos_token_id=256, eot_token_id=eot_id))
    assert tokenizer.eog_ids == {256, 257, 258}
    assert [tokenizer.token_bytes(i) for i in (256, 257, 258, 259)] == [b""] * 4


def test_ends_named_by_metadata_alone_count() -> None:
    """Case 5: texts that nobody knows."""
    specials = [("<fin>", NORMAL), ("<over>", CONTROL), ("<out>", CONTROL)]
    keys = {"eos_token_id": 256, "eot_token_id": 257, "eom_token_id": 258}
    tokenizer = Tokenizer.from_gguf(bpe_file(specials, **keys))
    assert tokenizer.eog_ids == {256, 257, 258}
    assert tokenizer.encode("<fin>", parse_special=True) == [256]


def test_html_is_no_end_of_turn() -> None:
    """Case 5: `</s>` is strike-through where the vocabulary does not call it control."""
    assert Tokenizer.from_gguf(bpe_file([("</s>", NORMAL)])).eog_ids == frozenset()
    assert Tokenizer.from_gguf(bpe_file([("</s>", CONTROL)])).eog_ids == {256}


def test_mistyped_end_of_turn_is_control() -> None:
    """Case 56: `<|im_end|>` of type normal ends a turn and has no text."""
    tokenizer = Tokenizer.from_gguf(bpe_file([("<|im_end|>", NORMAL)]))
    assert tokenizer.eog_ids == {256}
    assert tokenizer.token_bytes(256) == b""
    assert tokenizer.encode("<|im_end|>", parse_special=True) == [256]
    assert 256 not in tokenizer.encode("<|im_end|>")


@pytest.mark.parametrize("make_file", [bpe_file, spm_file])
def test_user_defined_tokens_are_always_one_id(make_file: object) -> None:
    """Case 56: longest match, with spaces inside, overlapping; their text is output."""
    texts = ["<think>", "<think> now", "two  spaces", "    ", "  "]
    file = make_file([(text, USER_DEFINED) for text in texts])  # type: ignore[operator]
    tokenizer = Tokenizer.from_gguf(file)
    first = tokenizer.num_tokens - len(texts)
    think, think_now, two_spaces, four, two = range(first, first + len(texts))
    for parse_special in (False, True):

        def found(text: str, parse_special: bool = parse_special) -> list[int]:
            ids = tokenizer.encode(text, add_bos=False, parse_special=parse_special)
            return [token_id for token_id in ids if token_id >= first]

        assert found("a<think>b") == [think]
        assert found("<think> nowhere<think>") == [think_now, think]
        assert found("two  spaces") == [two_spaces]
        assert found("x" + " " * 7 + "y") == [four, two]
    assert tokenizer.token_bytes(think_now) == b"<think> now"


def test_control_text_is_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    control = tokenizer.token_text(tokenizer.eos_id or 0)
    text = f"a{control}b"
    assert tokenizer.eos_id not in tokenizer.encode(text)
    assert tokenizer.encode(text, parse_special=True).count(tokenizer.eos_id or 0) == 1
    assert tokenizer.find_control(text + control) == [1, 2 + len(control)]


def test_protected_positions_begin_no_control_token(tokenizer: Tokenizer) -> None:
    control = tokenizer.token_text(tokenizer.eos_id or 0)
    text = f"a{control}b{control}"
    ids = tokenizer.encode(text, parse_special=True, protected={1})
    assert ids[-1] == tokenizer.eos_id
    assert ids.count(tokenizer.eos_id or 0) == 1
    plain = tokenizer.encode(f"a{control}b")
    assert ids[:-1] == plain


def test_protection_leaves_user_defined_tokens() -> None:
    tokenizer = Tokenizer.from_gguf(bpe_file([("<x>", USER_DEFINED), ("<x>y", CONTROL)]))
    assert tokenizer.encode("<x>y", parse_special=True) == [257]
    assert tokenizer.encode("<x>y", parse_special=True, protected={0}) == [256, *b"y"]


def test_spm_text_after_a_special_token_gets_its_space() -> None:
    tokenizer = Tokenizer.from_gguf(spm_file(add_bos_token=False))
    the = tokenizer.encode("the")
    assert tokenizer.encode("the</s>the", parse_special=True) == [*the, 2, *the]
    bare = Tokenizer.from_gguf(spm_file(add_bos_token=False, add_space_prefix=False))
    assert decode(bare, bare.encode("the")) == "the"


def test_phi3_drops_white_space_after_its_marks() -> None:
    specials = [("<|user|>", CONTROL)]
    phi = Tokenizer.from_gguf(spm_file(specials, **{"general.name": "Phi-3 Mini"}))
    other = Tokenizer.from_gguf(spm_file(specials))
    text = "<|user|>\n the"
    assert phi.encode(text, parse_special=True) == other.encode(
        text[:8] + "the", parse_special=True
    )
    assert other.encode(text, parse_special=True) != phi.encode(text, parse_special=True)


# ---- tokens to bytes -----------------------------------------------------------------------


def test_padded_ids_have_no_text(tokenizer: Tokenizer) -> None:
    """Case 55: rows of the embedding beyond the vocabulary."""
    for token_id in (tokenizer.num_tokens, tokenizer.num_tokens + 31, -1):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""


def test_token_bytes_of_spm() -> None:
    tokenizer = Tokenizer.from_gguf(spm_file())
    texts = {tokenizer.token_text(i): tokenizer.token_bytes(i) for i in range(tokenizer.num_tokens)}
    assert (texts["▁the"], texts["<0xE9>"], texts["</s>"], texts["<unk>"]) == (
        b" the",
        b"\xe9",
        b"",
        b"",
    )


def test_token_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    """A GGUF file may hold tokens that are parts of characters."""
    model = write_tiny_model(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.tokens": None})
    texts = [*spm_file().metadata["tokenizer.ggml.tokens"]]
    texts[-1] = "@@@@"
    written = write_tiny_model(tmp_path / "tiny.gguf", metadata={"tokenizer.ggml.tokens": texts})
    data = written.path.read_bytes().replace(b"@@@@", b"\xff\xfe\xff\xfe")
    model.path.write_bytes(data)
    tokenizer = Tokenizer.from_gguf(GgufFile.open(model.path))
    assert tokenizer.token_bytes(tokenizer.num_tokens - 1) == b"\xff\xfe\xff\xfe"
    assert decode(tokenizer, tokenizer.encode("the end")) == " the end"


def test_bpe_tokens_outside_the_byte_alphabet_are_their_text() -> None:
    tokenizer = Tokenizer.from_gguf(bpe_file([("日本", NORMAL)]))
    assert tokenizer.token_bytes(256) == "日本".encode()


def test_empty_and_repeated_tokens_load() -> None:
    for file in (
        spm_file([("", NORMAL), ("the", NORMAL)]),
        bpe_file([("", NORMAL), ("a", NORMAL)]),
    ):
        tokenizer = Tokenizer.from_gguf(file)
        assert read_vocabulary(file).texts[-1] == tokenizer.token_text(tokenizer.num_tokens - 1)
        assert decode(tokenizer, tokenizer.encode("athe")).strip() == "athe"
