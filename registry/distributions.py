"""Names of distributions, which compare as PEP 503 has it: ``Acme_Kernels`` and ``acme-kernels`` are one."""

import re

_SEPARATORS = re.compile(r"[-_.]+")
#: This project's own distribution, in its normal form.
HOST_DISTRIBUTION = "kernel-muster"
#: The package that it installs.
HOST_MODULE = "kernel_muster"


def normal_name(name: str) -> str:
    """Return the normal form of a name: small letters, and one ``-`` for each run of separators."""
    return _SEPARATORS.sub("-", name).lower()


def same_distribution(one: str, other: str) -> bool:
    """Whether two names are of one distribution."""
    return one == other or normal_name(one) == normal_name(other)
