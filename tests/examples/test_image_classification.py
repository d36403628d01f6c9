"""examples/image_classification from its flags to the files of the run, and the reading of its data."""

import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_privacy.accounting import compute_epsilon
from paddle_privacy.verify.chain import read_ledger

RECIPE = Path(__file__).parents[2] / "examples" / "image_classification"


@pytest.fixture(scope="module")
def images():
    # Under a name of its own: the other recipe's folder is on sys.path.
    spec = importlib.util.spec_from_file_location("image_classification_images", RECIPE / "images.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_idx(path, array):
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype("uint8").tobytes()))


@pytest.fixture
def folder(tmp_path):
    """The four files of 120 and 30 images of 28 x 28 pixels."""
    draw = np.random.RandomState(0)
    (tmp_path / "data").mkdir()
    for name, rows in (("train", 120), ("t10k", 30)):
        write_idx(tmp_path / "data" / f"{name}-images-idx3-ubyte.gz", draw.randint(0, 256, (rows, 28, 28)))
        write_idx(tmp_path / "data" / f"{name}-labels-idx1-ubyte.gz", np.arange(rows) % 10)
    return tmp_path / "data"


def run(*flags):
    return subprocess.run([sys.executable, str(RECIPE / "train.py"), *map(str, flags)], capture_output=True, text=True)


def test_private_run_on_digits(tmp_path):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install scikit-learn")
    output = tmp_path / "run"
    done = run("--data", "digits", "--epochs", 2, "--accountant", "rdp", "--output", output)
    assert done.returncode == 0, done.stderr
    summary = json.loads((output / "summary.json").read_text())
    sigma = summary["privacy"]["noise_multiplier"]
    steps = 2 * 7  # 1,297 rows in batches of 216

    # Not through the optimizer: σ, rate and steps into the accountant.
    expected = compute_epsilon(noise_multiplier=sigma, sample_rate=216 / 1297, steps=steps, delta=1e-5)
    assert summary["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert expected <= 3.0

    (recorded,) = read_ledger(output / "ledger.jsonl").runs
    assert (recorded.steps, recorded.closed, recorded.header["dataset_size"]) == (steps, True, 1297)
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [m["epoch"] for m in metrics] == [1, 2]
    assert metrics[-1]["epsilon"] == summary["epsilon"] > metrics[0]["epsilon"]

    # Ten classes; a network that learns nothing has 10% ± 1.7% of 300 rows, so this is more than ten deviations off.
    assert summary["test_accuracy"] > 0.3
    for shown in ("test accuracy", "ε (epsilon)", "δ (delta)", "σ (noise multiplier)", "relation", "poisson"):
        assert shown in done.stdout
    assert "loss" not in done.stdout


def test_convolutions_on_files_without_privacy(folder, tmp_path):
    output = tmp_path / "run"
    done = run("--data", folder, "--network", "cnn", "--epochs", 1, "--non-private", "--output", output)
    assert done.returncode == 0, done.stderr
    assert json.loads((output / "summary.json").read_text())["test_rows"] == 30
    assert not (output / "ledger.jsonl").exists()
    assert "privacy               none" in done.stdout

    again = run("--data", folder, "--output", output)
    assert again.returncode == 2
    assert "error:" in again.stderr and str(output) in again.stderr


def test_images_are_scaled_by_the_format_and_split_once(images, folder):
    data = images.load(str(folder))
    raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    joined = np.concatenate([data.train[0], data.dev[0]])
    assert joined.dtype == np.float32 and joined.shape == (120, 1, 28, 28)
    np.testing.assert_allclose((joined.reshape(-1) + 1) * 127.5, np.frombuffer(raw, np.uint8), atol=1e-4)
    assert [len(part[0]) for part in (data.train, data.dev, data.test)] == [110, 10, 30]
    np.testing.assert_array_equal(np.concatenate([data.train[1], data.dev[1]]), np.arange(120) % 10)


def test_unreadable_data_is_refused_with_what_to_do(images, folder):
    with pytest.raises(images.DataError, match=r"dataset-fashion-mnist.*--data digits"):
        images.load(str(folder / "nothing"))
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.zeros(100))
    with pytest.raises(images.DataError, match="120 images but 100 labels"):
        images.load(str(folder))
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.zeros((120, 1)))
    with pytest.raises(images.DataError, match="not an IDX file of unsigned bytes in 1 dimensions"):
        images.load(str(folder))


def test_digits_are_split_without_overlap(images):
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's: pip install scikit-learn")
    from sklearn.datasets import load_digits

    data = images.load("digits")
    assert [len(part[0]) for part in (data.train, data.dev, data.test)] == [1297, 200, 300]
    joined = np.concatenate([part[0] for part in (data.train, data.dev, data.test)]).reshape(-1, 64)
    original = load_digits().data / 8 - 1
    np.testing.assert_allclose(joined[np.lexsort(joined.T)], original[np.lexsort(original.T)], atol=1e-6)


@pytest.mark.parametrize("mirror", [False, True])
def test_views_are_the_image_moved_by_a_pixel(images, mirror):
    """Each is one of the nine shifts of its image, or of the mirrored one; all of them occur."""
    random = np.random.default_rng(0)
    pixels = random.uniform(-1, 1, (200, 1, 6, 6)).astype("float32")
    seen = list(images.views(pixels, 4, mirror, random))
    assert len(seen) == 4
    np.testing.assert_array_equal(seen[0], pixels)
    found = set()
    for view in seen[1:]:
        assert view.shape == pixels.shape
        assert view.dtype == pixels.dtype
        for original, moved in zip(pixels[:, 0], view[:, 0]):
            versions = {}
            for turned in (False, True) if mirror else (False,):
                padded = np.pad(original[:, ::-1] if turned else original, 1, constant_values=-1.0)
                for down in range(3):
                    for across in range(3):
                        versions[turned, down, across] = padded[down : down + 6, across : across + 6]
            same = [name for name, version in versions.items() if np.array_equal(version, moved)]
            assert len(same) == 1
            found.add(same[0])
    # 600 draws of 18: one that never occurs has probability below 1e-13.
    assert len(found) == (18 if mirror else 9)


def test_views_are_averaged_into_one_gradient_a_row(folder, tmp_path):
    """ε is that of one view: the copies are no further rows."""
    spent = []
    for count in (1, 3):
        output = tmp_path / f"views{count}"
        flags = ("--epochs", 1, "--batch-size", 40, "--accountant", "rdp", "--views", count)
        done = run("--data", folder, *flags, "--output", output)
        assert done.returncode == 0, done.stderr
        assert "several times" not in done.stderr
        spent.append(json.loads((output / "summary.json").read_text())["epsilon"])
    assert spent[0] == spent[1]
    done = run("--data", folder, "--views", 0)
    assert done.returncode == 2
    assert "--views must be at least 1" in done.stderr
