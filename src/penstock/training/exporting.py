"""Write a trained model as a folder of Hugging Face."""

import json
import shutil
from pathlib import Path

from penstock.errors import OptionError
from penstock.parallel import ParallelModel
from penstock.training.model_sources import HuggingFaceModel
from penstock.training.settings import TrainConfig

_OF_TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt")


def export(pipe: ParallelModel, config: TrainConfig, *, is_first: bool) -> None:
    """Write the model, its configuration and its tokenizer; all ranks must call it.

    A folder that the model was loaded from has what it said of caches and tokenizers; this adds it
    for a model that began with random weights, and for a tokenizer that was given.
    """
    assert isinstance(config.model, HuggingFaceModel)  # The options were checked.
    pipe.save_pretrained(config.export)
    if is_first:
        try:
            _add_tokenizer(config, Path(config.export))
            _restore_cache(config.model, Path(config.export) / "config.json")
        except OSError as error:
            raise OptionError(
                f"--export is {config.export}, which cannot be completed: {error}. Name a folder "
                "that you can write to."
            ) from error


def _add_tokenizer(config: TrainConfig, folder: Path) -> None:
    source = config.tokenizer_file
    if source is None or source.parent.resolve() == folder.resolve():
        return
    shutil.copyfile(source, folder / "tokenizer.json")
    for pattern in _OF_TOKENIZERS:
        for file in source.parent.glob(pattern):
            if not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _restore_cache(model: HuggingFaceModel, file: Path) -> None:
    """Let the exported model use a cache, as it did before training turned it off."""
    described = json.loads(file.read_text())
    was = model.read_config().get("use_cache", True)
    if described.get("use_cache") is False and was:
        file.write_text(json.dumps({**described, "use_cache": was}, indent=2) + "\n")
