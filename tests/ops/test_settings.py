"""The settings object of every entry point, and masks that are prepared once per batch."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lion.ops import (
    Gates,
    SegmentIndex,
    Settings,
    initial_state,
    linear_attention,
    linear_attention_parts,
    multi_scan_attention,
    prefill,
    segment_index,
    step,
)
from lion.ops.settings import NAMES

from .helpers import SMALL_FORMS, case, make, pairwise

LENGTH = 12
INPUTS = make("S", LENGTH)
ORDERS = torch.stack([torch.arange(LENGTH), torch.arange(LENGTH).flip(0)])
SEGMENTS = torch.tensor([[3] * 5 + [-1] + [1] * 6, [-1] * 2 + [0] * 10])
VALID = torch.arange(LENGTH).expand(2, -1) % 5 != 2


def one_step(q, k, v, log_decay, **arguments):
    return step(q, k, v, initial_state(k, v), log_decay, **arguments)


def scans(q, k, v, log_decay, **arguments):
    return multi_scan_attention(q, k, v, [log_decay, log_decay.flip(2)], ORDERS, **arguments)


ENTRIES = {
    "linear_attention": linear_attention,
    "linear_attention_parts": linear_attention_parts,
    "multi_scan_attention": scans,
    "prefill": prefill,
    "step": one_step,
}
UNUSED = {  # fields that do not apply to an entry point
    "linear_attention": {"scan_merge"},
    "linear_attention_parts": {"scan_merge", "scale", "eps"},
    "multi_scan_attention": set(),
    "prefill": {"form", "direction", "dropout_p", "scan_merge"},
    "step": {"form", "direction", "dropout_p", "scan_merge", "chunk_size"},
}
OTHER = Settings(  # another value of every field, except of the delta rule
    form="full",
    direction="forward",
    normalize="max",
    decay_convention="target",
    feature_map="elu1",
    scale=0.3,
    chunk_size=3,
    eps=20.0,
    dropout_p=0.5,
    scan_merge="outputs",
)
every_entry = pytest.mark.parametrize("entry", ENTRIES)


def run(entry: str, **arguments) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if "settings" not in arguments:
        arguments.setdefault("feature_map", None)
    return tensors(ENTRIES[entry](*INPUTS[:4], **arguments))


def tensors(out) -> list[torch.Tensor]:
    return [x for x in tree_leaves(out) if x is not None]


def same(got: list, expected: list) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


@every_entry
def test_an_object_or_its_fields(entry):
    """Check settings as an object, as fields, and as an object with one overridden field."""
    fields = {name: getattr(OTHER, name) for name in NAMES if name not in UNUSED[entry]}
    expected = run(entry, settings=OTHER)
    assert same(run(entry, **fields), expected)
    assert not same(run(entry), expected)
    for name, value in fields.items():
        back = dataclasses.replace(OTHER, **{name: getattr(Settings(feature_map=None), name)})
        assert same(run(entry, settings=back, **{name: value}), expected), name


@every_entry
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("form", "chunk_size", "kernels")])
def test_every_field_matters_or_is_refused(entry, name):
    settings = Settings(normalize="none", scale=0.5)  # the normalisation that accepts a scale
    if name in ("eps", "scan_merge"):
        settings = Settings(eps=1e-6, feature_map=None)
    change = {name: getattr(OTHER, name)}
    if name in UNUSED[entry]:
        with pytest.raises(ValueError, match=f"^{name}: not a setting here, "):
            run(entry, **change)
    elif name == "undecayed_erase":
        with pytest.raises(ValueError, match=r"^undecayed_erase: only the delta rule erases"):
            run(entry, undecayed_erase=True)
    else:
        assert not same(run(entry, settings=settings), run(entry, settings=settings, **change))


@every_entry
def test_a_name_that_is_none(entry):
    with pytest.raises(ValueError, match=r"^decay_conventoin: not a setting here, did you mean 'decay_convention'"):
        run(entry, decay_conventoin="source")
    with pytest.raises(ValueError, match=r"^normalise: not a setting here, did you mean 'normalize'"):
        run(entry, normalise="sum")


@every_entry
def test_row_sums_ask_for_a_feature_map(entry):
    """Check that row sums require the argument `feature_map`, whatever q and k contain; None means already mapped."""
    call = ENTRIES[entry]
    for normalize in ("sum", "pre"):
        for given in (dict(normalize=normalize), dict(settings=Settings(normalize=normalize))):
            with pytest.raises(ValueError, match=r"^feature_map: normalize='(sum|pre)' .*silu_shifted, .*or None if"):
                call(*INPUTS[:4], **given)
        assert same(tensors(call(*INPUTS[:4], normalize=normalize, feature_map=None)), run(entry, normalize=normalize))
    for normalize in ("max", "none"):
        assert same(tensors(call(*INPUTS[:4], normalize=normalize)), run(entry, normalize=normalize))


@every_entry
@pytest.mark.parametrize("bad", (None, {}, dict(form="chunk"), "chunk"), ids=str)
def test_settings_that_are_none(entry, bad):
    for fields in ({}, dict(normalize="none")):
        with pytest.raises(ValueError, match=r"^settings: expected lion\.ops\.Settings, or its fields by name, got"):
            run(entry, settings=bad, **fields)


@pytest.mark.parametrize(
    "bad, hint",
    [
        (dict(is_causal=True), 'is_causal: not a setting here, direction="forward"'),
        (dict(attn_mask=None), "attn_mask: not a setting here, valid .B, L. marks padding"),
        (dict(key_padding_mask=VALID), "key_padding_mask: not a setting here, use valid"),
        (dict(feature_map="elu"), "feature_map: expected one of .*, got 'elu', did you mean 'elu1'"),
        (dict(form="recurrent"), "form: expected one of full, chunk, rnn, auto, got 'recurrent', did you mean 'rnn'"),
    ],
    ids=str,
)
def test_names_of_sdpa_and_others(bad, hint):
    with pytest.raises(ValueError, match=f"^{hint}"):
        INPUTS.on(linear_attention, **bad)


@pytest.mark.parametrize(
    "name, value",
    [
        ("form", "fast"),
        ("direction", "up"),
        ("normalize", "softmax"),
        ("decay_convention", "eq14"),
        ("feature_map", "exp"),
        ("chunk_size", 0),
        ("chunk_size", 2.5),
        ("chunk_size", "64"),
        ("chunk_size", None),
        ("chunk_size", True),
        ("scale", "1"),
        ("eps", -1.0),
        ("eps", float("nan")),
        ("eps", "1"),
        ("dropout_p", "0.1"),
        ("dropout_p", 1.5),
        ("scan_merge", "sum"),
        ("form", ["full"]),
        ("form", {}),
        ("feature_map", {"full"}),
        ("normalize", ["full"]),
    ],
)
def test_settings_check_themselves(name, value):
    with pytest.raises(ValueError, match=f"^{name}: .*got"):
        Settings(**{name: value})


def test_settings_that_exclude_each_other_and_frozen_ones():
    with pytest.raises(ValueError, match=r"^dropout_p: .*got"):
        Settings(dropout_p=0.1, form="rnn")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().form = "rnn"


@pytest.mark.parametrize("name", NAMES)
def test_every_field_is_explained(name):
    assert f"        {name}: " in Settings.__doc__


@pytest.mark.compiled
def test_settings_in_a_graph():
    torch._dynamo.reset()
    settings = dataclasses.replace(OTHER, dropout_p=0.0)

    def every_call(q, k, v, log_decay):
        return [call(q, k, v, log_decay, settings=settings, normalize="sum") for call in ENTRIES.values()]

    compiled = torch.compile(every_call, fullgraph=True, backend="eager")
    expected = tensors(every_call(*INPUTS[:4]))
    for got, want in zip(tensors(compiled(*INPUTS[:4])), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-12)
    torch._dynamo.reset()


# Masks


class Sorts(TorchDispatchMode):
    """A counter of operators that sort, gather or assert."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(word in func.__name__ for word in ("sort", "cummax", "_assert", "_local_scalar"))
        return func(*args, **(kwargs or {}))


