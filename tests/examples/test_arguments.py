"""Flags: defaults by model, and refusals that name the flag."""

import subprocess
import sys

import pytest
from arguments import parse_arguments
from conftest import RECIPE


def test_defaults_depend_on_the_model_and_on_privacy():
    tiny, pretrained = parse_arguments([]), parse_arguments(["--model", "ernie-3.0-medium-zh"])
    plain = parse_arguments(["--model", "ernie-3.0-medium-zh", "--non-private"])
    assert (tiny.model, tiny.data, tiny.epsilon, tiny.delta) == ("tiny", "mini", 3.0, 1e-5)
    assert tiny.dropout == pretrained.dropout == 0.0 < plain.dropout
    assert pretrained.batch_size > plain.batch_size
    assert plain.clip_norm is None


def test_given_values_win():
    args = parse_arguments(["--epochs", "2", "--clip-norm", "0.5", "--freeze-layers", "0", "--dropout", "0"])
    assert (args.epochs, args.clip_norm, args.freeze_layers, args.dropout) == (2, 0.5, 0, 0.0)
    assert parse_arguments(["--clip-norm", "auto"]).clip_norm == "auto"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--epsilon", "0"], "--epsilon: must be a positive number"),
        (["--epsilon", "nan"], "--epsilon: must be a positive number"),
        (["--epsilon", "three"], "--epsilon: invalid"),
        (["--delta", "1"], "--delta: must lie strictly between 0 and 1"),
        (["--epochs", "0"], "--epochs: must be a whole number of at least 1"),
        (["--batch-size", "2.5"], "--batch-size: invalid"),
        (["--learning-rate", "-1"], "--learning-rate: must be a positive number"),
        (["--max-length", "2"], "--max-length: must be at least 3"),
        (["--clip-norm", "inf"], "--clip-norm: must be a positive number"),
        (["--freeze-layers", "-1"], "--freeze-layers: must be a whole number of at least 0"),
        (["--physical-batch-size", "0"], "--physical-batch-size: must be a whole number of at least 1"),
        (["--dropout", "1"], "--dropout: must be at least 0 and less than 1"),
        (["--weight-decay", "-0.1"], "--weight-decay: must be a number of at least 0"),
        (["--optimizer", "lbfgs"], "--optimizer: invalid choice"),
        (["--clip-norm-data", "mini"], "--clip-norm-data is used by --clip-norm auto only"),
        (["--non-private", "--clip-norm", "1"], "--clip-norm has no meaning with --non-private"),
        (["--non-private", "--physical-batch-size", "8"], "--physical-batch-size has no meaning"),
        (["--epsilom", "3"], "unrecognized arguments: --epsilom"),
    ],
)
def test_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        parse_arguments(flags)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_help_imports_no_framework():
    code = (
        "import sys, runpy\n"
        f"sys.path.insert(0, {str(RECIPE)!r})\n"
        "import train\n"
        "try: train.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'paddle', 'paddlenlp', 'numpy'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--freeze-layers" in done.stdout
