"""examples/load_and_decode: the decoded tokens of a small checkpoint of either format, and refusals."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "load_and_decode"
PROMPTS = ("--ids", "1,2,3", "--ids", "4,5")


def load(name):
    spec = importlib.util.spec_from_file_location(f"load_and_decode_{name}", EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One checkpoint in each format, of the same weights."""
    small = load("small_checkpoint")
    folder = tmp_path_factory.mktemp("checkpoints")
    return {name: small.write_checkpoint(folder / name, format=name) for name in small.FORMATS}


@pytest.fixture
def decode(capsys):
    """Run the example as its command; return exit code, rows of ids and stderr."""
    main = load("decode").main

    def run(*arguments):
        code = main([str(one) for one in arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def test_both_formats_of_the_same_weights_decode_to_the_same_tokens(checkpoints, decode):
    found = {}
    for name, folder in checkpoints.items():
        code, rows, err = decode(folder, "--small", "--target", "cpu", *PROMPTS, "--tokens", "6")
        assert code == 0
        assert [len(row.split()) for row in rows] == [6, 6]
        assert err == "130 tensors used, 0 activation or cache scales not needed\n"
        found[name] = rows
    assert len({tuple(rows) for rows in found.values()}) == 1


def test_drafts_change_no_token_and_a_seed_gives_one_text(checkpoints, decode):
    common = (checkpoints["modelopt"], "--small", "--target", "cpu", *PROMPTS, "--tokens", "6")
    assert decode(*common, "--drafts", "2")[1] == decode(*common)[1]
    sampled = decode(*common, "--temperature", "0.9", "--top-k", "20", "--seed", "3")
    assert sampled[1] == decode(*common, "--temperature", "0.9", "--top-k", "20", "--seed", "3")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--ids", "512"), "token 512 at place 0: expected an integer from 0 to 511"),
        (("--tokens", "0"), "0 new tokens: expected at least 1"),
        (("--temperature", "-1"), "expected a temperature from 0 on"),
        (("--ids", "-1"), "token -1 at place 0"),
    ],
)
def test_what_makes_no_sense_is_said_without_a_traceback(checkpoints, decode, arguments, said):
    code, rows, err = decode(checkpoints["modelopt"], "--small", "--target", "cpu", *arguments)
    assert (code, rows) == (2, [])
    assert said in err


def test_folder_that_is_no_checkpoint_and_one_of_no_known_model_are_refused(checkpoints, decode, tmp_path):
    assert decode(tmp_path, "--small", "--target", "cpu")[0] == 2
    code, rows, _ = decode(checkpoints["modelopt"], "--target", "cpu")
    assert code == 1
    assert any("UNKNOWN_MODEL" in row for row in rows)


def test_decode_without_a_gpu_names_no_target_that_it_does_not_take(checkpoints, decode):
    code, rows, _ = decode(next(iter(checkpoints.values())), "--small", "--target", "cuda:99")
    text = "\n".join(rows)
    assert (code, "NO_DEVICE" in text, "--target cpu" in text) == (1, True, True)
    assert "name an architecture" not in text


def test_sampling_does_not_go_with_drafts(checkpoints, decode, capsys):
    with pytest.raises(SystemExit) as ended:
        decode(checkpoints["modelopt"], "--small", "--target", "cpu", "--drafts", "2", "--temperature", "1")
    assert ended.value.code == 2
    assert "greedy choice only" in capsys.readouterr().err
