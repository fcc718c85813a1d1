"""Tests of models of long sequences: padding, pairs, windows, forms, initialisation, optimizer groups, long inputs."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy, pad

from lion.config import build
from lion.layers.blocks.s5 import ACTIVATIONS
from lion.layers.mixers import MIXERS as ENTRIES
from lion.layers.mixers.hippo import HippoConfig
from lion.layers.optim_factors import optim_factors
from lion.models.lra import LRA, LRAConfig, LRAMasked, LRAMaskedConfig
from lion.trainer.compilation import compile_blocks
from lion.trainer.optim import OptimConfig, make_optimizer
from tests.layers.helpers import close, doubles, invalid
from tests.models.helpers import adapted, check_forms

DIM, HEADS, VOCABULARY, LENGTH = 16, 2, 11, 40
MIXERS = ("softmax", "lion_lit", "lion_d_hippo", "lion_s_hippo")
SHAPE = {"mixer": "softmax", "dim": DIM, "depth": 1, "num_heads": HEADS}
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def config(mixer: str = "lion_s_hippo", attention: dict | None = None, **settings) -> LRAConfig:
    chosen = ENTRIES[mixer].layer.Config(**attention or {})
    settings = {"depth": 2, **settings}
    return LRAConfig(mixer, DIM, num_heads=HEADS, attention=chosen, **settings)


def model(mixer: str = "lion_s_hippo", attention: dict | None = None, parts: int = 1, **settings) -> LRA:
    torch.manual_seed(0)
    sizes = {"classes": 3, "length": 2 * LENGTH, "vocabulary": VOCABULARY, "parts": parts}
    made = LRA(config(mixer, attention, **settings), **sizes).double()
    made(*rows(parts=parts))  # change the running statistics from 0 and 1
    return made.eval()


def rows(batch: int = 4, parts: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and segments (B, L), or (B, 2, L), padded at the end."""
    rng = torch.Generator().manual_seed(seed)
    shape = (batch, LENGTH) if parts == 1 else (batch, 2, LENGTH)
    tokens = torch.randint(VOCABULARY, shape, generator=rng)
    lengths = torch.randint(1, LENGTH + 1, shape[:-1], generator=rng)
    return tokens, torch.where(torch.arange(LENGTH) < lengths[..., None], 0, -1)


@every_mixer
def test_padding_at_either_side_reaches_nothing(mixer):
    made, (tokens, segments) = model(mixer), rows()
    want = made(tokens, segments)
    for junk in (0, VOCABULARY - 1):
        close(made(tokens.masked_fill(segments < 0, junk), segments), want)
    for row in range(len(tokens)):
        alone = tokens[row][segments[row] >= 0][None]
        close(made(alone)[0], want[row])
        for left, right in ((5, 0), (3, 4)):
            wide = pad(alone, (left, right))
            where = pad(torch.zeros_like(alone), (left, right), value=-1)
            close(made(wide, where)[0], want[row])


@every_mixer
def test_training_normalises_by_valid_tokens_alone(mixer):
    """Check that losses and gradients do not depend on the amount of padding, nor on its content; all parts learn."""
    (tokens, segments), found = rows(), []
    for padding, junk in ((0, 0), (9, 5)):
        made = model(mixer).train()
        wide = pad(tokens.masked_fill(segments < 0, junk), (0, padding), value=junk)
        made(wide, pad(segments, (0, padding), value=-1)).logsumexp(1).sum().backward()
        gradients = {name: p.grad for name, p in made.named_parameters()}
        assert not [name for name, gradient in gradients.items() if gradient is None or not gradient.any()]
        found.append(gradients | dict(made.named_buffers()))
    for name, value in found[0].items():
        if value is not None:
            close(found[1][name], value, msg=name)


@pytest.mark.parametrize("attention", [{}, {"spectrum": "legs"}, {"decay_shape": "scalar"}, {"normalize": "pre"}])
def test_forms_agree(attention):
    forms = (("full", None), ("chunk", 8), ("chunk", 64), ("rnn", 1), ("rnn", 16))
    check_forms(model("lion_s_hippo", attention), *rows(), forms=forms)


