"""The table of blocks: the recipe's `model.block`."""

from lion.layers.block import Block, PreNorm
from lion.layers.post_norm import PostNorm
from lion.layers.s5 import S5Block

BLOCKS: dict[str, type[Block]] = {"pre_norm": PreNorm, "post_norm": PostNorm, "s5": S5Block}
