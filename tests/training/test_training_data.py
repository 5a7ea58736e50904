"""Where data comes from, how it becomes tokens, and in which order they are seen."""

import json
import string
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import PLAIN
from torch import Tensor

from penstock.errors import OptionError
from penstock.training.documents import Documents, read_documents
from penstock.training.held_out import Evaluation
from penstock.training.loader import Batches, Sequences, generator_for, held_out_batches
from penstock.training.model_sources import HuggingFaceModel
from penstock.training.tokens import ByteTokens, TokenizerFile, choose_tokens, tokenise

LETTERS = Documents((), (string.ascii_letters.encode(),))


def test_text_is_the_bytes_of_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_bytes(name.encode() + b"\xff\x00")
    found = read_documents([str(tmp_path / "c.md"), str(tmp_path)])
    assert (b"c.md\xff\x00", b"a.txt\xff\x00", b"b.txt\xff\x00") == found.parts


def test_text_without_a_file_is_python_source_and_always_the_same() -> None:
    text = read_documents([])
    assert 4_000_000 == text.num_tokens_at_most
    assert b"import " in text.parts[0]
    assert text == read_documents([])


def test_text_has_nothing_of_how_this_python_was_built() -> None:
    """Machines with the same Python, in another folder or built otherwise, learn the same."""
    [data] = read_documents([]).parts
    built = list(Path(sysconfig.get_path("stdlib")).glob("_sysconfigdata*.py"))
    assert built
    assert not any(path.read_bytes()[:200] in data for path in built)


def test_data_of_a_function_are_texts_or_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_data.py").write_text(
        "import torch\n"
        "def text(): return 'one'\n"
        "def texts(): return (word for word in ['one', b'two'])\n"
        "def tokens(): return torch.tensor([5, 6])\n"
        "def rows(): return [[1, 2], torch.tensor([3])]\n"
        "def nothing(): return [1.5]\n"
        "def fails(): return 1 / 0\n"
    )
    for name, expected in (
        ("text", (b"one",)),
        ("texts", (b"one", b"two")),
        ("tokens", ((5, 6),)),
        ("rows", ((1, 2), (3,))),
    ):
        assert expected == read_documents([f"own_data:{name}"]).parts
    with pytest.raises(OptionError, match=r"what own_data:nothing returns has a float\. Expected"):
        read_documents(["own_data:nothing"])
    with pytest.raises(OptionError, match=r"own_data:fails failed: ZeroDivisionError"):
        read_documents(["own_data:fails"])


