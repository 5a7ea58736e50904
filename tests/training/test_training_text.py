import string
import sysconfig
from pathlib import Path

import pytest
import torch

from penstock.errors import OptionError
from penstock.training.batches import Batches, generator_for
from penstock.training.text import Text, read_text

LETTERS = Text("", string.ascii_letters.encode())


def test_text_is_the_bytes_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xff\x00ab")
    assert Text(str(path), b"\xff\x00ab") == read_text(str(path), context=3)


def test_text_without_a_file_is_python_source_and_always_the_same() -> None:
    text = read_text("", context=8)
    assert 4_000_000 == len(text.data)
    assert b"import " in text.data
    assert text == read_text("", context=8)


def test_text_has_nothing_of_how_this_python_was_built() -> None:
    """Machines with the same Python, in another folder or built otherwise, learn the same."""
    data = read_text("", context=8).data
    built = list(Path(sysconfig.get_path("stdlib")).glob("_sysconfigdata*.py"))
    assert built
    assert not any(path.read_bytes()[:200] in data for path in built)


@pytest.mark.parametrize(("content", "size"), [(b"", 0), (b"abcd", 4)])
def test_text_shorter_than_a_sequence_is_rejected(
    tmp_path: Path, content: bytes, size: int
) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=f"has {size} bytes. Expected at least 5, because"):
        read_text(str(path), context=4)


def test_text_that_is_missing_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot be read: .*\. Set --text to a file\."):
        read_text(str(tmp_path / "missing"), context=4)


def test_target_is_what_follows_each_token() -> None:
    tokens, target = Batches(LETTERS, context=4, batch=3, seed=0).of(1)
    assert (3, 4) == tokens.shape == target.shape
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    place = LETTERS.data.index(tokens[0, -1].item())
    assert LETTERS.data[place + 1] == target[0, -1]


def test_batch_depends_on_its_step_and_seed_alone() -> None:
    batches = Batches(LETTERS, context=4, batch=3, seed=0)
    before = [batches.of(step)[0] for step in (1, 2, 3)]
    again = Batches(LETTERS, context=4, batch=3, seed=0)
    assert torch.equal(before[2], again.of(3)[0])
    assert not torch.equal(before[0], before[1])
    assert not torch.equal(before[0], Batches(LETTERS, context=4, batch=3, seed=1).of(1)[0])


def test_the_last_byte_of_a_text_can_be_a_target_and_nothing_lies_beyond() -> None:
    _, target = Batches(Text("", b"abc"), context=1, batch=64, seed=0).of(1)
    assert set(b"bc") == set(target.flatten().tolist())


def test_numbers_of_a_name_do_not_depend_on_those_of_others() -> None:
    first = torch.rand(3, generator=generator_for(0, "a"))
    torch.rand(3, generator=generator_for(0, "b"))
    assert torch.equal(first, torch.rand(3, generator=generator_for(0, "a")))
    assert not torch.equal(first, torch.rand(3, generator=generator_for(0, "b")))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev"])
def test_text_that_is_no_file_is_rejected(path: str) -> None:
    with pytest.raises(OptionError, match=f"the text {path} is not a regular file"):
        read_text(path, context=8)
