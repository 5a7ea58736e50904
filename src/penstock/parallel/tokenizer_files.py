"""The files of a folder of Hugging Face that belong to its tokenizer."""

import shutil
from pathlib import Path

_NAMES = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "*.model",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "*.tiktoken",
    "tokenizer*",
    "vocab*",
)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer of one folder to another, which keeps the files that it has."""
    for pattern in _NAMES:
        for file in filter(Path.is_file, source.glob(pattern)):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)
