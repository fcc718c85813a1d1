"""Models of text in transformers: the values of our models, masks, packed rows, saving, losses, checkpointing."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

import transformers

from lion.transformers import (
    LionConfig,
    LionForCausalLM,
    LionForImageClassification,
    LionForMaskedLM,
    LionForSequenceClassification,
    LionForTokenClassification,
    LionModel,
)
from tests.layers.helpers import close, invalid
from tests.transformers.tiny import config, flattened, ids, left_padded, made

KINDS = [
    (LionModel, "bert"),
    (LionModel, "gpt"),
    (LionForMaskedLM, "bert"),
    (LionForSequenceClassification, "bert_classifier"),
    (LionForSequenceClassification, "gpt"),
    (LionForCausalLM, "gpt"),
    (LionModel, "lra"),
    (LionForMaskedLM, "lra_masked"),
    (LionForSequenceClassification, "lra"),
    (LionForTokenClassification, "bert"),
    (LionForTokenClassification, "token_classifier"),
]
EVERY = pytest.mark.parametrize(("kind", "name"), KINDS, ids=lambda x: getattr(x, "__name__", x))


def output(model, *args, **inputs):
    return model(*args, **inputs)[0].detach()


@torch.no_grad()
def test_outputs_are_those_of_our_models():
    tokens, types = ids(2, 9), torch.tensor([[0] * 4 + [1] * 5] * 2)
    segments = torch.tensor([[0] * 9, [0] * 6 + [-1] * 3])
    mask = (segments >= 0).long()
    for kind, name in ((LionForMaskedLM, "bert"), (LionForSequenceClassification, "bert_classifier")):
        model = made(kind, name, model={"token_types": 2}, num_labels=3)
        found = output(model, tokens, mask, token_type_ids=types)
        wanted = model.model(tokens, segments, types)
        kept = mask.bool() if wanted.dim() == 3 else slice(None)
        assert torch.equal(found[kept], wanted[kept]) and wanted.std() > 0.1
    model = made(LionForCausalLM, "gpt")
    assert torch.equal(output(model, tokens, mask)[0], model.model(tokens, segments)[0])


@EVERY
@torch.no_grad()
def test_padding_packed_rows_and_embeddings_in_place_of_ids_change_nothing(kind, name):
    model = made(kind, name, num_labels=3)
    rows = [ids(5), ids(9, seed=1), ids(2, seed=2)]
    alone = [output(model, row[None])[0] for row in rows]
    tokens, mask = left_padded(rows)
    together = output(model, tokens, mask)
    embeds = model.get_input_embeddings()(tokens[..., None] if name == "token_classifier" else tokens)
    embedded = output(model, inputs_embeds=embeds, attention_mask=mask)
    of_tokens = together.dim() == 3
    for i, row in enumerate(rows):
        kept = slice(-len(row), None) if of_tokens else slice(None)
        close(together[i, kept], alone[i], 1e-11)
        assert torch.equal(embedded[i, kept], together[i, kept])
    invalid("input_ids, inputs_embeds: expected one of them", model, tokens, inputs_embeds=embeds)
    if not of_tokens:
        return
    batch = flattened(rows)
    for names in (["position_ids"], ["seq_idx"], ["cu_seq_lens_q"], ["position_ids", "seq_idx"]):
        packed = output(model, batch["input_ids"], **{key: batch[key] for key in names})
        close(packed[0], torch.cat(alone), 1e-11)


@torch.no_grad()
def test_plain_positions_are_those_without():
    model, tokens = made(LionForCausalLM, "gpt", "softmax"), ids(2, 7)
    assert torch.equal(output(model, tokens), output(model, tokens, position_ids=torch.arange(7)[None]))


PLACES = torch.arange(6)[None]
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
NO_MASK = r"attention_mask: expected 1 for tokens and 0 for padding, .*packed"
NO_POSITIONS = r"position_ids: .*count the tokens of each document from 0"
REFUSED = [
    ({"attention_mask": torch.ones(2, 1, 6, 6)}, NO_MASK),
    ({"attention_mask": torch.ones(2, 6, 6, dtype=torch.long)}, NO_MASK),
    ({"attention_mask": torch.zeros(2, 6)}, NO_MASK),
    ({"attention_mask": torch.ones(2, 5).int()}, NO_MASK),
    ({"position_ids": PLACES + 2}, NO_POSITIONS),
    ({"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6]])}, NO_POSITIONS),
    ({"position_ids": PLACES, "seq_idx": DOCUMENTS}, NO_POSITIONS),
    ({"seq_idx": torch.zeros(1, 6).int()}, "seq_idx: expected the shape"),
    ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "cu_seq_lens_q: expected packed documents in one row, got 2"),
    ({"output_attentions": True}, "output_attentions: linear mixers do not compute"),
    ({"bool_masked_pos": PLACES > 2}, "bool_masked_pos: a BERT reads the mask token"),
    ({"use_cache": True}, "use_cache: Bert reads all tokens at once"),
]


def test_what_cannot_be_expressed_is_refused():
    model, tokens = made(LionForMaskedLM, "bert"), ids(2, 6)
    for given, message in REFUSED:
        invalid(message, model, tokens, **given)
    single = made(LionForSequenceClassification, "lra", num_labels=3)
    pairs = made(LionForSequenceClassification, "lra", num_labels=3, parts=2)
    invalid(r"input_ids: expected \(B, L\), got \(4, 2, 10\)", single, ids(4, 2, 10))
    invalid(r"input_ids: expected \(B, 2, L\), got \(4, 10\)", pairs, ids(4, 10))
    invalid(r"input_ids: expected \(B, 2, L\), got \(2, 4, 10\)", pairs, ids(2, 4, 10))
    assert pairs(ids(4, 2, 10)).logits.shape == (4, 3)


@EVERY
def test_saved_models_load_bit_for_bit(kind, name, tmp_path):
    model = made(kind, name, num_labels=3).float()
    model.save_pretrained(tmp_path)
    again, report = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    close(again.state_dict(), model.state_dict(), 0)
    assert again.config.model == model.config.model
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(copied) is kind and torch.equal(output(copied, ids(1, 6)), output(model, ids(1, 6)))
        copied.activation_checkpointing_enable()
    close(output(again, ids(1, 6)), output(model, ids(1, 6)))


def test_weights_have_the_names_of_a_run_and_auto_classes_find_them(tmp_path):
    """Load a folder whose weights have our names, without the prefix."""
    model = made(LionForMaskedLM, "bert").float()
    model.save_pretrained(tmp_path / "bert", state_dict=model.model.state_dict())
    again, report = LionForMaskedLM.from_pretrained(tmp_path / "bert", output_loading_info=True)
    assert not report["missing_keys"]
    close(output(again, ids(1, 6)), output(model, ids(1, 6)))
    made(LionForCausalLM, "gpt").save_pretrained(tmp_path / "gpt")
    for auto, name, kind in (
        (transformers.AutoModel, "gpt", LionModel),
        (transformers.AutoModelForCausalLM, "gpt", LionForCausalLM),
        (transformers.AutoModelForSequenceClassification, "gpt", LionForSequenceClassification),
        (transformers.AutoModelForTokenClassification, "bert", LionForTokenClassification),
    ):
        assert type(auto.from_pretrained(tmp_path / name)) is kind


def test_a_classifier_starts_from_a_language_model_and_keeps_its_weights(tmp_path):
    source = made(LionForMaskedLM, "bert").float()
    source.save_pretrained(tmp_path / "mlm")
    model, report = LionForSequenceClassification.from_pretrained(
        tmp_path / "mlm", num_labels=3, output_loading_info=True
    )
    new = {f"model.{layer}.{kind}" for layer in ("pooler", "classifier") for kind in ("weight", "bias")}
    assert report["missing_keys"] == new and model.config.model["name"] == "bert_classifier"
    held = model.state_dict()
    assert all(torch.equal(held[k], v) for k, v in source.state_dict().items() if not k.startswith("model.head."))
    assert held["model.pooler.weight"].std().item() == pytest.approx(0.4, rel=0.2)  # our initialisation, init_std
    model.save_pretrained(tmp_path / "classifier")
    LionForMaskedLM.from_pretrained(tmp_path / "classifier")


def test_models_of_one_configuration_do_not_change_it():
    """Check that a model without a classifier takes no setting of one from other models of the configuration."""
    shared = config("bert_classifier", model={"classifier_dropout": 0.0}, num_labels=3)
    before = LionForSequenceClassification(shared)
    LionModel(shared)
    for model in (before, LionForSequenceClassification(shared)):
        assert model.config.model["classifier_dropout"] == 0 and model.model.classifier_dropout.p == 0


def test_a_classifier_reads_the_last_token_before_padding_without_a_mask():
    model = made(LionForSequenceClassification, "gpt", num_labels=3, pad_token_id=0)
    tokens = ids(2, 6)
    tokens[1, 4:] = 0
    wanted = torch.cat([model(tokens[:1]).logits, model(tokens[1:, :4]).logits])
    close(model(tokens).logits, wanted)
    close(model(tokens, tokens != 0).logits, wanted)


@pytest.mark.slow
def test_missing_weights_and_buffers_are_those_of_a_new_model():
    """Start from no weights at all, as `from_pretrained` does on the meta device."""
    for kind, name in (*KINDS[2:], (LionForImageClassification, "vit")):
        settings = {"tpe": 2, "drop_path": 0.3} if name != "gpt" else {"tpe": 2}
        found = kind.from_pretrained(None, config=config(name, "lion_s_hippo", settings), state_dict={})
        new = kind(config(name, "lion_s_hippo", settings))
        close(dict(found.named_buffers()), dict(new.named_buffers()), 0)
        for key, value in found.named_parameters():
            assert not value.is_meta and value.isfinite().all()
            fixed = new.get_parameter(key)
            if fixed.unique().numel() == 1:  # biases and norms
                assert torch.equal(value, fixed), key


def test_losses_by_hand():
    tokens, labels = ids(2, 6), ids(2, 6, seed=3)
    labels[:, ::2] = -100
    few = torch.where(labels >= 0, labels % 3, -100)
    for kind, name, wanted in (
        (LionForMaskedLM, "bert", labels),
        (LionForTokenClassification, "token_classifier", few),
    ):
        model = made(kind, name, num_labels=3)
        found = model(tokens, labels=wanted)
        by_hand = F.cross_entropy(found.logits.flatten(0, 1), wanted.flatten())
        close(found.loss.double(), by_hand)
    close(model(tokens[..., None]).logits, found.logits)
    model = made(LionForCausalLM, "gpt")
    found = model(tokens, labels=labels)
    wanted = F.cross_entropy(found.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    close(found.loss.double(), wanted, 1e-5)
    last = model(tokens, logits_to_keep=2).logits
    close(last, found.logits[:, -2:])
    model, numbers = made(LionForSequenceClassification, "gpt", num_labels=1), torch.tensor([0.5, 2.0]).double()
    found = model(tokens, labels=numbers)
    close(found.loss, F.mse_loss(found.logits[:, 0], numbers))
    model = made(LionForMaskedLM, "lra_masked", vocab_size=None, mean=(0.2,), std=(0.5,))
    hidden = labels >= 0
    found = model(tokens, bool_masked_pos=hidden, labels=tokens.where(hidden, -100))
    wanted = (found.logits[..., 0] - (tokens / 255 - 0.2) / 0.5)[hidden].abs().mean()
    close(found.loss, wanted)
    changed = model(torch.where(hidden, 7, tokens), bool_masked_pos=hidden).logits
    close(changed, found.logits)


def losses(model, tokens, labels, count, *parts, **more):
    """Return the losses of parts of a batch, and of the whole batch."""
    found = []
    for part in parts:
        given = {key: x[part] for key, x in more.items()}
        found.append(model(tokens[part], labels=labels[part], num_items_in_batch=count, **given).loss)
    return found, model(tokens, labels=labels, **more).loss


@pytest.mark.parametrize(("kind", "name"), [KINDS[2], KINDS[5], KINDS[10], KINDS[7]])
def test_losses_of_parts_of_a_batch_add_up(kind, name):
    """Check gradient accumulation: the sum over parts of a batch is the loss of the batch, whatever their labels."""
    tokens, labels = ids(2, 6), ids(2, 6, seed=3) % 3
    labels[0, 2:] = -100
    count, more = (labels >= 0).sum(), {}
    if name == "gpt":
        count = (labels[:, 1:] >= 0).sum()
    if name == "lra_masked":
        more = {"bool_masked_pos": labels >= 0}
        model = made(kind, name, vocab_size=None, mean=(0.2,), std=(0.5,))
    else:
        model = made(kind, name, num_labels=3)
    parts, whole = losses(model, tokens, labels, count, slice(1), slice(1, 2), **more)
    close(sum(parts), whole)
    assert abs(parts[0] - parts[1]) > 0.1 * whole


LABELS = {
    "regression": torch.tensor([0.5, -2, 3]).double(),
    "multi_label_classification": torch.tensor([[0.0, 1, 1], [1, 0, 0], [1, 1, 1]]).double(),
    "single_label_classification": torch.tensor([0, 2, 1]),
}
PICTURES = torch.arange(3 * 96).remainder(256).to(torch.uint8).view(3, 1, 8, 12)


@pytest.mark.parametrize(
    ("kind", "name", "samples"),
    [(LionForSequenceClassification, "bert", ids(3, 6)), (LionForImageClassification, "vit", PICTURES)],
)
def test_losses_of_parts_of_a_batch_of_samples_add_up(kind, name, samples):
    for problem, labels in LABELS.items():
        model = made(kind, name, num_labels=1 if problem == "regression" else 3)
        model.config.problem_type = problem
        parts, whole = losses(model, samples, labels, labels.numel(), slice(2), slice(2, 3))
        close(sum(parts), whole)


@EVERY
def test_checkpointing_recomputes_the_same_gradients(kind, name):
    model, tokens = made(kind, name, num_labels=3).train(), ids(2, 6)
    seen = []

    def gradients():
        model.zero_grad()
        torch.manual_seed(0)  # of dropout
        model(tokens)[0].pow(2).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    wanted = gradients()
    block = model.model.units()[0]
    block.attention.register_forward_hook(lambda *_: seen.append(1))
    gradients()
    assert len(seen) == 1
    model.activation_checkpointing_enable()
    close(gradients(), wanted, 1e-11)
    assert len(seen) == 3  # forward, and again in the backward pass


@torch.no_grad()
def test_hidden_states_are_the_inputs_of_the_blocks_and_the_output():
    model, tokens = made(LionForCausalLM, "gpt"), ids(1, 5)
    states = model(tokens, output_hidden_states=True).hidden_states
    assert len(states) == 3 and torch.equal(states[0], model.model.tokens(tokens))
    assert torch.equal(states[-1], model.model.encode(tokens))
    first = model(tokens[:, :3], use_cache=True, output_hidden_states=True)
    rest = model(tokens[:, 3:], past_key_values=first.past_key_values, output_hidden_states=True)
    for whole, *parts in zip(states, first.hidden_states, rest.hidden_states, strict=True):
        close(torch.cat(parts, 1), whole, 1e-11)


@pytest.mark.parametrize(("kind", "name"), [KINDS[2], KINDS[5], KINDS[7]])
def test_new_tokens_are_added(kind, name, tmp_path):
    model = made(kind, name, model={} if name == "lra_masked" else {"pad_vocabulary": 64}).float()
    before = output(model, ids(1, 6))
    model.resize_token_embeddings(43)
    after = output(model, ids(1, 6))
    assert after.shape[-1] == 43
    close(after[..., :40], before)
    model.save_pretrained(tmp_path)
    again, added = kind.from_pretrained(tmp_path), torch.tensor([[42]])
    close(output(again, added), output(model, added))


BAD = [
    (LionForCausalLM, config("bert"), r"model.name: LionForCausalLM is made from gpt, not from 'bert'"),
    (LionForCausalLM, config("gpt", vocab_size=None), "vocab_size: missing"),
    (LionForCausalLM, config("gpt", tie_word_embeddings=False), "tie_word_embeddings: heads share the token embed"),
    (LionForImageClassification, config("gpt"), "LionForImageClassification is made from vit, not from 'gpt'"),
    (LionForImageClassification, config("vit", image_size=None), "image_size: missing"),
    (LionModel, config("vit"), "LionModel: a model of tokens, .*hidden states of LionForImageClassification"),
]


def test_bad_configurations_name_the_valid_ones(tmp_path):
    for kind, settings, message in BAD:
        invalid(message, kind, settings)
    invalid("LionConfig: model: missing section", LionForMaskedLM, LionConfig())
    invalid(r"unknown key 'model.mixr': did you mean 'mixer'", LionForCausalLM, config("gpt", model={"mixr": "x"}))
    invalid(r"sizes are in the model section, model=\{'dim': 3, \.\.\}", LionConfig, hidden_size=3)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=9)).save_pretrained(tmp_path)
    invalid(
        r"a model of type 'bert', not 'lion'; \./run\.sh convert reads BERT", LionForMaskedLM.from_pretrained, tmp_path
    )


@pytest.mark.parametrize(("mixer", "block"), [("softmax", "plain"), ("lightnet", "plain"), ("rwkv7", "published")])
@torch.no_grad()
def test_offloaded_weights(mixer, block):
    accelerate = pytest.importorskip("accelerate")
    model = made(LionForCausalLM, "gpt", mixer, {"attention": {"block": block}}).float()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
    tokens = torch.arange(24).view(2, 12)
    how = {"max_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        assert torch.equal(offloaded(tokens).logits, model(tokens).logits)
        assert torch.equal(offloaded.generate(tokens, **how), model.generate(tokens, **how))
        assert all(p.is_meta for p in offloaded.parameters())


@pytest.mark.parametrize(("mixer", "longest"), [("softmax", 32), ("lion_s", None)])
def test_the_configuration_tells_the_positions_of_a_model(mixer, longest):
    made_of = made(LionForCausalLM, "gpt", mixer).config
    for each in (config("gpt", mixer), made_of):
        assert getattr(each, "max_position_embeddings", None) == longest
    assert "max_position_embeddings" not in made_of.to_dict()


def test_nested_ids_are_a_line():
    rows = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)
    invalid("tokens: a nested tensor, expected rows of one length", made(LionModel, "gpt").model, rows)
