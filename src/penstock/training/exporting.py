"""Write a trained model as a folder of Hugging Face."""

import json
import shutil
from pathlib import Path

import torch

from penstock.errors import OptionError
from penstock.parallel import ParallelModel
from penstock.parallel.tokenizer_files import copy_tokenizer
from penstock.stage import Group
from penstock.training.connected_ranks import connected
from penstock.training.export_choice import Export
from penstock.training.model_sources import HuggingFaceModel
from penstock.training.models import Place, spread
from penstock.training.orders import choose_orders
from penstock.training.settings import TrainConfig


def export_checkpoint(
    chosen: Export, *, group: Group = None, device: torch.device | str = "cpu"
) -> None:
    """Write a checkpoint as a folder; every rank calls this with the same arguments."""
    config = chosen.config
    with connected(group, torch.device(device)) as comm:
        place = Place.of(config, group, torch.device(device))
        pipe = spread(config, choose_orders(config), place)
        pipe.load(chosen.folder)
        export(pipe, config, is_first=comm.rank == 0)
        pipe.close()


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
                f"{config.export} has the weights, but its tokenizer and configuration cannot be "
                f"completed: {error}. Name a folder that you can write to."
            ) from error


def _add_tokenizer(config: TrainConfig, folder: Path) -> None:
    source = config.tokenizer_file
    if source is None or source.parent.resolve() == folder.resolve():
        return
    shutil.copyfile(source, folder / "tokenizer.json")
    copy_tokenizer(source.parent, folder)


def _restore_cache(model: HuggingFaceModel, file: Path) -> None:
    """Let the exported model use a cache, as it did before training turned it off."""
    described = json.loads(file.read_text())
    was = model.read_config().get("use_cache", True)
    if described.get("use_cache") is False and was:
        file.write_text(json.dumps({**described, "use_cache": was}, indent=2) + "\n")
