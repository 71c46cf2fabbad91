"""The Transformers callback and Trainer in real trainings on a tiny BERT."""

import warnings

import pytest
import torch

import excite
from excite import InputError

warnings.filterwarnings("ignore", category=DeprecationWarning)
transformers = pytest.importorskip("transformers")

from excite.integrations.callback import plain_values  # noqa: E402
from excite.integrations.transformers import ExcitedTrainer, TransformersCallback, _settings  # noqa: E402
from models import state_of  # noqa: E402


def network():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=2,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def data():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (16, 6), generator=generator)
    ones = torch.ones_like(ids)
    return [{"input_ids": i, "attention_mask": o, "labels": int(i[0] > 9)} for i, o in zip(ids, ones)]


def arguments(tmp_path, **options):
    options = {"report_to": "none", "logging_steps": 1, **options}
    return transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), num_train_epochs=2, per_device_train_batch_size=4, use_cpu=True, save_strategy="no",
        disable_tqdm=True, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, **options,
    )  # fmt: skip


class Weights(transformers.TrainerCallback):
    """Keeps the weights after every step: checkpoints to compute from by hand."""

    def __init__(self):
        self.kept = []

    def on_train_begin(self, args, state, control, model=None, **given):
        self.kept.append([p.detach().clone() for p in model.parameters()])

    on_step_end = on_train_begin


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_numbers_match_saved_weights_and_the_trainers_log(tmp_path, parts):
    model, weights = network(), Weights()
    before = state_of(model)["hooks"]
    callback = TransformersCallback(tmp_path / "run", every={"distance": 1}, alerts=[])
    trainer = transformers.Trainer(
        model,
        arguments(tmp_path, gradient_accumulation_steps=parts),
        train_dataset=data(),
        callbacks=[weights, callback],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    run = excite.load_run(tmp_path / "run")
    assert run.status == "done"
    logged = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert run.series("loss/step")[1].tolist() == pytest.approx(logged, abs=1e-4)  # Trainer rounds its log
    assert len(logged) == 8 // parts
    start = weights.kept[0]
    moved = [sum((a - b).square().sum() for a, b in zip(now, start)).sqrt().item() for now in weights.kept]
    assert run.series("distance/absolute")[1].tolist() == pytest.approx(moved, rel=1e-5)
    assert any(name.startswith("rank/effective/") for name in run.names())
    assert state_of(model)["hooks"] == before


@pytest.mark.slow
def test_the_trainer_excites(tmp_path):
    model = network()
    settings = {"radius": 0.05, "classes": 2}
    trainer = ExcitedTrainer(model, arguments(tmp_path, seed=3), train_dataset=data(), excitation=settings)
    trainer.train()
    ours = network()
    pe = excite.PersistentExcitation(ours, output="logits", **settings)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    twin = transformers.Trainer(network(), arguments(tmp_path, seed=3), train_dataset=data())
    transformers.set_seed(3)
    ours.train()
    batches = [batch for epoch in range(2) for batch in _epoch(twin, epoch)]
    for batch in batches:
        optimizer.zero_grad()
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        pe.loss(inputs, batch["labels"]).backward()
        optimizer.step()
    logged = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len(logged) == len(batches) == 8
    for theirs, mine in zip(model.parameters(), ours.parameters()):
        assert torch.allclose(theirs, mine, atol=1e-6)
    with pytest.raises(InputError, match="expected excitation="):
        ExcitedTrainer(model, arguments(tmp_path), train_dataset=data(), excitation={})


@pytest.mark.slow
def test_an_excited_training_with_dropout_is_watched(tmp_path):
    model = network()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    callback = TransformersCallback(tmp_path / "run", every={"distance": 1}, alerts=[])
    trainer = ExcitedTrainer(
        model,
        arguments(tmp_path, max_steps=3),
        train_dataset=data(),
        callbacks=[callback],
        excitation={"radius": 0.05, "classes": 2},
    )
    trainer.train()
    callback.close()
    with excite.load_run(tmp_path / "run") as run:
        assert any(name.startswith("distance/") for name in run.names())
        assert "train/loss" in run.names()


def _epoch(trainer, epoch):
    """The batches that Trainer draws in an epoch."""
    loader = trainer.get_train_dataloader()
    if hasattr(loader, "set_epoch"):
        loader.set_epoch(epoch)
    return list(loader)


@pytest.mark.slow
def test_what_the_trainer_logs_arrives_in_the_run(tmp_path):
    callback = TransformersCallback(tmp_path / "run", probes=[excite.probes.Loss()], alerts=[])
    trainer = transformers.Trainer(
        network(),
        arguments(tmp_path, eval_strategy="epoch"),
        train_dataset=data(),
        eval_dataset=data(),
        callbacks=[callback],
    )
    trainer.train()
    run = excite.load_run(tmp_path / "run")
    logged = [row for row in trainer.state.log_history if "loss" in row]
    assert run.series("train/loss")[0].tolist() == [row["step"] for row in logged]
    assert run.series("train/loss")[1].tolist() == pytest.approx([row["loss"] for row in logged])
    assert run.series("train/learning_rate")[1].tolist() == [0.1] * 8
    assert run.series("eval/loss")[0].tolist() == [4, 8]
    assert "train/train_runtime" in run.names()


def images(count=24):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 3, 8, 8, generator=generator)
    return [{"pixel_values": one, "labels": int(one.mean() > 0.5)} for one in x]


