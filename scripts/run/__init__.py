"""What the pages in ``scripts/`` share and no library part may know: config, run directory, reports, exit codes."""
