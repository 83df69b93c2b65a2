"""`python -m ckptd_daemon.verify`: see `ckptd_daemon.verify.verifier`."""

from __future__ import annotations

import sys

from ckptd_daemon import lean

if __name__ == "__main__":
    lean.begin()
    from ckptd_daemon.verify.verifier import main

    main(sys.argv[1:])
