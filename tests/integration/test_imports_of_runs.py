"""What a run imports when it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness.places import ROOT
from harness.tiny_runs import TINY


def test_a_run_without_compile_does_not_import_the_compiler_which_takes_longer_than_all_else(tmp_path: Path) -> None:
    flags = [*TINY, "--train-iters", "2", "--zero-stage", "3", "--save", str(tmp_path), "--eval-iters", "1", "--eval-interval", "1"]
    program = "import sys; from pretrain_zeropp_gpt import main; print('code', main(sys.argv[1:]), 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, *flags], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "code 0 False"
