"""transformers' `Trainer` fine-tunes an exported masked language model on a task of GLUE."""

import json
import re

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from data.text.tokenizers import make_tokenizer
from lion.transformers import LionConfig, LionForCausalLM, LionForMaskedLM, LionForSequenceClassification
from lion.transformers.remote import AUTO
from tests.helpers import ROOT, glue_folder
from tests.layers.helpers import close
from tests.transformers.tiny import ids, made
from tools.export.transformers import save_tokenizer


def rows(folder, split, tokenizer):
    lines = [json.loads(line) for line in (folder / "sst2" / f"{split}.jsonl").read_text().splitlines()]
    return [{**tokenizer(line["sentence"]), "labels": line["label"]} for line in lines]


@pytest.mark.slow
def test_it_learns_glue_and_resumes_from_its_checkpoint(tmp_path):
    glue = glue_folder(tmp_path / "glue", ["sst2"], rows=48)
    words = make_tokenizer("wordpiece", (glue / "sst2" / "train.jsonl").read_text().splitlines(), 60)
    section = {"name": "bert", "mixer": "lion_s", "dim": 32, "depth": 2, "num_heads": 2}
    torch.manual_seed(0)
    model = LionForMaskedLM(LionConfig(model=section, vocab_size=words.vocabulary, length=64))
    model.save_pretrained(tmp_path / "mlm")
    save_tokenizer(tmp_path / "mlm", words, model.model)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "mlm")
    train, held_out = (rows(glue, split, tokenizer) for split in ("train", "validation"))

    def trainer(**how):
        settings = {"learning_rate": 3e-3, "per_device_train_batch_size": 16, "max_steps": 30, "save_steps": 15}
        settings |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "seed": 1}
        return transformers.Trainer(
            LionForSequenceClassification.from_pretrained(tmp_path / "mlm", num_labels=2),
            transformers.TrainingArguments(str(tmp_path / "out"), **settings | how),
            train_dataset=train,
            eval_dataset=held_out,
            data_collator=transformers.DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
        )

    whole = trainer(activation_checkpointing=True)
    assert whole.evaluate()["eval_accuracy"] < 0.8
    whole.train()
    assert whole.evaluate()["eval_accuracy"] > 0.95
    again = trainer()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-15"))
    close(again.model.state_dict(), whole.model.state_dict(), 1e-5)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "checkpoint-30")
    close(loaded.state_dict(), whole.model.state_dict(), 0)


@pytest.mark.slow
def test_the_readme_leads_from_data_to_the_hub(tmp_path, monkeypatch):
    """Run the README's example, in which the upload is replaced, and train the adapters of PEFT."""
    peft = pytest.importorskip("peft")
    pushed = []
    monkeypatch.setattr(transformers.Trainer, "push_to_hub", lambda trainer: pushed.append(trainer.args.output_dir))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reviews").mkdir()
    for split in ("train", "test"):
        lines = ["text,label", *("a fine film,1", "a dull film,0") * 32]
        (tmp_path / "reviews" / f"{split}.csv").write_text("\n".join(lines))
    text = (ROOT / "lion/transformers/README.md").read_text()
    whole, adapted = re.findall(r"^```python\n(import (?:datasets|peft).*?)^```", text, re.DOTALL | re.MULTILINE)
    torch.manual_seed(0)
    held = {}
    exec(whole, held)
    assert pushed == ["reviews_lion_s"]
    (found,) = held["classify"]("a fine film")
    assert found["label"] == "LABEL_1" and found["score"] > 0.9
    exec(adapted, held)
    model = held["model"].eval()
    batch = held["tokenizer"](["a fine film", "a dull film"], return_tensors="pt")
    before = model(**batch).logits
    train = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(train, lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(**batch, labels=torch.tensor([0, 1])).loss
        loss.backward()
        optimizer.step()
    tuned = model(**batch).logits
    assert (tuned - before).abs().max() > 1e-2
    model.save_pretrained("adapters")
    again = peft.PeftModel.from_pretrained(LionForSequenceClassification.from_pretrained("reviews_lion_s"), "adapters")
    close(again.eval()(**batch).logits, tuned)
    close(model.merge_and_unload()(**batch).logits, tuned, atol=1e-4, rtol=1e-4)


def test_smoothed_labels_are_the_next_tokens(tmp_path):
    model, tokens = made(LionForCausalLM, "gpt").float(), ids(2, 16)
    logits = model(tokens).logits
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    for smoothing in (0.0, 1e-9):
        how = {"label_smoothing_factor": smoothing, "use_cpu": True, "report_to": []}
        trainer = transformers.Trainer(model, transformers.TrainingArguments(tmp_path, **how))
        loss = trainer.compute_loss(model, {"input_ids": tokens, "labels": tokens})
        close(loss, expected, atol=0, rtol=1e-5)


def test_every_class_is_in_the_tables_of_names():
    for auto, kind in AUTO.items():
        if auto != "AutoConfig":
            assert getattr(transformers, auto)._model_mapping._model_mapping["lion"] == kind, auto
