"""Print pip constraints: the lowest version that pyproject.toml declares of each package that the project needs."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
for requirement in project["dependencies"]:
    found = re.fullmatch(r"([A-Za-z0-9_.-]+)>=([0-9.]+)(,<[0-9.]+)?", requirement)
    if found is None:
        sys.exit(f"{requirement!r} has no lower bound of the form name>=1.2")
    print(f"{found[1]}=={found[2]}")