def test_pairs_are_encoded_by_themselves_and_compared():
    made, (tokens, segments) = model(parts=2), rows(parts=2)
    first, second = (made.pooled(tokens[:, i], segments[:, i]) for i in (0, 1))
    want = made.head(torch.cat([first, second, first - second, first * second], -1))
    close(made(tokens, segments), want)
    assert made.length == 4 * LENGTH
    assert made.head[1].approximate == "tanh"


def test_pixels_are_normalised():
    made = LRA(config(), classes=2, length=LENGTH, mean=0.4, std=0.2).eval()
    pixels = torch.randint(256, (3, LENGTH), dtype=torch.uint8)
    value = (pixels / 255 - 0.4) / 0.2
    seen = []
    made.tokens.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    assert made(pixels).shape == (3, 2)
    close(seen[0][..., 0], value)


def test_positions_of_pixels_are_those_of_the_image():
    """Check position embeddings of a model for another size.

    Embeddings of pixels are interpolated to larger and smaller images. Of the embeddings of tokens a shorter model
    takes the first; a longer model cannot use them.
    """

    def made(length, vocabulary=None):
        return LRA(config("softmax"), classes=2, length=length, vocabulary=vocabulary)

    small, large = made(4**2), made(8**2)
    grid = torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, 4)] * 2, indexing="ij"), -1)
    with torch.no_grad():
        small.positions.weight[:, :2] = grid.view(16, 2)
    grown = adapted(large, small)
    rows, columns = grown[:, :2].view(8, 8, 2).unbind(-1)
    assert grown.shape == (64, small.config.dim) and torch.allclose(rows, columns.T, atol=1e-6)
    assert (rows.diff(dim=0) > 0).all() and rows.diff(dim=1).abs().max() < 1e-6
    assert adapted(small, large).shape == (16, small.config.dim)
    assert torch.equal(adapted(small, small), small.positions.weight)
    longer = made(20)  # pixels of no square
    assert torch.equal(adapted(made(17), longer), longer.positions.weight[:17])
    short, long = made(4, vocabulary=9), made(8, vocabulary=9)
    assert torch.equal(adapted(short, long), long.positions.weight[:4])
    assert len(adapted(long, short)) == 4


@pytest.mark.parametrize(("mixer", "tpe"), [("softmax", 0), ("softmax", 2), ("lion_s_hippo", 0)])
@pytest.mark.parametrize("window", [1, 8, 13, 100])
def test_a_window_sees_its_own_tokens_alone(mixer, tpe, window):
    """Check that outputs depend only on the tokens of their window, at any depth, and after MD-TPE."""
    made, (tokens, _) = model(mixer, window=window, tpe=tpe, position_embedding=False), rows(batch=1)
    before, other = made.encode(tokens), tokens.clone()
    other[0, 20] = (other[0, 20] + 1) % VOCABULARY
    changed = ((made.encode(other) - before).abs().amax(-1)[0] > 1e-12).nonzero().flatten().tolist()
    start = 20 // window * window
    assert changed == list(range(start, min(start + window, LENGTH)))
    whole = model(mixer, tpe=tpe, position_embedding=False)
    whole.load_state_dict(made.state_dict())
    part = tokens[:, start : start + window]
    close(before[:, start : start + window], whole.encode(part))


def test_a_window_takes_padding_behind_the_tokens_alone():
    made, (tokens, segments) = model(window=16), rows()
    want = made(tokens, segments)
    close(made(tokens.masked_fill(segments < 0, 3), segments), want)
    close(made(pad(tokens, (0, 9)), pad(segments, (0, 9), value=-1)), want)
    close(made(tokens, segments >= 0), want)
    packed = torch.where(torch.arange(LENGTH) < 20, 0, 1).expand_as(segments)
    for wrong in (packed, segments.flip(1), segments.flip(1) >= 0):
        invalid("segments: with a window, a row is one document, with padding behind it", made, tokens, wrong)