MASKED = ("linear_attention", "linear_attention_parts", "prefill")
KINDS = {"decay": INPUTS, "delta": case(make("lit", LENGTH), "beta")}


@pytest.mark.parametrize(
    "entry, valid, segments, kind, form",
    pairwise(MASKED, (None, VALID), (SEGMENTS, None), tuple(KINDS), tuple(SMALL_FORMS)),
)
def test_prepared_masks_are_the_masks(entry, valid, segments, kind, form):
    """Check that prepared masks give bitwise equal results, without sorting or checking again."""
    how = {} if entry == "prefill" else SMALL_FORMS[form]
    expected = KINDS[kind].on(ENTRIES[entry], valid=valid, segments=segments, normalize="none", **how)
    prepared = segment_index(valid, segments)
    with Sorts() as sorts:
        got = KINDS[kind].on(ENTRIES[entry], segments=prepared, normalize="none", **how)
    assert same(tensors(got), tensors(expected))
    assert sorts.count == 0
    with Sorts() as sorts:
        segment_index(valid, SEGMENTS)
    assert sorts.count > 0  # the counter must see such operators


def test_an_index():
    index, valid = segment_index(None, torch.tensor([[7, 7, -1, 7, 2], [-1, 0, 0, -1, -1]]))
    assert index.tolist() == [[1, 1, 1, 1, 2], [0, 1, 1, 1, 1]]
    assert valid.tolist() == [[True, True, False, True, True], [False, True, True, False, False]]
    assert segment_index(None, None) == SegmentIndex(None, None)
    assert segment_index(VALID, None) == SegmentIndex(None, VALID)


