from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Ten thousand tests stay to the end: no collection of garbage need go through them, at a third of a second each."""
    gc.collect()
    gc.freeze()
