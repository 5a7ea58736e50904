"""Valid files of every kind that Penstock reads, their readers, and ways to damage files."""

import json
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

import penstock
from penstock.cli.costs_option import load_costs
from penstock.cli.given import read_file
from penstock.cli.levels_option import read_levels
from penstock.compat.actions import read_order
from penstock.costs import CostTable
from penstock.errors import CheckpointError
from penstock.parallel.checkpoint_reader import CheckpointReader
from penstock.parallel.safetensors_folder import SafetensorsFolder
from penstock.parallel.training_state import read_description
from penstock.timeline import Recording, Timeline
from penstock.timeline.recording import RecordedStep
from penstock.training.log_sinks import JsonLinesFile
from penstock.training.model_sources import HuggingFaceModel
from penstock.training.orders import read_schedule
from penstock.training.run_files import read_options
from penstock.training.saved import Saved


@dataclass(frozen=True)
class Kind:
    """A kind of file: the path of one in a folder, its content, and what reads it."""

    path: str
    content: bytes
    read: Callable[[Path], Any]


def _recording() -> str:
    schedule = penstock.schedules.get("ZB-H1")(num_ranks=2, num_microbatches=2)
    report = penstock.simulate(schedule, CostTable.uniform(2))
    timeline = report.timeline
    step = RecordedStep(3, Timeline(timeline.schedule, timeline.starts, timeline.ends))
    return Recording((step, step)).to_json()


def _read_recording(path: Path) -> None:
    recording = Recording.load(path)
    assert Recording.from_json(recording.to_json()) == recording
    recording.typical()
    recording.simulated()


def _read_costs(path: Path) -> None:
    costs = CostTable.load(path)
    assert CostTable.from_json(costs.to_json()) == costs


def _read_weights(path: Path) -> None:
    folder = SafetensorsFolder.of(path.parent)
    with folder.reading() as reader:
        for name, entry in folder.entries.items():
            assert entry.shape == tuple(reader.read(name).shape)


_STATE = {"model.weight": torch.arange(4.0), "optimizer.state.weight.step": torch.tensor(3.0)}


