"""Dispatch sites and layers of a live boot's misses: one finding for each cause, with every lookup line."""

import kernel_muster as km


@km.track_caller
def helper(kernels, func):
    return kernels.try_kernel("acme", func)


@km.track_caller
def outer_helper(kernels, func):
    return helper(kernels, func)


def test_one_kernel_missing_in_61_layers_is_one_finding_with_all_sites_and_layers(world):
    def build(boot):
        for number in range(61):
            kernels = boot.kernels.for_layer(f"layers.{number}.attn")
            if number % 2:
                kernels.kernel("acme", "mul")
            else:
                kernels.kernel("acme", "mul")

    outcome = world.run(build)
    assert outcome.codes == ["MISSING"]
    found = outcome.finding("MISSING")
    assert found.layers == tuple(f"layers.{number}.attn" for number in range(61))
    assert len(found.where) == 2
    assert sorted(site.rpartition(" ")[2] for site in found.where) == ["(30x)", "(31x)"]
    assert outcome.report.counts.lookups == 61
    assert outcome.report.counts.refusing == 1
    assert [row.layers for row in outcome.report.kernels] == [found.layers]


def test_required_and_optional_misses_of_one_key_are_one_finding(world):
    def build(boot):
        boot.kernels.for_layer("layers.1").kernel("acme", "mul")
        boot.kernels.for_layer("layers.0").try_kernel("acme", "mul")

    found = world.run(build).finding("MISSING")
    assert len(found.where) == 2
    assert sorted(found.layers) == ["layers.0", "layers.1"]


def test_site_of_a_helper_is_the_line_that_called_it(world):
    def build(boot):
        helper(boot.kernels, "mul")
        outer_helper(boot.kernels, "mul")
        [helper(boot.kernels, "mul") for _ in range(3)]

    first = build.__code__.co_firstlineno + 1
    where = world.run(build).finding("MISSING").where
    lines = [int(site.split(":")[1].split()[0]) for site in where]
    assert lines == [first, first + 1, first + 2]
    assert all(site.startswith("tests/audit/test_sites.py:") for site in where)
    assert where[2].endswith("(3x)")


def test_two_lookups_on_one_line_are_counted_at_one_site(world):
    def build(boot):
        boot.kernels.try_kernel("acme", "mul"), boot.kernels.try_kernel("acme", "mul")

    (site,) = world.run(build).finding("MISSING").where
    assert site.endswith("(2x)")


def test_malformed_key_is_missing_and_says_why(world):
    outcome = world.run(lambda boot: boot.kernels.kernel("Acme", "a::b"))
    assert outcome.codes == ["MISSING"]
    assert outcome.finding("MISSING").subject == "Acme::a::b"
    assert "does not match" in outcome.finding("MISSING").why


def test_miss_hints_at_the_same_function_elsewhere_and_at_near_names(world):
    plugins = {"acme": world.acme("acme::mul", "acme_old::quantize")}
    outcome = world.run(world.ask("acme::mull", "acme::quantize", "acme::mul"), plugins)
    whys = {f.subject: f.why for f in outcome.report.findings}
    assert "did you mean acme::mul?" in whys["acme::mull"]
    assert "quantize exists in acme_old" in whys["acme::quantize"]


def test_miss_of_a_blocked_plugins_key_names_the_block(world):
    outcome = world.run(world.ask("acme::mul"), {"acme": world.acme("acme::mul")}, no_plugins=["acme"])
    assert outcome.codes == ["MISSING"]
    assert any("no_plugins" in remedy for remedy in outcome.finding("MISSING").remedies)


def test_misses_of_a_failed_plugin_are_its_findings_consequences(world):
    plugins = {"acme": world.plugin(kernels=[world.spec("acme::mul"), 42])}
    outcome = world.run(world.ask("acme::mul", "acme::other"), plugins)
    assert outcome.codes == ["BAD_SPEC"]
    explains = outcome.finding("BAD_SPEC").explains
    assert [text.split(":", 1)[0] for text in explains] == ["MISSING acme", "MISSING acme"]
    assert all("test" in text or "conftest" in text for text in explains)


def test_override_of_a_failed_plugin_is_no_finding_of_its_own(world):
    world.distribution("acme-kernels", world.plugin(kernels=[world.spec("acme::mul"), 42]), plugin="acme")
    fork = [world.spec("acme::mul", overrides="acme-kernels", contract="fork_double")]
    world.distribution("fork", world.plugin(kernels=fork, contracts=[world.contract("fork_double")]))
    outcome = world.run(world.ask("acme::mul"))
    assert outcome.codes == ["BAD_SPEC"]
    assert outcome.finding("BAD_SPEC").subject == "acme"
