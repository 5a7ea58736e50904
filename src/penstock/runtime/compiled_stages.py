"""Compile the modules of a rank's stages, for `Pipeline(compile=True)`."""

from collections.abc import Sequence

from penstock.compiling.module_compiler import make_backend
from penstock.errors import StageError
from penstock.stage import PipelineStage
from penstock.stage.stage_checks import unwrapped


def compile_stages(stages: Sequence[PipelineStage]) -> None:
    """Compile each stage's module in place, inside of its wrappers."""
    from penstock.torch_private.compiler import compile_in_place  # It takes seconds to load.

    for stage in stages:
        if stage.is_compiled:
            raise StageError(
                f"compile is True, but a part of stage {stage.stage_index} on rank "
                f"{stage.group_rank} is compiled already. Leave compile out, or compile no part."
            )
    backend = make_backend()
    for stage in stages:
        compile_in_place(unwrapped(stage.submod), backend=backend)
