"""A daemon that SIGKILLs itself at its N-th call that changes something below its root or in a slot.

Usage: doomed_daemon.py N half|whole ROOT KEEP_LAST
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent / "tests"))

from ckptd_daemon.core.command import main
from killing import Killing

if __name__ == "__main__":
    number, how, root, keep_last = sys.argv[1:]
    Killing(int(number), [root, os.environ["CKPTD_SHM_DIR"]], half=how == "half")
    sys.exit(main(["--root", root, "--keep-last", keep_last]))
