"""Measurement of the thresholds of dispatch on the local device.

1. ``source.py``     the result of a measurement: times of all arms at a shape and row count (the protocol ``Source``).
2. ``device.py``     the source that measures on a GPU. Tests have their own.
3. ``shapes.py``     the measured shapes.
4. ``questions.py``  the edges, and the competing arms of each. Pure, like the next two.
5. ``edges.py``      puts each edge at the least loss against the faster arm.
6. ``picks.py``      the dispatched arms under the new edges, beside cuBLAS.
7. ``write.py``      the table, and its summary as Markdown.
"""
