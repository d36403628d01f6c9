"""Each strategy of the recipe on `mini`: what it trains, what it computes, and what it saves."""

import json

import numpy as np
import predict
import pytest

# Flags, and a pattern of the parameters that must move; all others must stay.
STRATEGIES = {
    "full": ("--strategy full", ""),
    "last layers": ("--freeze-layers 1", "encoder.layers.1|pooler|classifier"),
    "lora": ("--strategy lora", "q_proj.weight|v_proj.weight|pooler|classifier"),
    "lora in the last layer": (
        "--strategy lora --freeze-layers 1",
        "layers.1.self_attn.q_proj.weight|layers.1.self_attn.v_proj.weight|pooler|classifier",
    ),
    "bitfit": ("--strategy bitfit", "bias|pooler|classifier"),
    "head": ("--strategy head", "pooler|classifier"),
    "probe": ("--strategy probe", "nothing that PaddleNLP knows of"),
    "prompt": (
        "--strategy prompt",
        "encoder|position|token_type|embeddings.layer_norm|cls.predictions.transform|cls.predictions.layer_norm",
    ),
    "prompt, last layer": (
        "--strategy prompt --freeze-layers 1",
        "encoder.layers.1|cls.predictions.transform|cls.predictions.layer_norm",
    ),
}
FEW_STEPS = ("--batch-size", "100", "--epochs", "1", "--learning-rate", "0.01", "--max-length", "24")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A checkpoint of two layers with both heads, as from pretraining; random, and larger than what new layers get."""
    import ernie
    import paddle
    from paddlenlp.transformers import ErnieConfig, ErnieForMaskedLM

    folder = tmp_path_factory.mktemp("pretrained")
    _, tokenizer = ernie.build_tiny(2, 0.0, folder)
    config = ErnieConfig(
        vocab_size=len(ernie.tiny_vocabulary()),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=64,
        pad_token_id=0,
        initializer_range=0.2,
    )
    paddle.seed(5)
    model = ErnieForMaskedLM(config)
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return folder


def before_and_after(run, pretrained, tmp_path, flags):
    """Parameters by name as the run found them and as it saved them, and the run's summary."""
    import ernie
    import paddle

    code, folder, shown = run("--model", str(pretrained), *flags.split(), *FEW_STEPS)
    assert code == 0, shown
    prompted = "prompt" in flags
    paddle.seed(0)
    before, _ = ernie.load(str(pretrained), 2, 0.0, tmp_path / "again", masked_lm=prompted)
    after, _ = ernie.load(str(folder / "model"), 2, 0.0, tmp_path / "again", masked_lm=prompted)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    states = [{name: value.numpy() for name, value in model.state_dict().items()} for model in (before, after)]
    return *states, summary, folder


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_moves_its_parameters_and_no_others(run, pretrained, tmp_path, name):
    flags, moving = STRATEGIES[name]
    before, after, summary, _ = before_and_after(run, pretrained, tmp_path, flags)
    assert summary["ended"] == "completed"
    assert 0 < summary["epsilon"] <= 3
    assert before.keys() == after.keys()
    for parameter, value in before.items():
        moved = not np.array_equal(value, after[parameter])
        assert moved == any(part in parameter for part in moving.split("|")), parameter


@pytest.mark.parametrize("flags", [flags for flags, _ in STRATEGIES.values() if "probe" not in flags])
def test_the_saved_model_scores_as_the_trained_one_did(run, pretrained, small_folder, tmp_path, flags):
    """Through PaddleNLP's own forward pass: the network's shortcuts and merged factors change nothing."""
    import ernie
    import paddle
    import reviews

    code, folder, shown = run("--model", str(pretrained), *flags.split(), *FEW_STEPS)
    assert code == 0, shown
    prompted = "prompt" in flags
    model, tokenizer = ernie.load(str(folder / "model"), 2, 0.0, tmp_path / "again", masked_lm=prompted)
    prompt = json.loads((folder / "model" / "recipe.json").read_text(encoding="utf-8"))["prompt"]
    test = reviews.load(str(small_folder)).test
    rows = ernie.encode(tokenizer, [text for text, _ in test], 24, prompt["before"] if prompted else ())
    model.eval()
    correct, probabilities = [], []
    for ids, (_, label) in zip(rows, test):
        scores = model(paddle.to_tensor(ids[None])).numpy()[0]
        if prompted:
            assert ids[prompt["position"]] == tokenizer.mask_token_id
            scores = scores[prompt["position"], prompt["words"]]
        correct.append(int(scores.argmax(-1)) == label)
        probabilities.append(np.exp(scores) / np.exp(scores).sum())
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert np.mean(correct) == summary["test_accuracy"]
    found = predict.load(folder / "model").probabilities([text for text, _ in test])
    np.testing.assert_allclose(found, probabilities, rtol=1e-3, atol=1e-6)