class Rows:
    """What the tests need of a dataset of Hugging Face."""

    def __init__(self, **columns: list[Any]) -> None:
        self.column_names = list(columns)
        self._columns = columns

    def __getitem__(self, name: str) -> list[Any]:
        return self._columns[name]


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        (Rows(text=["a", "b"], label=[1, 2]), (b"a", b"b")),
        ({"train": Rows(input_ids=[[1], [2, 3]])}, ((1,), (2, 3))),
        ({"test": Rows(text=["a"])}, "which has the splits test. Name the folder of one"),
        (Rows(words=["a"]), "whose columns are words. Expected 'text', or 'input_ids'"),
    ],
)
def test_data_of_a_dataset_folder_are_a_column_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Any, expected: Any
) -> None:
    from types import SimpleNamespace

    (tmp_path / "state.json").touch()
    module = SimpleNamespace(load_from_disk=lambda path: loaded)
    monkeypatch.setitem(__import__("sys").modules, "datasets", module)
    if isinstance(expected, str):
        with pytest.raises(OptionError, match=expected):
            read_documents([str(tmp_path)])
    else:
        assert expected == read_documents([str(tmp_path)]).parts


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/dev/zero", "--data is /dev/zero, which is not a regular file"),
        ("missing", "--data is missing, which cannot be read: No such file"),
        ("empty", "--data is empty, which is empty. Give a text to learn."),
        (".", r"--data is \., a folder without \.txt files"),
    ],
)
def test_data_that_cannot_be_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    with pytest.raises(OptionError, match=expected):
        read_documents([path])


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer.json with a token for each of three words."""
    vocabulary = {"one": 0, "two": 1, "<end>": 2, "?": 3}
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(tokenizer))
    return path


def test_tokens_are_those_of_the_models_folder_with_its_end_after_each_document(
    words: Path,
) -> None:
    config = {"model_type": "llama", "vocab_size": 4, "eos_token_id": [2, 3]}
    (words.parent / "config.json").write_text(json.dumps(config))
    model = HuggingFaceModel(str(words.parent), 4)
    tokens = choose_tokens(replace(PLAIN, model=model))
    row = tokenise(Documents((), (b"one two one", b"two three")), tokens)
    assert [0, 1, 0, 2, 1, 3, 2] == row.tolist()
    assert "one two" == tokens.decode([0, 1])
    (words.parent / "config.json").write_text(json.dumps({**config, "vocab_size": 3}))
    with pytest.raises(OptionError, match="of which there are 4, but the model knows 3"):
        choose_tokens(replace(PLAIN, model=model))


def test_tokens_of_a_given_file_have_no_end_and_bytes_have_none(words: Path) -> None:
    tokens = TokenizerFile(words, None)
    assert [1, 0] == tokenise(Documents((), (b"two one",)), tokens).tolist()
    assert [97, 255] == tokenise(Documents((), (b"a\xff",)), ByteTokens()).tolist()
    assert "a\N{REPLACEMENT CHARACTER}" == ByteTokens().decode([97, 255])
    assert 0 == len(tokenise(Documents((), (b"",)), ByteTokens()))
    words.write_text("{}")
    with pytest.raises(OptionError, match=r"the tokenizer .*json cannot be read: "):
        TokenizerFile(words, None)


def test_tokens_that_the_model_does_not_know_are_rejected() -> None:
    for row, vocabulary in (((1, 9), 9), ((-1, 2), None)):
        with pytest.raises(
            OptionError, match=rf"has tokens from {row[0]} to {row[1]}, but the mod"
        ):
            tokenise(Documents((), (row,)), ByteTokens(), vocabulary=vocabulary)
    assert [1, 8] == tokenise(Documents((), ((1, 8),)), ByteTokens(), vocabulary=9).tolist()


def letters(**options: Any) -> Batches:
    sequences = Sequences(tokenise(LETTERS, ByteTokens()), 4)
    return Batches(sequences, **{"batch": 3, "seed": 0, **options})


def test_target_is_what_follows_each_token() -> None:
    tokens, target = letters().of(0)
    assert (3, 4) == tokens.shape == target.shape
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    place = LETTERS.parts[0].index(tokens[0, -1].item())
    assert LETTERS.parts[0][place + 1] == target[0, -1]


def test_batch_depends_on_its_number_and_seed_alone() -> None:
    batches = letters()
    before = [batches.of(number)[0] for number in (0, 1, 7)]
    assert torch.equal(before[2], letters().of(7)[0])
    assert not torch.equal(before[0], before[1])
    assert not torch.equal(before[0], letters(seed=1).of(0)[0])


def test_each_epoch_has_all_sequences_once_in_another_order() -> None:
    # 52 letters are 12 sequences of 4 tokens, with the token after the last; a batch has 5.
    seen = torch.cat([letters(batch=5).of(number)[0][:, 0] for number in range(5)])[:24].tolist()
    assert set(string.ascii_letters[:48:4].encode()) == set(seen[:12]) == set(seen[12:])
    assert seen[:12] != seen[12:]


def test_share_that_is_held_out_is_never_trained_on() -> None:
    trained, held_out = Sequences(tokenise(LETTERS, ByteTokens()), 4).split(0.25)
    assert (9, 3) == (len(trained), len(held_out))
    rows = held_out.rows(torch.arange(3))[0]
    assert string.ascii_letters[36:48].encode() == bytes(rows.flatten().tolist())
    last = trained.rows(torch.tensor([8]))[1]
    assert string.ascii_letters[33:37].encode() == bytes(last.flatten().tolist())


def test_evaluation_has_whole_batches() -> None:
    sequences = Sequences(tokenise(LETTERS, ByteTokens()), 4)
    assert [list(range(5)), list(range(5, 10))] == [
        places.tolist() for places in held_out_batches(sequences, 5)
    ]
    assert [[*range(12), 0, 1]] == [places.tolist() for places in held_out_batches(sequences, 14)]


def test_data_without_a_whole_sequence_is_rejected() -> None:
    short = Sequences(torch.arange(4), 4)
    with pytest.raises(OptionError, match=r"the data has no whole sequence to train on\. Give"):
        Batches(short, batch=1, seed=0)
    with pytest.raises(OptionError, match="the data to evaluate on has no whole sequence"):
        held_out_batches(short, 1)


def test_numbers_of_a_name_do_not_depend_on_those_of_others() -> None:
    first = torch.rand(3, generator=generator_for(0, "a"))
    torch.rand(3, generator=generator_for(0, "b"))
    assert torch.equal(first, torch.rand(3, generator=generator_for(0, "a")))
    assert not torch.equal(first, torch.rand(3, generator=generator_for(0, "b")))


def test_evaluation_takes_its_first_batches() -> None:
    sequences = Sequences(torch.arange(33), 4)
    for most, count in ((1, 1), (3, 3), (9, 4), (0, 4)):
        seen: list[int] = []

        def evaluate(tokens: Tensor, target: Tensor, seen: list[int] = seen) -> Tensor:
            seen.append(int(tokens[0, 0]))
            return target[0, 0].double()

        found = Evaluation(sequences, 2, most).run(5, evaluate)
        assert [0, 8, 16, 24][:count] == seen
        assert (5, sum(seen) / count + 1) == (found.step, found.loss)
