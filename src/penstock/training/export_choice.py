"""The checkpoint that `penstock export` writes as a folder, checked before any process starts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import OptionError
from penstock.training.choices import check_packages, make_config
from penstock.training.documents import Documents
from penstock.training.launching import is_worker
from penstock.training.model_sources import HuggingFaceModel
from penstock.training.orders import choose_orders
from penstock.training.saved import Saved, digests_of, saved_steps, step_folder
from penstock.training.settings import TrainConfig


@dataclass(frozen=True, slots=True)
class Export:
    """A checkpoint to export, and the config of the ranks that do it."""

    config: TrainConfig
    step: int

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return step_folder(Path(self.config.checkpoint), self.step)

    def __str__(self) -> str:
        ranks = f"{self.config.num_ranks} rank{'' if self.config.num_ranks == 1 else 's'}"
        return f"exporting step {self.step} of {self.config.checkpoint} on {ranks}"


def choose_export(
    checkpoint: str, folder: str, num_ranks: int | None, env: Mapping[str, str]
) -> Export:
    """Return what is exported: the last checkpoint of a training, of a model of transformers."""
    steps = saved_steps(Path(checkpoint))
    if not steps:
        raise OptionError(
            f"there is no checkpoint in {checkpoint}. Expected the folder of a training: the one "
            "that `penstock train --checkpoint FOLDER` has written to."
        )
    saved = Saved.read(step_folder(Path(checkpoint), steps[-1]))
    _check_model(checkpoint, saved)
    given = {"checkpoint": checkpoint, "resume": True, "export": folder, "schedule": "1F1B"}
    if num_ranks is not None:
        given["ranks"] = num_ranks
    elif not is_worker(env):
        given["ranks"] = 1
    # What training would hold is not needed.
    config = make_config({**given, "force": True}, env)
    choose_orders(config)
    check_packages(config)
    _check_same(checkpoint, saved, config)
    return Export(config, saved.step)


def _check_model(checkpoint: str, saved: Saved) -> None:
    """Raise an error unless the model of a training was, and is, a folder of Hugging Face."""
    name = str(saved.options.get("model") or "")
    if not name or (":" in name and not Path(name).exists()):
        raise OptionError(
            f"the training in {checkpoint} is of {name or 'the GPT of Penstock'}, which is not a "
            "model of transformers. Expected one with --model FOLDER; the values of others are in "
            "its checkpoints."
        )
    if not Path(name).exists():
        raise OptionError(
            f"the training in {checkpoint} is of the model in {name}, which is not there any more. "
            "Put it back: its configuration and tokenizer are exported with the weights."
        )


def _check_same(checkpoint: str, saved: Saved, config: TrainConfig) -> None:
    """Raise an error if the model or its tokenizer has changed since the training."""
    assert isinstance(config.model, HuggingFaceModel)  # It was checked before.
    digests = digests_of(config, Documents((), ()))
    for name, path in (("model", config.model.config_file), ("tokenizer", config.tokenizer_file)):
        if saved.digests.get(name) != digests[name]:
            raise OptionError(
                f"the {name} of the training in {checkpoint} has changed since, so what is "
                f"exported would not fit together: {path or 'it is not there any more'}. Put back "
                "the one that was trained."
            )
