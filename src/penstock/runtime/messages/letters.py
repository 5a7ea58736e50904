"""Bytes of unknown length, sent as a letter of known length: nearly all forms fit into one."""

LETTER_BYTES = 1024
_LENGTH_BYTES = 8


def as_letters(content: bytes) -> list[bytearray]:
    """Return the letter that tells the length of `content`; another has the rest, if any."""
    room = LETTER_BYTES - _LENGTH_BYTES
    letter = len(content).to_bytes(_LENGTH_BYTES, "little") + content[:room].ljust(room, b"\0")
    return [bytearray(part) for part in (letter, content[room:]) if part]


def open_letter(letter: bytes) -> tuple[bytes, int]:
    """Return the content of a letter, and how many bytes of it are in another one."""
    length = int.from_bytes(letter[:_LENGTH_BYTES], "little")
    content = letter[_LENGTH_BYTES : _LENGTH_BYTES + length]
    return content, length - len(content)
