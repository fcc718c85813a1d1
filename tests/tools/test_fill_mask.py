"""Tests of `predict` with a masked language model: tokens for masks in text."""

import pytest
import tokenizers
import torch

import lion
from data.text.tokenizers import Tokenizer, open_tokenizer
from lion.runs import open_run
from tests.helpers import here, printed, refuse
from tests.tools.untrained import text_info, untrained
from tools.compose import resolve
from tools.export.transformers import dressed
from tools.fill_mask import shown

BYTES = open_tokenizer("bytes")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make an untrained run on bytes, with 12 positions."""
    folder = tmp_path_factory.mktemp("fill")
    small = "model.dim=12 model.depth=1 model.num_heads=2 model.max_positions=12 data.length=12 trainer.compile=false"
    data = ["data.name=text", "data.tokenizer=bytes", f"run.root={folder}", "run.name=run"]

    def change(model):
        model.head.bias.data.normal_()
        model.head.bias.data[BYTES.encode("abcdefghijklmnop")] += 20  # likely tokens are printable
        model.positions.weight.data.normal_()

    return untrained(resolve("mlm_tiny_softmax", small.split() + data), text_info(BYTES, 12), change)


@torch.no_grad()
def test_the_likeliest_tokens_stand_for_each_mask(run, capsys):
    _, _, *rows = printed(capsys, "predict", run, "a[MASK]b[MASK]", "[MASK]", "--top", 2).splitlines()
    model, mask = lion.load(run, compile=False), BYTES.special["mask"]
    before, after = BYTES.frame
    a, b = BYTES.encode("ab")
    wanted = []
    for row in ([*before, a, mask, b, mask, *after], [*before, mask, *after]):
        shares = model(torch.tensor([row]))[0].softmax(-1)
        wanted += [shares[i].topk(2) for i, token in enumerate(row) if token == mask]
    places = [["a[MASK]b[MASK]", "(1)"], ["a[MASK]b[MASK]", "(2)"], ["[MASK]"]]
    for row, place, found in zip(rows, places, wanted, strict=True):
        answers = []
        for share, token in zip(found.values.tolist(), found.indices):
            answers += f"{BYTES.decode([token])} {100 * share:.1f}%".split()
        assert row.split() == place + answers


def test_a_mask_takes_the_blank_before_it_if_its_tokenizer_does(run, capsys, monkeypatch):
    """Byte-level tokenizers of RoBERTa's kind give the blank before a word to the word, and so to the mask."""
    inner = tokenizers.Tokenizer.from_str(BYTES.inner.to_str())
    inner.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True, special=True)])
    monkeypatch.setattr("tools.fill_mask.open_tokenizer_of", lambda _: Tokenizer("bytes", inner))
    _, _, blank, none = printed(capsys, "predict", run, "a [MASK] b", "a[MASK] b", "--top", 3).splitlines()
    assert blank.split()[3:] == none.split()[2:]
    exported = dressed(Tokenizer("bytes", inner), open_run(run).model)[0].get_added_tokens_decoder()
    assert {token.content: token.lstrip for token in exported.values()}["[MASK]"]


def test_blanks_and_bytes_are_seen():
    for token, text in {"paris": "paris", " paris": "' paris'", "\n": r"'\n'", "": "''", "##s": "##s"}.items():
        assert shown(token) == text


def test_what_cannot_be_answered_keeps_no_other_from_its_answer(run, capsys):
    assert "'nothing': expected at least one [MASK]" in refuse(capsys, "predict", run, "nothing")
    assert here("predict", run, "far too long a text for this [MASK]", "x[MASK]", "--eager") == 2
    out = capsys.readouterr()
    assert "only 12 position embeddings" in out.err and out.err.count("\n") == 1
    assert out.out.splitlines()[2].startswith("x[MASK]")
