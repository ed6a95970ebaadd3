import pytest
from kernel_muster.registry.keys import KernelKey
from kernel_muster.registry.messages.template import fields_of, fill


@pytest.mark.parametrize(
    ("template", "values", "text"),
    [
        ("{key} is absent", {"key": KernelKey("norm", "rms_norm")}, "norm::rms_norm is absent"),
        ("{names}", {"names": ("a", "b")}, "a, b"),
        ("{names:or}", {"names": ["a", "b"]}, "a or b"),
        ("{names:semicolons}", {"names": ("a", "b")}, "a; b"),
        ("{count:# kernel}", {"count": 1}, "1 kernel"),
        ("{count:# kernel}", {"count": 0}, "0 kernels"),
        ("absent{near:hint}", {"near": ()}, "absent"),
        ("absent{near:hint}", {"near": ("a", "b")}, "absent; did you mean a or b?"),
        ("{size:.1f} GiB", {"size": 1.25}, "1.2 GiB"),
        ("ask for {--stage reached}", {"reached": "loaded"}, "ask for --stage loaded"),
        ("give {--manifest FILE}, or leave {--quant} out", {}, "give --manifest FILE, or leave --quant out"),
    ],
)
def test_template_is_filled(template: str, values: dict[str, object], text: str) -> None:
    assert fill(template, values) == text


def test_template_without_one_of_its_values_raises() -> None:
    with pytest.raises(KeyError, match="reached"):
        fill("ask for {--stage reached}", {})


def test_fields_of_a_template_are_the_values_that_it_reads() -> None:
    assert fields_of("{key}{near:hint} {--stage reached} {--manifest FILE} {--quant}") == {"key", "near", "reached"}
