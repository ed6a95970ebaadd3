import copy
import pickle

import pytest
from kernel_muster.registry.messages import command
from kernel_muster.registry.messages.audience import Audience
from kernel_muster.registry.messages.message import Message, message, quoted
from kernel_muster.registry.messages.template import fields_of

PYTHON = Audience("python", {"tuning_uncovered": "range {range}"}, lambda name, value: f"{name[2:]}={value!r}")


def test_message_is_its_text_on_the_command_line() -> None:
    found = message("tuning_uncovered", range="1 to 16 rows", shapes=("64x64",))
    assert found == "it covers 1 to 16 rows; outside: 64x64"
    assert (found.template, found.values["shapes"]) == ("tuning_uncovered", ("64x64",))


def test_message_of_another_audience_has_its_words() -> None:
    found = message("tuning_uncovered", range="1 to 16 rows", shapes=("64x64",)).for_audience(PYTHON)
    assert found == "range 1 to 16 rows"
    assert found.values["shapes"] == ("64x64",)


def test_message_inside_a_message_is_reworded_with_it() -> None:
    inner = message("tuning_uncovered", range="1 to 16 rows", shapes=("64x64",))
    assert message("quoted", text="x").for_audience(PYTHON) == "x"
    assert message("tuning_stale", differences=(inner,)).for_audience(PYTHON) == "range 1 to 16 rows"


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))])  # noqa: S301
def test_message_survives_a_copy(twin: object) -> None:
    found = twin(message("tuning_uncovered", range="r", shapes=("a",)))  # type: ignore[operator]
    assert isinstance(found, Message)
    assert (found, found.template, dict(found.values)) == (
        "it covers r; outside: a", "tuning_uncovered", {"range": "r", "shapes": ("a",)}
    )  # fmt: skip


def test_message_with_other_values_is_made_anew() -> None:
    found = message("tuning_uncovered", range="r", shapes=("a",)).with_values(range="s")
    assert found == "it covers s; outside: a"


def test_quoted_text_is_kept_word_for_word_for_every_audience() -> None:
    text = quoted("{not a field} --stage loaded")
    assert text == text.for_audience(PYTHON) == "{not a field} --stage loaded"
    assert quoted(text) is text


def test_unknown_template_raises() -> None:
    with pytest.raises(KeyError, match="no_such_sentence"):
        message("no_such_sentence")


@pytest.mark.parametrize("name", command.TEMPLATES)
def test_every_template_parses(name: str) -> None:
    assert isinstance(fields_of(command.TEMPLATES[name]), frozenset)