def test_a_probe_sees_every_layer_and_predicts_as_it_was_tested(run, pretrained, small_folder, tmp_path, capsys):
    """Its features against PaddleNLP's hidden states row by row, without padding; then the saved probe."""
    import ernie
    import paddle
    import reviews
    from audited import scores_of

    code, folder, shown = run("--model", str(pretrained), "--strategy", "probe", *FEW_STEPS)
    assert code == 0, shown
    test = reviews.load(str(small_folder)).test
    texts = [text for text, _ in test]
    found = predict.load(folder / "model").probabilities(texts)
    right = [shares.argmax() == label for shares, (_, label) in zip(found, test)]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert np.mean(right) == summary["test_accuracy"]

    model, tokenizer = ernie.load(str(pretrained), 2, 0.0, tmp_path / "again")
    model.eval()
    weights = {name: value.numpy() for name, value in paddle.load(str(folder / "model" / predict.PROBE)).items()}
    for ids, shares in zip(ernie.encode(tokenizer, texts, 24), found):
        layers = model(paddle.to_tensor(ids[None]), output_hidden_states=True, return_dict=True).hidden_states[1:]
        parts = [part for layer in layers for part in (layer[0, 0].numpy(), layer[0].mean(0).numpy())]
        features = np.concatenate(parts).astype(np.float64)
        features /= np.sqrt(np.mean(features**2))
        units = np.maximum(features @ weights["hidden.weight"] + weights["hidden.bias"], 0)
        scores = units @ weights["classifier.weight"] + weights["classifier.bias"]
        np.testing.assert_allclose(shares, np.exp(scores) / np.exp(scores).sum(), rtol=1e-3)

    labels = np.array([label for _, label in test])
    losses, _ = scores_of(folder / "model", test)
    np.testing.assert_allclose(losses, -np.log(found[np.arange(len(test)), labels]), rtol=1e-4, atol=1e-6)

    capsys.readouterr()
    assert predict.main([str(folder), *texts[:2]]) == 0
    shown = capsys.readouterr().out.splitlines()
    (folder / "model" / predict.PROBE).unlink()
    with pytest.raises(ernie.ModelError, match="probe.pdparams is missing"):
        predict.load(folder / "model")
    assert shown == [f"{shares.argmax()}\t{shares.max():.3f}\t{text}" for shares, text in zip(found[:2], texts[:2])]


def test_a_run_without_a_saved_model_is_named(tmp_path, capsys):
    assert predict.main([str(tmp_path), "好"]) == 2
    assert "recipe.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["", "--freeze-layers 1", "--freeze-layers 2"])
@pytest.mark.parametrize("prompted", [False, True])
def test_the_network_computes_the_scores_of_the_model(pretrained, small_folder, tmp_path, flags, prompted):
    """Rows of unequal length, in one padded batch, against PaddleNLP's forward pass row by row."""
    import paddle
    import reviews
    import task
    from arguments import parse_arguments

    strategy = ["--strategy", "prompt"] if prompted else []
    given = ["--model", str(pretrained), "--data", str(small_folder), "--max-length", "24", *flags.split(), *strategy]
    prepared = task.prepare(parse_arguments(given), tmp_path / "model", reviews.load(str(small_folder)))
    plain = task.prepare(
        parse_arguments(["--model", str(pretrained), "--data", str(small_folder), "--max-length", "24", *strategy]),
        tmp_path / "model",
        reviews.load(str(small_folder)),
    )
    chosen = [3, 11, 30, 59]
    prepared.network.eval()
    prepared.model.eval()
    inputs, _ = prepared.join([prepared.test[row] for row in chosen])
    found = prepared.network(*map(paddle.to_tensor, inputs)).numpy()
    assert len({len(plain.test[row][0]) for row in chosen}) > 1
    for scores, row in zip(found, chosen):
        whole = prepared.model(paddle.to_tensor(plain.test[row][0][None])).numpy()[0]
        if prompted:
            whole = whole[prepared.prompt.position, prepared.prompt.words]
        np.testing.assert_allclose(scores, whole, rtol=1e-4, atol=1e-5)


