"""All private names of torch are in one module, which says which of them a torch lacks."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from imports import SOURCE_FILES, SRC, name_file
from penstock import torch_private
from penstock.backward.sources import _MATRIX_NODES
from penstock.errors import TorchError
from penstock.torch_private import (
    NAMES,
    NAMES_LOADED_LATE,
    NAMES_OF_OBJECTS,
    missing_names,
    newest_name,
)
from penstock.torch_private.compiler import NAMES_OF_COMPILER
from penstock.torch_private.fsdp2 import (
    NAMES_BEFORE_2_15,
    NAMES_OF_FSDP2,
    NAMES_OF_FSDP2_OBJECTS,
    NAMES_SINCE_2_15,
    OPTIONAL_NAMES,
)
from torch_names import private_names

THE_ONE = SRC / "penstock" / "torch_private"
THE_MIRROR = SRC / "penstock" / "compat"  # It has the names of torch.distributed.pipelining.
OF_TRANSFORMERS = SRC / "penstock" / "parallel" / "transformers_parts.py"  # And its private names.
OF_PIPELINES = SRC / "penstock" / "runtime" / "pipeline_successor.py"  # And theirs.
ALL_NAMES = [
    *NAMES,
    *NAMES_LOADED_LATE,
    *NAMES_OF_OBJECTS,
    *NAMES_OF_COMPILER,
    *NAMES_OF_FSDP2,
    *NAMES_OF_FSDP2_OBJECTS,
    *NAMES_BEFORE_2_15,
    *NAMES_SINCE_2_15,
    *OPTIONAL_NAMES,
]
DOTTED = [name.replace(":", ".") for name in ALL_NAMES]
ATTRIBUTES = {name.rpartition(".")[2] for name in ALL_NAMES if "." in name.partition(":")[2]} - {
    "default"
}


def find(source: str) -> list[str]:
    return private_names(source, DOTTED, ATTRIBUTES)


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCE_FILES if path.parent not in (THE_ONE, THE_MIRROR)],
    ids=name_file,
)
def test_file_names_nothing_private_of_torch(path: Path) -> None:
    """Import it from penstock.torch_private, which says why it is needed."""
    found = find(path.read_text())
    if path in (OF_TRANSFORMERS, OF_PIPELINES):
        found = [name for name in found if name.startswith("torch.") or name in ATTRIBUTES]
    assert [] == found


@pytest.mark.parametrize("path", sorted(THE_MIRROR.glob("*.py")), ids=name_file)
def test_file_of_the_mirror_names_nothing_else_private_of_torch(path: Path) -> None:
    found = [name for name in find(path.read_text()) if name.startswith("torch.")]
    assert [] == [name for name in found if not name.startswith("torch.distributed.pipelining.")]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch.utils import _pytree as pytree", ["torch.utils._pytree"]),
        ("from torch._ops import OpOverload", ["torch._ops.OpOverload"]),
        ("def f():\n    from torch.utils._pytree import keystr", ["torch.utils._pytree.keystr"]),
        ("import torch\ntorch._C._autograd", ["torch._C", "torch._C._autograd"]),
        ("from torch import nn\nnn.Module._load", ["torch.nn.Module._load"]),
        ("import torch.distributed as d\nd._x(1)", ["torch.distributed._x"]),
        (
            "from torch.utils.checkpoint import CheckpointFunction",
            ["torch.utils.checkpoint.CheckpointFunction"],
        ),
        ("a = torch.ops.aten\na._unsafe_view.default", ["_unsafe_view"]),
        (
            "class A:\n    def f(self, m):\n        self._parameters = m._parameters",
            ["_parameters"],
        ),
        ("module.weight._base", ["_base"]),
        ("ddp.reducer", ["reducer"]),
        ("getattr(node, '_saved_' + name)", ["_saved_"]),
        ("vars(module)['_buffers']", ["_buffers"]),
        ("print('see torch.utils._pytree.keystr.')", ["torch.utils._pytree.keystr"]),
        ("import torch\ntorch.__version__, torch.nn.Module.__call__", []),
        ("from penstock.torch_private import pytree\npytree.keystr", []),
        ("class A:\n    def _f(self, other):\n        return self._g or other._f()", []),
        ("os._exit(1), row._asdict(), row._replace(a=1)", []),
    ],
)
def test_private_name_would_be_found(source: str, expected: list[str]) -> None:
    assert expected == find(source)


def test_this_torch_has_every_name() -> None:
    assert [] == missing_names(NAMES)


def test_this_torch_has_every_name_that_is_loaded_late_or_that_objects_have() -> None:
    """Apart, as it loads torch's compiler and its sharding, which other tests do without."""
    code = (
        "import torch, torch.distributed as dist\n"
        "from penstock import torch_private as private\n"
        "from penstock.torch_private import fsdp2\n"
        "print(private.missing_names(private.NAMES_LOADED_LATE))\n"
        "module = torch.nn.Linear(1, 1)\n"
        "compiled = torch.compile(module)\n"
        "print(private.is_optimized_module(compiled), private.is_optimized_module(module))\n"
        "print(private.original_module(compiled) is module, private.original_module(module))\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "ddp = torch.nn.parallel.DistributedDataParallel(module)\n"
        "private.prepare_reducer(ddp)\n"
        "module.weight.sum().backward()\n"
        "print(private.unready_parameters(ddp))\n"
        "sharded = torch.distributed.fsdp.fully_shard(torch.nn.Linear(1, 1, device='cpu'),"
        " mesh=dist.init_device_mesh('cpu', (1,)))\n"
        "state, [group] = fsdp2.sharded_state(sharded), fsdp2.ShardedGroup.all_of([sharded])\n"
        "fsdp2.prepare_sharded_state(state)\n"
        "fsdp2.set_backward_ending(state, fsdp2.backward_ending(state))\n"
        "group.settings = group.settings\n"
        "group.gather()\n"
        "group.accumulate()\n"
        "print(group.mesh.size(), group.is_gathered, len(list(group.gathered_parameters())))\n"
        "group.free()\n"
        "group.grads = group.grads\n"
        "group.end_backward()\n"
        "group.drop_grads()\n"
        "print(group.has_unreduced_grads)\n"
        "fsdp2.finish_sharded_backward(state)\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
    assert [
        "[]",
        "True False",
        "True None",
        "[1]",
        "1 True 2",
        "False",
    ] == done.stdout.splitlines()


def test_every_private_name_of_the_module_is_checked() -> None:
    source = "\n".join(path.read_text() for path in sorted(THE_ONE.glob("*.py")))
    checked = {*DOTTED, *ATTRIBUTES}
    while parents := {name.rpartition(".")[0] for name in checked} - checked:
        checked |= parents
    found = [name for name in find(source) if not name.startswith(("_saved_", "_raw_saved_"))]
    assert [] == [name for name in found if name not in checked]


def test_every_name_of_pytree_that_is_used_is_checked() -> None:
    used = {
        node.attr
        for path in SOURCE_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "pytree"
    }
    used.add(torch_private.REGISTER_PYTREE_NODE.rpartition(".")[2])
    module = "torch.utils._pytree:"
    assert {f"{module}{name}" for name in used} == {n for n in NAMES if n.startswith(module)}


@pytest.mark.parametrize("kind", _MATRIX_NODES, ids=lambda kind: kind.__name__)
def test_everything_that_a_matrix_product_saves_is_checked(kind: type) -> None:
    node = _MATRIX_NODES[kind]
    expected = set()
    for factor in (node.left.name, node.right.name):
        expected |= {f"_saved_{factor}", f"_raw_saved_{factor}"}
        if node.is_2d:
            expected |= {f"_saved_{factor}_sym_sizes", f"_saved_{factor}_sym_strides"}
    if node.left_edge:
        expected |= {"_saved_alpha", "_saved_beta"}
    checked = {name.rpartition(".")[2] for name in NAMES if f".{kind.__name__}." in name}
    assert expected == checked


def test_missing_names_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "_foreach_add_")
    monkeypatch.setitem(sys.modules, "torch.utils._python_dispatch", None)
    monkeypatch.delitem(torch.nn.Module.__annotations__, "_buffers")
    expected = [
        "torch.nn.Module._buffers",
        "torch.utils._python_dispatch.TorchDispatchMode",
        "torch._foreach_add_",
    ]
    assert expected == missing_names(NAMES)
    assert ["torch.a.b", "torch.nn.Module._c.d"] == missing_names(
        ["torch:a.b", "torch.nn:Module._c.d"]
    )


