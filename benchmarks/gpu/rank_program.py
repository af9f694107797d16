"""A rank that runs the training script several times in one process, so that torch and CUDA start once.

    python -m benchmarks.gpu.rank_program JOB

The file JOB holds [{"flags": [...], "port": N}, ...]. After each run the rank makes the file JOB.INDEX.RANK with the exit code. A run that
fails ends the process, as it does in the training script.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path


def run_all(job: Path) -> int:
    from pretrain_zeropp_gpt import main

    for index, one in enumerate(json.loads(job.read_text())):
        os.environ["MASTER_PORT"] = str(one["port"])
        print(f"== run {index}: {' '.join(one['flags'])}", flush=True)
        code = main(one["flags"])
        if code == 0:
            _free()
        _mark(job.with_name(f"{job.name}.{index}.{os.environ['RANK']}"), code)
        if code:
            return code
    return 0


def _mark(file: Path, code: int) -> None:
    made = file.with_name(f".{file.name}")
    made.write_text(str(code))
    os.replace(made, file)  # whoever sees the file finds its content


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    exit_code = run_all(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # as the training script does
