"""Models cut into stages train as the whole model does, and keep its names.

All ranks are in this process; `tests/dist/test_cut_models_on_processes.py` has real ones.
"""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import penstock
from cut_models import CUT_MODELS
from cut_training import ROWS, CutRun, assert_like_whole, cut, train_cut
from fuzzing import IS_LONG, rotated
from penstock import Pipe

SCHEDULES = ["1F1B", "Interleaved1F1B", "ZB-V"]
every_model = pytest.mark.parametrize("name", CUT_MODELS)
# Each model is cut in one way, the same in all tests: to trace one takes long.
NUM_STAGES = {name: 2 + 2 * (number % 3 > 0) for number, name in enumerate(CUT_MODELS)}
every_cut = rotated(name=list(CUT_MODELS), num_stages=list(NUM_STAGES.values()))
ONE_STAGE_PER_LAYER = list(CUT_MODELS) if IS_LONG else ["conv", "tied-head"]


@cache
def _traced(name: str, num_stages: int) -> Pipe:
    return cut(CUT_MODELS[name], num_stages)


def _pipe(name: str, num_stages: int) -> Pipe:
    """As if new. Not traced anew each time, which would take longer than all else."""
    pipe = _traced(name, num_stages)
    state = CUT_MODELS[name].model(num_stages).state_dict()
    for module in _modules(pipe):
        module.load_state_dict({key: state[key] for key in module.state_dict()})
        module.zero_grad()
    return pipe


def check(run: CutRun) -> None:
    pipe = _pipe(run.model, run.num_stages)
    assert_like_whole(run, penstock.local_ranks(run.num_ranks, train_cut, run, pipe))


@rotated(name=list(CUT_MODELS), num_stages=list(NUM_STAGES.values()), schedule=SCHEDULES)
def test_cut_model_trains_as_whole(name: str, num_stages: int, schedule: str) -> None:
    check(CutRun(name, num_stages, schedule))


@pytest.mark.fuzz
@pytest.mark.parametrize("name", ONE_STAGE_PER_LAYER)
def test_one_stage_per_layer_trains_as_whole(name: str) -> None:
    check(CutRun(name, 8, "ZB-V", num_steps=2))


def _modules(pipe: Pipe) -> list[nn.Module]:
    return [pipe.get_stage_module(index) for index in range(pipe.num_stages)]


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


@every_cut
def test_stages_have_the_names_of_the_model(name: str, num_stages: int) -> None:
    model = CUT_MODELS[name].model(num_stages)
    modules = _modules(_pipe(name, num_stages))
    assert num_stages == len(modules)
    assert set(model.state_dict()) == {key for m in modules for key in m.state_dict()}
    params = dict(model.named_parameters(remove_duplicate=False))
    for module in modules:
        own = dict(module.named_parameters(remove_duplicate=False))
        assert set(own) <= set(params)
        assert {key: params[key].requires_grad for key in own} == {
            key: param.requires_grad for key, param in own.items()
        }


@every_cut
def test_state_dicts_go_from_the_model_to_stages_and_back(name: str, num_stages: int) -> None:
    model = CUT_MODELS[name].model(num_stages)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.rand(tensor.shape) * 9)
    state = model.state_dict()
    modules = _modules(_pipe(name, num_stages))
    for module in modules:
        module.load_state_dict({key: state[key] for key in module.state_dict()}, strict=True)
    gathered = {key: value for module in modules for key, value in module.state_dict().items()}
    blank = CUT_MODELS[name].model(num_stages)
    blank.load_state_dict(gathered, strict=True)
    for key, value in state.items():
        assert torch.equal(value, blank.state_dict()[key]), key


@every_model
def test_tracing_leaves_the_model_as_it_was_and_stages_hold_its_parameters(name: str) -> None:
    num_stages = NUM_STAGES[name]
    model = CUT_MODELS[name].model(num_stages)
    before = _state_of(model)
    random_state = torch.get_rng_state()
    pipe = cut(CUT_MODELS[name], num_stages, model)
    assert torch.equal(random_state, torch.get_rng_state())
    _assert_as_it_was(before, model)
    expected = _named_tensors(model)
    seen: dict[str, int] = {}
    for index, module in enumerate(_modules(pipe)):
        for key, tensor in _named_tensors(module).items():
            if not isinstance(tensor, nn.Parameter) or key not in seen:
                assert expected[key] is tensor, key
                seen[key] = index
            else:  # What an earlier stage holds too is copied.
                assert expected[key] is not tensor, key
                assert torch.equal(expected[key], tensor)
    assert set(expected) == set(seen)


