"""The manual's runnable examples run, and print the output shown."""


def test_examples_of_a_page_run_as_shown(page, shell, blocks_of):
    for block in blocks_of(page):
        try:
            shell.run(block)
        except BaseException as error:
            error.add_note(f"{page}:{block.line}")
            raise


def test_fences_say_only_what_the_runner_knows(page, blocks_of):
    for block in blocks_of(page):
        assert block.language in {"", "sh", "text", "python", "cpp", "toml", "json", "markdown"}, f"{page}:{block.line}"
        # Blocks marked torch run in tests/torch, if it is installed.
        assert set(block.options) <= {"run", "exit", "file", "output", "torch"}, f"{page}:{block.line}"