@pytest.mark.parametrize(
    "valid, segments, message",
    [
        (torch.ones(5, dtype=torch.bool), None, r"^valid: expected \(B, L\)"),
        (torch.ones(2, 5), None, "^valid: expected bool"),
        (None, torch.zeros(5, dtype=torch.long), r"^segments: expected \(B, L\)"),
        (None, torch.zeros(2, 5), "^segments: expected integer"),
        (torch.ones(2, 4, dtype=torch.bool), torch.zeros(2, 5).long(), r"^segments: expected integer \(2,"),
        (None, torch.tensor([[0, 1, 0]]), "^segments: the tokens of a segment must be contiguous"),
    ],
)
def test_masks_that_are_none(valid, segments, message):
    with pytest.raises(ValueError, match=message):
        segment_index(valid, segments)


@pytest.mark.parametrize("entry", MASKED)
def test_prepared_masks_of_other_tokens(entry):
    with pytest.raises(ValueError, match=r"^segments: expected a SegmentIndex of shape \(2, 12\)"):
        run(entry, segments=segment_index(None, SEGMENTS[:, :9]))
    with pytest.raises(ValueError, match=r"^valid: prepared segments already contain it"):
        run(entry, valid=VALID, segments=segment_index(None, SEGMENTS))


def test_gates_are_one_object_a_tensor_or_names():
    """Check that all ways to pass gates agree, that a gate is passed once, and that a prefix is refused elsewhere."""
    q, k, v, log_decay = INPUTS[:4]
    bonus = torch.full((q.shape[1],), 0.5, dtype=q.dtype)
    want = linear_attention(q, k, v, Gates(log_decay, bonus=bonus), feature_map="relu")
    assert torch.equal(want, linear_attention(q, k, v, log_decay, bonus=bonus, feature_map="relu"))
    assert torch.equal(want, linear_attention(q, k, v, bonus=bonus, log_decay=log_decay, feature_map="relu"))
    with pytest.raises(ValueError, match="bonus: passed twice, in gates and by name"):
        linear_attention(q, k, v, Gates(log_decay, bonus=bonus), bonus=bonus, feature_map="relu")
    with pytest.raises(ValueError, match="prefix: only linear_attention and prefill take it"):
        linear_attention_parts(q, k, v, prefix=q, feature_map="relu")
