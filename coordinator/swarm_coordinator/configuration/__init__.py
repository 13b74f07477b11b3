"""`run.toml`: the settings of a run, its commented template, and addresses for HTTP."""
