"""From a lookup to the selected kernel, with a record of every decision."""
