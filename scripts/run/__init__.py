"""What the pages in ``scripts/`` share and no library part may know: configuration, run directory, reports, exit codes."""