@every_model
def test_pipe_gives_what_the_model_gives_to_the_last_bit(name: str) -> None:
    model = CUT_MODELS[name].model(NUM_STAGES[name])
    pipe = _pipe(name, NUM_STAGES[name])
    for step in range(2):
        args, kwargs, _ = CUT_MODELS[name].batch(ROWS, step)
        expected, actual = model(*args, **kwargs), pipe(*args, **kwargs)
        assert pytree.tree_structure(expected) == pytree.tree_structure(actual)
        for wanted, found in zip(
            pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True
        ):
            assert torch.equal(wanted, found)
            assert wanted.requires_grad == found.requires_grad


State = tuple[dict[str, nn.Module], dict[str, tuple[Tensor, Tensor, int]]]


def _state_of(model: nn.Module) -> State:
    """Its modules, and its tensors with their values and versions."""
    tensors = {key: (t, t.clone(), t._version) for key, t in _named_tensors(model).items()}
    return dict(model.named_modules()), tensors


def _assert_as_it_was(before: State, model: nn.Module) -> None:
    modules, tensors = before
    assert modules == dict(model.named_modules())
    assert tensors.keys() == _named_tensors(model).keys()
    for key, tensor in _named_tensors(model).items():
        same, value, version = tensors[key]
        assert same is tensor, key
        assert torch.equal(value, tensor), key
        assert version == tensor._version, key
        assert tensor.grad is None, key
    for module in modules.values():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_model_that_is_not_training_gives_stages_that_are_not() -> None:
    model = CUT_MODELS["conv"].model(2).eval()
    pipe = cut(CUT_MODELS["conv"], 2, model)
    assert not model.training
    assert not any(m.training for module in _modules(pipe) for m in module.modules())


def test_non_persistent_buffers_stay_so_in_every_stage() -> None:
    modules = _modules(_pipe("conv", 4))
    for module in modules:
        assert "ramp" in dict(module.named_buffers())
        assert "ramp" not in module.state_dict()
        assert "offset" in module.state_dict()


def test_several_pipes_of_one_model_share_its_parameters() -> None:
    model = CUT_MODELS["skip-many"].model(2)
    first, second = (cut(CUT_MODELS["skip-many"], n, model) for n in (2, 4))
    args, _, _ = CUT_MODELS["skip-many"].batch(ROWS, 0)
    with torch.no_grad():
        model.get_parameter("layers.3.weight").mul_(2)
    expected = model(*args)
    assert torch.equal(expected, first(*args))
    assert torch.equal(expected, second(*args))


def test_copy_of_a_stage_has_parameters_of_its_own() -> None:
    module = _pipe("conv", 2).get_stage_module(0)
    twin = copy.deepcopy(module)
    batch = CUT_MODELS["conv"].batch(ROWS, 0)
    for key, tensor in _named_tensors(twin).items():
        assert tensor is not _named_tensors(module)[key]
    expected, actual = (m(*batch.args, **batch.kwargs) for m in (module, twin))
    for wanted, found in zip(expected, actual, strict=True):
        assert torch.equal(wanted, found)
    before = _named_tensors(module)["layers.0.norm.running_mean"].clone()
    twin(*batch.args, **batch.kwargs)
    assert torch.equal(before, _named_tensors(module)["layers.0.norm.running_mean"])


def test_stage_starts_and_received_values_are_described() -> None:
    info = _pipe("tied-head", 2).info()
    assert 2 == info.num_stages
    assert ("embed.weight",) == info.stages[0].tied == info.stages[1].tied
    assert () == info.stages[0].receives
    assert "" == info.stages[0].starts_at
    assert "float64[2, 3, 4]" in info.stages[1].receives[0]
    assert "tied: embed.weight" in str(info)
