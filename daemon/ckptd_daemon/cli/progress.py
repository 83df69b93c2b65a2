"""Progress of long commands: lines on stderr, few enough to be read."""

from __future__ import annotations
