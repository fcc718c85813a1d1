"""Tests of `predict` with a masked language model: tokens for masks in text."""

import pytest
import tokenizers
import torch

import lion
from data.text.tokenizers import Tokenizer, open_tokenizer
from lion.runs import open_run
from lion.samples.text import TextInfo
from tests.helpers import here, refuse
from tools.compose import make_task, resolve
from tools.convert import write_run
from tools.export.transformers import dressed
from tools.fill_mask import shown


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Make an untrained run on bytes, with 12 positions."""
    folder = tmp_path_factory.mktemp("fill")
    small = ["model.dim=12", "model.depth=1", "model.num_heads=2", "model.max_positions=12", "data.length=12"]
    text = ["data.name=text", "data.tokenizer=bytes", "trainer.compile=false", f"run.root={folder}", "run.name=run"]
    recipe, tokenizer = resolve("mlm_tiny_softmax", small + text), open_tokenizer("bytes")
    info = TextInfo(tokenizer.vocabulary, 12, "bytes", tokenizer.fingerprint, tokenizer.special)
    torch.manual_seed(0)
    model = make_task(recipe, info).build_model(recipe.model)
    model.head.bias.data.normal_()
    model.head.bias.data[tokenizer.encode("abcdefghijklmnop")] += 20  # likely tokens are printable
    model.positions.weight.data.normal_()
    write_run(recipe.folder, recipe, {"info": info.to_dict(), "model": model.state_dict(), "ema": None}, {}, {})
    return folder / "run"


@torch.no_grad()
def test_the_likeliest_tokens_stand_for_each_mask(run, capsys):
    assert here("predict", run, "a[MASK]b[MASK]", "[MASK]", "--top", 2) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    tokenizer, model = open_tokenizer("bytes"), lion.load(run, compile=False)
    mask = tokenizer.special["mask"]
    before, after = tokenizer.frame
    a, b = tokenizer.encode("ab")
    ids = [*before, a, mask, b, mask, *after]
    wanted = []
    for row in (ids, [*before, mask, *after]):
        shares = model(torch.tensor([row]))[0].softmax(-1)
        wanted += [shares[i].topk(2) for i, token in enumerate(row) if token == mask]
    assert [row.split()[:-4] for row in rows] == [["a[MASK]b[MASK]", "(1)"], ["a[MASK]b[MASK]", "(2)"], ["[MASK]"]]
    for row, found in zip(rows, wanted):
        answers = [f"{tokenizer.decode([i])} {100 * p:.1f}%" for p, i in zip(found.values.tolist(), found.indices)]
        assert row.split() == row.split()[:-4] + " ".join(answers).split()


def test_a_mask_takes_the_blank_before_it_if_its_tokenizer_does(run, capsys, monkeypatch):
    """Byte-level tokenizers of RoBERTa's kind give the blank before a word to the word, and so to the mask."""
    inner = tokenizers.Tokenizer.from_str(open_tokenizer("bytes").inner.to_str())
    inner.add_special_tokens([tokenizers.AddedToken("[MASK]", lstrip=True, special=True)])
    monkeypatch.setattr("tools.fill_mask.open_tokenizer_of", lambda _: Tokenizer("bytes", inner))
    assert here("predict", run, "a [MASK] b", "a[MASK] b", "--top", 3) == 0
    _, _, blank, none = capsys.readouterr().out.splitlines()
    assert blank.split()[3:] == none.split()[2:]
    exported = dressed(Tokenizer("bytes", inner), open_run(run).model)[0].get_added_tokens_decoder()
    assert {token.content: token.lstrip for token in exported.values()}["[MASK]"]


def test_blanks_and_bytes_are_seen():
    assert [shown(token) for token in ("paris", " paris", "\n", "", "##s")] == [
        "paris",
        "' paris'",
        r"'\n'",
        "''",
        "##s",
    ]


def test_what_cannot_be_answered_keeps_no_other_from_its_answer(run, capsys):
    assert "'nothing': expected at least one [MASK]" in refuse(capsys, "predict", run, "nothing")
    assert here("predict", run, "far too long a text for this [MASK]", "x[MASK]", "--eager") == 2
    out = capsys.readouterr()
    assert "only 12 position embeddings" in out.err and out.err.count("\n") == 1
    assert out.out.splitlines()[2].startswith("x[MASK]")
