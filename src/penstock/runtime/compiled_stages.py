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
        stage.refresh()
        place = f"stage {stage.stage_index} on rank {stage.group_rank}"
        if stage.is_compiled:
            raise StageError(
                f"compile is True, but a part of {place} is compiled already. Expected stages "
                "without compiled parts. Leave compile out, or pass modules that are not compiled."
            )
        if stage.is_sharded:
            raise StageError(
                f"compile is True, but {place} is sharded by fully_shard or replicate. Expected "
                "modules that are compiled before they are sharded. Call penstock.compile on "
                "them, then fully_shard."
            )
    backend = make_backend()
    for stage in stages:
        compile_in_place(unwrapped(stage.submod), backend=backend)
