import re

import torch

from lion.layers.layout import Layout, grid_layout, valid_of
from lion.layers.mixers import LionAttention

from .helpers import invalid

X = torch.randn(2, 6, 4)


def test_a_plain_sequence_has_nothing_to_say():
    assert Layout.of(X) == Layout() and Layout().positions_of(X).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert Layout().next_position(X).tolist() == [6, 6] and Layout().with_pairs(True).pairs is None


def test_positions_count_tokens_and_start_anew_with_each_segment():
    valid = torch.tensor([[False, True, True, False, True, True], [True] * 6])
    padded = Layout.of(X, valid)
    assert padded.positions[valid].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert padded.next_position(X).tolist() == [4, 6] and padded.segment_index is None
    packed = Layout.of(X, valid, torch.tensor([[7, 7, 7, 7, 3, 3], [0, 0, -1, 0, 5, 5]]))
    assert packed.valid.tolist() == [[False, True, True, False, True, True], [True, True, False, True, True, True]]
    assert packed.positions[packed.valid].tolist() == [0, 1, 0, 1, 0, 1, 2, 0, 1]
    assert packed.next_position(X).tolist() == [2, 2]


def test_boolean_segments_are_a_mask_of_padding():
    valid = torch.tensor([[False, True, True, False, True, True], [True] * 6])
    masks = Layout.of(X, segments=valid)
    segments = valid.long() - 1
    assert masks.segment_index is None and torch.equal(masks.valid, valid) and torch.equal(valid_of(valid), valid)
    assert torch.equal(valid_of(segments), valid)
    assert torch.equal(masks.positions[valid], Layout.of(X, segments=segments).positions[valid])


def test_pairs_keep_segments_apart():
    layout = Layout.of(X, segments=torch.tensor([[0, 0, 1, 1, 1, -1], [4, 4, 4, 4, 4, 4]]))
    for direction, seen in (("both", (-1, 0, 1)), ("forward", (-1, 0)), ("backward", (0, 1))):
        pairs = layout.with_pairs(direction).readable(direction)[:, 0]
        for row, i, j in ((r, i, j) for r in range(2) for i in range(6) for j in range(6)):
            ids = [[0, 0, 1, 1, 1, -1], [4] * 6][row]
            allowed = ids[i] == -1 or (ids[i] == ids[j] and ids[j] >= 0 and (j > i) - (j < i) in seen)
            assert pairs[row, i, j] == allowed, (direction, row, i, j)


def test_padding_is_cleaned_by_selection():
    x = X.clone()
    x[0, 3] = torch.nan
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[0, 3] = False
    assert Layout.of(x, valid).clean(x).isfinite().all() and Layout().clean(x) is x


def test_bad_masks_are_refused_once():
    invalid(r"valid: expected bool \(2, 6\)", Layout.of, X, torch.ones(2, 5, dtype=torch.bool))
    message = "segments: the tokens of a segment must be contiguous"
    invalid(message, Layout.of, X, segments=torch.tensor([[0, 1, 0, 1, 1, 1]] * 2))


def test_a_grid_can_have_padding_too():
    layout = grid_layout(1, 5).masked(X, torch.ones(2, 6, dtype=torch.bool))
    assert layout.coords.tolist() == [[-1, 0, 0, 0, 0, 0], [-1, 0, 1, 2, 3, 4]] and layout.valid is not None
    assert layout.special.tolist() == [True] + [False] * 5


def test_the_layout_of_other_tokens_is_refused():
    layer = LionAttention(12, 3)
    x = torch.randn(2, 7, 12)
    for other in (x[:1], x[:, :4], torch.randn(3, 7, 12)):
        layout = Layout.of(other, valid=torch.ones(other.shape[:2], dtype=torch.bool))
        made = re.escape(f"valid {tuple(other.shape[:2])} is of other tokens, got x of shape (2, 7)")
        invalid(f"layout: {made}", layer, x, layout)
    for name, shape in {"coords": (2, 6), "special": (6,), "orders": (2, 6), "positions": (3, 7)}.items():
        message = f"layout: {name} {re.escape(str(shape))} is of other tokens"
        invalid(message, layer, x, Layout(**{name: torch.zeros(shape, dtype=torch.long)}))


def test_masks_without_positions_are_refused():
    layer = LionAttention(12, 3)
    x = torch.randn(2, 7, 12)
    whole = Layout.of(x, segments=torch.zeros(2, 7, dtype=torch.long))
    for missing in ("valid", "positions"):
        invalid(r"need `valid` and `positions`, which Layout\.of", layer, x, whole._replace(**{missing: None}))
