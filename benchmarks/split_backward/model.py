"""The stage that is measured: transformer blocks, plain or checkpointed."""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HEADS = 4


@dataclass(frozen=True)
class Size:
    blocks: int
    width: int
    batch: int
    tokens: int
    rounds: int
    is_checkpointed: bool = False


SIZES = {
    "S": Size(4, 64, 1, 16, rounds=600),
    "M": Size(4, 256, 2, 64, rounds=120),
    "L": Size(4, 512, 4, 128, rounds=25),
    "M checkpointed": Size(4, 256, 2, 64, rounds=60, is_checkpointed=True),
}


class Block(nn.Module):
    """LayerNorm, fused qkv, attention, output linear, LayerNorm, 4x MLP; all with biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, width // HEADS)
        attended = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stage(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.blocks))
        self.is_checkpointed = size.is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x
