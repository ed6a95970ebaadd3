"""Measuring the thresholds of dispatch on the device at hand.

1. ``source.py``     what a measurement gives: times of all arms at a shape and row count (``Source`` is the protocol).
2. ``device.py``     the source that measures on a GPU; tests bring their own.
3. ``shapes.py``     which shapes are measured.
4. ``questions.py``  which edges are asked for, and which arms compete for each. Pure, as the next two are.
5. ``edges.py``      puts each edge where the loss against the faster arm is least.
6. ``picks.py``      what dispatch picks by the new edges, beside cuBLAS.
7. ``write.py``      the table, and its summary as Markdown.
"""