def vision_network():
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4, num_labels=2
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


@pytest.mark.slow
def test_margins_of_the_trainers_data_are_in_the_run(tmp_path):
    callback = TransformersCallback(tmp_path / "run")
    trainer = transformers.Trainer(
        vision_network(), arguments(tmp_path), train_dataset=images(), eval_dataset=images(10), callbacks=[callback]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    run = excite.load_run(tmp_path / "run")
    assert run.config["config"]["learning_rate"] == 0.1
    assert run.series("margin_gap/median/train")[0][[0, -1]].tolist() == [0, 12]
    assert run.series("margin_gap/points/test")[1][[0, -1]].tolist() == [10, 10]
    stored = run.read_json("margins-inf-test")
    assert (len(stored["values"]), stored["unit"]) == (10, {"low": 0.0, "high": 1.0, "pixels": True})


@pytest.mark.slow
def test_token_ids_have_no_margin_which_is_said_once(tmp_path):
    callback = TransformersCallback(tmp_path / "run", probes=None)
    trainer = transformers.Trainer(network(), arguments(tmp_path), train_dataset=data(), callbacks=[callback])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train()
    about = [str(one.message) for one in said if "margins" in str(one.message)]
    assert len(about) == 1
    assert "train: inputs are whole numbers such as token ids" in about[0]
    assert any(name.startswith("rank/effective/") for name in excite.load_run(tmp_path / "run").names())


def test_the_config_is_what_the_user_chose_of_the_arguments(tmp_path):
    found = plain_values(_settings(arguments(tmp_path, hub_token="secret", eval_strategy="epoch")))
    assert found["learning_rate"] == 0.1
    assert (found["eval_strategy"], found["lr_scheduler_type"], found["optim"]) == ("epoch", "constant", "sgd")
    assert (found["seed"], found["weight_decay"]) == (42, 0.0)  # defaults that everybody compares
    assert "adam_beta1" not in found
    assert "secret" not in str(found)
    assert str(tmp_path) not in str(found)


def test_the_evaluation_data_are_those_of_the_trainer_that_calls(tmp_path):
    callback, inner = TransformersCallback(tmp_path / "run"), TransformersCallback(tmp_path / "inner")
    trainer = transformers.Trainer(network(), arguments(tmp_path), eval_dataset=data(), callbacks=[callback])

    class Calls(transformers.Trainer):
        def nested(self):
            return callback._evaluation_data(), inner._evaluation_data()

    other = Calls(network(), arguments(tmp_path), eval_dataset=data()[:3], callbacks=[inner])
    assert other.nested() == (None, other.eval_dataset)  # not that of a trainer that does not hold the callback
    assert callback._evaluation_data() is None
    assert trainer.eval_dataset is not None


@pytest.mark.slow
def test_a_language_model_is_excited_token_by_token_and_watched(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2, attn_pdrop=0.1)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(20, (16, 8))
    labels = torch.where(torch.arange(8) < 3, -100, ids)
    rows = [{"input_ids": a, "attention_mask": torch.ones_like(a), "labels": b} for a, b in zip(ids, labels)]
    settings = {
        "radius": 0.0, "norm": "2", "targets": "next-token", "loss": "cross-entropy",
        "layers": ["transformer.wte:output", "transformer.h.0:output"], "tokens": "prompt",
    }  # fmt: skip
    pe = excite.PersistentExcitation(model.eval(), output="logits", **settings)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    theirs = model(**batch, labels=labels).loss
    assert pe.loss(batch, labels).item() == pytest.approx(theirs.item(), rel=1e-6)
    callback = TransformersCallback(tmp_path / "run", every={"distance": 1}, alerts=[])
    trainer = ExcitedTrainer(
        model, arguments(tmp_path, max_steps=2), train_dataset=rows, callbacks=[callback], excitation={**settings, "radius": 0.05}
    )  # fmt: skip
    trainer.train()
    callback.close()
    found = trainer.excitation.perturbations(batch, labels)
    assert set(found) == set(settings["layers"])
    assert not found["transformer.wte:output"][0][:, 3:].any()  # prompt tokens only
    with excite.load_run(tmp_path / "run") as run:
        assert any(name.startswith("distance/") for name in run.names())
        assert "train/loss" in run.names()


def test_the_earlier_name_of_the_callback():
    from excite.integrations import transformers

    with pytest.warns(DeprecationWarning, match="ExciteCallback is deprecated: use excite.integrations.transformers.T"):
        assert transformers.ExciteCallback is TransformersCallback
