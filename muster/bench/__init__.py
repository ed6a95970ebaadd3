"""Measurement of kernels on the local device, beside the installed peers.

A *family* (``families.MODULES``) yields *problems*. The core handles all of them alike:

1. ``families.py`` has ``BenchFamily(name, problems, rows, default_rows, parse_shape)`` and the table of all families,
   each a module with ``FAMILY``. A new family is one module and one line in ``MODULES``.
2. ``problem.py``: a ``Request`` from the command goes in, a ``Problem`` comes out: one shape at one row count, with its
   contestants, the judge of their outputs, and the contestant that serves as floor.
3. ``contestants.py``: ``Contestant(name, role, make)``. ``make(stream)`` returns an ``Entry`` (launches over cold
   copies, output, bytes, operations) or ``Absent`` with the reason. Its helpers: ``read_kernel``, ``launch_of``,
   ``poisoned``, ``as_torch``, ``copied``. ``data.py`` makes NVFP4 weights. ``peers.py``: dense peers.
4. ``race.py`` sets every contestant up, launches it once, judges its output, then times all in turn (``timing.py``).
   It yields a ``Row`` for each: microseconds, spread, ratio to the floor, GB/s, TFLOP/s, error, or a note.
5. ``record.py`` writes rows of any family as JSON, or as a Markdown table for each.

CuPy, torch and the peers are imported inside functions only.
"""
