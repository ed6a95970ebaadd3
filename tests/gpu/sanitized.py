"""Prove the small cases of device kernels under compute-sanitizer, with which all cases would take hours.

    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/gpu/sanitized.py 'moe*' --most-bytes 300000

Keys, and cases with ``--cases``, are given as patterns of file names. A case counts with the bytes of its arguments.
The last line gives the number of cases. Exit code 1: a proof failed, 2: no case ran.
"""

import argparse
import importlib
import pkgutil
import sys
import time
from fnmatch import fnmatchcase

import kernel_muster as km
import numpy as np
from kernel_muster import plugins
from kernel_muster.audit.proof.proofs import device_memory, prove
from kernel_muster.registry.backends.cuda_kernel import is_device_backend
from kernel_muster.registry.errors import MusterError


def keys_of(patterns):
    families = [
        module.name for module in pkgutil.iter_modules(plugins.__path__) if module.ispkg and module.name[0] != "_"
    ]
    modules = [importlib.import_module(f"kernel_muster.plugins.{family}") for family in families]
    keys = {spec.key for module in modules for spec in module.muster_kernels() if is_device_backend(spec.backend)}
    return sorted(key for key in keys if any(fnmatchcase(key, pattern) for pattern in patterns))


def bytes_of(contract, case):
    """Return how many bytes the arguments of a case hold."""
    arguments = contract.arguments(case, np.random.default_rng(0)).values()
    arrays = [array for value in arguments for array in (value, *getattr(value, "__dict__", {}).values())]
    return sum(getattr(array, "nbytes", 0) for array in arrays)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="+")
    parser.add_argument("--cases", default="*")
    parser.add_argument("--most-bytes", type=int, default=300_000)
    options = parser.parse_args()
    kernels = km.open_registry("cuda")

    def find(key):
        try:
            return kernels.kernel(key.module, key.func)
        except MusterError:
            return None

    ran, failed = 0, 0
    for key in keys_of(options.patterns):
        handle, begun = kernels.kernel(*key.split("::")), time.monotonic()
        named = [case for case in handle.contract.cases if fnmatchcase(case.name, options.cases)]
        small = [case for case in named if bytes_of(handle.contract, case) <= options.most_bytes]
        results = list(prove(handle, device_memory(0), find, small.__contains__))
        wrong = [finding for result in results for finding in result.findings]
        total, seconds = len(handle.contract.cases), time.monotonic() - begun
        print(f"{key}: {len(results)} of {total} cases, {len(wrong)} findings, {seconds:.0f} s", flush=True)
        for finding in wrong:
            print(f"  {finding.code}: {finding.why}")
        ran, failed = ran + len(results), failed + len(wrong)
    print(f"{ran} cases ran, {failed} findings")
    return 2 if not ran else int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
