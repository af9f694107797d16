"""A rank of a short run of the training script, which then says how much memory of the host it has had at most, in KiB."""

from __future__ import annotations

import sys
from pathlib import Path

from pretrain_zeropp_gpt import main

if __name__ == "__main__":
    main(sys.argv[1:])
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    print(f"\npeak {peak}", flush=True)