def test_activations_are_those_of_s5():
    """Compare with half a GLU with flax's GELU, x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    x = 3 * doubles(2, 5, DIM)
    u = x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    for name, kept in (("half_glu1", u), ("half_glu2", x)):
        half = ACTIVATIONS[name](DIM, 0.0).double()
        gate = torch.sigmoid(u @ half.gate.weight.T + half.gate.bias)
        close(half(x), kept * gate, 1e-12)


def test_where_weights_start():
    """Compare with C.2: W_q, W_k and the decay's gate ~ N(0, 0.1^2); W_v is the diagonal of zero-order hold."""

    def made(mixer="lion_s_hippo", **settings):
        attention = ENTRIES[mixer].layer.Config(**settings)
        found = LRA(LRAConfig(mixer, 128, 1, 8, attention=attention), classes=2, length=8)
        return found, found.encoder.blocks[0].attention

    def spread(weight):
        return weight.std().item()

    attention = made()[1]
    query, key, value = attention.qkv.weight.chunk(3)
    for weight in (query, key, attention.decays[0].gate.weight):
        assert spread(weight) == pytest.approx(0.1, rel=0.05) and abs(weight.mean()) < 5e-3
    held = attention.decays[0].zero_order_hold().flatten()
    assert torch.equal(value, held.diag()) and (held > 0).all()
    attention = made(value_start="zoh_per_step")[1]
    held = attention.decays[0].zero_order_hold(per_step=True).flatten()
    assert torch.equal(attention.qkv.weight.chunk(3)[2], held.diag()) and 0.01 < held.min() and held.max() <= 1
    dense, attention = made(value_start="dense")
    assert spread(attention.qkv.weight.chunk(3)[2]) == pytest.approx(128**-0.5, rel=0.05)
    assert spread(dense.head.weight) == pytest.approx(128**-0.5, rel=0.15)
    assert spread(made("fox")[1].decay.gate.weight) == pytest.approx(0.1, rel=0.1)


def test_groups_of_the_optimizer():
    """Check S5's groups: decays, rotations, steps and norms have a separate learning rate and no weight decay."""
    made = model(memory_lr=0.25)
    own = {name.rpartition("encoder.blocks.0.")[2] for name in optim_factors(made) if "blocks.0." in name}
    decays = {f"attention.decays.0.{name}" for name in ("log_rate", "log_dt", "frequency")}
    assert own == {"norm1.weight", "norm1.bias"} | decays
    for mixer, attention, names in (
        ("vim", {}, ("sides.0.a", "sides.1.step_bias")),
        ("hydra", {}, ("a", "step_bias", "norm.weight")),
        ("rwkv6", {"block": "published"}, ("head_norm.weight", "head_norm.bias")),
    ):
        found = optim_factors(model(mixer, attention, memory_lr=0.25))
        assert all(found[f"encoder.blocks.0.attention.{name}"].lr == 0.25 for name in names), mixer
    optimizer, factors = make_optimizer(made, OptimConfig(lr=1e-3, weight_decay=0.05))
    names = {id(p): name for name, p in made.named_parameters()}
    for group, factor in zip(optimizer.param_groups, factors):
        for name in (names[id(p)] for p in group["params"]):
            slow = any(part in name for part in ("norm", "log_", "frequency"))
            assert factor == (0.25 if slow else 1.0), name
            assert (group["weight_decay"] == 0) == (slow or name.endswith("bias")), name


def test_dropout_takes_whole_channels_and_batch_norm_its_momentum():
    made = model(dropout=0.3, norm_momentum=0.9).train()
    assert {block.norm1.momentum for block in made.encoder.blocks} == {0.9}
    seen = []
    made.encoder.blocks[0].dropout.register_forward_hook(lambda module, inputs, output: seen.append(output))
    made(rows()[0])
    gone = seen[0] == 0
    assert (gone.all(1) | ~gone.any(1)).all() and 0.2 < gone.double().mean() < 0.8


def test_labels_distinguish_rows():
    for mixer, attention, label in (
        ("softmax", {}, "softmax"),
        ("softmax", {"rotation": "rope"}, "softmax rope rotation"),
        ("lion_s_hippo", {}, "lion_s_hippo"),
        ("lion_s_hippo", {"spectrum": "random"}, "lion_s_hippo random start"),
        ("lion_s_hippo", {"value_start": "dense"}, "lion_s_hippo dense values"),
        ("lion_s_hippo", {"decay_shape": "scalar"}, "lion_s_hippo scalar decay"),
        ("lion_s_hippo", {"decay_gate": "softplus"}, "lion_s_hippo softplus gate"),
        (
            "lion_s_hippo",
            {"feature_map": "sigmoid", "normalize": "none"},
            "lion_s_hippo sigmoid feature map without row sum",
        ),
    ):
        assert config(mixer, attention).label() == label
    assert config("softmax", {"rotation": "rope"}, window=64).label() == "softmax rope rotation window 64"
    assert config("softmax", window=8).with_mixer("lion_lit").window == 8


