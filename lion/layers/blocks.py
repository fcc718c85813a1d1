"""The table of blocks: the recipe's `model.block`."""

from lion.layers.adaln import AdaLNZero
from lion.layers.block import Block, PreNorm
from lion.layers.post_norm import PostNorm
from lion.layers.s5 import S5Block

BLOCKS: dict[str, type[Block]] = {
    "adaln_zero": AdaLNZero,
    "post_norm": PostNorm,
    "pre_norm": PreNorm,
    "s5": S5Block,
}
