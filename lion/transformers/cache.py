"""The cache of generation: the states of all layers, of constant size in linear mixers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import Cache


class LionCache(Cache):
    """The state of a stream, as the `cache` of `generate` (`past_key_values` before transformers 5.24).

    Attributes:
        state: State of the model (`lion.models.gpt.GPTState`) after the last token; None before the first token. Its
            size does not depend on the number of tokens, except with the mixers softmax and fox, which keep the keys
            and values of all tokens.
        seen: Number of tokens of a row so far, padding included.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: Any = None
        self.seen = 0

    def __len__(self) -> int:
        if self.state is None:
            return 0
        return len(self.state.blocks)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def is_linear(self) -> list[bool]:
        """Return [False]: `generate` then passes only tokens that the cache has not read."""
        return [False]

    @property
    def batch_size(self) -> int:
        if self.state is None:
            return -1
        return len(self.state.position)

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    def update_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a function of the rows (dimension 0) to every tensor of the state."""
        self.state = tree_map(change, self.state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.update_rows(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.update_rows(lambda x: x.repeat_interleave(repeats, 0))

    def reset(self) -> None:
        self.state = None
        self.seen = 0

    @property
    def is_croppable(self) -> bool:
        return False

    def crop(self, tokens_to_remove: int) -> NoReturn:
        raise ValueError("LionCache: a recurrent state cannot forget its last tokens; start again from the prompt")


def cache_of(output: Any) -> LionCache | None:
    """Return the cache of the output of a model."""
    if hasattr(output, "cache"):
        return output.cache
    return output.past_key_values