def test_what_is_wrong_is_named():
    single, pairs = model(), model(parts=2)
    shape, ids = r"inputs: expected \(B, .*L\), got", torch.zeros(1, 81, dtype=torch.long)
    invalid("mlp: 'half_glu1' belongs to block 's5', 'pre_norm' takes mlp, mlp", config, block="pre_norm")
    invalid("attention.scans: a sequence has one order", config, "lion_s", {"scans": ("row_snake",)})
    invalid(r"tokens: expected integers \(B, L\) or embeddings .* got float32", single.encode, torch.rand(2, 12))
    invalid("tokens: 81 in one row, this model has only 80 position embeddings", model("softmax"), ids)
    invalid("hidden: only model 'lra_masked' takes masked inputs", single.encode, ids, hidden=ids > 0)
    for made, size in ((pairs, (4, 9)), (pairs, (4, 3, 9)), (single, (4, 2, 9)), (single, (9,))):
        invalid(shape, made, torch.zeros(size).long())
    for name, value in (("parts", 3), ("parts", 0), ("std", 0.0), ("length", 0), ("vocabulary", 0)):
        invalid(f"^{name}: expected", LRA, config(), **{"classes": 2, "length": LENGTH, name: value})
    invalid("window: expected at least 1, got 0", build, LRAConfig, {**SHAPE, "window": 0}, source=str)


def test_hidden_inputs_are_not_seen():
    made = LRAMasked(LRAMaskedConfig("lion_s_hippo", DIM, 2, HEADS), length=LENGTH, vocabulary=VOCABULARY).eval()
    tokens, hidden = rows()[0], torch.rand(4, LENGTH) < 0.3
    other = torch.where(hidden, (tokens + 1) % VOCABULARY, tokens)
    want = made(tokens, hidden=hidden)
    assert want.shape == (4, LENGTH, VOCABULARY) and torch.equal(made(other, hidden=hidden), want)
    assert not torch.allclose(made(other), made(tokens))


@pytest.mark.every  # tests/trainer/test_runtime.py compiles blocks, tests/gpu/test_mixers.py each operator
@pytest.mark.compiled
def test_compiled_blocks_compute_the_same():
    made, given = model(depth=1).float(), rows()
    made.train()
    want = made(*given)
    compile_blocks(made, backend="aot_eager")
    close(made(*given), want, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_some_steps_on_sixteen_thousand_tokens(precision):
    """Check at Path-X's length that all numbers stay finite and the weights change."""
    attention = HippoConfig(form="chunk", dt_min=1e-4)
    made = LRA(LRAConfig("lion_s_hippo", 4, 1, 1, attention=attention), classes=2, length=16_384)
    before = [p.clone() for p in made.parameters()]
    optimizer, _ = make_optimizer(made, OptimConfig(lr=1e-2))
    pixels, label = torch.randint(256, (1, 16_384), dtype=torch.uint8), torch.tensor([1])
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = cross_entropy(made(pixels).float(), label)
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in made.parameters())
        optimizer.step(), optimizer.zero_grad()
    assert all(p.isfinite().all() and not torch.equal(p, old) for p, old in zip(made.parameters(), before))
    assert loss < 0.69  # a guess has loss log 2


@pytest.mark.slow
def test_memory_is_linear_in_length():
    """Check that a training step on four times the tokens needs four times the memory."""
    from lion.trainer.diagnostics import tensor_peak

    made = LRA(LRAConfig("lion_s_hippo", 16, 1, 2, attention=HippoConfig(form="chunk")), classes=2, length=16_384)

    def peak(length: int) -> int:
        pixels = torch.zeros(1, length, dtype=torch.uint8)
        return tensor_peak(lambda: made(pixels).sum().backward(), torch.device("cpu"))

    assert 3.6 < peak(16_384) / peak(4_096) < 4.4
