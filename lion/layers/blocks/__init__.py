"""The table of blocks: the recipe's `model.block`."""

from lion.layers.blocks.adaln import AdaLNZero
from lion.layers.blocks.base import Block, PreNorm
from lion.layers.blocks.post_norm import PostNorm
from lion.layers.blocks.s5 import S5Block

BLOCKS: dict[str, type[Block]] = {
    "adaln_zero": AdaLNZero,
    "post_norm": PostNorm,
    "pre_norm": PreNorm,
    "s5": S5Block,
}
