"""Tests of converting Hydra's masked language models, on a model that is written from their description."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lion
from data.text.tokenizers import make_tokenizer
from tests.helpers import printed, refuse
from tests.layers.test_hydra import oracle
from tests.tools.test_convert import Part

TEXT = ["The capital of France is Paris.", "Ask not what your country can do for you.", "To be, or not to be: that is."]
DIM, DEPTH, STATE, HEADS, WIDTH = 16, 2, 4, 2, 7
SMALL = f"""
model.dim={DIM} model.depth={DEPTH} model.num_heads={HEADS} model.attention.state={STATE} model.pad_vocabulary=64
trainer.precision=fp32 trainer.compile=false trainer.micro_batch=4 data.name=text data.length=17
""".split()


class Mixer(nn.Module):
    """The published matrix of Hydra, with the names of `hydra/modules/hydra.py`."""

    def __init__(self):
        super().__init__()
        inner, channels = 2 * DIM, 2 * DIM + 4 * STATE
        self.in_proj = nn.Linear(DIM, inner + channels + 2 * HEADS, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, WIDTH, groups=channels, padding=WIDTH // 2)
        self.dt_bias, self.A_log = nn.Parameter(torch.randn(HEADS)), nn.Parameter(torch.randn(HEADS))
        self.D, self.fc_D = nn.Parameter(torch.randn(HEADS)), nn.Linear(inner, HEADS, bias=False)
        self.norm = nn.RMSNorm(inner)
        self.out_proj = nn.Linear(inner, DIM, bias=False)

    def forward(self, u):
        first = 2 * DIM + len(self.conv1d.weight)
        weights = {
            "inputs.weight": self.in_proj.weight[:first],
            "steps.weight": self.in_proj.weight[first:],
            "convolution.weight": self.conv1d.weight[:, 0].T,
            "convolution.bias": self.conv1d.bias,
            "step_bias": self.dt_bias,
            "a": self.A_log,
            "skip": self.D,
            "diagonal.weight": self.fc_D.weight,
            "norm.weight": self.norm.weight,
            "proj.weight": self.out_proj.weight,
        }
        return torch.stack([oracle(weights, row, "both", HEADS) for row in u])


class Described(nn.Module):
    """A BERT with the names of `hydra/bert/src/bert_layers.py`: post-norm layers without MLP and positions."""

    def __init__(self, vocabulary):
        super().__init__()
        embeddings = Part(
            word_embeddings=nn.Embedding(vocabulary, DIM),
            token_type_embeddings=nn.Embedding(2, DIM),
            LayerNorm=nn.LayerNorm(DIM, eps=1e-12),
        )
        layers = nn.ModuleList(Part(layer=Part(mixer=Mixer(), norm=nn.LayerNorm(DIM, eps=1e-5))) for _ in range(DEPTH))
        self.bert = Part(embeddings=embeddings, encoder=Part(layer=layers))
        transform = Part(dense=nn.Linear(DIM, DIM), LayerNorm=nn.LayerNorm(DIM, eps=1e-12))
        decoder = nn.Linear(DIM, vocabulary)
        decoder.weight = embeddings.word_embeddings.weight
        self.cls = Part(predictions=Part(transform=transform, decoder=decoder))

    def forward(self, tokens, types):
        e, head = self.bert.embeddings, self.cls.predictions
        x = e.LayerNorm(e.word_embeddings(tokens) + e.token_type_embeddings(types))
        for part in self.bert.encoder.layer:
            x = part.layer.norm(x + part.layer.mixer(x))
        return head.decoder(head.transform.LayerNorm(F.gelu(head.transform.dense(x))))


@pytest.fixture
def tokenizer(tmp_path):
    made = make_tokenizer("wordpiece", TEXT, 200)
    made.inner.save(str(tmp_path / "tokenizer.json"))
    return made


@pytest.fixture
def theirs(tokenizer):
    torch.manual_seed(0)
    model = Described(-(-tokenizer.vocabulary // 8) * 8).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


def command(tmp_path, *more):
    run, tokenizer = tmp_path / "run", f"data.tokenizer={tmp_path}/tokenizer.json"
    return ["convert", tmp_path / "their.pt", "mlm_base_hydra", run, *SMALL, tokenizer, *more]


@torch.no_grad()
@pytest.mark.parametrize("composer", [False, True])
def test_the_logits_are_theirs(composer, theirs, tokenizer, tmp_path, capsys):
    weights = theirs.state_dict()
    if composer:
        weights = {"state": {"model": {f"model.{name}": value for name, value in weights.items()}}}
    torch.save(weights, tmp_path / "their.pt")
    out = printed(capsys, *command(tmp_path))
    assert "hydra" in out and "taken from the recipe: model.norm_eps=1e-12" in out
    ours = lion.load(tmp_path / "run", compile=False).double().eval()
    tokens = torch.randint(ours.vocabulary, (2, 13), generator=torch.Generator().manual_seed(3))
    types = (torch.arange(13) > 5).long().expand(2, -1)
    want = theirs.double()(tokens, types)[..., : ours.vocabulary]
    assert want.std() > 0.3
    worst = (ours(tokens, types=types) - want).abs().max()
    assert worst < 3e-5 * want.abs().max()  # their norms in blocks have an epsilon of 1e-5, ours 1e-12
    for block, part in zip(ours.encoder.blocks, theirs.bert.encoder.layer):  # with equal epsilons: rounding
        block.norm1.eps = part.layer.norm.eps
    assert (ours(tokens, types=types) - want).abs().max() < 1e-10 * want.abs().max()


def test_another_size_is_refused(theirs, tmp_path, capsys):
    torch.save(theirs.state_dict(), tmp_path / "their.pt")
    for name, right, wrong in (
        ("dim", DIM, 2 * DIM),
        ("depth", DEPTH, 3),
        ("num_heads", HEADS, 4),
        ("attention.state", STATE, 8),
        ("attention.expand", 2, 1),
        ("attention.conv_width", WIDTH, 4),
        ("token_types", 2, 1),
        ("mlp", "none", "mlp"),
    ):
        line = refuse(capsys, *command(tmp_path, f"model.{name}={wrong}"))
        assert f"model.{name} is {right}, not {wrong}" in line
        assert f"try model.{name}={right}" in line
        assert not (tmp_path / "run").exists()


def test_other_weights_are_refused(theirs, tmp_path, capsys):
    whole, block = theirs.state_dict(), "bert.encoder.layer.1.layer.mixer."
    without = {name: value for name, value in whole.items() if name != f"{block}fc_D.weight"}
    more = {**whole, "bert.embeddings.position_embeddings.weight": torch.zeros(32, DIM)}
    bad = {**whole, f"{block}A_log": torch.full((HEADS,), torch.nan)}
    for weights, message in (
        (without, f"{block}fc_D.weight is missing: not a masked language model of Hydra"),
        (more, "our model has no place for bert.embeddings.position_embeddings.weight"),
        (bad, f"{block}A_log holds NaN or infinity"),
    ):
        torch.save(weights, tmp_path / "their.pt")
        assert message in refuse(capsys, *command(tmp_path))


def test_no_classifiers_are_released(tmp_path, capsys):
    torch.save({"head.weight": torch.zeros(3, 4)}, tmp_path / "vim.pth")
    line = refuse(capsys, "convert", tmp_path / "vim.pth", "hydra_small", tmp_path / "run")
    assert "only Hydra's masked language models are released ('bert', recipe mlm_base_hydra), no 'vit'" in line