def _checkpoint(folder: Path) -> tuple[bytes, bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(dict(_STATE), checkpoint_id=folder, no_dist=True)
    return (folder / ".metadata").read_bytes(), (folder / "__0_0.distcp").read_bytes()


@contextmanager
def _as_in_load() -> Iterator[None]:
    """Turn what is raised into a CheckpointError, as `load` does for all that it reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"cannot be loaded: {error}") from error


def _read_checkpoint(path: Path) -> None:
    state = {name: torch.zeros_like(value) for name, value in _STATE.items()}
    CheckpointReader(path.parent).read_metadata()
    with _as_in_load():
        state_dict_loader.load(state, storage_reader=CheckpointReader(path.parent), no_dist=True)


def _read_description(path: Path) -> None:
    with _as_in_load():
        read_description(path.parent)


_TRAINING = {
    "format": "penstock training state",
    "optimizer": [{"lr": 0.1, "params": ["weight"]}],
    "extra": {
        "step": 7,
        "options": {"batch": 8, "seed": 1, "microbatches": 4, "steps": 9, "lr": 0.1},
        "digests": {"data": "0", "tokenizer": "1", "model": "2"},
        "state": {"__pairs__": [[2, 1]]},
    },
}
_COSTS = CostTable(
    forward=[1, 2], backward_input=[1, 1.5], backward_weight=[0.5, 1], time_scale=[1, 2, 0.5]
).to_json()
_CSV = penstock.passes.add_sends(
    penstock.schedules.get("ZB-V")(num_ranks=2, num_microbatches=2)
).to_csv()
_TOML = (
    'model = "small"\nsteps = 10\nlr = 3e-4\ndata = ["a.txt", "b.txt"]\n# A comment.\nclip = 1.0\n'
)
_YAML = _TOML.replace(" =", ":").replace("3e-4", "0.0003")
_LOG = "".join(json.dumps({"step": step, "loss": 2.5}) + "\n" for step in range(1, 5))
_CONFIG = {"model_type": "llama", "vocab_size": 64, "eos_token_id": [2], "n_positions": 32}


def _safetensors() -> bytes:
    header = {"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    text = json.dumps(header).encode().ljust(72)
    return len(text).to_bytes(8, "little") + text + torch.arange(4.0).numpy().tobytes()


def _read_config(path: Path) -> None:
    model = HuggingFaceModel(str(path.parent), 8)
    assert model.read_config()
    str(model), model.vocabulary, model.end_token  # What is read must be usable.


def _read_log(path: Path) -> None:
    JsonLinesFile(str(path), resumed_step=2).close()


def make_kinds(folder: Path) -> dict[str, Kind]:
    """Return all kinds, by what they are; `folder` is used for what torch writes."""
    metadata, values = _checkpoint(folder / "made")
    training = json.dumps(_TRAINING).encode()
    recording = _recording().encode()
    index = json.dumps({"weight_map": {"weight": "1.safetensors"}}).encode()
    return {
        "costs": Kind("costs.json", _COSTS.encode(), _read_costs),
        "costs of an option": Kind("o.json", _COSTS.encode(), lambda p: load_costs(str(p), None)),
        "level": Kind("l.json", _COSTS.encode(), lambda p: read_levels([f"0.5={p}"])),
        "recording": Kind("recording.json", recording, _read_recording),
        "recorded costs": Kind("r.json", recording, lambda p: load_costs(str(p), None)),
        "recorded schedule": Kind("s.json", recording, lambda p: read_file(str(p))),
        "schedule": Kind("s.csv", _CSV.encode(), lambda p: read_file(str(p))),
        "schedule of a training": Kind("t.csv", _CSV.encode(), lambda p: read_schedule(str(p))),
        "order of compat": Kind(
            "c.csv", b"0F0,0F1,0B0,,0B1\n1F0,1B0\n", lambda p: read_order(str(p))
        ),
        "TOML": Kind("run.toml", _TOML.encode(), lambda p: read_options(str(p))),
        "YAML": Kind("run.yaml", _YAML.encode(), lambda p: read_options(str(p))),
        "saved options": Kind(
            "step-000007/training.json", training, lambda p: Saved.read(p.parent)
        ),
        "description": Kind("state/training.json", training, _read_description),
        "metadata": Kind("state/.metadata", metadata, _read_checkpoint),
        "values": Kind("state/__0_0.distcp", values, _read_checkpoint),
        "weights": Kind("weights/model.safetensors", _safetensors(), _read_weights),
        "sharded weights": Kind("sharded/1.safetensors", _safetensors(), _read_weights),
        "index": Kind("sharded/model.safetensors.index.json", index, _read_weights),
        "config": Kind("config/config.json", json.dumps(_CONFIG).encode(), _read_config),
        "log": Kind("log.jsonl", _LOG.encode(), _read_log),
    }


def write_all(kinds: dict[str, Kind], folder: Path) -> None:
    """Write all files, since some are read with others beside them."""
    for kind in kinds.values():
        (folder / kind.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / kind.path).write_bytes(kind.content)


_PIECES = [
    *(b"[", b"]", b"{", b"}", b'"', b",", b":", b"\n", b"\r", b"=", b"#", b"-", b".", b"\\"),
    *(b"null", b"true", b"NaN", b"Infinity", b"-1", b"1e999", b"-0", b"0", b"1e9", b"1000000000"),
    *(b"\x00", b"\xff", b"\xc3\x28", b"\xef\xbb\xbf", b"\\ud800", b"\xed\xa0\x80", b"\xe2\x80\xa8"),
    *(
        b"9" * 30,
        b"9" * 5000,
        b"[" * 3000,
        b'{"a":' * 3000,
        b"F" * 100,
        b"!!python/object:os.system",
    ),
    *(
        b"&a [*a, *a]",
        b"<<: *a",
        b"0F999999999",
        b"999999999F0",
        b"2999-99-99T99:99:99Z",
        b"''''''",
    ),
]
_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf")),
    *("", "inf", "F32", "../../x", "\ud800", "x" * 300, [], {}, [[]], [None], {"": {}}, [1, "a"]),
    *(10**9, [10**9], [[1e9, 2]], {"__pairs__": 3}, {"__pairs__": [[[], 1]]}, [0.5, 0.5, 0.5, 0.5]),
]


def damage(content: bytes, rng: random.Random) -> bytes:
    """Return the content with one to three faults: in its bytes, or in the values of its JSON."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.5:
            content = _damage_values(content, rng)
        else:
            content = _damage_bytes(content, rng)
    return content


def _damage_bytes(content: bytes, rng: random.Random) -> bytes:
    begin = rng.randrange(len(content) + 1)
    end = min(begin + rng.choice((1, 1, 2, 8, 64)), len(content))
    match rng.randrange(6):
        case 0:
            return content[:begin] + rng.choice(_PIECES) + content[begin:]
        case 1:
            return content[:begin] + rng.choice(_PIECES) + content[end:]
        case 2:
            return content[:begin] + content[end:]
        case 3:
            return content[:end] + content[begin:]
        case 4:
            return content[:begin]
    return content[:begin] + rng.randbytes(end - begin) + content[end:]


def _damage_values(content: bytes, rng: random.Random) -> bytes:
    """Replace, remove or add a value somewhere in the JSON; other contents as if in bytes."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        return _damage_bytes(content, rng)
    places = list(_places(values))
    if not places:
        return json.dumps(rng.choice(_VALUES)).encode()
    holder, key = rng.choice(places)
    match rng.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            text = json.dumps(values)
            return text.replace(
                json.dumps(key), f"{json.dumps(key)}: 1, {json.dumps(key)}"
            ).encode()
        case 2 if isinstance(holder, list):
            holder.insert(key, rng.choice(_VALUES))
        case _:
            holder[key] = rng.choice(_VALUES)
    return json.dumps(values).encode(errors="surrogatepass")


def _places(value: Any) -> Any:
    """Yield each list or dict in a value, with each of its keys."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from _places(value[key])
