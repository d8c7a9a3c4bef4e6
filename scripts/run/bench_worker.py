"""A process that makes one measurement:  python -m run.bench_worker SPEC  (JSON); its last line is the result."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from run.bench_work import PROGRAMS, Spec


def work(spec: Spec) -> dict[str, Any]:
    """The measurement; imports wait until here, because start-up counts them."""
    start = time.perf_counter()
    if spec.what == "files":
        from run.bench_files import write_files

        return write_files(spec)
    if spec.program == PROGRAMS[0]:
        from run.bench_ours import MEASURES
    else:
        from run.bench_peer import MEASURES
    import_s = round(time.perf_counter() - start, 4)
    return MEASURES[spec.what](spec) | {"import_s": import_s}


if __name__ == "__main__":
    print(json.dumps(work(Spec.from_json(sys.argv[1]))))
