"""`python -m ckptd_daemon`: see `ckptd_daemon.core.command`."""

from __future__ import annotations

import sys

from ckptd_daemon import lean

if __name__ == "__main__":
    lean.begin()
    lean.import_without("msgspec", "typing_extensions")
    from ckptd_daemon.core.command import main

    sys.exit(main(sys.argv[1:]))
