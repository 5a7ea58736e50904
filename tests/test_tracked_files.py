"""Files in the repository are text, except the pictures of the docs."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PICTURES = {".png"}


def tracked_files() -> list[Path]:
    """The files that git tracks, relative to the root."""
    # The tree may belong to another user, as it does in many containers: git would refuse it.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name]


def is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", True), ("½ ÷ 2\n".encode(), True), (b"a\0b", False), (b"\x89PNG\r\n", False)],
)
def test_text_is_told_from_binary(content: bytes, expected: bool) -> None:
    assert expected == is_text(content)


def test_tracked_file_is_text_or_a_picture_of_the_docs() -> None:
    """Sixty checkpoints that an example had written to the root were once committed."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        # An unpacked archive may hold caches and builds too, which nobody wants to commit.
        pytest.skip("which files are tracked is known only to git, in a clone")
    files = tracked_files()
    assert Path("pyproject.toml") in files
    binary = [
        file.as_posix()
        for file in files
        if (ROOT / file).is_file()  # One that was deleted is tracked until the next commit.
        and not (file.parts[0] == "docs" and file.suffix in PICTURES)
        and not is_text((ROOT / file).read_bytes())
    ]
    assert [] == binary