def test_torch_that_lacks_names_is_one_error_at_every_use() -> None:
    code = (
        "import torch, penstock\n"
        "del torch._foreach_add_, torch._is_functional_tensor\n"
        "torch.__version__ = '2.19.0+cpu'\n"
        "for name in ('measure_costs', 'split_args_kwargs_into_chunks', 'Pipeline', 'Pipe'):\n"
        "    try:\n        getattr(penstock, name)\n"
        "    except penstock.errors.TorchError as error:\n        print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
    expected = (
        "torch 2.19.0+cpu has no torch._foreach_add_, torch._is_functional_tensor. Penstock needs "
        "these private names of torch, as they are in torch 2.13, 2.14 or 2.15. "
        'Install one of these versions with: pip install "torch>=2.13,<2.16".'
    )
    assert [expected] * 4 == done.stdout.splitlines()


# What a program does, each with a name that it needs and that is not there.
COMPILE = """
import torch, torch._inductor.compile_fx
del torch._inductor.compile_fx.compile_fx_inner, torch._C._DisableAutocast
import penstock
use = lambda: penstock.compile(torch.nn.Linear(1, 1))(torch.ones(1, 1))
"""
SHARD = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.init_device_mesh("cpu", (1,))
module = fully_shard(torch.nn.Linear(1, 1), mesh=mesh)
import penstock
use = lambda: penstock.PipelineStage(module, 0, 1, "cpu", group=mesh.get_group())
"""
NOT_IN_THE_CLASS = "del FSDPParamGroup.wait_for_unshard, FSDPParamGroup.is_unsharded"
NEITHER_OLD_NOR_NEW = """
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
for name in ("to_accumulated_grad_if_needed", "unsharded_grad_dtype"):
    if hasattr(FSDPParam, name):
        delattr(FSDPParam, name)
"""
NOT_IN_THE_OBJECT = "del module._get_fsdp_state()._fsdp_param_groups[0].comm_ctx"
REPORT = """
try:
    use()
except penstock.errors.TorchError as error:
    print(error)
import os, sys
sys.stdout.flush()
os._exit(0)  # What lacks names cannot be taken down in order.
"""
_FSDP2 = "torch.distributed.fsdp._fully_shard"
_GROUP = f"{_FSDP2}._fsdp_param_group.FSDPParamGroup"


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        (COMPILE, "torch._inductor.compile_fx.compile_fx_inner, torch._C._DisableAutocast"),
        (SHARD + NOT_IN_THE_CLASS, f"{_GROUP}.wait_for_unshard, {_GROUP}.is_unsharded"),
        (SHARD + NEITHER_OLD_NOR_NEW, f"{_FSDP2}._fsdp_param.FSDPParam.unsharded_grad_dtype"),
        (SHARD + NOT_IN_THE_OBJECT, f"{_GROUP}.comm_ctx"),
    ],
    ids=["compiler", "fsdp2, a class", "fsdp2, old or new", "fsdp2, an object"],
)
def test_torch_that_lacks_names_of_a_part_is_one_error_where_the_part_is_used(
    code: str, missing: str
) -> None:
    done = subprocess.run([sys.executable, "-c", code + REPORT], capture_output=True, text=True)
    expected = (
        f"torch {torch.__version__} has no {missing}. Penstock needs these private names of torch, "
        "as they are in torch 2.13, 2.14 or 2.15. "
        'Install one of these versions with: pip install "torch>=2.13,<2.16".\n'
    )
    assert expected == done.stdout, done.stderr


@pytest.mark.parametrize(
    "path", [path for path in SOURCE_FILES if path.parent != THE_ONE], ids=name_file
)
def test_only_one_folder_does_what_depends_on_the_version_of_torch(path: Path) -> None:
    assert path.name == "torch_version.py" or "is_before" not in path.read_text()


def test_missing_name_of_a_module_that_is_loaded_late_is_an_error_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = "torch.distributed._functional_collectives"
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(TorchError, match=rf"has no {package}.AsyncCollectiveTensor\. Penstock"):
        torch_private.async_collective_tensor()


def test_class_that_is_missing_from_a_loaded_module_is_an_error_rather_than_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    with pytest.raises(TorchError, match=r"has no torch\._dynamo\.OptimizedModule\. Penstock"):
        torch_private.is_optimized_module(torch.nn.Linear(1, 1))


def test_newest_name_is_taken_of_those_that_mean_the_same() -> None:
    assert "torch:Tensor" == newest_name("torch:Tensor", "torch:nn")
    assert "torch:nn" == newest_name("torch:Tensors", "torch:nn")
    assert "torch:Tensors" == newest_name("torch:Tensors", "torch:nns")


def test_class_whose_module_is_not_loaded_has_no_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert not torch_private.is_optimized_module(torch.nn.Linear(1, 1))
    assert not torch_private.is_compiler_loaded()
