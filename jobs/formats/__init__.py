"""How rows are read from each kind of file; `jobs.dataset` puts files together."""
