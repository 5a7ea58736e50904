"""Cut a batch into microbatches, join their results, and weigh their losses."""

import penstock.torch_private  # noqa: F401 (checks torch)
from penstock.microbatches.chunk_specs import Replicate, TensorChunkSpec
from penstock.microbatches.merging import merge_chunks
from penstock.microbatches.splitting import split_args_kwargs_into_chunks

__all__ = [
    "Replicate",
    "TensorChunkSpec",
    "merge_chunks",
    "split_args_kwargs_into_chunks",
]