def test_kept_states_are_those_of_the_same_rows_and_weights(pretrained, small_folder, tmp_path):
    import reviews
    import task
    from arguments import parse_arguments

    def states(*flags):
        args = parse_arguments(["--model", str(pretrained), "--data", str(small_folder), "--max-length", "24", *flags])
        return task.prepare(args, tmp_path / "model", reviews.load(str(small_folder))).test.inputs

    kept = ("--state-cache", str(tmp_path / "states"))
    first = states("--freeze-layers", "1", *kept)
    written = sorted((tmp_path / "states").iterdir())
    again, fresh = states("--freeze-layers", "1", *kept), states("--freeze-layers", "1")
    assert sorted((tmp_path / "states").iterdir()) == written
    for one, two, three in zip(first, again, fresh):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(one, three)
    other = states("--freeze-layers", "2", *kept)
    assert len(list((tmp_path / "states").iterdir())) == 2 * len(written)
    assert other[0].shape == (1, 16)


def test_a_prompt_needs_pretrained_words(run, pretrained, tmp_path):
    """A checkpoint without the masked-language-model head, a template without [MASK], and words that are no tokens."""
    from paddlenlp.transformers import ErnieForSequenceClassification

    headless = tmp_path / "headless"
    ErnieForSequenceClassification.from_pretrained(str(pretrained), num_classes=2).save_pretrained(str(headless))
    for name in ("vocab.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (headless / name).write_bytes((pretrained / name).read_bytes())
    code, _, shown = run("--model", str(headless), "--strategy", "prompt", *FEW_STEPS, output=tmp_path / "a")
    assert code == 2
    assert "no masked-language-model head" in shown
    for flags, message in (
        (("--prompt", "很好。"), "exactly once"),
        (("--label-words", "好评,差"), "not one token"),
        (("--label-words", "好,差,中"), "2 labels"),
    ):
        code, _, shown = run(
            "--model", str(pretrained), "--strategy", "prompt", *flags, *FEW_STEPS, output=tmp_path / flags[1]
        )
        assert code == 2
        assert message in shown


def test_flags_that_contradict_each_other_are_refused(capsys):
    from arguments import parse_arguments

    for flags, message in (
        (["--strategy", "head", "--freeze-layers", "1"], "freezes all layers"),
        (["--strategy", "probe", "--freeze-layers", "1"], "freezes all layers"),
        (["--label-words", "差,好"], "--strategy prompt only"),
        (["--non-private", "--optimizer", "adambc"], "privacy noise"),
    ):
        with pytest.raises(SystemExit):
            parse_arguments(flags)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("strategy", ["head", "probe"])
def test_a_head_on_its_own_is_the_measured_setting(strategy):
    """`--strategy head` alone has the flags under which RESULTS.md measured it, with and without privacy."""
    import sweep
    from arguments import parse_arguments

    measured = next(setting for setting in sweep.SETTINGS if setting.name == strategy)
    for epsilon, extra in ((3.0, []), (np.inf, ["--non-private"])):
        given = parse_arguments(["--model", "m", "--data", "d", "--output", "o", *measured.flags(epsilon)])
        alone = parse_arguments(["--model", "m", "--data", "d", "--output", "o", "--strategy", strategy, *extra])
        assert vars(alone) == vars(given)


def test_moving_average_is_the_weighted_sum_of_the_weights():
    import paddle
    from averaging import MovingAverage

    weight = paddle.create_parameter([2], "float32")
    path = np.random.default_rng(3).normal(size=(30, 2))
    weight.set_value(path[0].astype(np.float32))
    average = MovingAverage([weight], 0.8)
    expected = path[0]
    for step, value in enumerate(path[1:], start=1):
        weight.set_value(value.astype(np.float32))
        average.update()
        keep = min(0.8, (1 + step) / (10 + step))
        expected = keep * expected + (1 - keep) * value
    with average.in_place():
        np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(weight.numpy(), path[-1], rtol=1e-6)


def test_batches_of_similar_length_hold_every_row_once():
    from batches import EncodedRows, ShuffledByLength

    lengths = np.random.default_rng(1).integers(3, 60, size=1003)
    rows = EncodedRows([np.zeros(length, dtype=np.int64) for length in lengths], [0] * len(lengths))
    sampler = ShuffledByLength(rows, 8, seed=0)
    first, second = list(sampler), list(sampler)
    assert len(first) == len(sampler)
    assert first != second
    for batches in (first, second):
        assert sorted(row for batch in batches for row in batch) == list(range(1003))
        padding = sum(len(batch) * max(lengths[batch]) for batch in batches) / lengths.sum()
        assert padding < 1.2


def test_the_sweep_tabulates_what_its_run_folders_hold(tmp_path):
    import sweep

    head = next(setting for setting in sweep.SETTINGS if setting.name == "head")
    for epsilon, seed, test in ((3.0, 0, 0.84), (3.0, 1, 0.86), (np.inf, 0, 0.90)):
        folder = tmp_path / sweep.folder_name(head, epsilon, seed)
        folder.mkdir()
        private = {"noise_multiplier": 2.5, "clip_norm": 1.0} if epsilon < np.inf else {}
        summary = {
            "test_accuracy": test,
            "test_accuracy_unseen": test + 0.05,
            "cpu_seconds": 60,
            "peak_memory_mib": 2048,
        }
        (folder / "summary.json").write_text(json.dumps({**summary, **private}))
        flags = {"batch_size": 1024, "epochs": 30, "learning_rate": 0.01}
        (folder / "config.json").write_text(json.dumps({"flags": flags}))
        (folder / "metrics.jsonl").write_text('{"dev_accuracy": 0.5}\n{"dev_accuracy": 0.8}\n')
    assert sweep.main(["--output", str(tmp_path), "--table-only"]) == 0
    rows = (tmp_path / "table.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 4
    # Mean of 84% and 86%, and their standard deviation √2; 85/90 of the best run without privacy.
    assert rows[2].startswith(
        "| head | 3 | 80.00% ± 0.00 | 85.00% ± 1.41 | 94.4% | 90.00% ± 1.41 | 94.7% | 2.500 | 1 | 1024 |"
    )
    assert rows[3].startswith("| head | ∞ | 80.00% | 90.00% | 100.0% | 95.00% | 100.0% | – | – | 1024 |")
    assert (tmp_path / "accuracy.png").stat().st_size > 1000


def test_the_sweep_asks_train_py_for_each_cell(monkeypatch, tmp_path):
    """Every setting's flags are ones that train.py takes, at each ε."""
    import sweep
    from arguments import parse_arguments

    for setting in sweep.SETTINGS:
        for epsilon in sweep.EPSILONS:
            args = parse_arguments(["--model", "m", "--data", "d", *setting.flags(epsilon)])
            assert args.non_private == (epsilon == np.inf)
            assert args.non_private or args.epsilon == epsilon


def test_membership_attack_beats_chance_on_a_model_that_learned_by_heart(run, small_folder, capsys):
    """300 rows, many epochs, no privacy; and the number of rows on each side is that of the unseen test rows."""
    import re

    import membership

    code, folder, _ = run("--non-private", "--epochs", "40", "--batch-size", "32", "--max-length", "32")
    assert code == 0
    assert membership.main(["--data", str(small_folder), str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "59 members, 59 non-members" in shown
    assert float(re.search(r"AUC (\d\.\d+)", shown)[1]) > 0.7
